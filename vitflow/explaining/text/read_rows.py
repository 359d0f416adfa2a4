"""One pass over a finished text, and the rows of any method for chosen tokens of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import OptionError, UnsupportedModelError
from vitflow.explaining.method_table import Method
from vitflow.explaining.progress import tracking
from vitflow.methods import layer_rows
from vitflow.methods.attention import check_layer
from vitflow.methods.fusion import fuse_heads
from vitflow.methods.rollout import for_the_class
from vitflow.models.languages import has_head
from vitflow.recording.isolation import evaluating, refuse_inference_tensors
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class RowsRead:
    """The rows of a method over one text.

    Attributes:
        rows: [layers, rows, tokens], the method ended at each layer.
        chosen: the index of the layer whose rows the method gives when it is not asked for all of them.
        own: the raw share of each row's own token, [layers, rows], where the rows are relative to the receptive field.
        matrices: fused attention of each layer, [layers, tokens, tokens].
        causal: whether no token sees a later one.
        logits: what the model answered.
    """

    rows: Tensor
    chosen: int
    own: Tensor | None
    matrices: Tensor
    causal: bool
    logits: Tensor | None


def read_rows(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    readout: Tensor,
    method: Method,
    options: Mapping[str, Any],
    *,
    targets: Sequence[tuple[int, int | None]] = (),
) -> RowsRead:
    """Read one text in one pass, and give the rows of a method for chosen tokens.

    Args:
        model: an encoder or a decoder of transformers.
        inputs: its arguments, input_ids [1, tokens] among them.
        readout: what speaks, [rows, tokens].
        method, options: of the table of methods for texts.
        targets: for a class-specific method, for each row the position of a logit, and whose it is: a token or class;
            None for the most probable.

    Raises:
        UnsupportedModelError: the model reads with an encoder and a decoder, or value weighting, where that is asked
            for, does not apply to it.
    """
    gradients = "gradients" in method.needs
    if gradients:
        refuse_inference_tensors(model)
    with torch.inference_mode(False), torch.set_grad_enabled(gradients), evaluating(model):
        trace = _record(model, inputs, options, gradients)
        return _rows(trace, readout, method, options, targets)


def _record(model: nn.Module, inputs: Mapping[str, Tensor], options: Mapping[str, Any], gradients: bool) -> Trace:
    kept: dict[str, Any] = {"fusions": [(options["head_fusion"], options["value_weighted"])]}
    if gradients:
        kept = {"gradients": True, "values": bool(options["value_weighted"])}
    with record_attention(model, visible=True, **kept) as trace:
        model(**inputs)
    if len(trace.streams) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has several streams of tokens ({', '.join(trace.streams)}), expected one: pass "
            "the part that reads, such as model.get_encoder(), or let it write with explain_generation."
        )
    return trace


def _rows(
    trace: Trace,
    readout: Tensor,
    method: Method,
    options: Mapping[str, Any],
    targets: Sequence[tuple[int, int | None]],
) -> RowsRead:
    own = None
    used = {name: value for name, value in options.items() if name not in ("head_fusion", "value_weighted", "layer")}
    chosen = check_layer("layer", options.get("layer", -1), len(trace.layers))
    if method.class_specific:
        weighted = trace.heads(value_weighted=options["value_weighted"])
        found = _for_targets(trace, weighted, readout, options["head_fusion"], targets, used)
        matrices = torch.stack([fuse_heads(heads.detach(), options["head_fusion"])[0] for heads in trace.heads()])
    else:
        fused = trace.fused(options["head_fusion"], value_weighted=options["value_weighted"])
        matrices = torch.stack([one[0] for one in fused])
    seen = [
        torch.ones_like(matrices[0], dtype=torch.bool) if layer.visible is None else layer.visible[0]
        for layer in trace.layers
    ]
    readout = readout.to(matrices)
    causal = all(not one.triu(1).any() for one in seen)
    if method.name == "attention":
        found = layer_rows.attention_rows([*matrices], seen, readout, **used)
    elif method.name == "rollout":
        found, own = layer_rows.rollout_rows([*matrices], seen, readout, **used)
    elif method.name == "flow":
        used["layers"] = min(used["layers"], len(seen)) if isinstance(used["layers"], int) else used["layers"]
        rounds = 2 if used["causal"] == "receptive_field" else 1
        with tracking("attention flow", rounds * len(seen) * readout.numel()) as progress:
            found, own = layer_rows.flow_rows([*matrices], seen, readout, progress=progress, **used)
    logits = None if trace.logits is None else trace.logits.detach()
    return RowsRead(found, chosen, own, matrices, causal, logits)


def _for_targets(
    trace: Trace,
    weighted: Sequence[Tensor],
    readout: Tensor,
    head_fusion: Any,
    targets: Sequence[tuple[int, int | None]],
    options: Mapping[str, Any],
) -> Tensor:
    """Rows of generic attention explainability: one backward pass for each row's own logit."""
    found = []
    with tracking("backward passes", len(readout)) as progress:
        for row, (position, target) in zip(readout, targets, strict=True):
            score = score_of(trace, position, target)
            gradients = trace.gradients_of(score).attentions
            layers = [layer[0] for layer in for_the_class(weighted, gradients, head_fusion)]
            found.append(layer_rows.relevance_rows(layers, row.to(layers[0]).unsqueeze(0), **options)[:, 0].detach())
            progress(1)
    return torch.stack(found, dim=1)


def score_of(trace: Trace, position: int, target: int | None) -> Tensor:
    """The logit of a token at a position of the text, or of a class for the whole text."""
    logits = trace.logits
    if logits is None or logits.ndim not in (2, 3) or not has_head(trace.model):
        raise OptionError(
            f"A class-specific method needs a model that predicts words or classes, and {type(trace.model).__name__} "
            "ends in features: load it with its head, or use a method such as rollout."
        )
    scores = logits[0] if logits.ndim == 2 else logits[0, position]
    return scores.max() if target is None else scores[target]
