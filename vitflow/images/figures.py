"""Figures for papers and screens, made with matplotlib: strips of images in columns, and how figures become files.

Each image of a strip is the axes of matplotlib, whose title and x label are its header and its caption, so that a
caller can replace them. Positions are whole pixels, so that images are not resampled, and follow from the measured
texts: constrained layout would do neither. pyplot is not used, so no window opens and no global state of the caller
changes.
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
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Affine2D
from numpy.typing import NDArray

from vitflow.errors import OptionError, unknown_name
from vitflow.files import write_atomically
from vitflow.images import DPI, FIGURE_FORMATS, overlay
from vitflow.images.pen import REACH, Bar, Limits, Pen
from vitflow.images.typesetting import BODY, GREY, RULE, SMALL, TITLE, QuietFigure, measure, plain, readable, wrap

#: Pixels per inch of figures in a notebook, so that a strip is as wide as the page.
NOTEBOOK_DPI = 100

# Lengths in inches: around a figure, between columns, and between rows.
_MARGIN, _COLUMN_GAP, _GAP = 0.08, 0.07, 0.05
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
    >>> [(axes.get_title(), axes.get_xlabel()) for axes in figure.axes]
    [('Image', ''), ('Rollout', 'cat')]
    """
    images = [cell.image for _, blocks in bands for block in blocks for cells in block for cell in cells]
    width = max(_NARROWEST, *(image.shape[1] / dpi for image in images))
    page = _Page(max(len(columns) for columns, _ in bands), width, dpi)
    for columns, blocks in bands:
        titles = page.groups(columns)
        for number, block in enumerate(blocks):
            rows = max(len(cells) for cells in block)
            if number and rows > 1:
                page.rule(0, len(columns))
            for row in range(rows):
                page.row([cells[row] if row < len(cells) else None for cells in block], titles)
                titles = []
    page.bars(bars)
    return page.finished(note)


def _lines(paragraphs: Iterable[str], width: float, size: float, lines: int = 2, weight: str = "normal") -> str:
    """Wrap each paragraph to at most `lines` lines of a width in inches."""
    return "\n".join(line for text in paragraphs for line in wrap(text, width, size, lines, weight))


def _height(text: str, size: float) -> float:
    """Return the height of lines of text in inches."""
    return (text.count("\n") + 1) * size / 56 if text else 0.0


class _Page:
    """A figure that is filled from top to bottom; lengths are in inches from its upper left corner.

    Args:
        columns: number of columns.
        width: width of a column.
        dpi: pixels per inch.
    """

    def __init__(self, columns: int, width: float, dpi: int) -> None:
        self._width, self._full, self._dpi = width, columns * (width + _COLUMN_GAP) - _COLUMN_GAP, dpi
        self._figure = QuietFigure(dpi=dpi, facecolor="white", layout="none")  # type: ignore[arg-type]
        self._top, self._placed = _MARGIN, list[tuple[Axes, float, float, NDArray[np.uint8]]]()
        self._downwards = Affine2D().scale(1, -1)
        self._to_page = self._downwards + self._figure.dpi_scale_trans

    def groups(self, columns: Sequence[Column]) -> list[tuple[str, str]]:
        """Write the common titles of adjacent columns; return the wrapped title and subtitle of each column."""
        first = 0
        for name, members in groupby(column.group for column in columns):
            count = len(list(members))
            if name:
                left, span = self._left(first), count * (self._width + _COLUMN_GAP) - _COLUMN_GAP
                self._write(_lines([name], span, SMALL, 1), left + span / 2, SMALL, ha="center")
                self.rule(first, count, down=_height(name, SMALL))
            first += count
        self._top += _GAP + _height("x", SMALL) if any(column.group for column in columns) else 0.0
        return [
            (_lines([one.title], self._width, TITLE, weight="bold"), _lines([one.subtitle], self._width, SMALL, 4))
            for one in columns
        ]

    def rule(self, first: int, count: int, down: float = 0.0) -> None:
        """Draw a thin line over some columns."""
        left, y = self._left(first), self._top + down
        x = [left, left + count * (self._width + _COLUMN_GAP) - _COLUMN_GAP]
        self._figure.add_artist(Line2D(x, [y, y], color=RULE, linewidth=0.5, transform=self._to_page))
        self._top += _GAP * (not down)

    def row(self, cells: Sequence[Cell | None], titles: Sequence[tuple[str, str]]) -> None:
        """Draw a row of images, with their titles if there are any, and with their captions."""
        above = max((_height(title, TITLE) for title, _ in titles), default=0.0)
        below = max((_height(subtitle, SMALL) for _, subtitle in titles), default=0.0)
        self._top += above + below + (0.04 if above or below else 0.0)
        heights = []
        for index, cell in enumerate(cells):
            if cell is None:
                continue
            space = self._width - cell.image.shape[1] / self._dpi
            axes = self._axes(cell.image, self._left(index) + space / 2, self._top)
            if titles:
                title, subtitle = titles[index]
                axes.set_title(title, y=1.0, pad=72 * (above + below) + 2, va="top", **plain(TITLE), weight="bold")
                _annotate(axes, subtitle, (0.5, 1.0), (0, 72 * below + 2), va="top")
            caption, details = (
                _lines(lines, self._width, size) for lines, size in ((cell.caption, BODY), (cell.details, SMALL))
            )
            axes.set_xlabel(caption, labelpad=2, **plain(BODY))
            _annotate(axes, details, (0.5, 0.0), (0, -2 - 72 * _height(caption, BODY)), va="top")
            heights.append(cell.image.shape[0] / self._dpi + _height(caption, BODY) + _height(details, SMALL))
        self._top += max(heights) + _GAP

    def bars(self, bars: Sequence[Bar]) -> None:
        """Draw colour bars below each other, each between its labels."""
        labels = [[_lines(label.splitlines(), _BAR_LABEL, SMALL, 1) for label in bar.labels] for bar in bars]
        room = max((measure(line, SMALL) for low, _ in labels for line in low.splitlines()), default=0.0)
        for bar, (low, high) in zip(bars, labels, strict=True):
            height = max(_height(low, SMALL), _height(high, SMALL))
            down = (height - bar.image.shape[0] / self._dpi) / 2
            axes = self._axes(bar.image, _MARGIN + room + 0.06, self._top + down)
            _annotate(axes, low, (0.0, 0.5), (-4, 0), ha="right", va="center")
            _annotate(axes, high, (1.0, 0.5), (4, 0), ha="left", va="center")
            self._top += height + 0.02
        self._top += _GAP / 2 if bars else 0.0

    def finished(self, note: str) -> Figure:
        """Write the note, and return the figure as large as its content requires."""
        text = _lines(note.splitlines(), self._full, SMALL, 10)
        self._write(text, _MARGIN, SMALL)
        height = np.ceil((self._top + _height(text, SMALL) + _MARGIN) * self._dpi)
        width = np.ceil((self._full + 2 * _MARGIN) * self._dpi)
        self._figure.set_size_inches(width / self._dpi, height / self._dpi)
        self._downwards.translate(0, height / self._dpi)
        for axes, left, top, image in self._placed:
            x, y = round(left * self._dpi), round(top * self._dpi)
            rows, cols = image.shape[:2]
            axes.set_position((x / width, 1 - (y + rows) / height, cols / width, rows / height))
        return self._figure

    def _left(self, column: int) -> float:
        return _MARGIN + column * (self._width + _COLUMN_GAP)

    def _axes(self, image: NDArray[np.uint8], left: float, top: float) -> Axes:
        """Add the axes of an image without ticks and frame."""
        axes: Axes = self._figure.add_axes((0, 0, 1, 1))
        axes.imshow(image, interpolation="nearest", origin="upper", aspect="auto")
        axes.set(xticks=[], yticks=[], facecolor="none")
        axes.spines[:].set_visible(False)
        self._placed.append((axes, left, top, image))
        return axes

    def _write(self, text: str, x: float, size: float, **style: Any) -> None:
        style |= {"va": "top", "linespacing": 1.1, "transform": self._to_page}
        self._figure.text(x, self._top, text, **plain(size) | {"color": GREY}, **style)


def _annotate(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Write small grey text at an offset in points from a place of axes."""
    style = {"ha": "center", "linespacing": 1.1, **plain(SMALL), "color": GREY, **style}
    if text:
        axes.annotate(text, at, offset, "axes fraction", "offset points", annotation_clip=False, **style)


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
