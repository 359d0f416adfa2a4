"""Draw the sample images and masks that vitflow bundles; the same pixels every time.

python -m tools.draw_assets [--output FOLDER]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitflow.demo import SAMPLE_FOLDER, DemoImage, draw_image

# Name, seed, and (height, width).
SAMPLES: tuple[tuple[str, int, tuple[int, int]], ...] = (
    ("disc_star_and_crescent", 97, (320, 320)),
    ("ring_and_triangle", 105, (320, 320)),
    ("ring_heart_and_star", 45, (288, 384)),
    ("square_and_crescent", 116, (288, 384)),
    ("star_triangle_and_square", 21, (384, 288)),
    ("triangle_heart_and_cross", 42, (384, 288)),
)
# Ground, then one colour for each class, so that a mask is readable in an image viewer too.
PALETTE = (
    (0, 0, 0),
    (220, 40, 40),
    (245, 140, 30),
    (240, 220, 50),
    (60, 190, 70),
    (50, 205, 215),
    (50, 90, 230),
    (140, 60, 210),
    (240, 80, 170),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=SAMPLE_FOLDER)
    folder = parser.parse_args(arguments).output
    (folder / "masks").mkdir(parents=True, exist_ok=True)
    for name, seed, size in SAMPLES:
        image = draw_image(seed, size)
        Image.fromarray(image.image).save(folder / f"{name}.png", optimize=True)
        mask = Image.fromarray(index_mask(image))
        mask.putpalette([value for colour in PALETTE for value in colour])
        mask.save(folder / "masks" / f"{name}.png", optimize=True)
        print(folder / f"{name}.png")


def index_mask(image: DemoImage) -> NDArray[np.uint8]:
    """All masks of an image as one: 0 is ground, else 1 + the class index; uint8 [height, width]."""
    indices = np.zeros(image.image.shape[:2], dtype=np.uint8)
    for label, mask in zip(image.labels, image.masks, strict=True):
        indices[mask] = 1 + label
    return indices


if __name__ == "__main__":
    main()
