"""The bundled demo: a small trained model, the pictures that it learned from, and their exact masks; works offline."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitflow.demo.drawing import (
        CLASS_NAMES,
        FIRST_TRAINING_SEED,
        DemoPicture,
        draw_ground,
        draw_picture,
        draw_pictures,
    )
    from vitflow.demo.model import DEMO_WEIGHTS, demo_metadata, load_demo_model

__all__ = [
    "CLASS_NAMES",
    "DEMO_WEIGHTS",
    "FIRST_TRAINING_SEED",
    "SAMPLE_FOLDER",
    "DemoPicture",
    "demo_metadata",
    "draw_ground",
    "draw_picture",
    "draw_pictures",
    "load_demo_model",
    "sample_masks",
    "sample_pictures",
]

SAMPLE_FOLDER = Path(__file__).with_name("pictures")

# Loaded when first asked for, so that finding the sample pictures loads neither torch nor OpenCV.
_HOMES = {
    "CLASS_NAMES": "drawing",
    "FIRST_TRAINING_SEED": "drawing",
    "DemoPicture": "drawing",
    "draw_ground": "drawing",
    "draw_picture": "drawing",
    "draw_pictures": "drawing",
    "DEMO_WEIGHTS": "model",
    "demo_metadata": "model",
    "load_demo_model": "model",
}


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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
