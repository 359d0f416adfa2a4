"""HTML pages with a common template and style, each in one file that requires no network, and the report of a run.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from vitflow.errors import printable
from vitflow.files import natural_order, write_atomically
from vitflow.images.geometry import Placement
from vitflow.images.overlay import KEPT, KNEE, LUMINANCE, color_table, is_soft, scale_range
from vitflow.images.typesetting import decimal

#: Names of the classes by index, if they are known.
Names = Sequence[str] | None
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


def write_report(
    output: Path,
    run: Mapping[str, Any],
    images: Iterable[Mapping[str, Any]],
    failures: Sequence[Mapping[str, Any]],
    counts: Mapping[str, int],
    *,
    named: Mapping[str, tuple[str, str]],
    labels: str | None,
    per_page: int = 300,
) -> Path:
    """Write `report.html` (and `report-2.html` …) of a folder run; return the path of the first page.

    It shows each image with each of its maps at any opacity, and the value of each patch. If an image is missing or has
    changed, its map is shown alone with the reason.

    Args:
        output: output folder of the run, which receives the pages.
        run: settings of the run: "root", "model", "methods", "options", "drawing", …, and whether maps of each method
            are "signed".
        images: the row of each explained image, with its "photograph" as JPEG, or None and the reason as
            "no_photograph"; the "grids" of its maps; their `placed_grids`; and the index of its true class as "truth",
            or None, if there are labels.
        failures: rows of the first images that failed.
        counts: number of "explained" and "failed" images.
        named: the displayed name of each method, and how its options differ from its publication, as text.
        labels: how the predictions compare with the labels, as text; None without labels.
        per_page: number of images per page.
    """
    drawing, remaining = run["drawing"], iter(images)
    soft = is_soft(drawing.get("vmin"), drawing.get("vmax"), True)
    count = max(-(-counts["explained"] // per_page), 1)
    names = [f"report-{number}.html" if number > 1 else "report.html" for number in range(1, count + 1)]
    shared = {
        "tables": color_tables(drawing.get("cmap")),
        "alpha": drawing.get("alpha", 0.75),
        "drawing": drawing_of(drawing.get("background", "grey"), soft=soft),
        "departures": {label: text for label, (_, text) in named.items()},
    }
    for number, name in enumerate(names, start=1):
        entries = [_entry(row, run, output) for row in islice(remaining, per_page)]
        page = make_html(
            "report",
            "report",
            title=output.resolve().name,
            run=run,
            explained=counts["explained"],
            failed=counts["failed"],
            failures=failures if number == 1 else [],
            labels=labels,
            classes=sorted({entry["label"] for entry in entries}, key=natural_order),
            methods={label: name for label, (name, _) in named.items()},
            data={"images": entries, **shared},
            pages=[{"number": index, "name": page} for index, page in enumerate(names, start=1)],
            number=number,
        )
        Page(page).save(output / name)
    return output / names[0]


def _entry(row: Mapping[str, Any], run: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Return the data of an image on the page, for JSON."""
    source = os.path.join(run["root"], row["input"])  # noqa: PTH118 - a name that may not be text
    photograph, reason = row["photograph"], row.get("no_photograph")
    record = {} if reason is None else {"photograph": reason}
    return {
        "name": printable(row["input"], lines=True),
        "link": _link(os.path.relpath(source, output)),
        "image": photograph and data_uri(photograph),
        "size": [row["width"], row["height"]],
        "window": row["window"],
        "areas": row["areas"],
        "label": row["target"] or "",
        "predicted": row["target"] is not None and row["class_index"] == row.get("predicted_index"),
        "probability": row["probability"],
        **_classes(row, run.get("class_names")),
        "maps": {
            name: _map(grid, run, run["signed"].get(name, True), row["facts"].get(name, {}) | record)
            for name, grid in row["grids"].items()
        },
        "overlays": {name: _link(path) for name, path in row["outputs"].items()},
    }


def _classes(row: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return the predicted class of an image, other probable classes than its target, and its true class, by name."""

    def name_of(index: int | None) -> str:
        return "" if index is None else names[index] if names and index < len(names) else f"class {index}"

    others = [[name_of(index), value] for index, value in row.get("top") or () if index != row["class_index"]]
    classes: dict[str, Any] = {"prediction": name_of(row.get("predicted_index")), "others": others[:3]}
    if (truth := row.get("truth")) is not None:
        classes |= {"truth": name_of(truth), "wrong": truth != row.get("predicted_index")}
    return classes


def _link(path: str) -> str:
    """Return a relative link to a file, with escaped bytes and without a scheme."""
    return "./" + quote_from_bytes(os.fsencode(path).replace(os.sep.encode(), b"/"))


def _map(grid: NDArray[np.float32], run: Mapping[str, Any], signed: bool, facts: Mapping[str, Any]) -> dict[str, Any]:
    limits = {name: run["drawing"][name] for name in ("vmin", "vmax") if name in run["drawing"]}
    low, high = scale_range(grid, **limits, signed=signed)
    # Seven digits tell float32 values apart; more would make the page larger for nothing.
    return {
        "shape": list(grid.shape),
        "values": [float(f"{value:.7g}") for value in grid.ravel()],
        "low": low,
        "high": high,
        "facts": {name: value for name, value in facts.items() if isinstance(value, str | int | float)},
    }
