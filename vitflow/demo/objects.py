"""Objects of the drawn images: eight shapes in eight colour families, inside the image and without overlap."""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from vitflow.demo.ground import Float, coordinates, develop, paint_ground

# Hue of each class in degrees, and the largest deviation from it.
_HUES = (
    (0.0, 8.0),
    (27.0, 7.0),
    (54.0, 7.0),
    (122.0, 24.0),
    (183.0, 12.0),
    (222.0, 12.0),
    (272.0, 13.0),
    (328.0, 11.0),
)
_COUNT_SHARES = (0.25, 0.45, 0.30)  # of images with one, two and three objects
_RADII = ((0.20, 0.34), (0.18, 0.27), (0.17, 0.23))  # smallest and largest radius, by count; the short side is 1
_GAP = 0.02  # smallest distance between the circles around two objects
_SUPERSAMPLING = 4
_SUBPIXEL_BITS = 4

Points = NDArray[np.float64]


@dataclass(frozen=True)
class Placed:
    """An object before it is drawn; lengths in units of the short side."""

    centre: tuple[float, float]  # x, y of the middle of the circle around it
    contours: list[Points]  # x, y around the centre; a second contour is a hole around the same middle
    colour: Float  # RGB, 0 to 1
    light: tuple[float, float]  # direction in which the object brightens

    @property
    def middle(self) -> tuple[float, float]:
        """Return the centre of area (x, y), which for a crescent is not that of its circle."""
        x, y = self.contours[0].T
        wedge = x * np.roll(y, -1) - np.roll(x, -1) * y  # twice the area between two corners and the centre
        shift_x = ((x + np.roll(x, -1)) * wedge).sum() / (3.0 * wedge.sum())
        shift_y = ((y + np.roll(y, -1)) * wedge).sum() / (3.0 * wedge.sum())
        return self.centre[0] + float(shift_x), self.centre[1] + float(shift_y)


def choose_count(random: np.random.Generator) -> int:
    """Draw the number of objects of an image: one, two or three."""
    return 1 + int(np.searchsorted(np.cumsum(_COUNT_SHARES)[:-1], random.random(), side="right"))


def place_objects(
    random: np.random.Generator,
    kinds: Sequence[tuple[int, int]],
    height: int,
    width: int,
    lean: float | None = None,
) -> list[Placed]:
    """Choose sizes, places, rotations and colours of one to three objects, each a (colour family, shape).

    Shapes have any rotation, or with `lean` at most this many degrees from upright.
    """
    low, high = _RADII[len(kinds) - 1]
    radii = random.uniform(low, high, len(kinds))
    centres = _place(random, radii, height, width)
    angle = random.uniform(0.0, 2.0 * np.pi)
    light = (float(np.cos(angle)), float(np.sin(angle)))  # the same for all objects of an image
    placed = []
    for (family, shape), radius, (x, y) in zip(kinds, radii, centres, strict=True):
        hue, spread = _HUES[family]
        hue, saturation, value = random.uniform((hue - spread, 0.62, 0.68), (hue + spread, 0.95, 1.0))
        colour = np.array(colorsys.hsv_to_rgb(hue / 360.0 % 1.0, saturation, value), dtype=np.float32)
        placed.append(Placed((x, y), _turn(random, shape, radius, lean), colour, light))
    return placed


def paint(seed: int, objects: Sequence[Placed], height: int, width: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Draw objects on the ground of a seed: RGB uint8 [height, width, 3], masks bool [objects, height, width]."""
    image, grain = paint_ground(seed, height, width)
    masks = np.zeros((len(objects), height, width), dtype=np.bool_)
    for placed, mask in zip(objects, masks, strict=True):
        _paint_object(placed, image, mask)
    return develop(image, grain), masks


def _place(random: np.random.Generator, radii: Points, height: int, width: int) -> list[tuple[float, float]]:
    """Return centres (x, y) of circles inside the image that do not overlap; shrinks `radii` if necessary."""
    short = min(height, width)
    while True:
        for _ in range(20):
            low = radii[:, None] + 0.01
            places = random.uniform(low, np.array([[width / short, height / short]]) - low)
            apart = np.hypot(*(places[:, None] - places[None, :]).transpose(2, 0, 1))
            needed = radii[:, None] + radii[None, :] + _GAP
            if (apart >= needed)[~np.eye(len(radii), dtype=np.bool_)].all():
                return [(float(x), float(y)) for x, y in places]
        radii *= 0.95


def _turn(random: np.random.Generator, shape: int, radius: float, lean: float | None) -> list[Points]:
    """Stretch a shape by up to 15 %, turn it, and scale it into a circle of the radius."""
    low, high = (0.0, 360.0) if lean is None else (_UPRIGHT[shape] - lean, _UPRIGHT[shape] + lean)
    stretch, angle = np.exp(random.uniform(-0.14, 0.14)), random.uniform(np.radians(low), np.radians(high))
    scale = np.array([stretch, 1.0 / stretch]) / max(stretch, 1.0 / stretch) * radius
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    return [contour * scale @ turn for contour in _CONTOURS[shape]]


def _paint_object(placed: Placed, image: Float, mask: NDArray[np.bool_]) -> None:
    """Draw one object into the image and mark the pixels that it touches in the mask."""
    short = min(image.shape[:2])
    contours = [(contour + placed.centre) * short for contour in placed.contours]
    left, top = np.floor(contours[0].min(axis=0)).astype(int)
    right, bottom = np.ceil(contours[0].max(axis=0)).astype(int)
    fine = np.zeros(((bottom - top) * _SUPERSAMPLING, (right - left) * _SUPERSAMPLING), dtype=np.uint8)
    # OpenCV's integer coordinates are pixel centres, ours are pixel corners: half a pixel apart.
    corners = [((contour - (left, top)) * _SUPERSAMPLING - 0.5) * 2**_SUBPIXEL_BITS for contour in contours]
    cv2.fillPoly(fine, [np.rint(corner).astype(np.int32) for corner in corners], 255, shift=_SUBPIXEL_BITS)
    area = (slice(top, bottom), slice(left, right))
    cover = cv2.resize(fine, (right - left, bottom - top), interpolation=cv2.INTER_AREA)
    mask[area] = cover > 0

    x, y = coordinates(*image.shape[:2])
    slope = placed.light[0] * (x[:, left:right] - placed.centre[0]) + placed.light[1] * (
        y[top:bottom] - placed.centre[1]
    )
    shaded = placed.colour * (1.0 + 0.8 * slope[..., None])
    image[area] += (shaded - image[area]) * (cover.astype(np.float32) / np.float32(255.0))[..., None]


def _circle(radius: float = 1.0, start: float = 0.0, stop: float = 2.0 * np.pi, points: int = 72) -> Points:
    angles = np.linspace(start, stop, points)
    return np.stack([radius * np.cos(angles), radius * np.sin(angles)], axis=1)


def _polygon(corners: int, inner: float | None = None) -> Points:
    """Return a regular polygon in the unit circle, or a star with inner corners at that radius."""
    count = corners if inner is None else 2 * corners
    angles = 2.0 * np.pi * np.arange(count) / count
    radii = np.ones(count)
    if inner is not None:
        radii[1::2] = inner
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def _cross(half_width: float = 0.37) -> Points:
    a, b = half_width, float(np.sqrt(1.0 - half_width**2))
    quarter = np.array([[b, -a], [b, a], [a, a]])
    turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
    return np.concatenate([quarter @ np.linalg.matrix_power(turn, number) for number in range(4)])


def _heart() -> Points:
    t = np.linspace(0.0, 2.0 * np.pi, 72)
    x = 16.0 * np.sin(t) ** 3
    y = -(13.0 * np.cos(t) - 5.0 * np.cos(2.0 * t) - 2.0 * np.cos(3.0 * t) - np.cos(4.0 * t)) - 2.0
    return np.stack([x, y], axis=1) / float(np.hypot(x, y).max())


def _crescent(offset: float = 0.6, radius: float = 0.75) -> Points:
    """Return the unit disc minus a smaller disc to its right."""
    # The circles x² + y² = 1 and (x − offset)² + y² = radius² cross at this x.
    crossing = (1.0 + offset**2 - radius**2) / (2.0 * offset)
    outer, inner = np.arccos(crossing), np.arccos((crossing - offset) / radius)
    back = _circle(1.0, outer, 2.0 * np.pi - outer)
    front = np.array([offset, 0.0]) + _circle(radius, 2.0 * np.pi - inner, inner)
    return np.concatenate([back, front])


_CONTOURS: tuple[list[Points], ...] = (
    [_heart()],
    [_circle()],
    [_polygon(5, inner=0.53)],
    [_polygon(3)],
    [_cross()],
    [_polygon(4)],
    [_circle(), _circle(0.44)],
    [_crescent()],
)

# Rotation in degrees from the contours above to the upright shape: a star on two points, a square on a side.
_UPRIGHT = (0.0, 0.0, -90.0, -90.0, 0.0, 45.0, 0.0, 0.0)
