"""Grad-CAM, and the layers that it and its relatives of other packages use: one for each branch of the model."""

from dataclasses import replace

import torch
from torch import Tensor

from vitflow.errors import OTHER_METHODS, UnsupportedModelError
from vitflow.explaining.maps import Maps
from vitflow.explaining.targeted_trace import TargetedTrace
from vitflow.methods import gradients
from vitflow.models.anatomy import forward_options
from vitflow.models.blocks import block_of, branch_norms, entries_of
from vitflow.recording.isolation import evaluating
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace

# Share of a gradient above which the rest is rounding, in float32 and in half precision.
_WHOLE, _WHOLE_IN_HALF = 0.99, 0.95


def gradcam(trace: TargetedTrace, *, layer: int) -> Maps:
    """Grad-CAM for the target at the first norm of a block, or at the output of a stage, on the grid of that layer.

    The maps of branches with the same grid are added.
    """
    paths, shares = cam_layers(trace, trace.class_indices, layer)
    grids, whole = [_map_of(trace, path) for path in paths], _whole(trace)
    facts = [{} if share >= whole else {"cam_share": round(share, 3)} for share in shares.tolist()]
    return Maps(torch.stack(grids).sum(dim=0), facts)


def cam_layers(trace: Trace, targets: Tensor, layer: int) -> tuple[list[str], Tensor]:
    """Return the modules whose Grad-CAM maps are added, and the share of each image's gradient that passes them.

    The gradient of the target is measured at the block that contains the layer. If a part of it passes elsewhere, the
    same layer of other branches with the same grid is added. A head may also read lower blocks of the same stack: then
    the share is below that of the whole.

    Args:
        trace: a pass recorded with gradients and the features of `branch_norms`.
        targets: class index of each image, [batch].
        layer: 1 for the first, −1 for the last.

    Returns:
        Module paths, and shares [batch].

    Raises:
        UnsupportedModelError: a part of the gradient passes neither these branches nor the first block of the stack.
    """
    model, whole = type(trace.model).__name__, _whole(trace)
    first, *others = branch_norms(trace.model, layer)
    paths = [path for path in (first, *others) if path in trace.features]
    if first not in paths:
        raise UnsupportedModelError(
            f"{model} does not run {first}, so Grad-CAM has no features: use another layer, input_gradient or "
            "occlusion."
        )
    for path in paths:
        count, images = len(trace.features[path]), len(targets)
        if count != images:
            fact = f"{model} computes {count} rows for {images} images at {path}, as for test-time augmentation, so "
            raise UnsupportedModelError(f"{fact}Grad-CAM has no place on the image. {OTHER_METHODS}")
    shares = trace.share_passing([block_of(paths[0])], targets)
    if shares.min() >= whole:
        return paths[:1], shares
    places = trace.feature_layouts
    same_grid = [path for path in paths if places[path] is not None and places[path] == places[paths[0]]]
    if len(same_grid) > 1:
        together = trace.share_passing([block_of(path) for path in same_grid], targets)
        if together.min() >= whole:
            return same_grid, together
    if any(trace.share_passing([entry], targets).min() >= whole for entry in entries_of(trace.model, paths[0])):
        return paths[:1], shares
    raise UnsupportedModelError(
        f"{model} computes its output in several branches that do not share a patch grid: "
        f"{float(shares.min()):.0%} of its gradient pass {block_of(paths[0])}, and Grad-CAM would omit the rest. "
        f"{OTHER_METHODS}"
    )


def measured_layers(trace: TargetedTrace, layer: int) -> list[str]:
    """Return the modules of `cam_layers` for a trace without gradients, from another forward pass."""
    size = (trace.pixels.shape[-2], trace.pixels.shape[-1])
    recording = record_attention(
        trace.model,
        gradients=True,
        attention=False,
        features=branch_norms(trace.model, layer),
        outputs=trace.outputs.read,
    )
    with torch.inference_mode(False), torch.enable_grad(), evaluating(trace.model), recording as recorded:
        trace.model(trace.pixels.detach().clone(), **forward_options(trace.model, size))
    return cam_layers(recorded, trace.class_indices, layer)[0]


def _whole(trace: Trace) -> float:
    half = trace.logits is not None and trace.logits.dtype.itemsize < 4
    return _WHOLE_IN_HALF if half else _WHOLE


def _map_of(trace: TargetedTrace, path: str) -> Tensor:
    """Return the Grad-CAM map of the output of one module, [batch, rows, cols]."""
    features, located = trace.features[path], trace.feature_layouts[path]
    if located is None:
        raise UnsupportedModelError(
            f"Grad-CAM requires features on a patch grid, of one run; the output of {path} in "
            f"{type(trace.model).__name__} has shape {tuple(features.shape)}. Use another layer, input_gradient or "
            "occlusion."
        )
    layout, channels_last = located
    pair = [features, trace.backward().features[path]]
    if features.ndim == 3:
        pair = [each[:, : layout.patches.stop] for each in pair]
    else:  # to [batch, tokens, channels]
        pair = [each.flatten(1, 2) if channels_last else each.flatten(2).transpose(1, 2) for each in pair]
    tokens = gradients.grad_cam(*pair, num_prefix_tokens=layout.num_prefix_tokens)
    grid: Tensor = replace(layout, num_suffix_tokens=0).to_grid(tokens)
    return grid
