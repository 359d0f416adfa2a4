"""Run a model on an image with some of its patches removed: dropped from the sequence, blank or blurred."""

from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import ShapeError, UnsupportedModelError, VitflowError, check_known
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.inputs import PlacedImage
from vitflow.images.geometry import Extent
from vitflow.methods.cells import cell_owners
from vitflow.methods.tokens import TokenLayout
from vitflow.recording.changed_tokens import droppable_tokens
from vitflow.recording.changed_tokens import run_on_patches as run_on_patches

REPLACEMENTS = ("drop", "blank", "blur")
# σ of the blur, as a share of the shorter side of the model input.
BLUR = 0.25

Indices = NDArray[np.intp]

# Weight of the patches in a readout, and largest deviation from a uniform one, relative, that are rounding.
_NO_WEIGHT, _UNIFORM = 1e-3, 1e-2


def can_drop_tokens(explainer: Explainer) -> bool:
    """Return True if the explainer's model can run on a subset of patches, tried once on noise.

    >>> can_drop_tokens(Explainer("demo"))
    True
    """
    try:
        check_can_drop(explainer, explainer.spec.size)
    except UnsupportedModelError:
        return False
    return True


def check_can_drop(explainer: Explainer, input_size: tuple[int, int]) -> TokenLayout:
    """Return the layout of the droppable tokens for a model input of (height, width) pixels.

    Raises:
        UnsupportedModelError: the model cannot run on a subset of patches; the message has reason and remedy.
    """
    parameter = next(explainer.model.parameters(), torch.zeros(()))
    pixels = torch.empty(1, explainer.spec.channels, *input_size, dtype=parameter.dtype, device=explainer.device)
    try:
        return droppable_tokens(explainer.model, pixels, explainer.layout, explainer.outputs.read)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{explainer.model_id} cannot drop patches from its sequence. {error} "
            'Use replace="blank" or replace="blur" instead.'
        ) from error


class Choice(NamedTuple):
    """A subset of an image's patches.

    Attributes:
        kept: indices of the patches on the grid, in raster order from the top left.
        grid: rows and columns of all patches.
        extent: the pixels of the patches; None if they divide the model input evenly.
    """

    kept: Indices
    grid: tuple[int, int]
    extent: Extent | None = None


def pools_patches(explainer: Explainer, placed: PlacedImage, target: int | None) -> bool:
    """Return True if the output for this image has no value without patches, by its readout.

    An average over all tokens has one if there are prefix tokens. An unknown readout counts as one of patches.

    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo")
    >>> pools_patches(explainer, explainer.placed(sample_images()[0], "image"), 0)
    False
    """
    try:
        targets = None if target is None else torch.tensor([target])
        trace = explainer.targeted(explainer.record(placed), targets)
        readout, layout = trace.readout[0].double().cpu(), trace.top
    except VitflowError:
        return True
    patches = float(readout[layout.patches].sum())
    uniform = bool((readout * len(readout) - 1.0).abs().max() < _UNIFORM)
    return patches > _NO_WEIGHT and not (uniform and layout.num_prefix_tokens)


def logits_of_kept(
    explainer: Explainer,
    pixels: Tensor,
    choices: Sequence[Choice],
    replace: str,
    batch_size: int,
    *,
    blank_if_empty: bool = False,
) -> Tensor:
    """Return the logits for an image with only the kept patches, [choices, classes], on the CPU.

    Args:
        explainer: explainer of the model.
        pixels: the image as the model's input, [1, channels, height, width].
        choices: the kept patches.
        replace: "drop" drops the tokens of the other patches from the sequence; "blank" fills these patches with the
            image's mean colour; "blur" fills them from the blurred image.
        batch_size: choices per forward pass; with "drop", choices with equal numbers of kept patches.
        blank_if_empty: with "drop", use the blank image if no patch is kept.

    Raises:
        OptionError: replace is unknown.
        ShapeError: replace is "drop", and a grid is not that of the model's tokens.
        UnsupportedModelError: replace is "drop", and the model does not support dropped tokens.
    """
    check_known("replacement", replace, REPLACEMENTS)
    if replace == "drop":
        return _with_dropped_tokens(explainer, pixels, choices, batch_size, blank_if_empty)
    height, width = pixels.shape[-2:]
    filler = blank(pixels) if replace == "blank" else blur(pixels)
    grids = {(choice.grid, choice.extent) for choice in choices}
    owners = {(grid, extent): cell_owners(height, width, *grid, extent) for grid, extent in grids}
    logits = []
    for start in range(0, len(choices), batch_size):
        visible = []
        for choice in choices[start : start + batch_size]:
            keeps = torch.zeros(choice.grid[0] * choice.grid[1], dtype=torch.bool)
            keeps[torch.from_numpy(choice.kept)] = True
            visible.append(keeps[owners[choice.grid, choice.extent]][None])
        images = torch.where(torch.stack(visible).to(pixels.device), pixels, filler)
        logits.append(explainer.logits(images).cpu())
    return torch.cat(logits)


def _with_dropped_tokens(
    explainer: Explainer, pixels: Tensor, choices: Sequence[Choice], batch_size: int, blank_if_empty: bool
) -> Tensor:
    layout = check_can_drop(explainer, (pixels.shape[-2], pixels.shape[-1]))
    by_length: dict[int, list[int]] = {}
    for index, choice in enumerate(choices):
        if choice.grid != (layout.rows, layout.cols):
            raise ShapeError(
                f"Dropping tokens requires a map of the model's {layout.rows} × {layout.cols} patches, got "
                f'{" × ".join(map(str, choice.grid))}. Use replace="blank" or replace="blur", which support any grid.'
            )
        by_length.setdefault(len(choice.kept), []).append(index)
    order, logits = list[int](), list[Tensor]()
    for length, indices in by_length.items():
        for start in range(0, len(indices), batch_size):
            chunk = indices[start : start + batch_size]
            if length == layout.num_patches:
                result = explainer.logits(pixels)
            elif length == 0 and blank_if_empty:
                result = explainer.logits(blank(pixels))
            else:
                kept = torch.from_numpy(np.stack([choices[index].kept for index in chunk]))
                result = run_on_patches(explainer.model, pixels, kept, layout=layout, outputs=explainer.outputs.read)
            logits.append(result.cpu().expand(len(chunk), -1))
            order += chunk
    return torch.cat(logits)[np.argsort(order)]


def blank(pixels: Tensor) -> Tensor:
    """Return the mean colour over the whole model input, as in occlusion, [1, channels, height, width]."""
    return pixels.mean(dim=(2, 3), keepdim=True).expand_as(pixels)


def blur(pixels: Tensor) -> Tensor:
    """Return the model input blurred by a Gaussian with a σ of a quarter of its shorter side.

    A smaller σ preserves too much: on the demo images, σ = 1/12 keeps 98 % of the probability, 1/8 77 %, and 1/4 less
    than 1 %. On photographs 1/14 is enough.
    """
    height, width = pixels.shape[-2:]
    image = np.ascontiguousarray(pixels[0].float().cpu().numpy().transpose(1, 2, 0))
    sigma = BLUR * min(height, width)
    blurred = cv2.GaussianBlur(image, (0, 0), sigmaX=sigma, borderType=cv2.BORDER_REFLECT_101)
    planes = np.ascontiguousarray(blurred.reshape(height, width, -1).transpose(2, 0, 1))
    return torch.from_numpy(planes).to(pixels.device, pixels.dtype)[None]
