"""The report of a folder run: self-contained HTML that requires no network."""

import base64
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import VitflowError, printable
from vitflow.files import natural_order
from vitflow.images.overlay import is_soft, scale_range
from vitflow.viewer.pages import FAILURES_SHOWN, drawing_of, one_table, write_html


def write_report(
    output: Path,
    run: Mapping[str, Any],
    states: Mapping[str, str],
    read_rows: Callable[[Iterable[str]], Iterable[Mapping[str, Any]]],
    photograph: Callable[[Mapping[str, Any]], bytes],
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
        states: "explained" or "failed" for each input to show; shown in the natural order of their names.
        read_rows: the rows of some inputs, with their "grids", and the "window" of the image that the model saw.
        photograph: returns the thumbnail of a row's image as JPEG (see `vitflow.viewer.pages.thumbnail`); raises
            VitflowError or OSError if it is not the image that was explained.
        departures: differences of each method's options from its publication, as text.
        per_page: number of images per page.
    """
    keys = sorted(states, key=natural_order)
    shown = [key for key in keys if states[key] == "explained"]
    failed = [key for key in keys if states[key] == "failed"]
    drawing = run["drawing"]
    cmap, soft = drawing.get("cmap"), is_soft(drawing.get("vmin"), drawing.get("vmax"), True)
    drawn = drawing_of(drawing.get("background", "grey"), soft=soft, contours=bool(drawing.get("contours")))
    tables = {"one_side": one_table(cmap, False), "two_sides": one_table(cmap, True)}
    starts = range(0, max(len(shown), 1), per_page)
    names = [f"report-{number}.html" if number > 1 else "report.html" for number in range(1, len(starts) + 1)]
    for number, (start, name) in enumerate(zip(starts, names, strict=True), start=1):
        rows = read_rows(shown[start : start + per_page])
        entries = list(_entries(rows, run, output, photograph))
        write_html(
            output / name,
            "report",
            "report",
            title=output.resolve().name,
            run=run,
            explained=len(shown),
            failed=len(failed),
            failures=list(read_rows(failed[:FAILURES_SHOWN])) if number == 1 else [],
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


def _entries(
    rows: Iterable[Mapping[str, Any]],
    run: Mapping[str, Any],
    output: Path,
    photograph: Callable[[Mapping[str, Any]], bytes],
) -> Iterator[dict[str, Any]]:
    """Return the data of each image on the page, for JSON."""
    for row in rows:
        source = os.path.join(run["root"], row["input"])  # noqa: PTH118 - a name that may not be text
        image, record = None, {}
        try:
            image = f"data:image/jpeg;base64,{base64.b64encode(photograph(row)).decode()}"
        except (VitflowError, OSError) as error:
            record = {"photograph": printable(str(error))}
        label = row["target"] or ""
        yield {
            "name": printable(row["input"], lines=True),
            "link": _link(os.path.relpath(source, output)),
            "image": image,
            "size": [row["width"], row["height"]],
            "window": [round(edge, 3) for edge in row["window"]],
            "label": label,
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
