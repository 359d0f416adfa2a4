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
import sys
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
from PIL import Image

from vitflow.errors import OptionError, printable, unknown_name
from vitflow.files import write_atomically
from vitflow.images import DPI, FIGURE_FORMATS, overlay
from vitflow.images.pen import Bar, Limits, Pen
from vitflow.images.typesetting import BODY, GREY, RULE, SMALL, TITLE, QuietFigure, measure, plain, readable, wrap

#: Pixels per inch of figures in a notebook, which shows them at half their size, sharp and with labels of 9 pixels; and
#: the width of an image in a strip there, in inches, so that a strip is as wide as a cell.
NOTEBOOK_DPI, NOTEBOOK_WIDTH = 220, 1.2

# Lengths in inches: around a figure, between columns, and between rows.
_MARGIN, _COLUMN_GAP, _GAP = 0.08, 0.07, 0.05
_NARROWEST = 1.15  # a column's least width, so that its words fit
_BAR_LABEL = 1.5  # the most that a label of a colour bar takes
_LONGEST = 4.0  # a word of the note up to this length, as the name of a model, is not broken


@dataclass(frozen=True, slots=True)
class Cell:
    """One image of a strip, uint8 RGB, with lines below it, and smaller ones below these; long lines are wrapped."""

    image: NDArray[np.uint8]
    caption: tuple[str, ...] = ()
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Column:
    """Header of one column of a strip: title, smaller lines below it, and a common title of adjacent columns."""

    title: str
    subtitle: str = ""
    group: str = ""


# One image's rows: for each column one cell, or as many as the block has rows.
Block = Sequence[Sequence[Cell]]
# Headers of columns, and the blocks below them.
Band = tuple[Sequence[Column], Sequence[Block]]


def draw_bands(bands: Sequence[Band], *, bars: Sequence[Bar] = (), note: str = "", dpi: int = DPI) -> Figure:
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
        page.groups([column.group for column in columns])
        heads = columns
        for number, block in enumerate(blocks):
            rows = max(map(len, block))
            if number and rows > 1:
                page.rule(0, len(columns))
                page.skip(_GAP)
            for row in range(rows):
                page.row([cells[row] if row < len(cells) else None for cells in block], heads)
                heads = ()
    page.bars(bars)
    return page.finished(note)


def _lines(paragraphs: Iterable[str], width: float, size: float, lines: int = 2, weight: str = "normal") -> str:
    """Wrap each paragraph to at most `lines` lines of a width in inches."""
    return "\n".join(line for text in paragraphs for line in wrap(text, width, size, lines, weight))


def _height(text: str, size: float) -> float:
    """Return the height of lines of text in inches."""
    return (text.count("\n") + 1) * size / 56 if text else 0.0


class _Page:
    """A figure that is filled from top to bottom; lengths are in inches from its upper left corner."""

    def __init__(self, columns: int, width: float, dpi: int) -> None:
        self._width, self._dpi, self._top = width, dpi, _MARGIN
        self._full = self._span(columns)
        self._figure = QuietFigure(dpi=dpi, facecolor="white", layout="none")  # type: ignore[arg-type]
        self._placed: list[tuple[Axes, float, float, NDArray[np.uint8]]] = []
        self._downwards = Affine2D().scale(1, -1)
        self._to_page = self._downwards + self._figure.dpi_scale_trans

    def skip(self, height: float) -> None:
        """Leave space."""
        self._top += height

    def groups(self, names: Sequence[str]) -> None:
        """Write the common titles of adjacent columns, with a rule below each."""
        if not any(names):
            return
        first, height = 0, _height("x", SMALL)
        for name, members in groupby(names):
            count = len(list(members))
            if name:
                middle = self._left(first) + self._span(count) / 2
                self._write(_lines([name], self._span(count), SMALL, 1), middle, self._top, ha="center")
                self.rule(first, count, down=height)
            first += count
        self.skip(height + _GAP)

    def rule(self, first: int, count: int, down: float = 0.0) -> None:
        """Draw a thin line over some columns."""
        left, y = self._left(first), self._top + down
        style: dict[str, Any] = {"color": RULE, "linewidth": 0.5, "transform": self._to_page}
        self._figure.add_artist(Line2D([left, left + self._span(count)], [y, y], **style))

    def row(self, cells: Sequence[Cell | None], heads: Sequence[Column]) -> None:
        """Draw a row of images with their headers, if there are any, and their captions."""
        titles = [_lines([head.title], self._width, TITLE, weight="bold") for head in heads]
        subtitles = [_lines([head.subtitle], self._width, SMALL, 4) for head in heads]
        above = max((_height(title, TITLE) for title in titles), default=0.0)
        below = max((_height(subtitle, SMALL) for subtitle in subtitles), default=0.0)
        self.skip(above + below + (0.04 if above or below else 0.0))
        heights = []
        for index, cell in enumerate(cells):
            if cell is None:
                continue
            middle, height = self._left(index) + self._width / 2, cell.image.shape[0] / self._dpi
            axes = self._axes(cell.image, middle - cell.image.shape[1] / self._dpi / 2, self._top)
            if heads:
                style = plain(TITLE) | {"weight": "bold", "va": "top"}
                axes.set_title(titles[index], y=1.0, pad=72 * (above + below) + 2, **style)
                self._write(subtitles[index], middle, self._top - below - 2 / 72, ha="center")
            caption, details = (
                _lines(lines, self._width, size) for lines, size in ((cell.caption, BODY), (cell.details, SMALL))
            )
            axes.set_xlabel(caption, labelpad=2, multialignment="center", **plain(BODY))
            height += _height(caption, BODY)
            self._write(details, middle, self._top + height + 2 / 72, ha="center")
            heights.append(height + _height(details, SMALL))
        self.skip(max(heights) + _GAP)

    def bars(self, bars: Sequence[Bar]) -> None:
        """Draw colour bars below each other, each between its labels."""
        labels = [[_lines(label.splitlines(), _BAR_LABEL, SMALL, 1) for label in bar.labels] for bar in bars]
        left = max((measure(line, SMALL) for low, _ in labels for line in low.splitlines()), default=0.0) + _MARGIN
        for bar, (low, high) in zip(bars, labels, strict=True):
            height = max(_height(low, SMALL), _height(high, SMALL))
            middle, (tall, wide) = self._top + height / 2, (side / self._dpi for side in bar.image.shape[:2])
            self._axes(bar.image, left + 0.06, middle - tall / 2)
            self._write(low, left, middle, ha="right", va="center")
            self._write(high, left + wide + 0.12, middle, ha="left", va="center")
            self.skip(height + 0.02)
        self.skip(_GAP / 2 if bars else 0.0)

    def finished(self, note: str) -> Figure:
        """Write the note, and return the figure as large as its content requires."""
        words = [min(measure(printable(word), SMALL), _LONGEST) for word in note.split()]
        self._full = max([self._full, *words])
        text = _lines(note.splitlines(), self._full, SMALL, 10)
        self._write(text, _MARGIN, self._top)
        height = np.ceil((self._top + _height(text, SMALL) + _MARGIN) * self._dpi)
        width = np.ceil((self._full + 2 * _MARGIN) * self._dpi)
        self._figure.set_size_inches(width / self._dpi, height / self._dpi)
        self._downwards.translate(0, height / self._dpi)
        for axes, left, top, image in self._placed:
            x, y = round(left * self._dpi), round(top * self._dpi)
            rows, cols = image.shape[:2]
            axes.set_position((x / width, 1 - (y + rows) / height, cols / width, rows / height))
        return self._figure

    def _span(self, columns: int) -> float:
        return columns * (self._width + _COLUMN_GAP) - _COLUMN_GAP

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

    def _write(self, text: str, x: float, y: float, *, va: str = "top", **style: Any) -> None:
        """Write small grey lines at a place of the page, evenly spaced: matplotlib's depend on the letters."""
        style |= plain(SMALL) | {"color": GREY, "va": "baseline", "transform": self._to_page}
        y += 0.93 * SMALL / 72 - (_height(text, SMALL) / 2 if va == "center" else 0.0)
        for number, line in enumerate(text.splitlines()):
            self._figure.text(x, y + _height("x", SMALL) * number, line, **style)


def draw_into(
    axes: Axes, image: NDArray[np.uint8], title: Sequence[str], bar: Bar, box: tuple[int, int, int, int]
) -> Figure:
    """Draw an image, which covers a box (left, top, right, bottom), with title and colour bar into a user's axes."""
    left, top, right, bottom = box
    axes.imshow(image, extent=(left, right, bottom, top))
    axes.set_axis_off()
    axes.set_title("\n".join(title), fontsize=TITLE, parse_math=False)
    scale = axes.inset_axes((0.2, -0.08, 0.6, 0.04))
    scale.imshow(bar.image, extent=(0, 1, 0, 1), aspect="auto")
    scale.set(xticks=[0, 1], yticks=[])
    scale.set_xticklabels(bar.labels, fontsize=SMALL)
    scale.spines[:].set_visible(False)
    return axes.figure  # type: ignore[return-value]


def show_figure(figure: Figure) -> None:
    """Display a figure below the cell of a notebook, or else in the viewer of the system."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and shell.has_trait("kernel"):
        sys.modules["IPython"].display.display(figure)
    else:
        Image.open(io.BytesIO(figure_bytes(figure, ".png"))).show()


def bar_with_values(grid: NDArray[np.float32], pen: Pen, limits: Limits, ends: tuple[str, str]) -> tuple[Bar, str]:
    """Return the colour bar of a map with its limits, "≥" if the map exceeds them, and a sentence on percentiles."""
    two_sides = overlay.has_two_sides(*limits)
    (low, high), unit = readable(*limits)
    high, (lower, upper) = f"{high} {unit}".strip(), overlay.ROBUST_PERCENTILES
    note = f"Colours: {lower:g}nd to {upper:g}th percentile of the patches."
    if not two_sides and limits[0] == 0 > grid.min():
        note = f"Colours: 0 to the {upper:g}th percentile of the patches; values below 0 are transparent."
    elif two_sides:
        note = f"Colours: up to the {upper:g}th percentile of the patches' absolute values; 0 is transparent."
    labels = low, high if limits[1] > limits[0] else ""
    if limits[1] > limits[0] and float((np.abs(grid) if two_sides else grid).max()) > limits[1] * (1 + 1e-6):
        labels = f"≤ {low}" if two_sides else low, f"≥ {high}"
    if two_sides:
        labels = f"{ends[0]}\n{labels[0]}", f"{ends[1]}\n{labels[1]}"
    return Bar(pen.ramp(limits), labels), note if pen.soft else ""


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
    settings: Any = {"savefig.bbox": None, "savefig.facecolor": "auto", "savefig.transparent": False}
    settings |= {"svg.fonttype": "none", "svg.hashsalt": "vitflow", "pdf.fonttype": 42}
    # Higher compression takes three times as long and saves a tenth of the file.
    more: dict[str, Any] = {"pil_kwargs": {"compress_level": 3}} if suffix == ".png" else {}
    file = io.BytesIO()
    with matplotlib.rc_context(settings):
        figure.savefig(file, format=suffix[1:], dpi=figure.dpi, metadata=metadata, **more)
    return file.getvalue()


class FigureResult:
    """Base class of results that are drawn as one figure and exported as JSON: `save` and the notebook display.

    Subclasses have `figure(path=None, *, dpi, …)` and `records(*, values)`, one for each image.
    """

    __slots__ = ()
    figure: Callable[..., Figure]
    records: Callable[..., list[dict[str, Any]]]

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the figure (.png, .pdf, .svg; options as for `figure`) or the records with values (.json).

        Return the path.

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
            file.write(json.dumps(self.records(values=True), ensure_ascii=False).encode("utf-8", "backslashreplace"))
        return path

    def _repr_mimebundle_(self, **_: Any) -> Any:
        """Return the figure for notebooks."""
        return bundle(repr(self), self.figure(dpi=NOTEBOOK_DPI))


def written(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Return a figure; with a path, also write it there."""
    if path is not None:
        save_figure(figure, path)
    return figure


def bundle(text: str, figure: Figure | None = None, tables: Sequence[str] = ()) -> tuple[dict[str, Any], ...]:
    """Return the display of a result in a notebook: text, a figure as PNG, and tables in HTML with the figure below.

    These are data and metadata by type, as of `_repr_mimebundle_`.
    """
    data, metadata = dict[str, Any]({"text/plain": text}), dict[str, Any]()
    if figure is not None:
        data["image/png"] = base64.b64encode(figure_bytes(figure, ".png")).decode()
        if figure.dpi == NOTEBOOK_DPI:
            width, height = (round(side * figure.dpi / 2) for side in figure.get_size_inches())
            metadata["image/png"] = {"width": width, "height": height}
    if tables:
        size = "".join(f' {name}="{pixels}"' for name, pixels in metadata.get("image/png", {}).items())
        shown = f'<img src="data:image/png;base64,{data["image/png"]}"{size} alt="">' if figure is not None else ""
        data["text/html"] = f"<p>{escape(text)}</p>{''.join(tables)}{shown}"
    return data, metadata


def html_table(rows: Iterable[Sequence[object]], head: Sequence[object] = ()) -> str:
    """Format a table as HTML with escaped cells.

    >>> html_table([("model", "a<b")])
    '<table><tr><th>model</th><td>a&lt;b</td></tr></table>'
    """
    lines = ["".join(f"<th>{escape(str(cell))}</th>" for cell in head)] if head else []
    for first, *cells in rows:
        lines.append(f"<th>{escape(str(first))}</th>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}")
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
