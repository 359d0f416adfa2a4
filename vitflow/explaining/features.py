"""Methods that read the features of layers: Grad-CAM, LeGrad, the frozen gradient, and similarity of patches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import OTHER_METHODS, OptionError, OutsideGridError, OutsideImageError, UnsupportedModelError
from vitflow.explaining.maps import Maps, Patch, TargetedTrace, patch_place
from vitflow.explaining.token_dropping import output_from_tokens
from vitflow.images.geometry import Placement
from vitflow.methods import gradients
from vitflow.methods import similarity as feature_methods
from vitflow.methods.frozen_gradient import frozen_gradient as frozen_map
from vitflow.methods.fusion import check_layer
from vitflow.methods.tokens import LAYOUT, TokenLayout
from vitflow.models.anatomy import class_token, forward_options
from vitflow.models.blocks import block_norm, block_of, block_paths, layer_output, lower_features
from vitflow.models.devices import refuse_inference_tensors
from vitflow.models.outputs import log_odds_gradient
from vitflow.progress import tracking
from vitflow.recording.backward import INPUT_OF
from vitflow.recording.frozen import attending_blocks, frozen_pass
from vitflow.recording.isolation import evaluating
from vitflow.recording.layers import RecordedLayers
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace

Box = Sequence[float]


def _located(trace: Trace, path: str) -> tuple[TokenLayout, bool]:
    """Return the layout of the output of a module, and True if its channels are last."""
    model = type(trace.model).__name__
    if path not in trace.features:
        raise UnsupportedModelError(f"{model} does not run {path}: use another layer, input_gradient or occlusion.")
    trace.check_places(path)
    features, located = trace.features[path], trace.feature_layouts[path]
    if located is None or trace.pixels is None or len(features) != len(trace.pixels):
        raise UnsupportedModelError(
            f"The output of {path} in {model}, of shape {tuple(features.shape)}, has no patch grid for each image. Use "
            f"another layer, input_gradient or occlusion; if its tokens are arranged in another way, pass {LAYOUT}."
        )
    return located


def _as_tokens(features: Tensor, channels_last: bool) -> Tensor:
    """Return features, which may be a feature map, as [batch, tokens, channels]."""
    return features.flatten(1, -2) if channels_last else features.flatten(2).mT


def frozen_gradient(trace: TargetedTrace) -> Maps:
    """Frozen gradient of the target's log-odds at the outputs of blocks ⌊L/4⌋ and ⌊L/2⌋ of L, at least the first.

    The pass is repeated with frozen nonlinearities, once for all targets.
    """
    refuse_inference_tensors(trace.model)
    assert trace.logits is not None
    if "frozen" not in trace.cached_outputs:
        blocks = attending_blocks(trace)
        chosen = [blocks[number - 1] for number in dict.fromkeys(max(1, len(blocks) // part) for part in (4, 2))]
        frozen = frozen_pass(trace, chosen)
        trace.cached_outputs["frozen"] = frozen
        trace.feature_layouts.update(zip(frozen.blocks, frozen.layouts, strict=True))
    frozen = trace.cached_outputs["frozen"]
    for path in frozen.blocks:
        trace.check_places(path)
    weights = log_odds_gradient(trace.logits, trace.class_indices, trace.outputs.activation)
    return Maps(frozen_map(frozen.contributions(weights), [layout for layout, _ in frozen.layouts]))


def gradcam(trace: TargetedTrace, *, layer: int) -> Maps:
    """Grad-CAM for the target at the first norm of a block, or at the output of a stage, on the grid of that layer.

    If the output is not computed from the patches of the last layer, as with a class token in post-norm blocks, the
    layer is the last one below with a gradient.
    """
    targets, norm = trace.class_indices, block_norm(trace.model, layer)
    read_lower = layer == -1 and not _has_gradient(trace, norm, targets)
    recorded, path = _recorded_layer(trace, layer) if read_lower else (trace, norm)
    facts: dict[str, Any] = {} if path == norm else {"cam_layer": path}
    facts |= {"cam_partial": True} if is_partial(recorded, targets, path) else {}
    layout, channels_last = _located(recorded, path)
    both = recorded.features, recorded.backward(targets, pixels=False).features
    pair = [_as_tokens(each[path], channels_last)[:, : layout.patches.stop] for each in both]
    tokens = gradients.grad_cam(*pair, num_prefix_tokens=layout.num_prefix_tokens)
    return Maps(replace(layout, num_suffix_tokens=0).to_grid(tokens), [facts] * len(tokens))


def _has_gradient(trace: Trace, path: str, targets: Tensor) -> bool:
    """Return True if the targets have a gradient at the patches of a module that runs, or its patches are unknown."""
    if path not in trace.features or (located := trace.feature_layouts[path]) is None:
        return path in trace.features
    gradient = _as_tokens(trace.backward(targets, pixels=False).features[path], located[1])
    return bool(gradient[:, located[0].patches].any())


def is_partial(trace: Trace, targets: Tensor, path: str) -> bool:
    """Return True if the output is also computed from lower blocks of the stack that Grad-CAM reads at this module.

    Outputs of several branches, which do not all pass the first block, are refused.
    """
    block = block_of(path)
    runs = path in trace.features
    partial = runs and trace.bypasses(block, targets) and trace.bypasses(INPUT_OF + block, targets)
    if partial and trace.bypasses(block_of(block_norm(trace.model, 1)), targets):
        raise UnsupportedModelError(
            f"{type(trace.model).__name__} computes its output in several branches, not only in that of {block}, and "
            f"Grad-CAM would omit the rest. {OTHER_METHODS}"
        )
    return partial


def measured_layer(trace: TargetedTrace, layer: int) -> tuple[str, TokenLayout]:
    """Return the module that `gradcam` reads for a trace without gradients, and its layout, from another pass."""
    recorded, path = _recorded_layer(trace, layer)
    is_partial(recorded, trace.class_indices, path)  # refuses several branches
    return path, _located(recorded, path)[0]


def _recorded_layer(trace: TargetedTrace, layer: int) -> tuple[Trace, str]:
    """Return another recorded pass, and the module that Grad-CAM reads: for layer −1 the last one with a gradient."""
    model, targets, size = trace.model, trace.class_indices, (trace.pixels.shape[-2], trace.pixels.shape[-1])
    norm = block_norm(model, layer)
    paths = [norm, *lower_features(model, norm)] if layer == -1 else [norm]
    recording = record_attention(
        model,
        gradients=True,
        attention=False,
        features=paths,
        layout=trace.model_info.layout,
        outputs=trace.outputs.read,
    )
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model), recording as recorded:
        model(trace.pixels.detach().clone(), **forward_options(model, size))
    path = next((path for path in paths if _has_gradient(recorded, path, targets)), norm)
    return recorded, path


def legrad(trace: TargetedTrace, *, start_layer: int) -> Maps:
    """Positive gradients of each layer's output with respect to its attention, averaged over heads, queries and layers.

    The output of a layer is the model's output with the tokens of that layer in place of the last layer's, and the mean
    of all tokens in place of a class token.
    """
    paths = block_paths(trace.model)
    blocks = [next((path for path in paths if f"{layer.name}.".startswith(f"{path}.")), None) for layer in trace.layers]
    if trace.staged or blocks != paths:
        raise UnsupportedModelError(
            "LeGrad requires a single stack of blocks with the same tokens, and no other attention, unlike "
            f"{type(trace.model).__name__}. Use gae or gradient_rollout."
        )
    trace.readout_of(trace.targets)  # refuses a head that reads several blocks
    first = check_layer("start_layer", start_layer, len(paths))
    gradient: list[Tensor] = []
    with tracking("LeGrad", len(paths) - first) as progress:
        # In place of each other token that is read more than any patch.
        read = trace.readout > trace.readout[:, trace.layout.patches].amax(dim=1, keepdim=True)
        for path, layer in list(zip(paths, trace.layers, strict=True))[first:]:
            with torch.inference_mode(False), torch.enable_grad():
                tokens = trace.features[path]
                tokens = torch.where(read.to(tokens.device).unsqueeze(-1), tokens.mean(dim=1, keepdim=True), tokens)
                output = output_from_tokens(trace.model, trace.pixels, paths[-1], tokens)
                scores = trace.outputs.required_scores(output, trace.model_info.id)
                scores = scores.gather(1, trace.class_indices.to(scores.device).view(-1, 1))
            # Only this layer: the layers above do not affect its output.
            single = Trace(layers=RecordedLayers([layer]), model=trace.model, watch=trace.watch)
            gradient += single.gradients_of(scores).attentions
            progress(1)
    return Maps(trace.layout.to_grid(gradients.legrad(gradient)))


def layer_features(trace: Trace, layer: int) -> tuple[Tensor, TokenLayout]:
    """Return the features of a layer after the model's last norm, [batch, tokens, width], and their layout."""
    path, norm = layer_output(trace.model, layer)
    layout, channels_last = _located(trace, path)
    features = trace.features[path].detach()
    with torch.no_grad():
        tokens = _as_tokens(features if norm is None else norm(features), channels_last)
    return gradients.at_least_float32(tokens), layout


def similarity(trace: TargetedTrace, *, layer: int, patch: Patch | None, box: Box | None) -> Maps:
    """Cosine of the features of each patch and those of a patch, the mean of a box, or the class token."""
    if patch is not None and box is not None:
        raise OptionError(f"Expected either patch or box, got both: patch={patch!r}, box={box!r}.")
    tokens, layout = layer_features(trace, layer)
    patches = tokens[:, layout.patches]
    if patch is not None:
        row, col = patch_place(patch)
        words, reference = f"patch ({row}, {col})", tokens[:, layout.token_of_patch(row, col)]
    elif box is not None:
        shares = torch.stack([_shares(image.placement, box, layout) for image in trace.images])
        words, reference = "the box", (shares.to(patches).unsqueeze(1) @ patches).squeeze(1)
    elif (index := class_token(trace.model, layout)) is not None:
        words, reference = "the class token", tokens[:, index]
    else:
        words, reference = "the mean of the patches", patches.mean(dim=1)
    grids = feature_methods.similarity(patches, reference).unflatten(1, (layout.rows, layout.cols))
    facts: list[dict[str, Any]] = [{"compared_with": words} for _ in grids]
    return Maps(grids, facts)


def _shares(placement: Placement, box: Box, layout: TokenLayout) -> Tensor:
    """Return the share of a box of the image in each patch of the model input, [patches]."""
    left, top, right, bottom = box_inside(check_box(box), placement)
    edges = [placement.to_input(top, left), placement.to_input(bottom, right)]
    (first, tall), (start, wide) = replace(placement, extent=layout.extent).cells((layout.rows, layout.cols))
    [(y0, x0), (y1, x1)] = [((y - first) * layout.rows / tall, (x - start) * layout.cols / wide) for y, x in edges]
    try:
        return feature_methods.area_shares((x0, y0, x1, y1), layout.rows, layout.cols)
    except OutsideGridError as error:
        raise OutsideImageError(
            f"The box {tuple(box)} is outside the region that the model saw, {placement.seen_box}: choose a box "
            "inside, or fit='squash' or 'pad'."
        ) from error


def box_inside(box: tuple[float, float, float, float], placement: Placement) -> tuple[float, float, float, float]:
    """Return a box of the image; OutsideImageError if it reaches out by more than a pixel of rounding."""
    left, top, right, bottom = box
    height, width = placement.image_size
    if min(left, top) < -1 or right > width + 1 or bottom > height + 1 or left >= width or top >= height:
        raise OutsideImageError(
            f"The box {box} reaches out of the image of {width} × {height} pixels. Give it in pixels of the image as "
            "displayed, which its EXIF orientation may turn."
        )
    return box


def check_box(box: Box) -> tuple[float, float, float, float]:
    """Return the edges of a box as floats; OptionError if it has no area."""
    try:
        left, top, right, bottom = (float(edge) for edge in box)
    except (TypeError, ValueError) as error:
        raise OptionError(f"Expected box=(left, top, right, bottom) in pixels of the image, got {box!r}.") from error
    if not (left < right < float("inf") and top < bottom < float("inf")):
        raise OptionError(f"Expected a box with left < right and top < bottom, got {tuple(box)!r}.")
    return left, top, right, bottom
