"""Rows of any method for selected tokens of a text, computed in one forward pass."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError, ValueNormsError
from vitflow.explaining.method_table import Method
from vitflow.methods.fusion import check_layer
from vitflow.methods.gradients import ValueWeighting
from vitflow.methods.rollout import relevance
from vitflow.recording.attention_kinds import refuse_other_layers
from vitflow.recording.isolation import evaluating, refuse_inference_tensors
from vitflow.recording.probing import is_causal
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace
from vitflow.text.languages import reading


@dataclass(frozen=True, slots=True, eq=False)
class ReadText:
    """Input of a method for texts: a recorded forward pass and the requested rows.

    The attention graph has one step per layer. That of an encoder-decoder model has the steps of the encoder first,
    then `steps_per_layer` for each layer of the decoder.

    Attributes:
        trace: recorded forward pass.
        visible: attention mask of each step, bool [tokens, tokens].
        readout: query weights [rows, tokens].
        targets: for each row, position and token or class id of a logit; None for the most probable.
        hidden: hidden states after each layer, [1, tokens, width], for methods that need features.
    """

    trace: Trace
    visible: Sequence[Tensor]
    readout: Tensor
    targets: Sequence[tuple[int, int | None]]
    hidden: Sequence[Tensor] = ()

    #: Steps per layer, and steps below the first layer.
    steps_per_layer: ClassVar[int] = 1
    steps_below: ClassVar[int] = 0

    @property
    def ends(self) -> list[int]:
        """The number of steps up to each layer, first layer first."""
        return list(range(self.steps_below + self.steps_per_layer, len(self.visible) + 1, self.steps_per_layer))

    def fused(self, head_fusion: str, value_weighted: ValueWeighting) -> list[Tensor]:
        """Return the fused attention of each step, [tokens, tokens]."""
        return [layer[0] for layer in self.trace.fused(head_fusion, value_weighted=value_weighted)]

    def relevance(self, layers: Sequence[Tensor], row: int, start_layer: int) -> Tensor:
        """Return a row of generic attention explainability, qᵀ (I + W_l) ⋯ (I + W_s) for l = 1 … L: [layers, tokens].

        Args:
            layers: W_l as returned by `gradient_weighted_attention`, [tokens, tokens].
            row: index of the row.
            start_layer: as for `relevance`.
        """
        first = check_layer("start_layer", start_layer, len(layers))
        readout = self.readout[row].unsqueeze(0).to(layers[0])
        stack = [layer.unsqueeze(0) for layer in layers]
        tops = range(1, len(layers) + 1)
        rows = [relevance(stack[first:top], readout=readout) if top > first else readout for top in tops]
        return torch.cat(rows)


@dataclass(frozen=True, slots=True, eq=False)
class RowsRead:
    """Result of a method for one text.

    Attributes:
        rows: [layers, rows, tokens], if the method ends at each layer.
        self_share: raw share of each row's query token, [layers, rows], if the rows are relative to the receptive
            field; else None.
        text: recorded forward pass.
    """

    rows: Tensor
    self_share: Tensor | None
    text: ReadText


def run_method(
    model: nn.Module, method: Method, options: Mapping[str, Any], record: Callable[[Mapping[str, Any]], ReadText]
) -> RowsRead:
    """Record a forward pass, and compute the rows of a method for texts.

    Args:
        model: the model, for gradients and to run it in eval mode.
        method, options: the method and its options.
        record: runs the model; its argument is the arguments of `record_attention` for what the method needs.

    Raises:
        OptionError: a layer that the model does not have.
    """
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
    return RowsRead(rows.detach(), self_share, text)


def read_rows(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    readout: Tensor,
    method: Method,
    options: Mapping[str, Any],
    *,
    targets: Sequence[tuple[int, int | None]] = (),
    within: str = "",
) -> RowsRead:
    """Compute the rows of a method for selected tokens of one text in one forward pass.

    Args:
        model: encoder or decoder of transformers.
        inputs: arguments of the model, including input_ids [1, tokens].
        readout: query weights [rows, tokens].
        method, options: a method for texts and its options.
        targets: for class-specific methods, position and token or class id of the logit of each row; None for the most
            probable.
        within: path of the language model in a vision-language model; by default the whole model.

    Raises:
        UnsupportedModelError: encoder-decoder model, model that mixes tokens by other means than attention, or model
            that does not support the requested value weighting.
    """
    refuse_other_layers(model, method.name)
    arguments: dict[str, Any] = dict(inputs)
    if not method.class_specific and "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1  # those of all tokens can take more memory than the attention
    if "features" in method.needs:
        arguments["output_hidden_states"] = True
    record = partial(_record, model, arguments, readout, targets, within)
    return run_method(model, method, options, record)


def _record(
    model: nn.Module,
    inputs: Mapping[str, Any],
    readout: Tensor,
    targets: Sequence[tuple[int, int | None]],
    within: str,
    kept: Mapping[str, Any],
) -> ReadText:
    """Run and record a forward pass over a text."""
    ids = inputs["input_ids"]
    try:
        with reading(model, ids), record_attention(model, visible=True, within=within, **kept) as trace:
            output: Any = model(**inputs)
    except ValueNormsError:
        plain = {"values": False} if "values" in kept else {"fusions": [("mean", False)]}
        _record(model, inputs, readout, targets, within, {**kept, **plain})  # other errors take precedence
        raise
    if len(trace.streams) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has several token streams ({', '.join(trace.streams)}), expected one: pass a part "
            "of the model, such as model.get_encoder()."
        )
    full = (1, ids.shape[1], ids.shape[1])
    examples = (layer.example for layer in trace.layers)
    other = next((tuple(example.shape) for example in examples if outer_shape(example) != full), None)
    if other is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} attends within parts of the text, in matrices of shape {other}, expected "
            f"{ids.shape[1]} × {ids.shape[1]} tokens in each layer: rollout, flow and GAE require full attention."
        )
    hidden = output.hidden_states[1:] if inputs.get("output_hidden_states") else ()
    return ReadText(trace, _visible(trace, inputs), readout, targets, hidden)


def outer_shape(matrix: Tensor) -> tuple[int, int, int]:
    """Return the batch size and the number of queries and keys of attention matrices."""
    return len(matrix), matrix.shape[-2], matrix.shape[-1]


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
    return [common if layer.visible is None else common & layer.visible[0] for layer in trace.layers]


def array_of(tensor: Tensor) -> NDArray[np.float32]:
    """Convert a tensor to a NumPy float32 array."""
    array: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return array
