"""Drawn images: coloured shapes on a muted, textured background, with the exact mask of every shape.

The same seed gives the same scene at every size.
"""

import colorsys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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

DEMO_MODEL = "vitflow_demo"  # architecture name of the model that was trained on them

# Images of smaller seeds are not used in training: they are for evaluation, tests and samples.
FIRST_TRAINING_SEED = 1_000_000


@dataclass(frozen=True)
class DemoImage:
    """A drawn image with its labels and masks.

    Attributes:
        image: RGB uint8 [height, width, 3].
        labels: the class index of each object; the objects of an image have different classes.
        masks: bool [objects, height, width], the pixels that each object touches; masks do not overlap.
    """

    image: NDArray[np.uint8]
    labels: tuple[int, ...]
    masks: NDArray[np.bool_]

    def mask_of(self, class_index: int) -> NDArray[np.bool_]:
        """Return the mask of one class, bool [height, width]; all False if the class is not in the image."""
        chosen = [mask for label, mask in zip(self.labels, self.masks, strict=True) if label == class_index]
        return chosen[0] if chosen else np.zeros(self.image.shape[:2], dtype=np.bool_)


def draw_image(seed: int, size: int | tuple[int, int] = 96) -> DemoImage:
    """Draw the image of a seed: one to three different objects on a muted, textured background.

    The same seed gives the same scene at every size, and the same pixels at the same size.

    Args:
        seed: at least 0; seeds from FIRST_TRAINING_SEED on are those that the demo model was trained on.
        size: side of a square image, or (height, width), in pixels; at least 16.

    Raises:
        OptionError: the seed is negative or the size too small.

    >>> image = draw_image(7)
    >>> image.image.shape, [CLASS_NAMES[label] for label in image.labels]
    ((96, 96, 3), ['purple ring', 'red heart', 'orange disc'])
    """
    height, width = check(seed, size)
    random = np.random.default_rng((seed, 1))
    count = choose_count(random)
    labels = tuple(random.permutation(len(CLASS_NAMES))[:count].tolist())
    # A class is one colour family with one shape.
    objects = place_objects(random, [(label, label) for label in labels], height, width)
    image, masks = paint(seed, objects, height, width)
    return DemoImage(image, labels, masks)


def draw_ground(seed: int, size: int | tuple[int, int] = 96) -> NDArray[np.uint8]:
    """Draw the image of a seed without its objects, RGB uint8 [height, width, 3]; arguments are as for `draw_image`.

    >>> image, ground = draw_image(7), draw_ground(7)
    >>> bool((image.image == ground)[~image.masks.any(axis=0)].all())
    True
    """
    return develop(*paint_ground(seed, *check(seed, size)))


def draw_images(count: int, seed: int = 0, size: int | tuple[int, int] = 96) -> Iterator[DemoImage]:
    """Draw the images of the seeds `seed`, `seed + 1`, …, one after the other.

    >>> [image.image.shape for image in draw_images(2, size=(32, 48))]
    [(32, 48, 3), (32, 48, 3)]
    """
    return (draw_image(seed + number, size) for number in range(count))


DEMO_CAPTION = Path(__file__).with_name("demo_caption")  # a LlavaForConditionalGeneration that captions drawn images
DEMO_TEXT = Path(__file__).with_name("demo_text")  # a SiglipModel that scores sentences for drawn images
SAMPLE_FOLDER = Path(__file__).with_name("images")
PHOTOGRAPH = Path(__file__).with_name("cat.jpg")  # for models that know more than drawn shapes


def sample_images() -> list[Path]:
    """Return the bundled sample images, sorted by name; masks/NAME.png has 0 for background, else 1 + the class index.

    >>> [path.name for path in sample_images()][:2]
    ['disc_star_and_crescent.png', 'ring_and_triangle.png']
    """
    return sorted(SAMPLE_FOLDER.glob("*.png"))


_FINEST_CELLS = 96  # the finest noise has this many cells on the short side, whatever the size of the image
# Hue of each class in degrees, and the largest deviation from it.
_HUES = (
    *((0.0, 8.0), (27.0, 7.0), (54.0, 7.0), (122.0, 24.0)),
    *((183.0, 12.0), (222.0, 12.0), (272.0, 13.0), (328.0, 11.0)),
)
_COUNT_SHARES = (0.25, 0.45, 0.30)  # of images with one, two and three objects
_RADII = ((0.20, 0.34), (0.18, 0.27), (0.17, 0.23))  # smallest and largest radius, by count; the short side is 1
_GAP = 0.02  # smallest distance between the circles around two objects
_SUPERSAMPLING = 4
_SUBPIXEL_BITS = 4

Float = NDArray[np.float32]
Points = NDArray[np.float64]


def check(seed: int, size: int | tuple[int, int]) -> tuple[int, int]:
    """Return the (height, width) of an image to draw; OptionError if the seed is negative or the size too small."""
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
    # A separate stream, so that the background does not depend on the objects.
    random = np.random.default_rng((seed, 0))
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


@dataclass(frozen=True)
class Placed:
    """An object before it is drawn; lengths in units of the short side."""

    centre: tuple[float, float]  # x, y of the middle of the circle around it
    contours: list[Points]  # x, y around the centre; a second contour is a hole around the same middle
    colour: Float  # RGB, 0 to 1
    light: tuple[float, float]  # direction in which the object brightens


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
    """Place one to three objects, each a (colour family, shape); with `lean` at most this many degrees from upright."""
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
    across, down = x[:, left:right] - placed.centre[0], y[top:bottom] - placed.centre[1]
    slope = placed.light[0] * across + placed.light[1] * down
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
    radii[1::2] = 1.0 if inner is None else inner
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
