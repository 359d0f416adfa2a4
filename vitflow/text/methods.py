"""The methods for texts: rows of selected tokens if the method ends at layer 1, 2, … L.

Each method takes a recorded text and its options. It returns rows [layers, rows, tokens], and the raw share of each
row's query token, [layers, rows], if the rows are relative to the receptive field, else None.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import OptionError, UnsupportedModelError, whole_number
from vitflow.explaining.captions import method_in_words
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.flow.layers import LayerRange, default_window, parse_window
from vitflow.methods.fusion import HeadFusion, add_residual, check_layer, discard_low
from vitflow.methods.gradients import ValueWeighting
from vitflow.methods.rollout import gradient_weighted_attention
from vitflow.methods.tokens import Causal, relative_to, self_token, uniform_attention
from vitflow.models.names import class_count
from vitflow.models.parts import decoder_of
from vitflow.progress import tracking
from vitflow.recording.trace import Trace
from vitflow.text.languages import predicts_words, refuse_not_causal
from vitflow.text.method_table import TEXT_METHODS
from vitflow.text.rows import TextTrace


def caption(
    method: str,
    options: Mapping[str, Any],
    model: str,
    *,
    target: str | None = None,
    probability: float | None = None,
) -> str:
    """Return a one-line caption: method, target of a class-specific method with its probability, and model.

    >>> options = {"head_fusion": "max", "value_weighted": False}
    >>> caption("gae", options, "bert", target="table", probability=0.25)
    'GAE (max over heads) · for “table”, probability 25.0% · bert'
    """
    likely = "" if probability is None else f", probability {probability:.1%}"
    explained = "" if target is None else f"for “{target}”{likely}"
    return " · ".join(filter(None, [method_in_words(TEXT_METHODS[method], options), explained, model]))


def rollout(
    text: TextTrace,
    *,
    head_fusion: str,
    value_weighted: ValueWeighting,
    discard_ratio: float,
    residual: float,
    start_layer: int,
    causal: Causal,
) -> tuple[Tensor, Tensor | None]:
    """Compute rows of attention rollout, qᵀ Â_l ⋯ Â_s for l = 1 … L; options as for `attention_rollout`."""
    steps = text.fused(head_fusion, value_weighted)
    first = check_layer("start_layer", start_layer, text.steps_below or len(steps))
    layers = [end - 1 for end in text.ends]

    def rows(matrices: Sequence[Tensor], ratio: float) -> Tensor:
        return _rollout_rows(matrices, text.visible, text.readout, ratio, residual, first)[layers]

    if causal == "receptive_field":
        steps = [step.double() for step in steps]
    return _relative(text, rows, steps, discard_ratio, causal)


def _rollout_rows(
    matrices: Sequence[Tensor],
    visible: Sequence[Tensor],
    readout: Tensor,
    discard_ratio: float,
    residual: float,
    first: int = 0,
) -> Tensor:
    """Return rows of rollout after each matrix [tokens, tokens], from the index `first` on: [layers, rows, tokens]."""
    product = torch.eye(readout.shape[-1], dtype=matrices[0].dtype, device=matrices[0].device)
    rows = []
    for index, (matrix, seen) in enumerate(zip(matrices, visible, strict=True)):
        if index >= first:
            product = add_residual(discard_low(matrix, discard_ratio, 0, seen), residual) @ product
        rows.append(readout.to(product) @ product)
    return torch.stack(rows)


def _relative(
    text: TextTrace,
    rows: Callable[[Sequence[Tensor], float], Tensor],
    steps: Sequence[Tensor],
    discard_ratio: float,
    causal: Causal,
) -> tuple[Tensor, Tensor | None]:
    """Return the rows of a method; with `causal="receptive_field"`, relative to those of uniform attention."""
    raw = rows(steps, discard_ratio)
    if causal != "receptive_field":
        return raw, None
    query = self_token(text.readout.to(steps[0]))
    reference = rows([uniform_attention(seen) for seen in text.visible], 0.0)
    return relative_to(raw, reference, query), (raw * query).sum(dim=-1)


def attention(
    text: TextTrace, *, head_fusion: str, value_weighted: ValueWeighting, layer: int, discard_ratio: float
) -> tuple[Tensor, None]:
    """Compute rows of the attention of the last step of each layer, qᵀ W_l; `layer` is the layer of the result."""
    steps = text.fused(head_fusion, value_weighted)
    last = [discard_low(steps[end - 1], discard_ratio, 0, text.visible[end - 1]) for end in text.ends]
    return torch.stack([text.readout.to(matrix) @ matrix for matrix in last]), None


def flow(
    text: TextTrace,
    *,
    head_fusion: str,
    value_weighted: ValueWeighting,
    layers: LayerRange,
    below: str,
    discard_ratio: float,
    residual: float,
    causal: Causal,
) -> tuple[Tensor, Tensor | None]:
    """Compute rows of attention flow through a window of layers that ends at each layer.

    Windows of lower layers have the same size, cut at the input; `layers="all"` includes an encoder. Each row is
    normalised over its sinks. If `below` is "rollout", it is propagated from the lowest layer of the window to the
    input by rollout. Other options as for `attention_flow`.
    """
    steps = text.fused(head_fusion, value_weighted)
    first, last = parse_window(default_window(layers, len(text.ends)), len(text.ends))
    size = text.steps_per_layer * (last - first + 1)
    spans = [(0 if layers == "all" else max(end - size, text.steps_below), end) for end in text.ends]
    readout = text.readout.to(steps[0])
    visible = [seen.unsqueeze(0) for seen in text.visible]

    def rows(matrices: Sequence[Tensor], ratio: float) -> Tensor:
        results = []
        options: dict[str, Any] = {"discard_ratio": ratio, "residual": residual, "num_prefix_tokens": 0}
        for low, top in spans:
            window = [matrix.unsqueeze(0) for matrix in matrices[low:top]]
            options |= {"visible": visible[low:top], "progress": progress}
            shares = torch.stack([attention_flow(window, source=row, **options).normalized[0] for row in readout])
            if below == "rollout" and low:
                lower = _rollout_rows(matrices[:low], text.visible[:low], shares, ratio, residual)
                shares = lower[-1].double()
            results.append(shares)
        return torch.stack(results)

    rounds = 2 if causal == "receptive_field" else 1
    with tracking("attention flow", rounds * len(spans) * readout.numel()) as progress:
        return _relative(text, rows, steps, discard_ratio, causal)


def gae(
    text: TextTrace, *, head_fusion: HeadFusion, value_weighted: ValueWeighting, start_layer: int
) -> tuple[Tensor, None]:
    """Compute rows of generic attention explainability, with one backward pass for the logit of each row."""
    trace, rows = text.trace, []
    weighted = trace.heads(value_weighted=value_weighted)
    with tracking("backward passes", len(text.targets)) as progress:
        for row, (position, target) in enumerate(text.targets):
            gradients = trace.gradients_of(_score(trace, position, target)).attentions
            # Layer by layer, because encoder and decoder matrices differ in shape.
            pairs = zip(weighted, gradients, strict=True)
            fused = [gradient_weighted_attention([layer], [gradient], head_fusion)[0][0] for layer, gradient in pairs]
            rows.append(text.relevance([layer.detach() for layer in fused], row, start_layer))
            progress(1)
    return torch.stack(rows, dim=1), None


def _score(trace: Trace, position: int, target: int | None) -> Tensor:
    """Return the logit of a token at a position of the text, or of a class of the whole text."""
    logits = trace.logits
    words = predicts_words(trace.model)
    if logits is None or logits.ndim not in (2, 3) or not (words or class_count(trace.model)):
        raise OptionError(
            f"Class-specific methods require a model that predicts words or classes, and {type(trace.model).__name__} "
            "ends in features: load it with its head, or use a method such as rollout."
        )
    scores = logits[0] if logits.ndim == 2 else logits[0, position]
    if target is not None:
        whole_number(f"the target, a {'token id' if words else 'class index'},", target, 0, len(scores) - 1)
    return scores.max() if target is None else scores[target]


def logit_lens(text: TextTrace, *, layer: int = -1) -> tuple[Tensor, Tensor]:
    """Compute rows of the logit lens, (h_l,j · e)⁺ for the output embedding e of each row's word, over earlier tokens.

    The model's final norm is applied to the hidden states of all layers. The query token, whose state predicts the
    word, is left out; its share is returned separately. Rows sum to 1; `layer` is the layer of the result.

    Source: nostalgebraist, "interpreting GPT: the logit lens", 2020; on images as in Li et al., ICCV 2025 (TAM).
    """
    model: Any = text.trace.model
    if not predicts_words(model) or not text.hidden:
        raise UnsupportedModelError(
            f"The logit lens requires a language model with an output embedding, got {type(model).__name__}: use "
            "rollout or attention."
        )
    refuse_not_causal(model)
    logits = text.trace.logits
    norms = [module for module in decoder_of(model).children() if "norm" in type(module).__name__.lower()]
    assert logits is not None
    ids = [int(logits[0, position].argmax()) if word is None else word for position, word in text.targets]
    words = model.get_output_embeddings().weight[ids].detach().float()
    positions = torch.tensor([position for position, _ in text.targets], device=words.device).unsqueeze(1)
    tokens = torch.arange(text.readout.shape[-1], device=words.device)
    rows, shares = [], []
    for number, hidden in enumerate(text.hidden, start=1):
        states = norms[-1](hidden) if norms and number < len(text.hidden) else hidden
        scores = (words @ states[0].detach().float().T).clamp_min(0.0).masked_fill(tokens > positions, 0.0)
        query = tokens == positions
        shares.append((scores * query).sum(dim=-1) / scores.sum(dim=-1).clamp_min(torch.finfo(scores.dtype).tiny))
        others = scores.masked_fill(query, 0.0)
        total = others.sum(dim=-1, keepdim=True)
        rows.append(others / torch.where(total > 0, total, 1.0))
    return torch.stack(rows), torch.stack(shares)
