"""Rows of any method for selected tokens of a text, or of a source and its generated text, by one forward pass."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError, ValueNormsError
from vitflow.methods.fusion import check_layer
from vitflow.methods.gradients import ValueWeighting
from vitflow.methods.rollout import joint_steps, relevance, relevance_across
from vitflow.models.devices import device_of, refuse_inference_tensors
from vitflow.recording.attention_kinds import refuse_other_layers
from vitflow.recording.isolation import evaluating
from vitflow.recording.layers import AttentionLayer
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace
from vitflow.registry.method_table import Method
from vitflow.text.languages import not_causal, reading
from vitflow.text.visibility import is_causal, whole_attention


@dataclass(frozen=True, slots=True, eq=False)
class TextTrace:
    """Input of a method for texts: a recorded forward pass and the requested rows.

    The attention graph has one step per layer. That of an encoder-decoder model, with the tokens of the source first,
    has the steps of the encoder, then two for each layer of the decoder.

    Attributes:
        trace: recorded forward pass.
        visible: attention mask of each step, bool [tokens, tokens].
        readout: query weights [rows, tokens].
        targets: for each row, position and token or class id of a logit; None for the most probable.
        hidden: hidden states after each layer, [1, tokens, width], for methods that need features.
        streams: layer indices in the trace of encoder attention, decoder self-attention and cross-attention; None for
            a single text.
    """

    trace: Trace
    visible: Sequence[Tensor]
    readout: Tensor
    targets: Sequence[tuple[int, int | None]]
    hidden: Sequence[Tensor] = ()
    streams: tuple[list[int], list[int], list[int]] | None = None

    @property
    def steps_per_layer(self) -> int:
        """The number of steps of each layer whose rows are returned."""
        return 1 if self.streams is None else 2

    @property
    def steps_below(self) -> int:
        """The number of layers of the encoder."""
        return 0 if self.streams is None else len(self.streams[0])

    @property
    def ends(self) -> list[int]:
        """The number of steps up to each layer, first layer first."""
        return list(range(self.steps_below + self.steps_per_layer, len(self.visible) + 1, self.steps_per_layer))

    def fused(self, head_fusion: str, value_weighted: ValueWeighting) -> list[Tensor]:
        """Return the fused attention of each step, [tokens, tokens]."""
        layers = [layer[0] for layer in self.trace.fused(head_fusion, value_weighted=value_weighted)]
        return layers if self.streams is None else joint_steps(*_by_stream(layers, self.streams))

    def relevance(self, layers: Sequence[Tensor], row: int, start_layer: int) -> Tensor:
        """Return a row of generic attention explainability, qᵀ (I + W_l) ⋯ (I + W_s) for l = 1 … L: [layers, tokens].

        `layers` are the W_l, [tokens, tokens]; with an encoder, see `relevance_across`.
        """
        if self.streams is not None:
            across = _by_stream(layers, self.streams)
            return relevance_across(*across, row=self.targets[row][0], start_layer=start_layer)
        first = check_layer("start_layer", start_layer, len(layers))
        readout = self.readout[row].unsqueeze(0).to(layers[0])
        stack = [layer.unsqueeze(0) for layer in layers]
        tops = range(1, len(layers) + 1)
        rows = [relevance(stack[first:top], readout=readout) if top > first else readout for top in tops]
        return torch.cat(rows)


def _by_stream(layers: Sequence[Tensor], streams: Sequence[Sequence[int]]) -> Iterator[list[Tensor]]:
    return ([layers[index] for index in stream] for stream in streams)


@dataclass(frozen=True, slots=True, eq=False)
class TextResult:
    """Rows [layers, rows, tokens] of a method that ends at each layer, and the recorded forward pass.

    `self_share` is the raw share of each row's query token, [layers, rows], if the rows are relative to the receptive
    field; else None.
    """

    rows: Tensor
    self_share: Tensor | None
    text: TextTrace


def _run(
    model: nn.Module, method: Method, options: Mapping[str, Any], record: Callable[[Mapping[str, Any]], TextTrace]
) -> TextResult:
    """Compute the rows of a method for the pass that `record` records with these arguments of `record_attention`."""
    gradients, weighting = "gradients" in method.needs, options.get("value_weighted", False)
    kept: dict[str, Any] = {"gradients": True, "values": bool(weighting)}
    if gradients:
        refuse_inference_tensors(model)
    else:
        kept = {"fusions": [(options.get("head_fusion", "mean"), weighting)]}
    with torch.inference_mode(False), torch.set_grad_enabled(gradients), evaluating(model):
        text = record(kept)
        rows, self_share = method.load()(text, **options)
    check_layer("layer", options.get("layer", -1), len(rows))
    return TextResult(rows.detach(), self_share, text)


def explain_rows(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    readout: Tensor,
    method: Method,
    options: Mapping[str, Any],
    *,
    targets: Sequence[tuple[int, int | None]] = (),
    within: str = "",
) -> TextResult:
    """Compute the rows of a method for selected tokens of one text in one forward pass.

    `inputs` are the arguments of an encoder or decoder, `readout` and `targets` those of `TextTrace`; `within` is the
    path of the language model in a vision-language model, by default the whole model.
    """
    refuse_other_layers(model, method.name)
    arguments: dict[str, Any] = dict(inputs)
    if not method.class_specific and "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1  # those of all tokens can take more memory than the attention
    if "features" in method.needs:
        arguments["output_hidden_states"] = True
    return _run(model, method, options, partial(_record, model, arguments, readout, targets, within))


def _record(
    model: nn.Module,
    inputs: Mapping[str, Any],
    readout: Tensor,
    targets: Sequence[tuple[int, int | None]],
    within: str,
    kept: Mapping[str, Any],
) -> TextTrace:
    """Run and record a forward pass over a text."""
    ids = inputs["input_ids"]
    try:
        with (
            reading(model, ids),
            record_attention(model, visible=True, within=within, chunks=whole_attention, **kept) as trace,
        ):
            output: Any = model(**inputs)
    except ValueNormsError:
        plain = {"values": False} if "values" in kept else {"fusions": [("mean", False)]}
        _record(model, inputs, readout, targets, within, {**kept, **plain})  # other errors take precedence
        raise
    if len(trace.layers.streams) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has several token streams ({', '.join(trace.layers.streams)}), expected one: pass "
            "a part of the model, such as model.get_encoder()."
        )
    _check_shapes(model, trace.layers, ids.shape[1], ids.shape[1])
    hidden = output.hidden_states[1:] if inputs.get("output_hidden_states") else ()
    return TextTrace(trace, _visible(trace, inputs), readout, targets, hidden)


def _check_shapes(model: nn.Module, layers: Sequence[AttentionLayer], queries: int, keys: int) -> None:
    """Raise UnsupportedModelError unless each layer has one matrix [queries, keys] for each head."""
    shapes = ((len(layer.example), *layer.example.shape[-2:]) for layer in layers)
    other = next((shape for shape in shapes if shape != (1, queries, keys)), None)
    if other is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} attends in {other[0]} matrices of {other[1]} × {other[2]} tokens, expected one of "
            f"{queries} × {keys} in each layer: rollout, flow and GAE require full attention."
        )


def _visible(trace: Trace, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the attention mask of each layer, [tokens, tokens], from recorded masks, padding and causality.

    With images, causality is not assumed: patches or a prefix may attend bidirectionally.
    """
    tokens = inputs["input_ids"].shape[1]
    common = torch.ones(tokens, tokens, dtype=torch.bool, device=trace.layers[0].example.device)
    if not {"pixel_values", "pixel_values_videos"} & set(inputs) and is_causal(trace.model):
        common = common.tril()
    if "attention_mask" in inputs:
        common = common & inputs["attention_mask"][0].bool().to(common.device)
    return [_seen(layer, common) for layer in trace.layers]


def _seen(layer: AttentionLayer, mask: Tensor) -> Tensor:
    """Return a mask [queries, keys] without what the recorded mask of the layer hides."""
    return mask if layer.visible is None else mask & layer.visible[0]


def explain_encoder_decoder(
    model: nn.Module,
    arguments: Mapping[str, Any],
    ids: Sequence[int],
    start: int,
    method: Method,
    options: Mapping[str, Any],
) -> TextResult:
    """Compute the rows of a method for generated tokens over the source and the tokens before them.

    `arguments` are those of `generate`, `ids` all tokens of the decoder, of which the first is generated at `start`.
    """
    inputs = {name: arguments[name] for name in ("input_ids", "pixel_values", "attention_mask") if name in arguments}
    return _run(model, method, options, partial(_record_pair, model, inputs, ids, start))


def _record_pair(
    model: nn.Module, inputs: Mapping[str, Tensor], ids: Sequence[int], start: int, kept: Mapping[str, Any]
) -> TextTrace:
    """Run and record a forward pass over a source and its generated text."""
    text = torch.tensor([ids[:-1]], device=device_of(model))
    with record_attention(model, visible=True, chunks=whole_attention, **kept) as trace:
        model(**inputs, decoder_input_ids=text, use_cache=False)
    indices = _streams(model, trace)
    layers = [[trace.layers[index] for index in stream] for stream in indices]
    m, n = (stream[0].example.shape[-1] if stream else 0 for stream in layers[:2])
    shapes = ((m, m), (n, n), (n, m))
    for stream, shape in zip(layers, shapes, strict=True):
        _check_shapes(model, stream, *shape)
    device = trace.layers[0].example.device
    later = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
    if any(bool(layer.example[0, ..., later].any()) for layer in layers[1]):
        raise not_causal(model)
    source, crossing = (torch.ones(shape, dtype=torch.bool, device=device) for shape in (shapes[0], shapes[2]))
    masks = zip(layers, (source, ~later, crossing), strict=True)
    seen = ([_seen(layer, mask) for layer in stream] for stream, mask in masks)
    targets = list(enumerate(ids[start:], start=start - 1))
    readout = torch.eye(m + n, device=device)[[m + position for position, _ in targets]]
    return TextTrace(trace, joint_steps(*seen), readout, targets, streams=indices)


def _streams(model: Any, trace: Trace) -> tuple[list[int], list[int], list[int]]:
    """Return the layer indices of encoder attention, decoder self-attention and cross-attention."""
    names = list(trace.layers.streams)
    crossing = [name for name in names if name.endswith(".cross_attention")]
    path = next(path for path, module in model.named_modules() if module is model.get_encoder())
    encoder = [name for name in names if f"{name}.".startswith(f"{path}.")]
    decoder = [name for name in names if name not in (*crossing, *encoder)]
    streams = trace.layers.streams
    recorded = ", ".join(f"{name} in {len(streams[name])} layers" for name in names)
    if not len(encoder) == len(decoder) == len(crossing) == 1 or len(streams[decoder[0]]) != len(streams[crossing[0]]):
        raise UnsupportedModelError(
            f"Expected {type(model).__name__} to have one encoder, and a decoder that attends to it in each layer, got "
            f"attention of {recorded or 'no part'}: record single passes with vitflow.record_attention and use "
            "trace.layers.of_stream."
        )
    index_of = {id(layer): index for index, layer in enumerate(trace.layers)}
    first, second, third = ([index_of[id(layer)] for layer in streams[s[0]]] for s in (encoder, decoder, crossing))
    return first, second, third


def array_of(tensor: Tensor) -> NDArray[np.float32]:
    """Convert a tensor to a NumPy float32 array."""
    array: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return array
