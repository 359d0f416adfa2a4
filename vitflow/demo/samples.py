"""The files that the package ships: sample pictures with the exact masks of their objects, and two demo models.

This module loads neither torch nor OpenCV.
"""

from pathlib import Path

DEMO_CAPTION = Path(__file__).with_name("demo_caption")  # a LlavaForConditionalGeneration: it says what a picture shows
DEMO_TEXT = Path(__file__).with_name("demo_text")  # a SiglipModel: it says how well a sentence fits a picture
SAMPLE_FOLDER = Path(__file__).with_name("pictures")


def sample_pictures() -> list[Path]:
    """The sample pictures that the package ships, sorted by name.

    >>> [path.name for path in sample_pictures()][:2]
    ['disc_star_and_crescent.png', 'ring_and_triangle.png']
    """
    return sorted(SAMPLE_FOLDER.glob("*.png"))


def sample_masks() -> list[Path]:
    """The masks of the sample pictures, in the same order: a pixel is 0 for ground, else 1 + the class index.

    >>> [path.name for path in sample_masks()] == [path.name for path in sample_pictures()]
    True
    """
    return [SAMPLE_FOLDER / "masks" / path.name for path in sample_pictures()]
