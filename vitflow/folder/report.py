"""The report of a folder run, its rows and photographs for the viewer; and its display in a notebook."""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ImageError, OptionError, printable
from vitflow.explaining.captions import departures
from vitflow.explaining.method_table import get_method
from vitflow.files import is_remote
from vitflow.folder.draw import not_named, open_run, read_photograph
from vitflow.pictures import notebook
from vitflow.pictures.figures import Cell, Column, draw_bands, figure_bytes
from vitflow.pictures.images import read_image
from vitflow.runs.columns import placement_of
from vitflow.runs.saved import SavedRun
from vitflow.viewer.packing import thumbnail
from vitflow.viewer.report import write_report


class Thumbnails:
    """The photographs that a run has in hand, made small for its report, so that none is decoded twice.

    They wait in a file without a name, which is gone with the run however it ends; in memory are their places alone.

    Args:
        folder: where there is room for the file.
    """

    def __init__(self, folder: Path) -> None:
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - closed with the run
        self._places: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def add(self, key: str, pixels: NDArray[np.uint8]) -> None:
        """Keep an input's photograph; on a full disk it will be decoded again."""
        small = thumbnail(pixels)
        with self._lock, contextlib.suppress(OSError):
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(small)
            self._file.flush()
            self._places[key] = (place, len(small))

    def get(self, key: str) -> bytes | None:
        """The photograph of an input as JPEG; None where the run did not have it in hand."""
        if key not in self._places:
            return None
        place, length = self._places[key]
        self._file.seek(place)
        return self._file.read(length)

    def close(self) -> None:
        """Give the room on the disk back."""
        self._file.close()


def report_run(
    output: str | os.PathLike[str],
    *,
    thumbnails: Thumbnails | None = None,
    **options: Any,
) -> Path:
    """Write the report of the run in a folder, `report.html` and further pages; the first page's path.

    Args:
        output: the run's output folder.
        thumbnails: the photographs that need not be read again.
        options: per_page and embed_bytes as for `vitflow.viewer.report.write_report`.

    Raises:
        OptionError: the folder holds no run, or its record is damaged.
    """
    with open_run(output) as saved:
        return _report(saved, thumbnails, options)


def _report(saved: SavedRun, thumbnails: Thumbnails | None, options: Mapping[str, Any]) -> Path:
    run = saved.fingerprint
    states = {row["input"]: row["status"] for row in saved.rows()}

    def photograph(row: Mapping[str, Any]) -> bytes:
        if thumbnails is not None and (small := thumbnails.get(row["input"])) is not None:
            return small
        if is_remote(run["root"]):
            raise ImageError(not_named(run["root"]))
        return thumbnail(read_photograph(row, run["root"], saved.max_pixels))

    def rows(keys: Iterable[str]) -> Iterator[dict[str, Any]]:
        for row, maps in saved.with_maps(keys):
            window = placement_of(row["placement"]).window if row["status"] == "explained" else None
            yield row | {"grids": maps, "window": window}

    told = {label: _departures(run, label) for label in run["methods"]}
    return write_report(saved.folder, run, states, rows, photograph, departures=told, **options)


def _departures(run: Mapping[str, Any], label: str) -> str:
    """How a method's maps depart from its publication; nothing of a method of its author's, or an edited record."""
    try:
        return departures(get_method(run["methods"][label]), run["options"][label])
    except (OptionError, KeyError, TypeError, ValueError, AttributeError):
        return ""


# -- the display in a notebook

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
