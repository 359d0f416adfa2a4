"""Rows of any method for selected tokens of a text, computed in one forward pass."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import OptionError, UnsupportedModelError, ValueNormsError, whole_number
from vitflow.explaining.method_table import Method
from vitflow.methods.flow.layers import LayerRange, default_window, parse_window
from vitflow.methods.fusion import HeadFusion, check_layer
from vitflow.methods.gradients import ValueWeighting
from vitflow.methods.rollout import gradient_weighted_attention
from vitflow.models.languages import decoder_of
from vitflow.progress import tracking
from vitflow.recording.attention_kinds import refuse_other_layers
from vitflow.recording.isolation import evaluating, refuse_inference_tensors
from vitflow.recording.probing import is_causal
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace
from vitflow.text import layer_rows
from vitflow.text.languages import has_head, predicts_words, reading
from vitflow.text.writing import refuse_not_causal


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
        """Return a row of generic attention explainability, [layers, tokens], from `relevant_layers`."""
        return layer_rows.relevance_rows(layers, self.readout[row].unsqueeze(0), start_layer=start_layer)[:, 0]


@dataclass(frozen=True, slots=True, eq=False)
class RowsRead:
    """Result of a method for one text.

    Attributes:
        rows: [layers, rows, tokens], if the method ends at each layer.
        chosen: layer index of the method's result.
        self_share: raw share of each row's query token, [layers, rows], if the rows are relative to the receptive
            field; else None.
        matrices: fused attention of each layer, [layers, tokens, tokens].
        logits: logits of the model; None if it has none.
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
    gradients = "gradients" in method.needs
    if gradients:
        refuse_inference_tensors(model)
    with torch.inference_mode(False), torch.set_grad_enabled(gradients), evaluating(model):
        fusion, weighting = options.get("head_fusion", "mean"), options.get("value_weighted", False)
        kept = {"within": within, **kept_matrices(method, options)}
        arguments: dict[str, Any] = dict(inputs)
        if not method.class_specific and "logits_to_keep" in inspect.signature(model.forward).parameters:
            arguments["logits_to_keep"] = 1  # those of all tokens can take more memory than the attention
        trace, hidden = _record(model, arguments, kept, hidden="features" in method.needs)
        fused = trace.fused(fusion, value_weighted=False if gradients else weighting)
        matrices = torch.stack([layer[0] for layer in fused])
        text = ReadText(trace, _visible(trace, inputs), readout.to(matrices), targets, hidden)
        rows, self_share = method.load()(text, **options)
    chosen = check_layer("layer", options.get("layer", -1), len(rows))
    return RowsRead(rows, chosen, self_share, matrices, None if trace.logits is None else trace.logits.detach())


def kept_matrices(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `record_attention` for what a method needs: gradients, or attention fused at once."""
    weighting = options.get("value_weighted", False)
    if "gradients" in method.needs:
        return {"gradients": True, "values": bool(weighting)}
    return {"fusions": [(options.get("head_fusion", "mean"), weighting)]}


def _record(
    model: nn.Module, inputs: Mapping[str, Tensor], kept: Mapping[str, Any], *, hidden: bool
) -> tuple[Trace, Sequence[Tensor]]:
    """Run and record a forward pass; return the trace, and the hidden states after each layer if `hidden`."""
    ids = inputs["input_ids"]
    try:
        with reading(model, ids), record_attention(model, visible=True, **kept) as trace:
            output: Any = model(**inputs, **({"output_hidden_states": True} if hidden else {}))
    except ValueNormsError:
        plain = {"values": False} if "values" in kept else {"fusions": [("mean", False)]}
        _record(model, inputs, {**kept, **plain}, hidden=False)  # other errors take precedence
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
    return trace, output.hidden_states[1:] if hidden else ()


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


def rollout(
    text: ReadText, *, head_fusion: str, value_weighted: ValueWeighting, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute rows of attention rollout."""
    steps = text.fused(head_fusion, value_weighted)
    rows, self_share = layer_rows.rollout_rows(steps, text.visible, text.readout.to(steps[0]), **options)
    layers = [end - 1 for end in text.ends]
    return rows[layers], None if self_share is None else self_share[layers]


def attention(
    text: ReadText, *, head_fusion: str, value_weighted: ValueWeighting, layer: int, **options: Any
) -> tuple[Tensor, None]:
    """Compute rows of the attention of the last step of each layer; `layer` is the layer of the result."""
    steps = text.fused(head_fusion, value_weighted)
    matrices, visible = ([each[end - 1] for end in text.ends] for each in (steps, text.visible))
    return layer_rows.attention_rows(matrices, visible, text.readout, **options), None


def flow(
    text: ReadText, *, head_fusion: str, value_weighted: ValueWeighting, layers: LayerRange, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute rows of attention flow through a window of layers that ends at each layer.

    Windows of lower layers have the same size, cut at the input; `layers="all"` includes an encoder.
    """
    steps = text.fused(head_fusion, value_weighted)
    first, last = parse_window(default_window(layers, len(text.ends)), len(text.ends))
    size, bottom = text.steps_per_layer * (last - first + 1), 0 if layers == "all" else text.steps_below
    spans = [(0 if layers == "all" else max(end - size, bottom), end) for end in text.ends]
    readout = text.readout.to(steps[0])
    rounds = 2 if options["causal"] == "receptive_field" else 1
    with tracking("attention flow", rounds * len(spans) * readout.numel()) as progress:
        return layer_rows.flow_rows(steps, text.visible, readout, spans, progress=progress, **options)


def gae(
    text: ReadText, *, head_fusion: HeadFusion, value_weighted: ValueWeighting, start_layer: int
) -> tuple[Tensor, None]:
    """Compute rows of generic attention explainability, with one backward pass for the logit of each row."""
    relevant = _relevant_layers(text.trace, text.targets, head_fusion, value_weighted)
    rows = [text.relevance(layers, row, start_layer) for row, layers in enumerate(relevant)]
    return torch.stack(rows, dim=1), None


def _relevant_layers(
    trace: Trace, targets: Sequence[tuple[int, int | None]], head_fusion: HeadFusion, value_weighted: ValueWeighting
) -> Iterator[list[Tensor]]:
    """Yield the fused (A ⊙ ∇A)⁺ of each layer, [queries, keys], for the logit of each target."""
    weighted = trace.heads(value_weighted=value_weighted)
    with tracking("backward passes", len(targets)) as progress:
        for position, target in targets:
            gradients = trace.gradients_of(_score(trace, position, target)).attentions
            # Layer by layer, because encoder and decoder matrices differ in shape.
            pairs = zip(weighted, gradients, strict=True)
            yield [
                gradient_weighted_attention([layer], [gradient], head_fusion)[0][0].detach()
                for layer, gradient in pairs
            ]
            progress(1)


def _score(trace: Trace, position: int, target: int | None) -> Tensor:
    """Return the logit of a token at a position of the text, or of a class of the whole text."""
    logits = trace.logits
    if logits is None or logits.ndim not in (2, 3) or not has_head(trace.model):
        raise OptionError(
            f"Class-specific methods require a model that predicts words or classes, and {type(trace.model).__name__} "
            "ends in features: load it with its head, or use a method such as rollout."
        )
    scores = logits[0] if logits.ndim == 2 else logits[0, position]
    if target is not None:
        whole_number("target", target, 0, len(scores) - 1)
    return scores.max() if target is None else scores[target]


def array_of(tensor: Tensor) -> NDArray[np.float32]:
    """Convert a tensor to a NumPy float32 array."""
    array: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return array


def logit_lens(text: ReadText, *, layer: int = -1) -> tuple[Tensor, Tensor]:
    """Compute rows of the logit lens, (h_l,j · e)⁺ for the output embedding e of each row's word, over earlier tokens.

    The model's final norm is applied to the hidden states of all layers. The query token, whose state predicts the
    word, is left out; its share is returned separately. Rows sum to 1.

    Args:
        text: recorded forward pass with hidden states.
        layer: layer of the result; rows of all layers are returned.

    Raises:
        UnsupportedModelError: the model does not generate text.

    Source: nostalgebraist, "interpreting GPT: the logit lens", 2020; on images as in Li et al., ICCV 2025 (TAM).
    """
    model: Any = text.trace.model
    if not predicts_words(model) or not text.hidden:
        raise UnsupportedModelError(
            f"The logit lens requires a language model with an output embedding, got {type(model).__name__}: use "
            "rollout or attention."
        )
    refuse_not_causal(model)
    logits, norm = text.trace.logits, _last_norm(decoder_of(model))
    assert logits is not None
    ids = [int(logits[0, position].argmax()) if word is None else word for position, word in text.targets]
    words = model.get_output_embeddings().weight[ids].detach().float()
    positions = torch.tensor([position for position, _ in text.targets], device=words.device).unsqueeze(1)
    tokens = torch.arange(text.readout.shape[-1], device=words.device)
    rows, shares = [], []
    for number, hidden in enumerate(text.hidden, start=1):
        states = hidden if number == len(text.hidden) or norm is None else norm(hidden)
        scores = (words @ states[0].detach().float().T).clamp_min(0.0).masked_fill(tokens > positions, 0.0)
        query = tokens == positions
        shares.append((scores * query).sum(dim=-1) / scores.sum(dim=-1).clamp_min(torch.finfo(scores.dtype).tiny))
        others = scores.masked_fill(query, 0.0)
        total = others.sum(dim=-1, keepdim=True)
        rows.append(others / torch.where(total > 0, total, 1.0))
    return torch.stack(rows), torch.stack(shares)


def _last_norm(decoder: nn.Module) -> nn.Module | None:
    """Return the final norm of a decoder; None if it has none."""
    norms = [module for module in decoder.children() if "norm" in type(module).__name__.lower()]
    return norms[-1] if norms else None
