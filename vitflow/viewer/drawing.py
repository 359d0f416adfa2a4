"""What pages draw with: small photographs, and the colours of vitflow's own overlays."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitflow.pictures.contours import CONTOURS
from vitflow.pictures.options import Background
from vitflow.pictures.overlay import KEPT, KNEE, LUMINANCE, SEQUENTIAL, color_table

#: Colour maps that a reader may choose, the usual one first.
COLOUR_MAPS = (SEQUENTIAL, "viridis", "inferno", "gray")


def thumbnail(pixels: NDArray[np.uint8], side: int = 512) -> bytes:
    """A photograph, uint8 RGB, made small for a page, as JPEG with a longer side of so many pixels at most."""
    picture = Image.fromarray(pixels)
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=82)
    return file.getvalue()


def drawing_of(background: Background = "grey", *, soft: bool = True, contours: bool = False) -> dict[str, Any]:
    """How maps are laid over photographs: all that a page's script needs to know of `vitflow.pictures.overlay`."""
    knee = KNEE if soft else 1.0
    return {
        "knee": knee,
        "kept": KEPT,
        "luminance": LUMINANCE,
        "background": background,
        "contours": contours,
        "shares": CONTOURS,
    }


def one_table(cmap: str | None, two_sides: bool) -> dict[str, list[Any]]:
    """The colours of a colour map, and how opaque each is, from 0 to 255, as overlays have them."""
    colors, shares = color_table(cmap, two_sides)
    return {"colors": colors.tolist(), "opacity": np.round(255 * shares).astype(int).tolist()}


def color_tables() -> dict[str, dict[str, dict[str, list[Any]]]]:
    """The colour maps that a reader may choose, each for one side of 0 and for both; the usual one is no choice."""
    return {
        name: {"one_side": one_table(own, False), "two_sides": one_table(own, True)}
        for name in COLOUR_MAPS
        for own in [None if name == SEQUENTIAL else name]
    }
