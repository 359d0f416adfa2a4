"""What a notebook shows of a folder run: the first overlays side by side, and their rows of the manifest."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitflow.errors import ImageError, printable
from vitflow.pictures import notebook
from vitflow.pictures.figures import Cell, Column, draw_bands, figure_bytes
from vitflow.pictures.images import read_image

#: Pictures that are shown.
SHOWN = 6
_LONGEST = 180  # pixels of a picture's longer side


def show_run(text: str, output: Path | str, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The first overlay of each row's picture, as one figure, and what the rows say."""
    head = ("picture", "status", "class", "probability")
    cells = []
    for row in rows:
        probability = row.get("probability")
        told = (row.get("class_name") or row.get("class_index"), "" if probability is None else f"{probability:.1%}")
        cells.append((printable(row["input"]), row["status"], *(told if row["status"] == "explained" else ("", ""))))
    return notebook.bundle(text, picture=_draw_sheet(Path(output), rows), tables=[notebook.html_table(cells, head)])


def _draw_sheet(output: Path, rows: Sequence[Mapping[str, Any]]) -> bytes | None:
    """The overlays in one row; None where there are none, as when they were moved away since."""
    columns, cells = [], []
    for row in rows:
        for label, file in list(row.get("outputs", {}).items())[:1]:
            try:
                overlay = notebook.shrink(read_image(output / file), _LONGEST)
            except ImageError:
                continue
            columns.append(Column(Path(row["input"]).name, label))
            cells.append([Cell(overlay, (str(row["class_name"] or ""),))])
    if not columns:
        return None
    return figure_bytes(draw_bands([(columns, [cells])], dpi=notebook.DPI), ".png")
