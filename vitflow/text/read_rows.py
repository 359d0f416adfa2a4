"""One pass over a finished text, and the rows of any method for chosen tokens of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import OptionError, UnsupportedModelError, ValueNormsError, whole_number
from vitflow.explaining.method import Method
from vitflow.explaining.progress import tracking
from vitflow.methods.flow.layers import LayerRange, default_window
from vitflow.methods.fusion import HeadFusion, check_layer
from vitflow.methods.gradients import ValueWeighting
from vitflow.methods.rollout import for_the_class
from vitflow.models.languages import decoder_of, has_head, predicts_words, reading
from vitflow.recording.attention_kinds import refuse_other_layers
from vitflow.recording.isolation import evaluating, refuse_inference_tensors
from vitflow.recording.probing import is_causal
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace
from vitflow.text import layer_rows
from vitflow.text.writing import refuse_looking_ahead


@dataclass(frozen=True, slots=True, eq=False)
class ReadText:
    """What a method for texts is given: a pass over one text, and what is asked of it.

    Attributes:
        trace: the pass.
        visible: which keys each query may see in each layer, bool [tokens, tokens].
        readout: what speaks, [rows, tokens].
        targets: for each row the position of a logit, and whose it is; None for the most probable.
        hidden: what each layer makes of the tokens, [1, tokens, width], for a method that needs features.
    """

    trace: Trace
    visible: Sequence[Tensor]
    readout: Tensor
    targets: Sequence[tuple[int, int | None]]
    hidden: Sequence[Tensor] = ()

    def fused(self, head_fusion: str, value_weighted: ValueWeighting) -> list[Tensor]:
        """Fused attention of each layer, [tokens, tokens]."""
        return [layer[0] for layer in self.trace.fused(head_fusion, value_weighted=value_weighted)]


@dataclass(frozen=True, slots=True, eq=False)
class RowsRead:
    """The rows of a method over one text.

    Attributes:
        rows: [layers, rows, tokens], the method ended at each layer.
        chosen: the index of the layer whose rows the method gives when it is not asked for all of them.
        self_share: raw share of each row's own token if relative to the receptive field, [layers, rows]; else None.
        matrices: fused attention of each layer, [layers, tokens, tokens].
        logits: what the model answered.
    """

    rows: Tensor
    chosen: int
    self_share: Tensor | None
    matrices: Tensor
    logits: Tensor | None


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
    """Read one text in one pass, and give the rows of a method for chosen tokens.

    Args:
        model: an encoder or a decoder of transformers.
        inputs: its arguments, input_ids [1, tokens] among them.
        readout: what speaks, [rows, tokens].
        method, options: of the table of methods for texts.
        targets: for a class-specific method, for each row the position of a logit, and whose it is: a token or class;
            None for the most probable.
        within: the path of the part that reads, in a model that may see as well; by default all of it.

    Raises:
        UnsupportedModelError: the model reads with an encoder and a decoder, mixes its tokens otherwise than by
            attention, or value weighting, where that is asked for, does not apply to it.
    """
    refuse_other_layers(model, method.name)
    gradients = "gradients" in method.needs
    if gradients:
        refuse_inference_tensors(model)
    with torch.inference_mode(False), torch.set_grad_enabled(gradients), evaluating(model):
        fusion, weighting = options.get("head_fusion", "mean"), options.get("value_weighted", False)
        kept: dict[str, Any] = {"fusions": [(fusion, weighting)], "within": within}
        if gradients:
            kept = {"gradients": True, "values": bool(weighting), "within": within}
        trace, hidden = _record(model, inputs, kept, hidden="features" in method.needs)
        found = trace.fused(fusion, value_weighted=False if gradients else weighting)
        matrices = torch.stack([layer[0] for layer in found])
        text = ReadText(trace, _visible(trace, inputs), readout.to(matrices), targets, hidden)
        rows, own = method.load()(text, **options)
    chosen = check_layer("layer", options.get("layer", -1), len(rows))
    return RowsRead(rows, chosen, own, matrices, None if trace.logits is None else trace.logits.detach())


def _record(
    model: nn.Module, inputs: Mapping[str, Tensor], kept: Mapping[str, Any], *, hidden: bool
) -> tuple[Trace, Sequence[Tensor]]:
    """A pass with what shall be kept of it, and what each layer makes of the tokens, where that is asked for."""
    ids = inputs["input_ids"]
    try:
        with reading(model, ids), record_attention(model, visible=True, **kept) as trace:
            output: Any = model(**inputs, **({"output_hidden_states": True} if hidden else {}))
    except ValueNormsError:
        plain = {"values": False} if "values" in kept else {"fusions": [("mean", False)]}
        _record(model, inputs, {**kept, **plain}, hidden=False)  # it may be refused without weights, too
        raise
    if len(trace.streams) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has several streams of tokens ({', '.join(trace.streams)}), expected one: pass "
            "the part that reads, such as model.get_encoder(), in Python."
        )
    whole = (1, ids.shape[1], ids.shape[1])
    other = next((tuple(one.shape) for one in (layer.example for layer in trace.layers) if outer(one) != whole), None)
    if other is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} attends within parts of the text, in matrices of shape {other}, expected "
            f"{ids.shape[1]} × {ids.shape[1]} tokens in each layer: rollout, flow and GAE need attention between all."
        )
    return trace, output.hidden_states[1:] if hidden else ()


def outer(matrix: Tensor) -> tuple[int, int, int]:
    """A matrix's batch, queries and keys."""
    return len(matrix), matrix.shape[-2], matrix.shape[-1]


def _visible(trace: Trace, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Which keys each query of a layer may see, [tokens, tokens]: by its masks, by padding, and by what was caused.

    Beside an image the masks alone tell: its patches, or all of a prefix, may see both ways.
    """
    tokens = inputs["input_ids"].shape[1]
    common = torch.ones(tokens, tokens, dtype=torch.bool, device=trace.layers[0].example.device)
    if "pixel_values" not in inputs and is_causal(trace.model):
        common = common.tril()
    if "attention_mask" in inputs:
        common = common & inputs["attention_mask"][0].bool().to(common.device)
    return [common if layer.visible is None else common & layer.visible[0] for layer in trace.layers]


def rollout(
    text: ReadText, *, head_fusion: str, value_weighted: ValueWeighting, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Rows of attention rollout."""
    return layer_rows.rollout_rows(text.fused(head_fusion, value_weighted), text.visible, text.readout, **options)


def attention(
    text: ReadText, *, head_fusion: str, value_weighted: ValueWeighting, layer: int, **options: Any
) -> tuple[Tensor, None]:
    """Rows of each layer's own attention."""
    matrices = text.fused(head_fusion, value_weighted)
    return layer_rows.attention_rows(matrices, text.visible, text.readout, **options), None


def flow(
    text: ReadText, *, head_fusion: str, value_weighted: ValueWeighting, layers: LayerRange, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Rows of attention flow, carried on to the input by rollout."""
    matrices = text.fused(head_fusion, value_weighted)
    options["layers"] = default_window(layers, len(matrices))
    rounds = 2 if options["causal"] == "receptive_field" else 1
    with tracking("attention flow", rounds * len(matrices) * text.readout.numel()) as progress:
        return layer_rows.flow_rows(matrices, text.visible, text.readout, progress=progress, **options)


def gae(
    text: ReadText, *, head_fusion: HeadFusion, value_weighted: ValueWeighting, **options: Any
) -> tuple[Tensor, None]:
    """Rows of generic attention explainability: one backward pass for each row's own logit."""
    found = relevant_layers(text.trace, text.targets, head_fusion, value_weighted)
    rows = [
        layer_rows.relevance_rows(layers, row.unsqueeze(0), **options)[:, 0]
        for row, layers in zip(text.readout, found, strict=True)
    ]
    return torch.stack(rows, dim=1), None


def relevant_layers(
    trace: Trace, targets: Sequence[tuple[int, int | None]], head_fusion: HeadFusion, value_weighted: ValueWeighting
) -> Iterator[list[Tensor]]:
    """The fused (A ⊙ ∇A)⁺ of each layer, [queries, keys], for the logit of one target after the other."""
    weighted = trace.heads(value_weighted=value_weighted)
    with tracking("backward passes", len(targets)) as progress:
        for position, target in targets:
            gradients = trace.gradients_of(_score(trace, position, target)).attentions
            # Layer by layer, as those of an encoder and a decoder differ in shape.
            pairs = zip(weighted, gradients, strict=True)
            yield [for_the_class([layer], [gradient], head_fusion)[0][0].detach() for layer, gradient in pairs]
            progress(1)


def _score(trace: Trace, position: int, target: int | None) -> Tensor:
    """The logit of a token at a position of the text, or of a class for the whole text."""
    logits = trace.logits
    if logits is None or logits.ndim not in (2, 3) or not has_head(trace.model):
        raise OptionError(
            f"A class-specific method needs a model that predicts words or classes, and {type(trace.model).__name__} "
            "ends in features: load it with its head, or use a method such as rollout."
        )
    scores = logits[0] if logits.ndim == 2 else logits[0, position]
    if target is not None:
        whole_number("target", target, 0, len(scores) - 1)
    return scores.max() if target is None else scores[target]


def array_of(tensor: Tensor) -> NDArray[np.float32]:
    """The same numbers in NumPy, float32."""
    array: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return array


def logit_lens(text: ReadText, *, layer: int = -1) -> tuple[Tensor, Tensor]:
    """Rows of the logit lens, (h_l,j · e)⁺ for the output embedding e of each row's word, among the tokens up to it.

    Hidden states below the last layer go through the model's last norm, as those of the last layer do. The row's own
    token has no part in it, as its state is read to predict the word; its share is told beside. Rows sum to 1.

    Args:
        text: a pass with its hidden states.
        layer: which one is asked for; rows are given of all.

    Raises:
        UnsupportedModelError: the model does not write.

    Source: nostalgebraist, "interpreting GPT: the logit lens", 2020; on images as in Li et al., ICCV 2025 (TAM).
    """
    model: Any = text.trace.model
    if not predicts_words(model) or not text.hidden:
        raise UnsupportedModelError(
            f"The logit lens needs a model that writes, whose hidden states its output embedding reads, got "
            f"{type(model).__name__}: use rollout or attention."
        )
    refuse_looking_ahead(model)
    logits, norm = text.trace.logits, _last_norm(decoder_of(model))
    assert logits is not None
    numbers = [int(logits[0, place].argmax()) if word is None else word for place, word in text.targets]
    words = model.get_output_embeddings().weight[numbers].detach().float()
    places = torch.tensor([place for place, _ in text.targets], device=words.device).unsqueeze(1)
    tokens = torch.arange(text.readout.shape[-1], device=words.device)
    rows, shares = [], []
    for number, hidden in enumerate(text.hidden, start=1):
        states = hidden if number == len(text.hidden) or norm is None else norm(hidden)
        scores = (words @ states[0].detach().float().T).clamp_min(0.0).masked_fill(tokens > places, 0.0)
        own = tokens == places
        shares.append((scores * own).sum(dim=-1) / scores.sum(dim=-1).clamp_min(torch.finfo(scores.dtype).tiny))
        others = scores.masked_fill(own, 0.0)
        total = others.sum(dim=-1, keepdim=True)
        rows.append(others / torch.where(total > 0, total, 1.0))
    return torch.stack(rows), torch.stack(shares)


def _last_norm(decoder: nn.Module) -> nn.Module | None:
    """The norm that a decoder's tokens go through after its last layer; None where there is none to be seen."""
    norms = [module for module in decoder.children() if "norm" in type(module).__name__.lower()]
    return norms[-1] if norms else None
