"""The report of a folder run: self-contained HTML that requires no network."""

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import printable
from vitflow.files import natural_order
from vitflow.images.overlay import is_soft, scale_range
from vitflow.viewer.pages import drawing_of, one_table, write_html


def write_report(
    output: Path,
    run: Mapping[str, Any],
    images: Iterable[Sequence[Mapping[str, Any]]],
    failures: Sequence[Mapping[str, Any]],
    counts: Mapping[str, int],
    *,
    departures: Mapping[str, str] | None = None,
    per_page: int = 300,
) -> Path:
    """Write `report.html` (and `report-2.html` …) of a folder run; return the path of the first page.

    It shows each image with each of its maps at any opacity, and the value of each patch. If an image is missing or has
    changed, its map is shown alone with the reason.

    Args:
        output: output folder of the run, which receives the pages.
        run: settings of the run: "root", "model", "methods", "options", "drawing", …
        images: the rows of each explained image, one for each target, with its "photograph" as JPEG, or None and the
            reason as "no_photograph"; the "grids" of its maps; and their `pages.placed_grids`.
        failures: rows of the first images that failed.
        counts: number of "explained" and "failed" images.
        departures: differences of each method's options from its publication, as text.
        per_page: number of images per page.
    """
    drawing, remaining = run["drawing"], iter(images)
    cmap, soft = drawing.get("cmap"), is_soft(drawing.get("vmin"), drawing.get("vmax"), True)
    drawn = drawing_of(drawing.get("background", "grey"), soft=soft, contours=bool(drawing.get("contours")))
    tables = {"one_side": one_table(cmap, False), "two_sides": one_table(cmap, True)}
    count = max(-(-counts["explained"] // per_page), 1)
    names = [f"report-{number}.html" if number > 1 else "report.html" for number in range(1, count + 1)]
    for number, name in enumerate(names, start=1):
        entries = [_entry(row, run, output) for rows in islice(remaining, per_page) for row in rows]
        write_html(
            output / name,
            "report",
            "report",
            title=output.resolve().name,
            run=run,
            explained=counts["explained"],
            failed=counts["failed"],
            failures=failures if number == 1 else [],
            classes=sorted({entry["label"] for entry in entries}, key=natural_order),
            methods=list(run["methods"]),
            data={
                "images": entries,
                "tables": tables,
                "alpha": drawing.get("alpha", 0.75),
                "drawing": drawn,
                "departures": departures or {},
            },
            pages=[{"number": index, "name": page} for index, page in enumerate(names, start=1)],
            number=number,
        )
    return output / names[0]


def _entry(row: Mapping[str, Any], run: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Return the data of an image on the page, for JSON."""
    source = os.path.join(run["root"], row["input"])  # noqa: PTH118 - a name that may not be text
    photograph, reason = row["photograph"], row.get("no_photograph")
    record = {} if reason is None else {"photograph": reason}
    return {
        "name": printable(row["input"], lines=True),
        "link": _link(os.path.relpath(source, output)),
        "image": photograph and f"data:image/jpeg;base64,{base64.b64encode(photograph).decode()}",
        "size": [row["width"], row["height"]],
        "window": row["window"],
        "areas": row["areas"],
        "label": row["target"] or "",
        "probability": row["probability"],
        "maps": {name: _map(grid, run, row["facts"].get(name, {}) | record) for name, grid in row["grids"].items()},
        "overlays": {name: _link(path) for name, path in row["outputs"].items()},
    }


def _link(path: str) -> str:
    """Return a relative link to a file, with escaped bytes and without a scheme."""
    return "./" + quote_from_bytes(os.fsencode(path).replace(os.sep.encode(), b"/"))


def _map(grid: NDArray[np.float32], run: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    values = grid.ravel()
    limits = {name: run["drawing"][name] for name in ("vmin", "vmax") if name in run["drawing"]}
    low, high = scale_range(values, **limits)
    # Seven digits tell float32 values apart; more would make the page larger for nothing.
    return {
        "shape": list(grid.shape),
        "values": [float(f"{value:.7g}") for value in values],
        "low": low,
        "high": high,
        "facts": {name: value for name, value in facts.items() if isinstance(value, str | int | float)},
    }
