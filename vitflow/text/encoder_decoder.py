"""A model with an encoder beside its decoder writes: what each token rests on, of the source and of earlier ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError, check_known
from vitflow.explaining.method import Method
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
    """What was written for one source, and what it rests on.

    Attributes:
        prompt: the tokens of the source, then those that the decoder begins with.
        generated: those that were written.
        rows: [layers of the decoder, generated, tokens]: over the prompt and what was written and read.
        self_share: raw share of each row's own token if relative to the receptive field, [layers, generated].
    """

    prompt: Words
    generated: Words
    rows: Tensor
    self_share: Tensor | None


def write_and_read(
    model: nn.Module, arguments: Mapping[str, Any], tokenizer: Any, method: Method, options: Mapping[str, Any]
) -> list[Written]:
    """Let it write after each source, and read each finished text once more, by any method.

    Raises:
        OptionError: the method does not apply to encoders and decoders.
        UnsupportedModelError: the model has other parts than an encoder over one text or image and a decoder that
            attends to it in each layer.
    """
    check_known("method for encoders and decoders", method.name, _ROWS)
    refuse_other_layers(model, method.name)
    gradients = "gradients" in method.needs
    if gradients:
        refuse_inference_tensors(model)
    sequences, start = _write(model, arguments)
    ended, found = ending(arguments, model), []
    source = next(arguments[name] for name in _SOURCES if name in arguments)
    for index, sequence in enumerate(sequences.tolist()):
        number = index * len(source) // len(sequences)  # where several were asked for after each source
        last = next((stop for stop in range(start + 1, len(sequence)) if ended(sequence[start:stop])), len(sequence))
        words = words_of(tokenizer, sequence[:last])
        given = {name: arguments[name][number : number + 1] for name in (*_SOURCES, _MASK) if name in arguments}
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            read = _read(model, given, words.ids[:-1], options, gradients)
            targets = list(enumerate(words.ids[start:], start=start - 1))
            rows, own = _ROWS[method.name](read, targets, **options)
        kept = torch.cat([read.real, torch.ones(last - 1, dtype=torch.bool, device=read.real.device)])
        prompt = _source_words(model, given, read.real, tokenizer) + words[:start]
        found.append(Written(prompt, words[start:], rows[..., kept].detach(), own))
    return found


# What an encoder reads, as transformers calls it.
_SOURCES, _MASK = ("input_ids", "pixel_values"), "attention_mask"


def _write(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[Tensor, int]:
    """What the decoder wrote, with what it began with, numbers [batch, tokens]; and how many it began with."""
    began: list[int] = []

    def look(args: Any, kwargs: Any) -> None:
        text = None if began else reads_text((), {name: one for name, one in kwargs.items() if name != "input_ids"})
        if text is not None:
            began.append(text.shape[1])

    return generated(model, arguments, look), began[0]


def _source_words(model: Any, given: Mapping[str, Tensor], real: Tensor, tokenizer: Any) -> Words:
    """The tokens of the source without padding; those of an image by their row and column, counted from 1."""
    if "input_ids" in given:
        return words_of(tokenizer, given["input_ids"][0][real].tolist())
    height, width = given["pixel_values"].shape[-2:]
    layout = read_layout(model.get_encoder(), (height, width), len(real))
    prefix = layout.num_prefix_tokens
    patches = [f" {row},{col}" for row in range(1, layout.rows + 1) for col in range(1, layout.cols + 1)]
    special = (True,) * prefix + (False,) * len(patches)
    return Words((*["[image]"] * prefix, *patches), tuple(range(len(real))), special)


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """One pass over a source and a finished text.

    Attributes:
        trace: the pass.
        streams: the layers of each stream, as numbers among those of the trace.
        visible: which keys each query may see.
        real: which tokens of the source are no padding.
    """

    trace: Trace
    streams: tuple[list[int], list[int], list[int]]
    visible: Streams
    real: Tensor

    def of(self, matrices: list[Tensor]) -> Streams:
        """A matrix for each layer of the trace, stream by stream."""
        return Streams(*([matrices[number] for number in numbers] for numbers in self.streams))

    def fused(self, head_fusion: str, value_weighted: Any) -> Streams:
        """Fused attention."""
        return self.of([layer[0] for layer in self.trace.fused(head_fusion, value_weighted=value_weighted)])

    def readout(self, targets: list[tuple[int, int]]) -> Tensor:
        """What speaks, [rows, m + n]: the decoder's token at each target's place."""
        n, m = self.visible.crossing[0].shape
        return torch.eye(m + n, device=self.real.device)[[m + place for place, _ in targets]]


def _read(
    model: nn.Module, given: Mapping[str, Tensor], ids: tuple[int, ...], options: Mapping[str, Any], gradients: bool
) -> _Read:
    weighting = options["value_weighted"]
    kept: dict[str, Any] = {"fusions": [(options["head_fusion"], weighting)]}
    if gradients:
        kept = {"gradients": True, "values": bool(weighting)}
    text = torch.tensor([ids], device=device_of(model))
    with record_attention(model, visible=True, **kept) as trace:
        model(**given, decoder_input_ids=text, use_cache=False)
    numbers = _streams(model, trace)
    layers = [[trace.layers[number] for number in stream] for stream in numbers]
    m, n = (one[0].example.shape[-1] if one else 0 for one in layers[:2])
    shapes = ((m, m), (n, n), (n, m))
    for stream, shape in zip(layers, shapes, strict=True):
        other = next((one for layer in stream if (one := outer_shape(layer.example)) != (1, *shape)), None)
        if other is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} attends in {other[0]} matrices of {other[1]} × {other[2]} tokens, expected "
                f"one of {shape[0]} × {shape[1]} in each layer: rollout, flow and GAE need attention between all."
            )
    device = trace.layers[0].example.device
    real = given[_MASK][0].bool().to(device) if _MASK in given else torch.ones(m, dtype=torch.bool, device=device)
    later = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
    if any(bool(layer.example[0, ..., later].any()) for layer in layers[1]):
        raise looking_ahead(model)
    common = real.expand(m, m), ~later, real.expand(n, m)
    seen = (
        [one if layer.visible is None else one & layer.visible[0] for layer in stream]
        for stream, one in zip(layers, common, strict=True)
    )
    return _Read(trace, numbers, Streams(*seen), real)


def _streams(model: Any, trace: Trace) -> tuple[list[int], list[int], list[int]]:
    """Which layers of a pass are the encoder's, the decoder's own, and its attention to the encoder."""
    names = list(trace.streams)
    crossing = [name for name in names if name.endswith(".cross_attention")]
    path = next(path for path, module in model.named_modules() if module is model.get_encoder())
    encoder = [name for name in names if f"{name}.".startswith(f"{path}.")]
    decoder = [name for name in names if name not in (*crossing, *encoder)]
    streams = trace.streams
    told = ", ".join(f"{name} in {len(streams[name])} layers" for name in names)
    if not len(encoder) == len(decoder) == len(crossing) == 1 or len(streams[decoder[0]]) != len(streams[crossing[0]]):
        raise UnsupportedModelError(
            f"Expected {type(model).__name__} to have one encoder, and a decoder that attends to it in each layer, got "
            f"attention of {told or 'no part'}: record single passes with vitflow.record_attention, and take "
            "trace.of_stream."
        )
    among = {id(layer): number for number, layer in enumerate(trace.layers)}
    found = [[among[id(layer)] for layer in streams[name]] for name in (encoder[0], decoder[0], crossing[0])]
    return found[0], found[1], found[2]


# -- the methods -------------------------------------------------------------------------------------------------------


def _rollout(
    read: _Read, targets: list[tuple[int, int]], *, head_fusion: str, value_weighted: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Rollout of the joint graph."""
    streams = read.fused(head_fusion, value_weighted)
    check_layer("start_layer", options["start_layer"], len(streams.encoder))
    steps = streams.steps()
    rows, own = layer_rows.rollout_rows(steps, read.visible.steps(), read.readout(targets).to(steps[0]), **options)
    layers = [end - 1 for end in streams.ends]  # of the decoder
    return rows[layers], None if own is None else own[layers]


def _attention(
    read: _Read, targets: list[tuple[int, int]], *, head_fusion: str, value_weighted: Any, layer: int, **options: Any
) -> tuple[Tensor, None]:
    """Each layer's own attention to the source."""
    streams = read.fused(head_fusion, value_weighted)
    n, m = streams.crossing[0].shape
    readout = read.readout(targets)[:, m:]
    check_layer("layer", layer, len(streams.crossing))
    rows = layer_rows.attention_rows(streams.crossing, read.visible.crossing, readout, **options)
    return torch.nn.functional.pad(rows, (0, n)), None


def _flow(
    read: _Read, targets: list[tuple[int, int]], *, head_fusion: str, value_weighted: Any, layers: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Flow of the joint graph, through whole layers of the decoder and down from there by rollout."""
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
    """Generic attention explainability: one backward pass for each token's own logit."""
    found = relevant_layers(read.trace, targets, head_fusion, value_weighted)
    rows = [
        relevance_across(read.of(layers), place, **options) for (place, _), layers in zip(targets, found, strict=True)
    ]
    return torch.stack(rows, dim=1), None


_ROWS: Mapping[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "rollout": _rollout,
    "attention": _attention,
    "flow": _flow,
    "gae": _gae,
}
