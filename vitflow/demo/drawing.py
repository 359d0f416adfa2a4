"""Drawn images: coloured shapes on a textured background, with the exact mask of every shape."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitflow.demo.painting import check, choose_count, develop, paint, paint_ground, place_objects

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
    """Draw the image of a seed without its objects, RGB uint8 [height, width, 3].

    Raises:
        OptionError: the seed is negative or the size too small.

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


def sample_images() -> list[Path]:
    """Return the bundled sample images, sorted by name.

    >>> [path.name for path in sample_images()][:2]
    ['disc_star_and_crescent.png', 'ring_and_triangle.png']
    """
    return sorted(SAMPLE_FOLDER.glob("*.png"))


def sample_masks() -> list[Path]:
    """Return the masks of the sample images, in the same order: 0 for background, else 1 + the class index.

    >>> [path.name for path in sample_masks()] == [path.name for path in sample_images()]
    True
    """
    return [SAMPLE_FOLDER / "masks" / path.name for path in sample_images()]
