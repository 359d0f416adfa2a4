"""Pictures that the project draws itself: coloured shapes on textured ground, with the exact mask of every shape."""

import colorsys
from collections.abc import Iterator
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError

CLASS_NAMES: tuple[str, ...] = (
    "red heart",
    "orange disc",
    "yellow star",
    "green triangle",
    "cyan cross",
    "blue square",
    "purple ring",
    "pink crescent",
)

DEMO_MODEL = "vitflow_demo"  # what the model that was trained on them calls itself

# Pictures of smaller seeds are never trained on: they are free for evaluation, for tests and for samples.
FIRST_TRAINING_SEED = 1_000_000

# Degrees around the colour circle: the middle of each class's colour family, and how far it strays.
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
_COUNT_SHARES = (0.25, 0.45, 0.30)  # of pictures with one, two and three objects
_RADII = ((0.20, 0.34), (0.18, 0.27), (0.17, 0.23))  # smallest and largest radius, by count; the short side is 1
_GAP = 0.02  # at least this much ground between the circles around two objects
_SUPERSAMPLING = 4
_SUBPIXEL_BITS = 4
_FINEST_CELLS = 96  # the finest noise has this many cells on the short side, whatever the size of the picture

Float = NDArray[np.float32]
Points = NDArray[np.float64]


@dataclass(frozen=True)
class DemoPicture:
    """A drawn picture and the truth about it.

    Attributes:
        image: RGB uint8 [height, width, 3].
        labels: the class index of each object; every object of a picture is of another class.
        masks: bool [objects, height, width], the pixels that each object touches; masks do not overlap.
    """

    image: NDArray[np.uint8]
    labels: tuple[int, ...]
    masks: NDArray[np.bool_]

    def mask_of(self, class_index: int) -> NDArray[np.bool_]:
        """The mask of one class, bool [height, width]; all False where the class is not in the picture."""
        chosen = [mask for label, mask in zip(self.labels, self.masks, strict=True) if label == class_index]
        return chosen[0] if chosen else np.zeros(self.image.shape[:2], dtype=np.bool_)


@dataclass(frozen=True)
class _Shape:
    """An object before it is drawn; lengths in units of the short side."""

    label: int
    centre: tuple[float, float]  # x, y
    contours: list[Points]  # x, y around the centre; a second contour is a hole
    colour: Float  # RGB, 0 to 1
    light: tuple[float, float]  # direction in which the object brightens


def limits_of(model_id: str) -> str:
    """What a model by this name knows, where that is less than a reader would take it for; else nothing.

    >>> limits_of("vitflow_demo"), limits_of("vit_tiny_patch16_224")
    ('knows eight drawn shapes only', '')
    """
    return "knows eight drawn shapes only" if model_id == DEMO_MODEL else ""


def draw_picture(seed: int, size: int | tuple[int, int] = 96) -> DemoPicture:
    """Draw the picture of a seed: one to three different objects on a muted, textured ground.

    The same seed gives the same scene at every size, and the same pixels at the same size.

    Args:
        seed: at least 0; seeds from FIRST_TRAINING_SEED on are those that the demo model was trained on.
        size: side of a square picture, or (height, width), in pixels; at least 16.

    Raises:
        OptionError: the seed is negative or the size too small.

    >>> picture = draw_picture(7)
    >>> picture.image.shape, [CLASS_NAMES[label] for label in picture.labels]
    ((96, 96, 3), ['purple ring', 'red heart', 'orange disc'])
    """
    height, width = _check(seed, size)
    ground, grain = _draw_ground(seed, height, width)
    shapes = _choose_shapes(seed, height, width)
    masks = np.zeros((len(shapes), height, width), dtype=np.bool_)
    for shape, mask in zip(shapes, masks, strict=True):
        _draw_shape(shape, ground, mask)
    return DemoPicture(_develop(ground, grain), tuple(shape.label for shape in shapes), masks)


def draw_ground(seed: int, size: int | tuple[int, int] = 96) -> NDArray[np.uint8]:
    """Draw the picture of a seed without its objects, RGB uint8 [height, width, 3].

    Raises:
        OptionError: the seed is negative or the size too small.

    >>> picture, ground = draw_picture(7), draw_ground(7)
    >>> bool((picture.image == ground)[~picture.masks.any(axis=0)].all())
    True
    """
    return _develop(*_draw_ground(seed, *_check(seed, size)))


def draw_pictures(count: int, seed: int = 0, size: int | tuple[int, int] = 96) -> Iterator[DemoPicture]:
    """Draw the pictures of the seeds `seed`, `seed + 1`, …, one after the other.

    >>> [picture.image.shape for picture in draw_pictures(2, size=(32, 48))]
    [(32, 48, 3), (32, 48, 3)]
    """
    return (draw_picture(seed + number, size) for number in range(count))


def _check(seed: int, size: int | tuple[int, int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    if seed < 0:
        raise OptionError(f"Expected a seed of at least 0, got {seed}.")
    if min(height, width) < 16:
        raise OptionError(f"Expected a picture of at least 16 x 16 pixels, got {height} x {width} (height x width).")
    return height, width


def _develop(picture: Float, grain: Float) -> NDArray[np.uint8]:
    """From colours in 0 to 1 and the grain over all of them to RGB uint8."""
    developed = (picture + grain[..., None]) * 255.0 + 0.5
    return np.asarray(np.clip(developed, 0.0, 255.0), dtype=np.uint8)


# --- The ground -----------------------------------------------------------------------------------------------------


def _draw_ground(seed: int, height: int, width: int) -> tuple[Float, Float]:
    """The ground without objects, RGB float32 [height, width, 3] in 0 to 1, and the grain [height, width]."""
    random = np.random.default_rng((seed, 0))  # its own stream: the ground does not depend on the objects
    x, y = _coordinates(height, width)
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


def _coordinates(height: int, width: int) -> tuple[Float, Float]:
    """The x [1, width] and y [height, 1] of the pixel centres, in units of the short side."""
    short = min(height, width)
    x = (np.arange(width, dtype=np.float32) + 0.5) / short
    y = (np.arange(height, dtype=np.float32) + 0.5) / short
    return np.asarray(x[None, :], dtype=np.float32), np.asarray(y[:, None], dtype=np.float32)


def _noise(random: np.random.Generator, cells: int, height: int, width: int) -> Float:
    """Smooth noise of deviation about 1 with so many cells on the short side, float32 [height, width]."""
    short = min(height, width)
    shape = (round(cells * height / short), round(cells * width / short))
    values = random.standard_normal(shape, dtype=np.float32)
    if shape == (height, width):
        return values
    # Shrinking averages the noise, as the eye and a model's own resizing do.
    method = cv2.INTER_CUBIC if height >= shape[0] else cv2.INTER_AREA
    return np.asarray(cv2.resize(values, (width, height), interpolation=method), dtype=np.float32)


def _muted_colour(random: np.random.Generator) -> Float:
    """Any hue, pale or dull, so that no colour family of the objects is foreign to the ground."""
    hue, saturation, value = random.uniform((0.0, 0.02, 0.25), (1.0, 0.34, 0.85))
    return np.array(colorsys.hsv_to_rgb(hue, saturation, value), dtype=np.float32)


def _draw_pebble(random: np.random.Generator, ground: Float, x: Float, y: Float) -> None:
    """A round neutral blob that belongs to no class: an edge and a surface are not yet an object."""
    centre_x, centre_y = random.uniform(0.0, x.max()), random.uniform(0.0, y.max())
    radius, angle, stretch = random.uniform((0.06, 0.0, 0.6), (0.18, np.pi, 1.0))
    along = np.cos(angle) * (x - centre_x) + np.sin(angle) * (y - centre_y)
    across = np.cos(angle) * (y - centre_y) - np.sin(angle) * (x - centre_x)
    distance = np.sqrt(along**2 + (across / stretch) ** 2)
    cover = np.clip((radius - distance) * 60.0 + 0.5, 0.0, 1.0)[..., None]
    colour = _muted_colour(random) * (1.0 - 0.5 * (distance / radius)[..., None].clip(0.0, 1.0) ** 2 * 0.6)
    ground += (colour - ground) * cover * np.float32(0.85)


# --- The objects ----------------------------------------------------------------------------------------------------


def _choose_shapes(seed: int, height: int, width: int) -> list[_Shape]:
    """Choose kinds, sizes, places, turns and colours of a picture's objects."""
    random = np.random.default_rng((seed, 1))
    count = 1 + int(np.searchsorted(np.cumsum(_COUNT_SHARES)[:-1], random.random(), side="right"))
    labels = random.permutation(len(CLASS_NAMES))[:count]
    low, high = _RADII[count - 1]
    radii = random.uniform(low, high, count)
    centres = _place(random, radii, height, width)
    angle = random.uniform(0.0, 2.0 * np.pi)
    light = (float(np.cos(angle)), float(np.sin(angle)))  # one lamp for the whole picture
    shapes = []
    for label, radius, (x, y) in zip(labels.tolist(), radii, centres, strict=True):
        hue, spread = _HUES[label]
        hue, saturation, value = random.uniform((hue - spread, 0.62, 0.68), (hue + spread, 0.95, 1.0))
        colour = np.array(colorsys.hsv_to_rgb(hue / 360.0 % 1.0, saturation, value), dtype=np.float32)
        shapes.append(_Shape(label, (x, y), _turn(random, _CONTOURS[label], radius), colour, light))
    return shapes


def _place(random: np.random.Generator, radii: Points, height: int, width: int) -> list[tuple[float, float]]:
    """Centres (x, y) of circles that lie whole in the picture and apart from each other; shrinks `radii` if it must."""
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


def _turn(random: np.random.Generator, contours: list[Points], radius: float) -> list[Points]:
    """Stretch a shape by up to 15 %, turn it, and scale it into a circle of the radius."""
    stretch, angle = np.exp(random.uniform(-0.14, 0.14)), random.uniform(0.0, 2.0 * np.pi)
    scale = np.array([stretch, 1.0 / stretch]) / max(stretch, 1.0 / stretch) * radius
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    return [contour * scale @ turn for contour in contours]


def _draw_shape(shape: _Shape, picture: Float, mask: NDArray[np.bool_]) -> None:
    """Draw one object into the picture and mark the pixels that it touches in the mask."""
    short = min(picture.shape[:2])
    contours = [(contour + shape.centre) * short for contour in shape.contours]
    left, top = np.floor(contours[0].min(axis=0)).astype(int)
    right, bottom = np.ceil(contours[0].max(axis=0)).astype(int)
    fine = np.zeros(((bottom - top) * _SUPERSAMPLING, (right - left) * _SUPERSAMPLING), dtype=np.uint8)
    # OpenCV's integer coordinates name pixel centres; ours name pixel corners, hence the half.
    corners = [((contour - (left, top)) * _SUPERSAMPLING - 0.5) * 2**_SUBPIXEL_BITS for contour in contours]
    cv2.fillPoly(fine, [np.rint(corner).astype(np.int32) for corner in corners], 255, shift=_SUBPIXEL_BITS)
    area = (slice(top, bottom), slice(left, right))
    cover = cv2.resize(fine, (right - left, bottom - top), interpolation=cv2.INTER_AREA)
    mask[area] = cover > 0

    x, y = _coordinates(*picture.shape[:2])
    slope = shape.light[0] * (x[:, left:right] - shape.centre[0]) + shape.light[1] * (y[top:bottom] - shape.centre[1])
    shaded = shape.colour * (1.0 + 0.8 * slope[..., None])
    picture[area] += (shaded - picture[area]) * (cover.astype(np.float32) / np.float32(255.0))[..., None]


def _circle(radius: float = 1.0, start: float = 0.0, stop: float = 2.0 * np.pi, points: int = 72) -> Points:
    angles = np.linspace(start, stop, points)
    return np.stack([radius * np.cos(angles), radius * np.sin(angles)], axis=1)


def _polygon(corners: int, inner: float | None = None) -> Points:
    """A regular polygon in the unit circle, or a star with inner corners at that radius."""
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
    """The unit disc less a smaller disc that lies to its right."""
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
