"""Methods on a recorded pass: rollouts, flow, attention and baselines, as functions from `TargetedTrace` to `Maps`."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import OptionError, UnsupportedModelError, VitflowWarning
from vitflow.explaining.inputs import PlacedImage
from vitflow.methods import cells, gradients
from vitflow.methods import rollout as rollouts
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.flow.layers import LayerRange, default_window
from vitflow.methods.fusion import HeadFusion, LargestValues, SignedFusion, check_layer, normalize_rows
from vitflow.methods.gradients import ValueWeighting
from vitflow.methods.staged_rollout import staged_attention, staged_rollout
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import pool_queries
from vitflow.models.info import ModelInfo
from vitflow.models.outputs import Outputs, activate, log_odds
from vitflow.progress import tracking
from vitflow.recording.backward import Backward
from vitflow.recording.parallel import remember_lower_layers
from vitflow.recording.readout import Readouts
from vitflow.recording.trace import Trace

Patch = Sequence[int]

# Saturated share from which a flow map gets a warning.
MOSTLY_SATURATED = 0.5
# Number of layers from which on rollout starts at the middle by default.
_LAYERS_OF_HALVES = 12


@dataclass(slots=True, kw_only=True)
class TargetedTrace(Trace):
    """A recorded pass with its targets: the first argument of the function of a method.

    It shares the recorded tensors with the trace that it was made from.

    Attributes:
        pixels: the model input, [batch, channels, height, width].
        run: maps model inputs to logits [batch, classes] by running the model again.
        model_info: properties of the model.
        targets: target class of each image, [batch]; None if the model has no classes.
        outputs: the outputs that maps explain; may differ from the reported ones.
        images: the images of the pass.
        raw_scores: logits of the reported outputs, [batch, classes], on the CPU.
        probabilities: reported scores, [batch, classes]; None if the model has no classes.
        range_note: note on outputs that may be probabilities already.
        seconds: duration of the pass.
        requested: names of the current method's options that were given, not defaults.
        is_random: True if the pass used random numbers, as Monte-Carlo dropout does.
        cached_outputs: outputs of further forward passes by key, for further classes and methods.
    """

    pixels: Tensor
    run: Callable[[Tensor], Tensor]
    model_info: ModelInfo
    targets: Tensor | None = None
    outputs: Outputs = field(default_factory=Outputs)
    images: Sequence[PlacedImage] = ()
    raw_scores: Tensor | None = None
    probabilities: Tensor | None = None
    range_note: str = ""
    seconds: float = 0.0
    requested: frozenset[str] = frozenset()
    is_random: bool = False
    cached_outputs: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace, targets: Tensor | None, **further: Any) -> "TargetedTrace":
        """Add targets and further attributes, at least `run` and `model_info`, to a recorded pass."""
        recorded = {field.name: getattr(trace, field.name) for field in fields(Trace)}
        return cls(**recorded, targets=targets, **further)

    @property
    def class_indices(self) -> Tensor:
        """Target class of each image, [batch]; OptionError if there is none."""
        if self.targets is None:
            raise OptionError(
                "Class-specific methods require classes, and this model has none: use rollout, or outputs=."
            )
        return self.targets

    @property
    def readout(self) -> Tensor:
        """Readout of the explained outputs; see `Trace.readout`."""
        return self.readout_of(self.targets)

    @property
    def readouts(self) -> Readouts:
        """Readouts of the explained outputs; see `Trace.readouts_of`."""
        return self.readouts_of(self.targets)

    @property
    def perturbed_outputs(self) -> Outputs:
        """Outputs that are computed for changed images."""
        return self.outputs.perturbed_outputs or self.outputs

    def cells(self, patch_size: int | None = None) -> dict[str, Any]:
        """Return rows, cols and extent of the patches, or of cells of `patch_size` pixels."""
        rows, cols = self.grid(patch_size)
        return {"rows": rows, "cols": cols, "extent": self.extent_of((rows, cols))}

    def backward(self, targets: Tensor | None = None, *, pixels: bool = True) -> Backward:
        """Backward pass, by default for the targets; see `Trace.backward`."""
        return Trace.backward(self, self.class_indices if targets is None else targets, pixels=pixels)

    def predict(self, pixels: Tensor) -> Tensor:
        """Return the probabilities [batch, classes] of other model inputs."""
        with torch.no_grad():
            return activate(self.run(pixels), self.perturbed_outputs.activation)

    def log_odds(self, pixels: Tensor) -> Tensor:
        """Return the log-odds [batch, classes] of other model inputs, which do not saturate at probability 1."""
        with torch.no_grad():
            return log_odds(self.run(pixels), self.perturbed_outputs.activation)


@dataclass(frozen=True, slots=True)
class Maps:
    """Maps of a batch, with facts about each.

    Attributes:
        grids: maps [batch, rows, cols], unscaled.
        facts: facts per image for captions, such as the saturated share of a flow.
        pixels: maps at the size of the model input, [batch, height, width], which are drawn instead; or None.
        significant: mask of the patches whose value is above 0 at 95 %, bool [batch, rows, cols]; or None.
        effective: options of each image's map that differ from the given ones, because a default does not apply.
        first_layer: first layer, counted from 1, of the affinity by which the map is refined.
    """

    grids: Tensor
    facts: list[dict[str, Any]] = field(default_factory=list)
    pixels: Tensor | None = None
    significant: Tensor | None = None
    effective: list[dict[str, Any]] | None = None
    first_layer: int = 1


def readout_of(trace: TargetedTrace, patch: Patch | None) -> Tensor:
    """Return the trace's readout [batch, tokens], or one-hot on the patch at (row, col)."""
    if patch is None:
        return trace.readout
    top = trace.top  # raises the reason if the tokens of the model cannot be followed
    example = trace.layers[-1].example
    kind = torch.promote_types(example.dtype, torch.float32)
    one_hot = torch.zeros(len(trace.pixels), top.num_tokens, dtype=kind, device=example.device)
    one_hot[:, top.token_of_patch(*patch_place(patch))] = 1.0
    return one_hot


def patch_place(patch: Patch) -> tuple[int, int]:
    """Return row and column of a patch; OptionError if it is not a pair."""
    try:
        row, col = patch
    except (TypeError, ValueError) as error:
        raise OptionError(f"Expected patch=(row, column), got {patch!r}.") from error
    return row, col


def _through_layers(
    trace: TargetedTrace,
    matrices: Sequence[Tensor | LargestValues],
    readouts: Mapping[int, Tensor],
    *,
    end_layer: int = -1,
    **options: Any,
) -> Maps:
    """Compute the row of a product of fused layers, on the (finest) patch grid; options are those of `staged_rollout`.

    The readouts [batch, tokens] are added to the row after each of these layers, those after layers above `end_layer`
    at that layer.
    """
    count = check_layer("end_layer", end_layer, len(trace.layers)) + 1
    tokens, starts = [layer.tokens for layer in trace.layers], dict[int, Tensor]()
    for number, weights in readouts.items():
        if number > count and tokens[number - 1].queries != tokens[count - 1].queries:
            raise UnsupportedModelError(
                f"The tokens of layer {count} of {type(trace.model).__name__} differ from those of layer {number}, "
                "which its head reads: use end_layer=-1."
            )
        start = min(number, count)
        starts[start] = starts[start] + weights if start in starts else weights
    passed = [layer.passed for layer in trace.layers[:count]]
    windows = trace.layers.windows(matrices)[:count]
    row, layout = staged_rollout(windows, tokens[:count], readout=starts, passed=passed, **options)
    return Maps(layout.to_grid(row))


def _readouts(trace: TargetedTrace, patch: Patch | None) -> dict[int, Tensor]:
    """Return the weights [batch, tokens] with which a product of layers starts, by the number of layers below them."""
    if patch is not None:
        return {len(trace.layers): readout_of(trace, patch)}
    blocks = trace.readouts.blocks
    return {block.layers: block.readout * block.share.unsqueeze(1) for block in blocks}


def _for_the_class(
    trace: TargetedTrace, patch: Patch | None, head_fusion: SignedFusion, value_weighted: ValueWeighting
) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Return the readouts and the fused (A ⊙ ∇A)⁺ of each layer, [batch · windows, queries, keys].

    An attention-pooling head is treated like a layer: its readout is its fused (A ⊙ ∇A)⁺, rows summing to 1.
    """
    gradient = trace.backward(pixels=False)
    matrices = rollouts.gradient_weighted_attention(
        trace.heads(value_weighted=value_weighted), gradient.attentions, head_fusion
    )
    readouts, top = _readouts(trace, patch), len(trace.layers)
    if patch is not None or trace.pooled is None or gradient.pooled is None:
        return readouts, matrices
    pooled = trace.readouts.pooled  # images whose output passes the head
    if not pooled.any():
        return readouts, matrices
    [queries] = rollouts.gradient_weighted_attention([trace.pooled.detach()], [gradient.pooled], head_fusion)
    weights = pool_queries(trace.model, trace.top, queries)
    weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return readouts | {top: torch.where(pooled.unsqueeze(1), weights, readouts[top].to(weights))}, matrices


def middle_layer(trace: Trace, lowest_read: int | None = None) -> int:
    """Return the first layer of the upper half, ⌊layers / 2⌋ + 1, of at least twelve layers of one grid; else 1.

    It is 1, too, if the output is read from a lower layer, `lowest_read`.
    """
    count = len(trace.layers)
    first = count // 2 + 1
    whole = count < _LAYERS_OF_HALVES or trace.staged or (lowest_read is not None and lowest_read < first)
    return 1 if whole else first


def rollout(
    trace: TargetedTrace,
    *,
    head_fusion: HeadFusion,
    value_weighted: ValueWeighting,
    patch: Patch | None,
    discard_ratio: float,
    start_layer: int | str = "middle",
    end_layer: int = -1,
    **options: Any,
) -> Maps:
    """Attention rollout of the readout, on the (finest) patch grid."""
    readouts, matrices = _readouts(trace, patch), trace.layers.fused_values(head_fusion, value_weighted)
    end = check_layer("end_layer", end_layer, len(trace.layers)) + 1
    start = middle_layer(trace, min(readouts)) if isinstance(start_layer, str) else start_layer
    start = check_layer("start_layer", start, end) + 1
    if isinstance(start_layer, str) and patch is None:
        remember_lower_layers(trace.call, trace.layers, start - 1)
    options["discard_ratio"] = [discard_ratio if layer.prefix is None else 0.0 for layer in trace.layers[:end]]
    maps = _through_layers(trace, matrices, readouts, start_layer=start, end_layer=end_layer, **options)
    facts = [{"layers": [start, end]}] * len(maps.grids) if (start, end) != (1, len(trace.layers)) else []
    return replace(maps, facts=facts, first_layer=start)


def flow(
    trace: TargetedTrace,
    *,
    layers: LayerRange,
    below: str,
    head_fusion: HeadFusion,
    discard_ratio: float,
    residual: float,
    value_weighted: ValueWeighting,
    patch: Patch | None,
) -> Maps:
    """Attention flow of the readout through a range of layers, propagated to the input by rollout below it.

    Through many layers nearly every flow is saturated, and the map does not depend on the layers above the first.
    Therefore flow is computed through the upper layers, and attention rollout propagates it to the patches.
    """
    if trace.staged or trace.replaces_tokens:
        what = "has windows or stages" if trace.staged else "replaces or zeroes some between blocks"
        raise UnsupportedModelError(
            f"Attention flow requires the same tokens in every layer, and {type(trace.model).__name__} {what}. Use "
            "rollout, attention, gradient_rollout or gae."
        )
    matrices = trace.fused(head_fusion, value_weighted=value_weighted)
    layers = default_window(layers, len(matrices))
    readout, layout = readout_of(trace, patch), trace.layout
    if layout.num_suffix_tokens:  # flow expects the patches last
        every = torch.arange(layout.num_tokens, device=readout.device)
        start, stop = layout.patches.start, layout.patches.stop
        order = torch.cat([every[:start], every[stop:], every[start:stop]])
        matrices, readout = [matrix[:, order][:, :, order] for matrix in matrices], readout[:, order]
        layout = TokenLayout(layout.num_prefix_tokens + layout.num_suffix_tokens, layout.rows, layout.cols)
    prefix = layout.num_prefix_tokens
    options: dict[str, Any] = {"discard_ratio": discard_ratio, "residual": residual, "num_prefix_tokens": prefix}
    with tracking("attention flow", len(readout) * layout.num_tokens) as progress:
        flows = attention_flow(matrices, source=readout, layers=layers, progress=progress, **options)
    tokens, (first, last) = flows.values, flows.layers
    start = middle_layer(trace)
    if passes_below := below == "rollout" and first > start:
        shares = flows.normalized.to(matrices[0].dtype)
        tokens = rollouts.attention_rollout(matrices[: first - 1], readout=shares, start_layer=start, **options)
    shares_saturated: list[float] = flows.saturated_share.tolist()
    if max(shares_saturated) > MOSTLY_SATURATED:
        warnings.warn(
            f"{max(shares_saturated):.0%} of the flows through layers {first} to {last} are saturated: they equal the "
            f"column sums of layer {first}, and the map does not depend on the layers above it. Use fewer layers.",
            VitflowWarning,
            stacklevel=2,
        )
    layers_below = [start, first - 1] if passes_below else None
    facts = [{"saturated": share, "flow_layers": [first, last], "below": layers_below} for share in shares_saturated]
    return Maps(layout.to_grid(tokens), facts)


def attention(
    trace: TargetedTrace,
    *,
    head_fusion: HeadFusion,
    layer: int,
    head: int | None,
    discard_ratio: float,
    value_weighted: ValueWeighting,
    patch: Patch | None,
) -> Maps:
    """Raw attention of the readout in one layer, on the patch grid."""
    index, readout = check_layer("layer", layer, len(trace.layers)), readout_of(trace, patch)
    if head is None:
        matrix = trace.fused(head_fusion, value_weighted=value_weighted)[index]
    else:
        heads = trace.heads(value_weighted=value_weighted)[index].detach()
        matrix = heads[:, check_layer("head", head, heads.shape[1])]
        matrix = normalize_rows(matrix) if value_weighted else matrix
    tokens = [layer.tokens for layer in trace.layers]
    windows = matrix.unflatten(0, (-1, tokens[index].windows))
    row, layout = staged_attention(windows, tokens, layer=layer, readout=readout, discard_ratio=discard_ratio)
    return Maps(layout.to_grid(row))


def gradient_rollout(
    trace: TargetedTrace,
    *,
    head_fusion: SignedFusion,
    value_weighted: ValueWeighting,
    patch: Patch | None,
    **options: Any,
) -> Maps:
    """Gradient rollout of the readout for the target, on the (finest) patch grid."""
    readouts, matrices = _for_the_class(trace, patch, head_fusion, value_weighted)
    return _through_layers(trace, matrices, readouts, **options)


def gae(trace: TargetedTrace, **options: Any) -> Maps:
    """Additive gradient rollout of the readout for the target: generic attention explainability."""
    return gradient_rollout(trace, additive=True, **options)


def input_gradient(trace: TargetedTrace, *, patch_size: int | None) -> Maps:
    """Absolute gradients of the target with respect to the pixels, summed per patch."""
    pixels = trace.backward().pixels
    assert pixels is not None
    return Maps(gradients.input_gradient(pixels, **trace.cells(patch_size)))


def occlusion(trace: TargetedTrace, *, patch_size: int | None, occlusion_batch: int, score: str) -> Maps:
    """Drop in the target's log-odds or probability without each patch."""
    options, predict = trace.cells(patch_size), trace.log_odds if score == "log-odds" else trace.predict
    with tracking("occlusion", len(trace.pixels) * options["rows"] * options["cols"]) as progress:
        options |= {"batch_size": occlusion_batch, "progress": progress}
        return Maps(cells.occlusion(predict, trace.pixels, trace.class_indices, **options))


def random(trace: TargetedTrace, *, random_seed: int) -> Maps:
    """Random numbers on the patch grid."""
    rows, cols = trace.grid()
    return Maps(cells.random_map(trace.pixels, rows=rows, cols=cols, seed=random_seed))


def centre(trace: TargetedTrace) -> Maps:
    """Gaussian at the centre of the image."""
    rows, cols = trace.grid()
    return Maps(cells.centre_prior(rows, cols).expand(len(trace.pixels), -1, -1))
