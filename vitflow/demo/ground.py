"""Background of the drawn images: muted and textured, the same scene at every size."""

import colorsys

import cv2
import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError

_FINEST_CELLS = 96  # the finest noise has this many cells on the short side, whatever the size of the image

Float = NDArray[np.float32]


def check(seed: int, size: int | tuple[int, int]) -> tuple[int, int]:
    """Check the (height, width) of an image to draw.

    Raises:
        OptionError: the seed is negative or the size too small.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if seed < 0:
        raise OptionError(f"Expected a seed of at least 0, got {seed}.")
    if min(height, width) < 16:
        raise OptionError(f"Expected an image of at least 16 x 16 pixels, got {height} x {width} (height x width).")
    return height, width


def develop(image: Float, grain: Float) -> NDArray[np.uint8]:
    """Convert colours from 0 to 1, plus the grain, to RGB uint8."""
    developed = (image + grain[..., None]) * 255.0 + 0.5
    return np.asarray(np.clip(developed, 0.0, 255.0), dtype=np.uint8)


def paint_ground(seed: int, height: int, width: int) -> tuple[Float, Float]:
    """Draw the background, RGB float32 [height, width, 3] in 0 to 1, and the grain [height, width]."""
    random = np.random.default_rng(
        (seed, 0)
    )  # a separate stream, so that the background does not depend on the objects
    x, y = coordinates(height, width)
    first, second, third = (_muted_colour(random) for _ in range(3))

    angle = random.uniform(0.0, 2.0 * np.pi)
    ramp = 0.5 + 0.6 * (np.cos(angle) * (x - x.mean()) + np.sin(angle) * (y - y.mean()))
    ramp = np.clip(ramp + 0.35 * _noise(random, 3, height, width), 0.0, 1.0)[..., None]
    clouds = np.clip(0.3 + 0.5 * _noise(random, 5, height, width), 0.0, 1.0)[..., None]
    ground = (first * (1.0 - ramp) + second * ramp) * (1.0 - clouds) + third * clouds

    for _ in range(random.integers(0, 4)):
        _draw_pebble(random, ground, x, y)

    relief = random.uniform(0.01, 0.06) * _noise(random, 9, height, width)
    relief += random.uniform(0.01, 0.06) * _noise(random, 28, height, width)
    if random.random() < 0.5:
        angle, waves, phase = random.uniform(0.0, np.pi), random.uniform(3.0, 12.0), random.uniform(0.0, 6.3)
        along = np.cos(angle) * x + np.sin(angle) * y + 0.04 * _noise(random, 4, height, width)
        relief += random.uniform(0.02, 0.07) * np.sin(2.0 * np.pi * waves * along + phase)
    grain = random.uniform(0.005, 0.04) * _noise(random, _FINEST_CELLS, height, width)
    return np.asarray(ground + relief[..., None], dtype=np.float32), np.asarray(grain, dtype=np.float32)


def coordinates(height: int, width: int) -> tuple[Float, Float]:
    """Return the x [1, width] and y [height, 1] of the pixel centres, in units of the short side."""
    short = min(height, width)
    x = (np.arange(width, dtype=np.float32) + 0.5) / short
    y = (np.arange(height, dtype=np.float32) + 0.5) / short
    return np.asarray(x[None, :], dtype=np.float32), np.asarray(y[:, None], dtype=np.float32)


def _noise(random: np.random.Generator, cells: int, height: int, width: int) -> Float:
    """Return smooth noise of deviation about 1 with `cells` cells on the short side, float32 [height, width]."""
    short = min(height, width)
    shape = (round(cells * height / short), round(cells * width / short))
    values = random.standard_normal(shape, dtype=np.float32)
    if shape == (height, width):
        return values
    # Shrinking averages the noise, as the resizing of a model does.
    method = cv2.INTER_CUBIC if height >= shape[0] else cv2.INTER_AREA
    return np.asarray(cv2.resize(values, (width, height), interpolation=method), dtype=np.float32)


def _muted_colour(random: np.random.Generator) -> Float:
    """Return a pale or dull colour of any hue, so that every hue of the objects occurs in the background."""
    hue, saturation, value = random.uniform((0.0, 0.02, 0.25), (1.0, 0.34, 0.85))
    return np.array(colorsys.hsv_to_rgb(hue, saturation, value), dtype=np.float32)


def _draw_pebble(random: np.random.Generator, ground: Float, x: Float, y: Float) -> None:
    """Draw a round neutral distractor that belongs to no class."""
    centre_x, centre_y = random.uniform(0.0, x.max()), random.uniform(0.0, y.max())
    radius, angle, stretch = random.uniform((0.06, 0.0, 0.6), (0.18, np.pi, 1.0))
    along = np.cos(angle) * (x - centre_x) + np.sin(angle) * (y - centre_y)
    across = np.cos(angle) * (y - centre_y) - np.sin(angle) * (x - centre_x)
    distance = np.sqrt(along**2 + (across / stretch) ** 2)
    cover = np.clip((radius - distance) * 60.0 + 0.5, 0.0, 1.0)[..., None]
    colour = _muted_colour(random) * (1.0 - 0.5 * (distance / radius)[..., None].clip(0.0, 1.0) ** 2 * 0.6)
    ground += (colour - ground) * cover * np.float32(0.85)
