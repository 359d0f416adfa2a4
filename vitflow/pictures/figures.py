"""Figures for papers and screens, made with matplotlib: strips of pictures in columns, and how figures become files.

Nothing here touches pyplot, so no window opens and no global state of the caller changes.
"""

import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import OptionError, ShapeError, unknown_name
from vitflow.files import write_atomically
from vitflow.pictures import notebook
from vitflow.pictures.options import DPI, FIGURE_FORMATS
from vitflow.pictures.pen import Bar
from vitflow.pictures.typesetting import BODY, GREY, INK, LEADING, SMALL, TITLE, Page, measure, wrap

# Lengths in inches.
_MARGIN, _COLUMN_GAP, _ROW_GAP = 0.08, 0.07, 0.10
_NARROWEST = 1.15  # a column's least width, so that its words fit
_BAR_LABEL = 1.5  # the most that a label of a colour bar takes


@dataclass(frozen=True, slots=True)
class Cell:
    """One picture of a strip.

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
    """The head of one column of a strip.

    Attributes:
        title: its name.
        subtitle: at most four smaller lines below it.
        group: what it has in common with its neighbours; drawn once over columns of one group that stand together.
    """

    title: str
    subtitle: str = ""
    group: str = ""


# One picture's rows: for each column one cell, or as many as the block has rows.
Block = Sequence[Sequence[Cell]]


def draw_bands(
    bands: Sequence[tuple[Sequence[Column], Sequence[Block]]],
    *,
    bars: Sequence[Bar] = (),
    note: str = "",
    dpi: int = DPI,
) -> Figure:
    """Lay pictures out in columns under heads, with captions, and colour bars and a note below them all.

    Args:
        bands: one or more strips below each other. Of each its columns, the heads from left to right; and its blocks of
            one or more rows. For each column a block has one cell per row, or a single cell that stands for all its
            rows and is drawn once, in the first.
        bars: the colours, one bar below the other.
        note: what holds for all of it; its own line breaks are kept.
        dpi: pixels per inch of the pictures.

    Raises:
        ShapeError: a block has another number of columns, or a column of it neither one cell nor one per row.

    >>> grey = np.full((60, 80, 3), 128, dtype=np.uint8)
    >>> figure = draw_bands([([Column("Photograph"), Column("Rollout")], [[[Cell(grey)], [Cell(grey, ("cat",))]]])])
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['Photograph', 'Rollout', 'cat']
    """
    for columns, blocks in bands:
        for block in blocks:
            rows = max((len(cells) for cells in block), default=0)
            if len(block) != len(columns) or any(len(cells) not in (1, rows) for cells in block):
                raise ShapeError(
                    f"Expected {len(columns)} columns of 1 or {rows} cells each, got {[len(cells) for cells in block]}."
                )
    images = [cell.image for _, blocks in bands for block in blocks for cells in block for cell in cells]
    width = max(_NARROWEST, *(image.shape[1] / dpi for image in images))
    most = max(len(columns) for columns, _ in bands)
    page = Page(dpi, 2 * _MARGIN + most * (width + _COLUMN_GAP) - _COLUMN_GAP)
    y = _MARGIN
    for columns, blocks in bands:
        lefts = [_MARGIN + index * (width + _COLUMN_GAP) for index in range(len(columns))]
        y = _draw_heads(page, columns, lefts, width, y)
        for number, block in enumerate(blocks):
            if number and max(len(cells) for cells in block) > 1:
                page.rule(_MARGIN, page.width - _MARGIN, y)
                y += _ROW_GAP
            y = _draw_block(page, block, lefts, width, y)
    if bars or note:
        y = _draw_foot(page, bars, note, y)
    return page.finish(y - _ROW_GAP + _MARGIN)


def _draw_heads(page: Page, columns: Sequence[Column], lefts: Sequence[float], width: float, y: float) -> float:
    """Draw the heads of the columns from y on; return where the pictures begin."""
    if any(column.group for column in columns):
        y += SMALL * LEADING
        for group, neighbours in groupby(zip(columns, lefts, strict=True), key=lambda one: one[0].group):
            if group:
                places = [place for _, place in neighbours]
                left, right = places[0], places[-1] + width
                [text, *_] = wrap(group, right - left, SMALL, lines=1)
                page.line(text, (left + right) / 2, y - 0.02, SMALL, color=GREY)
                page.rule(left, right, y + 0.025)
        y += 0.06
    titles = [wrap(column.title, width, TITLE, weight="bold") for column in columns]
    below = [wrap(column.subtitle, width, SMALL, lines=4) for column in columns]
    y += max(len(lines) for lines in titles) * TITLE * LEADING
    for left, title, subtitle in zip(lefts, titles, below, strict=True):
        for number, text in enumerate(reversed(title)):
            page.line(text, left + width / 2, y - 0.03 - number * TITLE * LEADING, TITLE, weight="bold")
        for number, text in enumerate(subtitle, start=1):
            page.line(text, left + width / 2, y - 0.03 + number * SMALL * LEADING, SMALL, color=GREY)
    return y + 0.02 + max(len(lines) for lines in below) * SMALL * LEADING


def _draw_block(page: Page, block: Block, lefts: Sequence[float], width: float, y: float) -> float:
    """Draw one block's rows from y on; return where the next block begins."""
    rows = max(len(cells) for cells in block)
    words = [[_words(cell, width) for cell in cells] for cells in block]
    heights = []
    for row in range(rows):
        in_row = [(cells[row], lines[row]) for cells, lines in zip(block, words, strict=True) if len(cells) > row]
        heights.append(max(_cell_height(page, cell, lines) for cell, lines in in_row))
    tops = [y + sum(heights[:row]) + row * _ROW_GAP for row in range(rows)]
    for cells, lines, left in zip(block, words, lefts, strict=True):
        for row, cell in enumerate(cells):
            _draw_cell(page, cell, lines[row], left, width, tops[row])
    return tops[-1] + heights[-1] + _ROW_GAP


def _words(cell: Cell, width: float) -> list[tuple[str, float, str]]:
    """The lines below a picture: text, size, colour."""
    lines = [(text, BODY, INK) for caption in cell.caption for text in wrap(caption, width, BODY)]
    return lines + [(text, SMALL, GREY) for detail in cell.details for text in wrap(detail, width, SMALL)]


def _cell_height(page: Page, cell: Cell, lines: Sequence[tuple[str, float, str]]) -> float:
    return float(cell.image.shape[0] / page.dpi + 0.02 + sum(size for _, size, _ in lines) * LEADING)


def _draw_cell(
    page: Page, cell: Cell, lines: Sequence[tuple[str, float, str]], left: float, width: float, top: float
) -> None:
    height, own_width = cell.image.shape[0] / page.dpi, cell.image.shape[1] / page.dpi
    page.picture(cell.image, left + (width - own_width) / 2, top)
    baseline = top + height + 0.02
    for text, size, color in lines:
        baseline += size * LEADING
        page.line(text, left + width / 2, baseline - 0.02, size, color=color)


def _draw_foot(page: Page, bars: Sequence[Bar], note: str, y: float) -> float:
    """Draw the colour bars and the note from y on; return where they end."""
    left = _MARGIN
    y += 0.06
    step = SMALL * LEADING
    if bars:
        labels = [[wrap(label, _BAR_LABEL, SMALL, lines=1)[0] for label in bar.labels] for bar in bars]
        low, high = (max(measure(own[end], SMALL) for own in labels) for end in (0, 1))
        start = page.snap(left + low + 0.05)
        for number, (bar, told) in enumerate(zip(bars, labels, strict=True), start=1):
            baseline, end = y + number * step - 0.02, start + bar.image.shape[1] / page.dpi
            page.line(told[0], start - 0.05, baseline, SMALL, ha="right", color=GREY)
            page.picture(bar.image, start, baseline - bar.image.shape[0] / page.dpi)
            page.line(told[1], end + 0.05, baseline, SMALL, ha="left", color=GREY)
            left = max(left, end + 0.05 + high + 0.2)
    if page.width - left < 0.45 * page.width:  # beside such a bar the note would be a column of single words
        left, y = _MARGIN, y + len(bars) * step + 0.03
        bars = ()
    room = page.width - _MARGIN - left
    lines = [text for paragraph in note.splitlines() for text in wrap(paragraph, room, SMALL, lines=10)]
    for number, text in enumerate(lines, start=1):
        page.line(text, left, y + number * step - 0.02, SMALL, ha="left", color=GREY)
    return y + max(len(lines), len(bars), 1) * step + _ROW_GAP


def check_format(path: str | os.PathLike[str], formats: Sequence[str] = FIGURE_FORMATS) -> str:
    """The suffix of a file to write, in lower case; OptionError if it is none of the formats."""
    suffix = Path(path).suffix.lower()
    if suffix not in formats:
        raise OptionError(unknown_name("file type", suffix or Path(path).name, formats))
    return suffix


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PNG, PDF or SVG, by the suffix; the same figure gives the same bytes.

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
    """A figure as a file of one of the `FIGURE_FORMATS`."""
    metadata: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}[suffix]
    settings: Any = {"savefig.bbox": None, "svg.fonttype": "none", "svg.hashsalt": "vitflow", "pdf.fonttype": 42}
    # Packing harder than this takes three times as long and saves a tenth of the file.
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
        """The figure at the size of a notebook page."""
        return notebook.bundle(repr(self), picture=figure_bytes(self.figure(dpi=notebook.DPI), ".png"))


def file_too(path: str | os.PathLike[str] | None, draw: Callable[[], Figure]) -> Figure:
    """Draw a figure and, where a path is given, write it there, too; its suffix is checked before."""
    if path is not None:
        check_format(path)
    figure = draw()
    if path is not None:
        save_figure(figure, path)
    return figure
