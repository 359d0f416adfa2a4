"""Overlay of a heatmap on its image: scale, colour, blend; images are RGB."""

from functools import cache
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, ShapeError, check_known, unknown_name
from vitflow.images.geometry import strips

#: Lower and upper percentile of the robust colour limits, as in seaborn.
ROBUST_PERCENTILES = (2.0, 98.0)

#: Default colour map if the limits are on one side of 0.
SEQUENTIAL = "plasma"

#: Default colours if the limits are on both sides of 0: blue below and red above, of equal lightness (63 and 64 in
#: CIELAB), so that the photograph stays readable; opacity shows the distance from 0.
TWO_HUES = ((90, 152, 255), (255, 110, 90))

#: The same with constant opacity.
DIVERGING = "bwr"

#: Share of the range after which colours grow slower, so that values beyond a soft limit still differ.
KNEE = 0.8

#: Image under the colours.
Ground = Literal["photo", "grey", "dim"]

#: Brightness and saturation of the image that a background keeps.
KEPT: dict[Ground, tuple[float, float]] = {"photo": (1.0, 1.0), "grey": (0.75, 0.0), "dim": (0.75, 0.5)}

#: Brightness and saturation that a grey background keeps of the part that the model did not see, and its added white.
_QUIET = (0.5, 0.0, 0.35)

#: Weights of red, green and blue in the luminance of ITU-R 601-2, as in Pillow's convert("L").
LUMINANCE = (0.299, 0.587, 0.114)

#: Differences up to this share of the largest value are rounding.
_ROUNDING = 1e-6


def scale_range(
    values: NDArray[np.floating[Any]],
    *,
    vmin: float | None = None,
    vmax: float | None = None,
    robust: bool = True,
    signed: bool = True,
) -> tuple[float, float]:
    """Return the colour limits of a grid or a heatmap; NaN is ignored.

    With robust, the limits that are not given are the 2nd and the 98th percentile, as in seaborn, unless these are
    equal; else the extremes. A map with negative values gets limits symmetric about 0: the 98th percentile of its
    absolute values, or the largest; one given limit sets the other. If it is not signed, its colours begin at 0 or
    above. A constant map gives two equal limits.

    >>> scale_range(np.arange(101.0)), scale_range(np.arange(101.0), robust=False, vmin=-5)
    ((2.0, 98.0), (-5.0, 100.0))
    >>> scale_range(np.array([-1.0, 0.0, 3.0]), robust=False), scale_range(np.array([-1.0, 0.0, 3.0]), vmax=2)
    ((-3.0, 3.0), (-2.0, 2.0))
    """
    for name, limit in (("vmin", vmin), ("vmax", vmax)):
        if limit is not None and not np.isfinite(limit):
            raise OptionError(f"Expected a finite {name}, got {limit}.")
    if vmin is not None and vmax is not None:
        if vmin > vmax:
            raise OptionError(f"Expected vmin of at most vmax, got vmin {vmin} and vmax {vmax}.")
        return float(vmin), float(vmax)
    low, high = _default_range(values[np.isfinite(values)], robust, signed)
    two_sides = has_two_sides(low, high)
    if vmin is not None:
        low, high = float(vmin), -float(vmin) if two_sides and vmin < 0 else max(high, float(vmin))
    if vmax is not None:
        low, high = -float(vmax) if two_sides and vmax > 0 else min(low, float(vmax)), float(vmax)
    return low, high


def _default_range(finite: NDArray[np.floating[Any]], robust: bool, signed: bool) -> tuple[float, float]:
    if not finite.size:
        return 0.0, 0.0
    low, high = float(finite.min()), float(finite.max())
    largest = max(abs(low), abs(high))
    if high - low <= _ROUNDING * largest:
        return low, low
    if low < -_ROUNDING * largest and (signed or high <= 0):
        usual = float(np.percentile(np.abs(finite), ROBUST_PERCENTILES[1])) if robust else 0.0
        limit = usual or largest
        return -limit, limit
    if robust:
        lower, upper = (float(limit) for limit in np.percentile(finite, ROBUST_PERCENTILES))
        if upper > max(lower, 0.0):
            low, high = lower, upper
    return max(low, 0.0), high


def has_two_sides(vmin: float, vmax: float) -> bool:
    """Return True if the colours between these limits diverge from 0."""
    return vmin < 0 < vmax


def blend(
    image: NDArray[np.uint8],
    heatmap: NDArray[np.floating[Any]],
    *,
    cmap: str | None = None,
    alpha: float = 0.75,
    fade: bool = True,
    vmin: float | None = None,
    vmax: float | None = None,
    robust: bool = True,
    soft: bool | None = None,
    background: Ground = "grey",
    mark_unseen: bool | None = None,
) -> NDArray[np.uint8]:
    """Draw a heatmap in colour over its image: uint8 RGB [height, width, 3].

    Args:
        image: uint8 RGB [height, width, 3].
        heatmap: values per pixel, [height, width]; NaN where the model saw nothing.
        cmap: name of a colormap of matplotlib; by default "plasma", or red above and blue below 0 if 0 is
            between the limits ("bwr" without fade).
        alpha: opacity of the colours, from 0 to 1; with fade, that of the highest values. 0 leaves the
            image unchanged.
        fade: opacity proportional to the value, so that the image stays visible where the map is low, or 0 if 0 is
            between the limits; otherwise all colours have the same opacity.
        vmin, vmax, robust: limits of the colours, as in scale_range().
        soft: values beyond the limits differ in colour, as they approach the last colour asymptotically. By default if
            the limits are robust and none is given.
        background: the seen part of the image in "grey", darkened to three quarters, so that the only colour
            is that of the map, and the unseen part grey and lighter; "dim": equally dark, with half the saturation; or
            unchanged, "photo", as the unseen part of both. An alpha below 0.5 reduces this effect.
        mark_unseen: draw a thin white and black line along the border of the region that the model saw; by default not
            on "grey".

    Raises:
        OptionError: an unknown colour map or background, or alpha, vmin or vmax is out of range.
        ShapeError: the image is not uint8 RGB, or the heatmap is not of its size.

    >>> image = np.zeros((1, 2, 3), dtype=np.uint8)
    >>> blend(image, np.array([[0.0, 1.0]]), cmap="gray", alpha=0.8, robust=False).tolist()
    [[[0, 0, 0], [204, 204, 204]]]
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or heatmap.shape != image.shape[:2]:
        raise ShapeError(
            f"Expected a uint8 RGB image [height, width, 3] and a heatmap [height, width] of the same size, "
            f"got {image.dtype} {image.shape} and {heatmap.shape}. upsample() makes a heatmap of the image's size."
        )
    if not 0.0 <= alpha <= 1.0:
        raise OptionError(f"Expected 0 <= alpha <= 1, got {alpha}.")
    check_known("background", background, list(KEPT))
    low, high = scale_range(heatmap, vmin=vmin, vmax=vmax, robust=robust)
    soft = is_soft(vmin, vmax, robust) if soft is None else soft
    two_sides = has_two_sides(low, high)
    colors, shares = color_table(DIVERGING if two_sides and not (cmap or fade) else cmap, two_sides)
    opacity = np.float32(alpha) * (shares if fade else np.ones_like(shares))
    mix, limits = _mix(*KEPT[background], 0.0, alpha), (low, high, KNEE if soft else 1.0)
    quiet = _mix(*_QUIET, alpha) if background == "grey" else None
    overlay, unseen = np.empty(image.shape, dtype=np.uint8), np.isnan(heatmap)
    for strip in strips(*heatmap.shape):
        ground, outside = image[strip].astype(np.float32), unseen[strip]
        step = _steps(heatmap[strip], limits, len(colors))
        weight = opacity.take(step, mode="clip")
        overlay[strip] = cv2.blendLinear(_mixed(ground, mix), colors.take(step, 0, mode="clip"), 1 - weight, weight)
        if outside.any():
            lost = image[strip] if quiet is None else _mixed(ground, quiet)
            np.copyto(overlay[strip], lost, where=outside[..., None])
    if unseen.any() and (background != "grey" if mark_unseen is None else mark_unseen):
        outline(overlay, unseen, max(1, round(min(unseen.shape) / 500)))
    return overlay


def is_soft(vmin: float | None, vmax: float | None, robust: bool) -> bool:
    """Return True if values beyond the limits get further colours: percentile limits, not set by the caller."""
    return robust and vmin is None and vmax is None


def _mix(brightness: float, saturation: float, white: float, alpha: float) -> NDArray[np.float32]:
    """Return the matrix [3, 4] from a pixel to its ground."""
    strength = min(2 * alpha, 1.0)
    weight, shared = 1 - strength + strength * brightness * saturation, strength * brightness * (1 - saturation)
    colours = weight * np.eye(3) + shared * np.tile(LUMINANCE, (3, 1))
    return np.column_stack([colours, [255 * white * strength] * 3]).astype(np.float32)


def _mixed(image: NDArray[np.float32], mix: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return each pixel's ground; for uint8, OpenCV would round the matrix."""
    return np.asarray(cv2.convertScaleAbs(cv2.transform(image, mix)), dtype=np.uint8)


def outline(image: NDArray[np.uint8], region: NDArray[np.bool_], thickness: int) -> None:
    """Draw a white line around a region, bool [height, width], and a black one around it, in place."""
    kernel = np.ones((2 * thickness + 1, 2 * thickness + 1), dtype=np.uint8)
    inside = region.view(np.uint8)
    white = cv2.dilate(inside, kernel)
    pixels = image.reshape(-1, 3)
    pixels[np.flatnonzero(cv2.dilate(white, kernel) > white)] = 0
    pixels[np.flatnonzero(white > inside)] = 255


def color_table(cmap: str | None, two_sides: bool) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return the colours of a matplotlib colour map, uint8 RGB [steps, 3], and their opacity if faded.

    Opacity grows from the lowest value, or from 0 to both sides: the two steps at 0 are transparent.

    >>> color_table("tab10", two_sides=True)[1].tolist()
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    """
    two_hues = two_sides and not cmap
    table = (
        np.repeat(np.array(TWO_HUES, dtype=np.uint8), 128, axis=0) if two_hues else _lookup_table(cmap or SEQUENTIAL)
    )
    last = len(table) - 1
    steps = np.arange(len(table), dtype=np.float32)
    if two_sides:
        return table, np.maximum(np.abs(2 * steps - last) - 1, 0) / np.float32(max(last - 1, 1))
    return table, steps / np.float32(max(last, 1))


def _lookup_table(cmap: str) -> NDArray[np.uint8]:
    if cmap == SEQUENTIAL:
        return _sequential()
    import matplotlib

    if cmap not in matplotlib.colormaps:
        names = [name for name in matplotlib.colormaps if not name.endswith("_r")]
        raise OptionError(unknown_name("colormap", cmap, names))
    colormap = matplotlib.colormaps[cmap]
    table: NDArray[np.uint8] = colormap(np.arange(colormap.N), bytes=True)[:, :3]
    return table


@cache
def _sequential() -> NDArray[np.uint8]:
    """Return the table of `SEQUENTIAL` from OpenCV, as matplotlib is slow to import."""
    steps = np.arange(256, dtype=np.uint8)[:, None]
    return np.ascontiguousarray(cv2.applyColorMap(steps, cv2.COLORMAP_PLASMA)[:, 0, ::-1])


def _steps(values: NDArray[np.floating[Any]], limits: tuple[float, float, float], steps: int) -> NDArray[Any]:
    """Return the index of each value's colour, of any for NaN, in the smallest unsigned type."""
    vmin, vmax, knee = limits
    # In float64: the range of a map may be too small for float32 to divide by.
    position = values.astype(np.float64)
    # The range may be too small even for float64: all values are far outside it.
    with np.errstate(over="ignore", invalid="ignore"):
        if not vmax > vmin:
            # Rounding must not lift a constant map above its own value.
            share = np.where(position > vmax + 1e-5 * abs(vmax), 1.0, 0.0)
        elif has_two_sides(vmin, vmax):  # each side has its half of the colours
            side = _curve(np.maximum(position / vmin, position / vmax), knee)
            share = (np.copysign(side, position) + 1) / 2
        else:
            position -= vmin
            position /= vmax - vmin
            share = _curve(position, knee)
        share *= steps
        return np.minimum(share, steps - 1, out=share).astype(np.min_scalar_type(steps - 1))


def _curve(shares: NDArray[np.float64], knee: float) -> NDArray[np.float64]:
    """Map shares of the range to 0…1, in place: linear up to the knee, then asymptotic to 1."""
    if knee < 1:
        beyond = np.flatnonzero(shares > knee)
        shares.flat[beyond] = knee + (1 - knee) * (1 - np.exp((knee - shares.flat[beyond]) / (1 - knee)))
    return np.clip(shares, 0.0, 1.0, out=shares)
