"""Figures for papers and screens, made with matplotlib: strips of images in columns, and how figures become files.

pyplot is not used, so no window opens and no global state of the caller changes.
"""

import base64
import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.offsetbox import HPacker, OffsetImage, VPacker
from numpy.typing import NDArray

from vitflow.errors import OptionError, unknown_name
from vitflow.files import write_atomically
from vitflow.images import DPI, FIGURE_FORMATS, overlay
from vitflow.images.pen import REACH, Bar, Limits, Pen
from vitflow.images.typesetting import (
    BODY,
    GREY,
    SMALL,
    TITLE,
    image_box,
    measure,
    page,
    readable,
    space,
    words,
    wrap,
)

#: Pixels per inch of figures in a notebook, so that a strip is as wide as the page.
NOTEBOOK_DPI = 100

# Lengths in inches.
_MARGIN, _COLUMN_GAP = 0.08, 0.07
_NARROWEST = 1.15  # a column's least width, so that its words fit
_BAR_LABEL = 1.5  # the most that a label of a colour bar takes


@dataclass(frozen=True, slots=True)
class Cell:
    """One image of a strip.

    Attributes:
        image: uint8 RGB [height, width, 3], drawn at `dpi` pixels per inch.
        caption: lines below it; a line too long for its column is wrapped or cut with an ellipsis.
        details: more lines below these, smaller and grey.
    """

    image: NDArray[np.uint8]
    caption: tuple[str, ...] = ()
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Column:
    """Header of one column of a strip.

    Attributes:
        title: its name.
        subtitle: at most four smaller lines below it.
        group: common title of adjacent columns; drawn once over them.
    """

    title: str
    subtitle: str = ""
    group: str = ""


# One image's rows: for each column one cell, or as many as the block has rows.
Block = Sequence[Sequence[Cell]]
# Headers of columns, and the blocks below them.
Band = tuple[Sequence[Column], Sequence[Block]]


def draw_bands(
    bands: Sequence[Band],
    *,
    bars: Sequence[Bar] = (),
    note: str = "",
    dpi: int = DPI,
) -> Figure:
    """Lay out images in columns under headers, with captions, colour bars and a note below.

    Args:
        bands: strips below each other: the headers of its columns, and its blocks of one or more rows. For each column
            a block has one cell per row, or a single cell, which is drawn in the first row.
        bars: colour bars, below each other.
        note: text below; its line breaks are kept.
        dpi: pixels per inch of the images.

    >>> grey = np.full((60, 80, 3), 128, dtype=np.uint8)
    >>> figure = draw_bands([([Column("Image"), Column("Rollout")], [[[Cell(grey)], [Cell(grey, ("cat",))]]])])
    >>> [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
    ['Image', 'Rollout', 'cat']
    """
    images = [cell.image for _, blocks in bands for block in blocks for cells in block for cell in cells]
    width = max(_NARROWEST, *(image.shape[1] / dpi for image in images))
    most = max(len(columns) for columns, _ in bands)
    full = most * (width + _COLUMN_GAP) - _COLUMN_GAP
    boxes: list[Artist] = []
    for columns, blocks in bands:
        boxes += _heads(columns, width)
        for number, block in enumerate(blocks):
            rows = max(len(cells) for cells in block)
            if number and rows > 1:
                boxes.append(space(full, line=True))
            boxes += [
                _row([_under(cells[row], width, dpi) if row < len(cells) else [] for cells in block], width)
                for row in range(rows)
            ]
    if bars:
        boxes.append(_bars(bars, dpi))
    foot = words(*note.splitlines(), size=SMALL, width=full, lines=10, color=GREY)
    return page([*boxes, *foot], dpi, _MARGIN)


def bar_with_values(grid: NDArray[np.float32], pen: Pen, limits: Limits, ends: tuple[str, str]) -> Bar:
    """Return the colour bar of a map between the values of its ends, with "≥" if the map has larger values."""
    low, high = limits
    two_sides = overlay.has_two_sides(low, high)
    most = float(np.abs(grid).max() if two_sides else grid.max())
    farthest = REACH * high if two_sides else low + REACH * (high - low)
    end = max(high, min(most, farthest)) if pen.soft else high
    start = -end if two_sides else low
    (first, last), unit = readable(start, end, largest=max(abs(low), abs(high)))
    if high > low and most > end * (1 + 1e-6):  # beyond the last colours the map goes on
        first, last = f"≤ {first}" if two_sides else first, f"≥ {last}"
    labels = (first, f"{last} {unit}".strip() if high > low else "")
    if two_sides:
        labels = f"{ends[0]}\n{labels[0]}", f"{ends[1]}\n{labels[1]}"
    return Bar(pen.ramp(start, end, limits), labels)


def limits_in_words(pen: Pen, limits: Limits) -> str:
    """Return a sentence with the percentiles that limit the colours; empty if none do."""
    if not pen.soft:
        return ""
    (low, high), unit = readable(*limits)
    lower, upper = overlay.ROBUST_PERCENTILES
    if overlay.has_two_sides(*limits):
        return (
            f"The {upper:g}th percentile of the patches' absolute values is {high} {unit}".rstrip()
            + "; 0 is transparent."
        )
    return f"The {lower:g}nd and the {upper:g}th percentile of the patches are {low} and {high} {unit}".rstrip() + "."


def image_bounds(figure: Figure) -> tuple[float, float, float, float]:
    """Return (left, top, right, bottom) of the first image of a figure, in pixels of the figure."""
    figure.draw_without_rendering()
    box, height = figure.findobj(OffsetImage)[0].get_window_extent(), figure.bbox.height
    return box.x0, height - box.y1, box.x1, height - box.y0


def _row(cells: Sequence[Sequence[Artist]], width: float | Sequence[float], align: Any = "top") -> HPacker:
    """Lay out columns of the given width(s) in inches side by side, each with its boxes from top to bottom."""
    widths = [width] * len(cells) if isinstance(width, float) else width
    columns: list[Artist] = [
        VPacker(children=[space(each), *boxes], align="center", sep=1)
        for boxes, each in zip(cells, widths, strict=True)
    ]
    return HPacker(children=columns, align=align, sep=72 * _COLUMN_GAP)


def _heads(columns: Sequence[Column], width: float) -> list[Artist]:
    """Return the column headings as one box: groups, titles and subtitles; none if all are empty."""
    groups = [(name, len(list(members))) for name, members in groupby(column.group for column in columns)]
    spans = [count * (width + _COLUMN_GAP) - _COLUMN_GAP for _, count in groups]
    over = [
        [*words(name, size=SMALL, width=span, lines=1, color=GREY), space(span, line=True)] if name else []
        for (name, _), span in zip(groups, spans, strict=True)
    ]
    style: dict[str, Any] = {"width": width, "align": "center"}
    titles = [words(column.title, size=TITLE, weight="bold", **style) for column in columns]
    below = [words(column.subtitle, size=SMALL, lines=4, color=GREY, **style) for column in columns]
    rows: list[tuple[Any, Any, str]] = [(over, spans, "bottom"), (titles, width, "top"), (below, width, "top")]
    boxes: list[Artist] = [_row(cells, widths, align) for cells, widths, align in rows if any(cells)]
    return [VPacker(children=boxes, sep=1)] if boxes else []


def _under(cell: Cell, width: float, dpi: int) -> list[Artist]:
    """Return an image with its lines of text as one box."""
    style: dict[str, Any] = {"width": width, "align": "center"}
    details = words(*cell.details, size=SMALL, color=GREY, **style)
    return [image_box(cell.image, dpi), *words(*cell.caption, size=BODY, **style), *details]


def _bars(bars: Sequence[Bar], dpi: int) -> VPacker:
    """Colour bars below each other, each between its labels."""
    labels = [
        [words(*label.splitlines(), size=SMALL, width=_BAR_LABEL, lines=1, color=GREY) for label in bar.labels]
        for bar in bars
    ]
    left = [line for bar in bars for text in bar.labels[0].splitlines() for line in wrap(text, _BAR_LABEL, SMALL, 1)]
    room = max(measure(line, SMALL) for line in left)
    rows: list[Artist] = [
        HPacker(
            children=[VPacker(children=[space(room), *low], align="right"), image_box(bar.image, dpi), *high],
            align="center",
            sep=4,
        )
        for bar, (low, high) in zip(bars, labels, strict=True)
    ]
    return VPacker(children=rows, sep=1, align="left")


def check_format(path: str | os.PathLike[str], formats: Sequence[str] = FIGURE_FORMATS) -> str:
    """Return the suffix of an output file in lower case; OptionError if the format is not supported."""
    suffix = Path(path).suffix.lower()
    if suffix not in formats:
        raise OptionError(unknown_name("file type", suffix or Path(path).name, formats))
    return suffix


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PNG, PDF or SVG by its suffix; identical figures give identical bytes.

    Text stays text in PDF and SVG.

    Raises:
        OptionError: another suffix.
        OSError: the file cannot be written.
    """
    data = figure_bytes(figure, check_format(path))
    with write_atomically(path) as file:
        file.write(data)
    return Path(path)


def figure_bytes(figure: Figure, suffix: str) -> bytes:
    """Encode a figure in one of the `FIGURE_FORMATS`."""
    metadata: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}[suffix]
    settings: Any = {"savefig.bbox": None, "svg.fonttype": "none", "svg.hashsalt": "vitflow", "pdf.fonttype": 42}
    # Higher compression takes three times as long and saves a tenth of the file.
    more: dict[str, Any] = {"pil_kwargs": {"compress_level": 3}} if suffix == ".png" else {}
    file = io.BytesIO()
    with matplotlib.rc_context(settings):
        figure.savefig(
            file,
            format=suffix[1:],
            dpi=figure.dpi,
            metadata=metadata,
            facecolor=figure.get_facecolor(),
            transparent=False,
            **more,
        )
    return file.getvalue()


class FigureResult:
    """Base class of results that are drawn as one figure and exported as JSON: `save` and the notebook display.

    Subclasses have `figure(path=None, *, dpi, …)` and `to_dict()`.
    """

    __slots__ = ()
    figure: Callable[..., Figure]
    to_dict: Callable[[], dict[str, Any]]

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the figure (.png, .pdf, .svg; options as for `figure`) or all values (.json); return the path.

        Raises:
            OptionError: another suffix, or drawing options for JSON.
        """
        path = Path(path)
        if check_format(path, (*FIGURE_FORMATS, ".json")) != ".json":
            self.figure(path, **options)
            return path
        if options:
            raise OptionError(f"JSON has no drawing options, got {', '.join(options)}.")
        with write_atomically(path) as file:
            file.write(json.dumps(self.to_dict(), ensure_ascii=False).encode("utf-8", "backslashreplace"))
        return path

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return the figure for notebooks."""
        return bundle(repr(self), self.figure(dpi=NOTEBOOK_DPI))


def written(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Return a figure; with a path, also write it there."""
    if path is not None:
        save_figure(figure, path)
    return figure


def bundle(text: str, figure: Figure | None = None, tables: Sequence[str] = ()) -> dict[str, str]:
    """Return what `_repr_mimebundle_` returns: the text, a figure as PNG, and tables in HTML with the figure below."""
    mimebundle = {"text/plain": text}
    encoded = "" if figure is None else base64.b64encode(figure_bytes(figure, ".png")).decode()
    if encoded:
        mimebundle["image/png"] = encoded
    if tables:
        shown = f'<img src="data:image/png;base64,{encoded}" alt="">' if encoded else ""
        mimebundle["text/html"] = f"<p>{escape(text)}</p>{''.join(tables)}{shown}"
    return mimebundle


def html_table(rows: Iterable[Sequence[object]], head: Sequence[object] = ()) -> str:
    """Format a table as HTML with escaped cells.

    >>> html_table([("model", "a<b")])
    '<table><tr><th>model</th><td>a&lt;b</td></tr></table>'
    """
    lines = ["".join(f"<th>{escape(str(cell))}</th>" for cell in head)] if head else []
    for first, *cells in rows:
        lines.append(f"<th>{escape(str(first))}</th>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}")
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
