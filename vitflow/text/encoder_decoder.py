"""Generation with encoder-decoder models: attribution of each token to the source and to earlier tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError, check_known
from vitflow.explaining.method_table import Method
from vitflow.methods.fusion import check_layer
from vitflow.methods.gradients import ValueWeighting
from vitflow.methods.rollout import relevance
from vitflow.models.anatomy import read_layout
from vitflow.models.calls import reads_text
from vitflow.recording.isolation import device_of, refuse_inference_tensors
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace
from vitflow.text.generate_calls import call_generate, not_causal, text_length
from vitflow.text.rows import ReadText, kept_matrices, outer_shape
from vitflow.text.words import Words, words_of


@dataclass(frozen=True, slots=True, eq=False)
class ExplainedText:
    """Generated text of one source, with attribution.

    Attributes:
        prompt: tokens of the source, then the initial tokens of the decoder.
        generated: generated tokens.
        rows: [decoder layers, generated, tokens], over the prompt and all generated tokens but the last.
        self_share: raw share of each row's query token, [layers, generated], if relative to the receptive field; else
            None.
    """

    prompt: Words
    generated: Words
    rows: Tensor
    self_share: Tensor | None


def explain_pairs(
    model: nn.Module, arguments: Mapping[str, Any], tokenizer: Any, method: Method, options: Mapping[str, Any]
) -> list[ExplainedText]:
    """Generate text for each source, and explain each text in one more forward pass.

    Raises:
        OptionError: the method does not support encoder-decoder models.
        UnsupportedModelError: the model is not an encoder of text or images and a decoder that attends to it in each
            layer.
    """
    check_known("method for encoders and decoders", method.name, ("rollout", "attention", "flow", "gae"))
    gradients = "gradients" in method.needs
    if gradients:
        refuse_inference_tensors(model)
    sequences, start = _generate(model, arguments)
    length_of, texts = text_length(arguments, model), []
    source = next(arguments[name] for name in _SOURCES if name in arguments)
    for index, sequence in enumerate(sequences.tolist()):
        row = index * len(source) // len(sequences)  # num_return_sequences may be above 1
        words = words_of(tokenizer, sequence[: length_of(sequence, start)])
        inputs = {name: arguments[name][row : row + 1] for name in (*_SOURCES, _MASK) if name in arguments}
        targets = list(enumerate(words.ids[start:], start=start - 1))
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            read = _recorded(model, inputs, words.ids[:-1], targets, kept_matrices(method, options))
            if "start_layer" in options:
                check_layer("start_layer", options["start_layer"], read.steps_below)
            rows, self_share = method.load()(read, **options)
        check_layer("layer", options.get("layer", -1), len(rows))
        kept = torch.cat([read.real, torch.ones(words.length - 1, dtype=torch.bool, device=read.real.device)])
        prompt = _source_words(model, inputs, read.real, tokenizer) + words[:start]
        texts.append(ExplainedText(prompt, words[start:], rows[..., kept].detach(), self_share))
    return texts


# transformers' names of the encoder's arguments
_SOURCES, _MASK = ("input_ids", "pixel_values"), "attention_mask"


def _generate(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Return the sequences of the decoder, ids [batch, tokens], and the number of its initial tokens."""
    initial: list[int] = []

    def look(args: Any, kwargs: Any) -> None:
        text = None if initial else reads_text((), {name: kwargs[name] for name in kwargs if name != "input_ids"})
        if text is not None:
            initial.append(text.shape[1])

    return call_generate(model, arguments, look), initial[0]


def _source_words(model: Any, inputs: Mapping[str, Tensor], real: Tensor, tokenizer: Any) -> Words:
    """Return the tokens of the source without padding; patches are named by row and column, counted from 1."""
    if "input_ids" in inputs:
        return words_of(tokenizer, inputs["input_ids"][0][real].tolist())
    height, width = inputs["pixel_values"].shape[-2:]
    layout = read_layout(model.get_encoder(), (height, width), len(real))
    prefix = layout.num_prefix_tokens
    patches = [f" {row},{col}" for row in range(1, layout.rows + 1) for col in range(1, layout.cols + 1)]
    special = (True,) * prefix + (False,) * len(patches)
    return Words((*["[image]"] * prefix, *patches), tuple(range(len(real))), special)


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """One matrix per layer of an encoder-decoder model: fused attention, or attention masks (bool).

    Attributes:
        encoder: encoder self-attention [m, m].
        decoder: decoder self-attention [n, n].
        crossing: cross-attention [n, m].
    """

    encoder: Sequence[Tensor]
    decoder: Sequence[Tensor]
    crossing: Sequence[Tensor]

    def steps(self) -> list[Tensor]:
        """Return the joint graph: one matrix [m + n, m + n] per step, source tokens first.

        >>> one = torch.tensor([[1.0]])
        >>> steps = Streams([torch.tensor([[0.5, 0.5], [0.0, 1.0]])], [one], [torch.tensor([[0.25, 0.75]])]).steps()
        >>> steps[0], steps[2]
        (tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 1.0000, 0.0000],
                [0.0000, 0.0000, 1.0000]]), tensor([[1.0000, 0.0000, 0.0000],
                [0.0000, 1.0000, 0.0000],
                [0.2500, 0.7500, 0.0000]]))
        """
        n, m = self.crossing[0].shape
        source, target = (torch.eye(size).to(self.crossing[0]) for size in (m, n))
        steps = [torch.block_diag(layer, target) for layer in self.encoder]
        for layer, crossing in zip(self.decoder, self.crossing, strict=True):
            steps.append(torch.block_diag(source, layer))
            steps.append(torch.cat([torch.block_diag(source, target)[:m], torch.nn.functional.pad(crossing, (0, n))]))
        return steps


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReadPair(ReadText):
    """Input of a method for a source and its generated text: the joint graph, source tokens first.

    Attributes:
        streams: layer indices in the trace of encoder attention, decoder self-attention and cross-attention.
        real: mask of the source tokens that are not padding.
    """

    streams: tuple[list[int], list[int], list[int]]
    real: Tensor

    steps_per_layer: ClassVar[int] = 2

    @property
    def steps_below(self) -> int:  # type: ignore[override]
        """The number of layers of the encoder."""
        return len(self.streams[0])

    def fused(self, head_fusion: str, value_weighted: ValueWeighting) -> list[Tensor]:
        """Return the fused attention of each step of the joint graph, [m + n, m + n]."""
        layers = [layer[0] for layer in self.trace.fused(head_fusion, value_weighted=value_weighted)]
        return _grouped(layers, self.streams).steps()

    def relevance(self, layers: Sequence[Tensor], row: int, start_layer: int) -> Tensor:
        """Return a row of generic attention explainability over source and generated text, [layers, m + n]."""
        return relevance_across(_grouped(layers, self.streams), self.targets[row][0], start_layer=start_layer)


def _grouped(layers: Sequence[Tensor], streams: Iterable[Sequence[int]]) -> Streams:
    """Group one matrix per layer of the trace by stream."""
    return Streams(*([layers[index] for index in indices] for indices in streams))


def _recorded(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    ids: tuple[int, ...],
    targets: Sequence[tuple[int, int | None]],
    kept: Mapping[str, Any],
) -> ReadPair:
    """Record a forward pass over a source and its generated text."""
    text = torch.tensor([ids], device=device_of(model))
    with record_attention(model, visible=True, **kept) as trace:
        model(**inputs, decoder_input_ids=text, use_cache=False)
    indices = _streams(model, trace)
    layers = [[trace.layers[index] for index in stream] for stream in indices]
    m, n = (stream[0].example.shape[-1] if stream else 0 for stream in layers[:2])
    shapes = ((m, m), (n, n), (n, m))
    for stream, shape in zip(layers, shapes, strict=True):
        actual = (outer_shape(layer.example) for layer in stream)
        other = next((sizes for sizes in actual if sizes != (1, *shape)), None)
        if other is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} attends in {other[0]} matrices of {other[1]} × {other[2]} tokens, expected "
                f"one of {shape[0]} × {shape[1]} in each layer: rollout, flow and GAE require full attention."
            )
    device = trace.layers[0].example.device
    real = inputs[_MASK][0].bool().to(device) if _MASK in inputs else torch.ones(m, dtype=torch.bool, device=device)
    later = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
    if any(bool(layer.example[0, ..., later].any()) for layer in layers[1]):
        raise not_causal(model)
    common = real.expand(m, m), ~later, real.expand(n, m)
    seen = (
        [mask if layer.visible is None else mask & layer.visible[0] for layer in stream]
        for stream, mask in zip(layers, common, strict=True)
    )
    readout = torch.eye(m + n, device=device)[[m + position for position, _ in targets]]
    return ReadPair(trace, Streams(*seen).steps(), readout, targets, streams=indices, real=real)


def _streams(model: Any, trace: Trace) -> tuple[list[int], list[int], list[int]]:
    """Return the layer indices of encoder attention, decoder self-attention and cross-attention."""
    names = list(trace.streams)
    crossing = [name for name in names if name.endswith(".cross_attention")]
    path = next(path for path, module in model.named_modules() if module is model.get_encoder())
    encoder = [name for name in names if f"{name}.".startswith(f"{path}.")]
    decoder = [name for name in names if name not in (*crossing, *encoder)]
    streams = trace.streams
    recorded = ", ".join(f"{name} in {len(streams[name])} layers" for name in names)
    if not len(encoder) == len(decoder) == len(crossing) == 1 or len(streams[decoder[0]]) != len(streams[crossing[0]]):
        raise UnsupportedModelError(
            f"Expected {type(model).__name__} to have one encoder, and a decoder that attends to it in each layer, got "
            f"attention of {recorded or 'no part'}: record single passes with vitflow.record_attention and use "
            "trace.of_stream."
        )
    index_of = {id(layer): index for index, layer in enumerate(trace.layers)}
    first, second, third = ([index_of[id(layer)] for layer in streams[s[0]]] for s in (encoder, decoder, crossing))
    return first, second, third


def relevance_across(streams: Streams, row: int, *, start_layer: int = 1) -> Tensor:
    """Compute generic attention explainability of an encoder-decoder model for one token of the decoder.

    R_ss of the source, R_tt of the decoder's tokens and R_ts begin as I, I and 0. Each layer W of the encoder adds
    W R_ss to R_ss. Each of the decoder adds W R_tt and W R_ts to R_tt and R_ts, then W′, its attention to the source,
    adds R̄_ttᵀ W′ R̄_ss to R_ts, where R̄ is I plus R − I with each row normalised to sum 1.

    Args:
        streams: W and W′ as returned by `gradient_weighted_attention`.
        row: index of the decoder token.
        start_layer: first encoder layer to include; 1 in the paper.

    Returns:
        The token's row of R_ts and R_tt if the decoder ends at each layer, [layers, m + n].

    Source: Chefer, Gur & Wolf, "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder
    Transformers", ICCV 2021, §3.2.

    >>> one = torch.tensor([[1.0]])
    >>> relevance_across(Streams([0.5 * torch.eye(2)], [one], [torch.tensor([[0.25, 0.75]])]), 0)
    tensor([[1., 3., 2.]])
    """
    n = len(streams.decoder[0])
    below = _normalised(relevance([layer.unsqueeze(0) for layer in streams.encoder], start_layer=start_layer)[0])
    target, source = torch.eye(n).to(below), torch.zeros_like(streams.crossing[0])  # R_tt, R_ts
    rows = []
    for layer, crossing in zip(streams.decoder, streams.crossing, strict=True):
        source = source + layer @ source
        target = target + layer @ target
        source = source + _normalised(target).mT @ crossing @ below
        rows.append(torch.cat([source[row], target[row]]))
    return torch.stack(rows)


def _normalised(relevances: Tensor) -> Tensor:
    """Return R̄ = I + (R − I) with each row of R − I normalised to sum 1."""
    eye = torch.eye(len(relevances)).to(relevances)
    added = relevances - eye
    total = added.sum(dim=-1, keepdim=True)
    return eye + added / torch.where(total > 0, total, 1.0)
