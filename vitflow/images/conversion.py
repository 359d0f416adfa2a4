"""Convert pixels to RGB in 8 bits, with notes on bands, pages and ranges that mean something else."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitflow.errors import ShapeError

#: The note on the bands of an image that are read.
FIRST_THREE = "bands 1, 2 and 3 of {} are read as red, green and blue, the others not"


def pages_of(image: Image.Image) -> int:
    """Return the number of pages of a TIFF file, 1 for other files and for pages of other resolutions."""
    if image.format != "TIFF":
        return 1
    try:
        size = image.size
        image.seek(1)
        reduced = bool(image.tag_v2.get(254, 0) & 1) or image.size != size  # type: ignore[attr-defined]
        pages: int = 1 if reduced else image.n_frames  # type: ignore[attr-defined]
    except Exception:  # one page, or damaged after the first
        pages = 1
    image.seek(0)
    return pages


def to_rgb(values: NDArray[np.uint8], notes: list[str], *, deep: bool, used: str | None) -> NDArray[np.uint8]:
    """Return RGB pixels of grey, RGB or RGBA values of 8 bits; `used` is as for `without_alpha`.

    Add a note if `deep` values, of more than 8 bits, fill a small part of their range.
    """
    highest = int(values[..., :3].max() if values.ndim == 3 else values.max())
    part = next((part for part in (256, 64, 16, 4) if highest <= 256 // part), 1)
    if deep and part > 1:
        notes.append(
            f"its values fill 1/{part} of their range: the model sees at most {256 // part} of 255. If "
            "that is not intended, pass an array of floats from 0 to 1: the values divided by the largest possible "
            "one, which is 4095 for 12 bits"
        )
    if values.ndim == 2:
        return np.repeat(values[:, :, None], 3, axis=2)
    return values if values.shape[2] == 3 else without_alpha(values, notes, used)


def without_alpha(rgba: NDArray[np.uint8], notes: list[str], used: str | None) -> NDArray[np.uint8]:
    """Blend RGBA pixels with white, or leave out a fourth channel that does not look like transparency, with a note.

    `used` is the note on the bands in use; None if the format defines the fourth channel as transparency.
    """
    alpha = rgba[:, :, 3]
    visible = alpha[alpha > 0]
    partly = visible[visible < 255]
    if used is None or 2 * partly.size <= visible.size or partly.min() == partly.max():
        return over_white(rgba)
    notes.append(used)
    return np.ascontiguousarray(rgba[:, :, :3])


def from_array(array: NDArray[Any]) -> tuple[NDArray[np.uint8], list[str]]:
    """RGB pixels of an array of grey, RGB or RGBA values, and notes."""
    if isinstance(array, np.ma.MaskedArray):
        if masked := int(np.ma.getmaskarray(array).sum()):
            raise ShapeError(f"Expected an array without masked values, got {masked}. Fill them: array.filled(value).")
        array = array.data
    grey_or_colour = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if not grey_or_colour or array.size == 0:
        first = array.ndim == 3 and array.shape[0] in (3, 4)
        raise ShapeError(
            f"Expected an array [height, width], [height, width, 3] (RGB) or [height, width, 4] (RGBA), "
            f"got {array.shape}." + (" Put the channels last: array.transpose(1, 2, 0)." if first else "")
        )
    notes: list[str] = []
    deep = array.dtype != np.uint8 and bool(array.any())
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:
        array = (array >> 8).astype(np.uint8)
    elif np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # NaN fails both
            raise ShapeError(
                f"Expected a float array with values from 0 to 1, got values from {low:g} to {high:g}. "
                f"Divide by 255, or convert to uint8."
            )
        array = np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        remedy = "array.astype(np.uint8) * 255" if array.dtype == bool else "array.astype(np.uint8)"
        condition = "For black and white" if array.dtype == bool else "If its values are from 0 to 255"
        raise ShapeError(
            f"Expected an array of uint8, uint16, or floats from 0 to 1, got {array.dtype}. {condition}: {remedy}."
        )
    return to_rgb(array.copy(order="C"), notes, deep=deep, used=FIRST_THREE.format(4)), notes


def over_white(rgba: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blend RGBA pixels with white."""
    alpha = rgba[:, :, 3:].astype(np.uint16)
    return ((rgba[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
