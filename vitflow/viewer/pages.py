"""HTML pages with a common template and style, each in one file that requires no network.

A page `NAME` is `NAME.html`, which extends `base.html`, with `NAME.css` behind the style of all pages. A page that a
reader can do something with has the script of all pages, `base.js`, and its own. Whatever comes from data or file names
is escaped, and no other script can run. The numbers of a page are packed in half precision, its photographs are small
JPEGs.
"""

import base64
import hashlib
import html
import io
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from vitflow.errors import printable
from vitflow.files import write_atomically
from vitflow.images.geometry import Placement
from vitflow.images.overlay import KEPT, KNEE, LUMINANCE, color_table
from vitflow.images.typesetting import decimal

#: Maximum number of failed inputs listed on a page; the manifest lists all.
FAILURES_SHOWN = 200


@dataclass(frozen=True, slots=True, repr=False)
class Page:
    """One self-contained page for a browser.

    Attributes:
        html: the page.
    """

    html: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.html) / 1e6:.1f} MB)"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page atomically."""
        with write_atomically(Path(path)) as file:
            file.write(self.html.encode("utf-8", "replace"))
        return Path(path)

    def _repr_html_(self) -> str:
        """Return the page in a sandboxed iframe for notebooks."""
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts allow-downloads" '
            'title="vitflow" style="width: 100%; height: 900px; border: 0"></iframe>'
        )


def make_html(name: str, *scripts: str, **values: Any) -> str:
    """Render the page of a template and its scripts as HTML with `values`, of which `data` is for the scripts."""
    style = Markup(_source("base.css") + _source(f"{name}.css"))
    script = Markup("".join(_source(f"{script}.js") for script in ("base", *scripts))) if scripts else Markup("")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _environment().get_template(f"{name}.html")
    return template.render(style=style, script=script, script_hash=digest, version=version("vitflow"), **values)


@cache
def _environment() -> Environment:
    loader = PackageLoader("vitflow.viewer")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals["most_failures"] = FAILURES_SHOWN
    environment.filters |= {"printable": printable, "count": "{:,}".format, "decimal": decimal}
    return environment


@cache
def _source(name: str) -> str:
    """Return a file of the template folder; empty if a page has none of that kind."""
    path = Path(__file__).parent / "templates" / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def data_uri(image: bytes, kind: str = "jpeg") -> str:
    """Return the content of an image file as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


Floats = NDArray[np.floating[Any]]

# Numbers as stored in a page, for JSON: the shape, and the compressed numbers in base64.
Packed = dict[str, Any]


def pack_half(values: Floats) -> Packed:
    """Pack numbers in half precision: relative error at most 2⁻¹¹, absolute error at most 3e-8 below 6e-5."""
    half = np.ascontiguousarray(values, dtype="<f2")
    # Upper bytes are similar and compress well; lower bytes hardly do.
    numbers = np.ascontiguousarray(half.view(np.uint8).reshape(-1, 2).T[::-1])
    return {"shape": list(half.shape), "data": base64.b64encode(zlib.compress(numbers.tobytes(), 6)).decode()}


def placed_grids(placed: Sequence[tuple[Placement, tuple[int, int]]]) -> dict[str, Any]:
    """Return where the scripts draw grids of (rows, columns): the seen "window" of the image, and uneven "areas".

    >>> placed_grids([(Placement((4, 4), (4, 4), (0, 0), (4, 4)), (2, 2))])
    {'window': [0.0, 0.0, 4.0, 4.0], 'areas': {}}
    """
    uneven = {grid: each.area(grid) for each, grid in reversed(placed) if each.extent is not None}
    areas = {f"{rows},{cols}": [round(edge, 3) for edge in area] for (rows, cols), area in uneven.items()}
    return {"window": [round(edge, 3) for edge in placed[0][0].window], "areas": areas}


def thumbnail(pixels: NDArray[np.uint8], side: int = 512) -> bytes:
    """Return a uint8 RGB photograph as JPEG, with a limited longer side."""
    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=82)
    return file.getvalue()


def drawing_of(background: str = "grey", *, soft: bool = True) -> dict[str, Any]:
    """Return the drawing constants that a page's script shares with `vitflow.images.overlay`."""
    return {
        "knee": KNEE if soft else 1.0,
        "kept": KEPT,
        "luminance": LUMINANCE,
        "background": background if background in KEPT else "grey",  # a page draws over the photograph
    }


def color_tables(cmap: str | None) -> dict[str, dict[str, list[Any]]]:
    """Return the colours of a colour map, sequential and diverging, and their opacity from 0 to 255."""
    tables = {}
    for name, two_sides in (("one_side", False), ("two_sides", True)):
        colors, shares = color_table(cmap, two_sides)
        tables[name] = {"colors": colors.tolist(), "opacity": np.round(255 * shares).astype(int).tolist()}
    return tables
