"""Similarity of patch features to a patch, a box, or the class token."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import OptionError, OutsideGridError, OutsideImageError, UnsupportedModelError
from vitflow.explaining.maps import Maps, Patch, patch_place
from vitflow.explaining.targeted_trace import TargetedTrace
from vitflow.images.geometry import Placement
from vitflow.methods import similarity as feature_methods
from vitflow.methods.gradients import at_least_float32
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import has_class_token
from vitflow.models.blocks import layer_output
from vitflow.recording.trace import Trace

Box = Sequence[float]


def layer_features(trace: Trace, layer: int) -> tuple[Tensor, TokenLayout]:
    """Return the features of a layer after the model's last norm, [batch, tokens, width], and their layout.

    Raises:
        UnsupportedModelError: the features have no patch grid.
    """
    path, norm = layer_output(trace.model, layer)
    if path not in trace.features:
        raise UnsupportedModelError(f"{type(trace.model).__name__} does not run {path}: use another layer.")
    features, located = trace.features[path], trace.feature_layouts[path]
    if located is None or trace.pixels is None or len(features) != len(trace.pixels):
        raise UnsupportedModelError(
            f"The output of {path} in {type(trace.model).__name__}, of shape {tuple(features.shape)}, has no patch "
            "grid. Use another layer."
        )
    layout, channels_last = located
    with torch.no_grad():
        tokens = features.detach() if norm is None else norm(features.detach())
    if tokens.ndim == 4:
        tokens = tokens.flatten(1, 2) if channels_last else tokens.flatten(2).transpose(1, 2)
    return at_least_float32(tokens), layout


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
    elif has_class_token(trace.model, layout):
        words, reference = "the class token", tokens[:, 0]
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
        raise OptionError(
            f"Expected box=(left, top, right, bottom) with left < right and top < bottom, got {tuple(box)!r}."
        )
    return left, top, right, bottom
