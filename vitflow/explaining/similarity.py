"""Likeness of what the patches hold: to one of them, to a marked box, or to the class token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import OptionError, OutsideGridError, OutsideImageError, UnsupportedModelError
from vitflow.explaining.maps import Maps, Patch, patch_place
from vitflow.explaining.targeted_trace import TargetedTrace
from vitflow.images.geometry import Placement
from vitflow.methods import features as likeness
from vitflow.methods.gradients import at_least_float32
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import has_class_token
from vitflow.models.blocks import layer_output
from vitflow.recording.trace import Trace

Box = Sequence[float]


def layer_features(trace: Trace, layer: int) -> tuple[Tensor, TokenLayout]:
    """What the tokens of a layer hold after the model's last norm, [batch, tokens, width], and how they are arranged.

    Raises:
        UnsupportedModelError: it does not lie on the image.
    """
    path, norm = layer_output(trace.model, layer)
    found, located = trace.features[path], trace.feature_layouts[path]
    if located is None or trace.pixels is None or len(found) != len(trace.pixels):
        raise UnsupportedModelError(
            f"The output of {path} in {type(trace.model).__name__}, of shape {tuple(found.shape)}, does not lie on the "
            "image: it has no patches to compare. Use another layer."
        )
    layout, channels_last = located
    with torch.no_grad():
        tokens = found.detach() if norm is None else norm(found.detach())
    if tokens.ndim == 4:
        tokens = tokens.flatten(1, 2) if channels_last else tokens.flatten(2).transpose(1, 2)
    return at_least_float32(tokens), layout


def similarity(trace: TargetedTrace, *, layer: int, patch: Patch | None, box: Box | None) -> Maps:
    """The cosine of the features of each patch to those of one patch, to their mean in a box, or to the class token."""
    if patch is not None and box is not None:
        raise OptionError(f"Expected a patch or a box to compare with, got both: patch={patch!r}, box={box!r}.")
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
    grids = likeness.similarity(patches, reference).unflatten(1, (layout.rows, layout.cols))
    facts: list[dict[str, Any]] = [{"compared_with": words} for _ in grids]
    return Maps(grids, facts)


def _shares(placement: Placement, box: Box, layout: TokenLayout) -> Tensor:
    """How much of a box of the image lies in each patch of the model input, [patches]."""
    left, top, right, bottom = check_box(box)
    height, width = placement.image_size
    if not (left < width and top < height and right > 0 and bottom > 0):
        raise OutsideImageError(f"The box {tuple(box)} lies outside the image of {width} × {height} pixels.")
    (y0, x0), (y1, x1) = placement.to_input(top, left), placement.to_input(bottom, right)
    down, across = layout.rows / placement.input_size[0], layout.cols / placement.input_size[1]
    try:
        return likeness.area_shares((x0 * across, y0 * down, x1 * across, y1 * down), layout.rows, layout.cols)
    except OutsideGridError as error:
        raise OutsideImageError(
            f"The box {tuple(box)} lies outside what the model saw of the image, "
            f"{placement.seen_box}: choose a box there, or fit='squash' or 'pad', which show the model all of it."
        ) from error


def check_box(box: Box) -> tuple[float, float, float, float]:
    """The edges of a box as numbers; OptionError unless it has some area."""
    try:
        left, top, right, bottom = (float(edge) for edge in box)
    except (TypeError, ValueError) as error:
        raise OptionError(f"Expected box=(left, top, right, bottom) in pixels of the image, got {box!r}.") from error
    if not (left < right < float("inf") and top < bottom < float("inf")):
        raise OptionError(
            f"Expected box=(left, top, right, bottom) with left < right and top < bottom, got {tuple(box)!r}."
        )
    return left, top, right, bottom
