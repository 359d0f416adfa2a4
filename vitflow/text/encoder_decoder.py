"""Generation with encoder-decoder models: attribution of each token to the source and to earlier tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError, check_known
from vitflow.explaining.method_table import Method
from vitflow.explaining.progress import tracking
from vitflow.methods.flow.layers import default_window, parse_window
from vitflow.methods.fusion import check_layer
from vitflow.models.anatomy import read_layout
from vitflow.models.languages import reads_text
from vitflow.recording.attention_kinds import refuse_other_layers
from vitflow.recording.isolation import device_of, refuse_inference_tensors
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace
from vitflow.text import layer_rows
from vitflow.text.labels import words_of
from vitflow.text.layer_rows import Streams, relevance_across
from vitflow.text.layout import Words
from vitflow.text.read_rows import outer_shape, relevant_layers
from vitflow.text.writing import ending, generated, looking_ahead


@dataclass(frozen=True, slots=True, eq=False)
class Written:
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


def write_and_read(
    model: nn.Module, arguments: Mapping[str, Any], tokenizer: Any, method: Method, options: Mapping[str, Any]
) -> list[Written]:
    """Generate text for each source, and explain each text in one more forward pass.

    Raises:
        OptionError: the method does not support encoder-decoder models.
        UnsupportedModelError: the model is not an encoder of text or images and a decoder that attends to it in each
            layer.
    """
    check_known("method for encoders and decoders", method.name, _ROWS)
    refuse_other_layers(model, method.name)
    gradients = "gradients" in method.needs
    if gradients:
        refuse_inference_tensors(model)
    sequences, start = _write(model, arguments)
    ended, texts = ending(arguments, model), []
    source = next(arguments[name] for name in _SOURCES if name in arguments)
    for index, sequence in enumerate(sequences.tolist()):
        row = index * len(source) // len(sequences)  # num_return_sequences may be above 1
        last = next((stop for stop in range(start + 1, len(sequence)) if ended(sequence[start:stop])), len(sequence))
        words = words_of(tokenizer, sequence[:last])
        inputs = {name: arguments[name][row : row + 1] for name in (*_SOURCES, _MASK) if name in arguments}
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            read = _read(model, inputs, words.ids[:-1], options, gradients)
            targets = list(enumerate(words.ids[start:], start=start - 1))
            rows, self_share = _ROWS[method.name](read, targets, **options)
        kept = torch.cat([read.real, torch.ones(last - 1, dtype=torch.bool, device=read.real.device)])
        prompt = _source_words(model, inputs, read.real, tokenizer) + words[:start]
        texts.append(Written(prompt, words[start:], rows[..., kept].detach(), self_share))
    return texts


# transformers' names of the encoder's arguments
_SOURCES, _MASK = ("input_ids", "pixel_values"), "attention_mask"


def _write(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Return the sequences of the decoder, ids [batch, tokens], and the number of its initial tokens."""
    initial: list[int] = []

    def look(args: Any, kwargs: Any) -> None:
        text = None if initial else reads_text((), {name: kwargs[name] for name in kwargs if name != "input_ids"})
        if text is not None:
            initial.append(text.shape[1])

    return generated(model, arguments, look), initial[0]


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
class _Read:
    """A recorded forward pass over a source and its generated text.

    Attributes:
        trace: recorded forward pass.
        streams: layer indices of each stream in the trace.
        visible: attention masks.
        real: mask of the source tokens that are not padding.
    """

    trace: Trace
    streams: tuple[list[int], list[int], list[int]]
    visible: Streams
    real: Tensor

    def of(self, matrices: list[Tensor]) -> Streams:
        """Group one matrix per layer of the trace by stream."""
        return Streams(*([matrices[index] for index in indices] for indices in self.streams))

    def fused(self, head_fusion: str, value_weighted: Any) -> Streams:
        """Return the fused attention of each stream."""
        return self.of([layer[0] for layer in self.trace.fused(head_fusion, value_weighted=value_weighted)])

    def readout(self, targets: list[tuple[int, int]]) -> Tensor:
        """Return one-hot query weights [rows, m + n] for the decoder token of each target."""
        n, m = self.visible.crossing[0].shape
        return torch.eye(m + n, device=self.real.device)[[m + position for position, _ in targets]]


def _read(
    model: nn.Module, inputs: Mapping[str, Tensor], ids: tuple[int, ...], options: Mapping[str, Any], gradients: bool
) -> _Read:
    weighting = options["value_weighted"]
    kept: dict[str, Any] = {"fusions": [(options["head_fusion"], weighting)]}
    if gradients:
        kept = {"gradients": True, "values": bool(weighting)}
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
        raise looking_ahead(model)
    common = real.expand(m, m), ~later, real.expand(n, m)
    seen = (
        [mask if layer.visible is None else mask & layer.visible[0] for layer in stream]
        for stream, mask in zip(layers, common, strict=True)
    )
    return _Read(trace, indices, Streams(*seen), real)


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


# -- methods -----------------------------------------------------------------------------------------------------------


def _rollout(
    read: _Read, targets: list[tuple[int, int]], *, head_fusion: str, value_weighted: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute rollout of the joint graph."""
    streams = read.fused(head_fusion, value_weighted)
    check_layer("start_layer", options["start_layer"], len(streams.encoder))
    steps = streams.steps()
    readout = read.readout(targets).to(steps[0])
    rows, self_share = layer_rows.rollout_rows(steps, read.visible.steps(), readout, **options)
    layers = [end - 1 for end in streams.ends]  # of the decoder
    return rows[layers], None if self_share is None else self_share[layers]


def _attention(
    read: _Read, targets: list[tuple[int, int]], *, head_fusion: str, value_weighted: Any, layer: int, **options: Any
) -> tuple[Tensor, None]:
    """Return the cross-attention of each layer."""
    streams = read.fused(head_fusion, value_weighted)
    n, m = streams.crossing[0].shape
    readout = read.readout(targets)[:, m:]
    check_layer("layer", layer, len(streams.crossing))
    rows = layer_rows.attention_rows(streams.crossing, read.visible.crossing, readout, **options)
    return torch.nn.functional.pad(rows, (0, n)), None


def _flow(
    read: _Read, targets: list[tuple[int, int]], *, head_fusion: str, value_weighted: Any, layers: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute flow of the joint graph through whole layers of the decoder, and rollout below."""
    streams = read.fused(head_fusion, value_weighted)
    begin, end = parse_window(default_window(layers, len(streams.decoder)), len(streams.decoder))
    bottom = 0 if layers == "all" else len(streams.encoder)
    spans = [(max(top - 2 * (end - begin + 1), bottom) if bottom else 0, top) for top in streams.ends]
    steps = streams.steps()
    readout = read.readout(targets).to(steps[0])
    rounds = 2 if options["causal"] == "receptive_field" else 1
    with tracking("attention flow", rounds * len(spans) * readout.numel()) as progress:
        return layer_rows.flow_rows(steps, read.visible.steps(), readout, spans=spans, progress=progress, **options)


def _gae(
    read: _Read, targets: list[tuple[int, int]], *, head_fusion: Any, value_weighted: Any, **options: Any
) -> tuple[Tensor, None]:
    """Compute generic attention explainability, with one backward pass for the logit of each token."""
    relevant = relevant_layers(read.trace, targets, head_fusion, value_weighted)
    pairs = zip(targets, relevant, strict=True)
    rows = [relevance_across(read.of(layers), position, **options) for (position, _), layers in pairs]
    return torch.stack(rows, dim=1), None


_ROWS: Mapping[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "rollout": _rollout,
    "attention": _attention,
    "flow": _flow,
    "gae": _gae,
}
