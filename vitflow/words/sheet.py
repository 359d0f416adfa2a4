"""Sheets of weights: a token's row layer by layer, and what each generated token rests on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from vitflow.errors import ShapeError, printable
from vitflow.methods.sequence.layout import Words
from vitflow.pictures.options import DPI
from vitflow.pictures.typesetting import BODY, GREY, INK, RULE, SMALL, Page
from vitflow.words.labels import labels_of, shown_positions
from vitflow.words.terminal import padded, shaded, width_of
from vitflow.words.trust import Trust, check_weights
from vitflow.words.view import MARGIN, View, color_of, draw_foot, draw_title, embedded, fractions, percent, render

#: A table of more cells is a picture, in HTML too; a figure of more prints no number in each.
MOST_CELLS, MOST_NUMBERS = 3000, 700
_CELL, _LONGEST_NAME = 0.235, 18
# Stands in the cell of a row's own token, where its share is told apart.
_ITSELF = "·"


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell: its shade from −1 to 1, its number, whether it was not seen, and whether it is its row's own token."""

    shade: float
    text: str
    unseen: bool
    asked: bool


@dataclass(frozen=True, slots=True)
class _Row:
    """A row: its name, its cells, and what lies elsewhere, in percent."""

    name: str
    cells: list[_Cell]
    rest: str | None


@dataclass(frozen=True)
class Sheet(View):
    """Rows of weights over the same tokens: layers, or generated tokens.

    Attributes:
        words: the tokens that the columns stand for.
        weights: [rows, tokens], NaN where a token is not seen; all rows have one scale.
        rows: a name for each row, first row first.
        rest: for each row what lies on other tokens, [rows], told in a column of its own.
        rest_name: what these are.
        own_tokens: for each row the position of its own token, which does not set the scale; beyond the last: none.
        own: the share of the asked tokens, or of the rows' own, where the weights do not hold it: their cells then have
            no number.
        upwards: the first row lies at the bottom, as layers do.
        asked, hidden, title, caption: as of every `View`.

    Raises:
        ShapeError: weights, rows and tokens do not fit each other.

    >>> words = Words(("the", " key"), (0, 1), (False, False))
    >>> print(Sheet(words, [[0.5, 0.5], [0.1, 0.9]], ["layer 1", "layer 2"], upwards=True).text().splitlines()[2])
    layer 2   10   90
    """

    words: Words
    weights: Any
    rows: Sequence[str]
    rest: Any = None
    rest_name: str = "elsewhere"
    own_tokens: Sequence[int] = ()
    own: float | None = None
    upwards: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", check_weights(self.weights, ("rows", self.words.length)))
        if self.rest is not None:
            object.__setattr__(self, "rest", check_weights(self.rest, (len(self.rows),)))
        object.__setattr__(self, "rows", [printable(name) for name in self.rows])
        object.__setattr__(self, "rest_name", printable(self.rest_name, lines=True))
        super().__post_init__()
        if len(self.rows) != len(self.weights):
            raise ShapeError(f"Expected a name for each of {len(self.weights)} rows, got {len(self.rows)}.")

    @property
    def trust(self) -> Trust:
        """What the last row says of itself where rows are layers, else the mean row."""
        row = self.weights[-1] if self.upwards else np.nan_to_num(self.weights).mean(axis=0)
        own = self.own
        if own is None and self.asked:
            own = float(np.nansum(np.abs(row[list(self.asked)])) / (np.nansum(np.abs(row)) or 1.0))
        return Trust.of(row, self.words, own=own, hidden=self.hidden)

    @cached_property
    def _shades(self) -> NDArray[np.float64]:
        counted = np.zeros(self.weights.shape, dtype=bool)
        counted[:, self._columns] = True
        counted[:, list(self.asked)] = False
        for row, own in zip(counted, self.own_tokens, strict=False):
            row[own : own + 1] = False
        return fractions(self._shares, counted)

    @cached_property
    def _totals(self) -> NDArray[np.float64]:
        """The weight of each row, with its rest, without signs."""
        totals = np.nansum(np.abs(self.weights), axis=1) + (0 if self.rest is None else np.abs(self.rest))
        return np.where(totals > 0, totals, 1.0)

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        shares: NDArray[np.float64] = self.weights / self._totals[:, None]
        return shares

    @cached_property
    def _columns(self) -> list[int]:
        return shown_positions(self.words, self.hidden)

    @cached_property
    def _table(self) -> list[_Row]:
        """The rows of the sheet, from its top."""
        order = range(len(self.rows))
        return [
            _Row(
                self.rows[row],
                [self._cell(row, column) for column in self._columns],
                None if self.rest is None else percent(float(self.rest[row] / self._totals[row])),
            )
            for row in (reversed(order) if self.upwards else order)
        ]

    def _cell(self, row: int, column: int) -> _Cell:
        weight, share = self.weights[row, column], float(self._shares[row, column])
        own = column in self.asked or list(self.own_tokens[row : row + 1]) == [column]
        apart = self.own is not None and own and not weight  # its share has no number here, which is not 0
        return _Cell(
            float(self._shades[row, column]), _ITSELF if apart else percent(share), bool(np.isnan(weight)), own
        )

    @property
    def _names(self) -> list[str]:
        labels = labels_of(self.words)
        return [labels[position].text for position in self._columns]

    def html(self) -> str:
        """The sheet in HTML: a table with a number in each cell; a picture, where it would have too many."""
        large = len(self.rows) * len(self._columns) > MOST_CELLS
        image = embedded(self.figure(framed=False)) if large else {}
        return render("sheet.html", view=self, names=self._names, table=[] if large else self._table, **image)

    def text(self, *, color: bool = False, width: int = 80, plain: bool = False) -> str:
        """The sheet for a terminal: blocks of as many columns as fit, a percentage in each cell."""
        head = max(width_of(name) for name in self.rows)
        rest = self.rest is not None
        cell = 5
        per_block = max((width - head) // cell - rest, 1)
        lines = [self.title] if self.title else []
        for first in range(0, len(self._columns), per_block):
            names = self._names[first : first + per_block]
            last = first + per_block >= len(self._columns)
            lines += self._names_above(names, head, cell, rest and last)
            for row in self._table:
                cells = [
                    " " * (cell - len(one.text)) + (shaded(one.text, one.shade, color=True) if color else one.text)
                    for one in row.cells[first : first + per_block]
                ]
                tail = f" |{row.rest:>4}" if row.rest is not None and last else ""
                lines.append(padded(row.name, head) + "".join(cells) + tail)
            lines.append("")
        return "\n".join([*lines, *self._foot])

    def _names_above(self, names: Sequence[str], head: int, cell: int, rest: bool) -> list[str]:
        """The names of columns in two lines, taking turns, so that each has twice the room."""
        found = []
        for turn in (0, 1):
            line = " " * head
            for number, name in enumerate(names):
                if number % 2 == turn:
                    line = padded(line, head + number * cell + 1) + padded(name, 2 * cell - 1)
            found.append(line.rstrip())
        if rest:
            found[-1] = padded(found[-1], head + len(names) * cell + 1) + f"| {self.rest_name}"
        return found

    @property
    def _foot(self) -> list[str]:
        apart = "" if self.own is None else f"; {_ITSELF} is the row's own token, whose share stands apart"
        told = [f"percent of each row's weight{apart}"]
        return [line for line in (*told, str(self.trust), self.trust.left_out, self.caption) if line]

    def figure(self, *, framed: bool = True) -> Figure:
        """The sheet as a figure; every name that has room stands at its column."""
        table, columns = self._table, self._columns
        cell = max(min(_CELL, 9.0 / max(len(columns), 1)), 0.03)
        height = max(min(_CELL, 9.0 / len(table)), 0.03)
        scratch = Page(DPI, 1.0)
        names = [_cut(name) for name in self._names]
        left = MARGIN + max(scratch.measure(_cut(row.name), BODY) for row in table) + 0.06
        above = max((scratch.measure(name, BODY) for name in names), default=0.0)
        width = left + cell * len(columns) + (0.75 if self.rest is not None else 0.0) + MARGIN
        page = Page(DPI, max(width, 3.6))
        top = draw_title(page, self.title if framed else "")
        top += above + 0.1
        every = max(round(0.1 / cell + 0.49), 1)
        for number in range(0, len(columns), every):
            x = left + (number + 0.5) * cell + 0.03
            page.line(names[number], x, top - 0.04, BODY, ha="center", rotation=90, rotation_mode="default")
        _draw_cells(page, table, left, top, cell, height)
        self._draw_words(page, left, top, cell, height)
        return draw_foot(page, self._foot if framed else (), top + height * len(table) + 0.06)

    def _draw_words(self, page: Page, left: float, top: float, cell: float, height: float) -> None:
        """The names of rows, the numbers of cells where there is room, and the column of the rest."""
        every = max(round(0.1 / height + 0.49), 1)
        numbers = len(self.rows) * len(self._columns) <= MOST_NUMBERS and cell > 0.15 and height > 0.1
        right = left + cell * len(self._columns)
        for place, row in enumerate(self._table):
            baseline = top + (place + 0.5) * height + 0.03
            if place % every == 0:
                page.line(_cut(row.name), left - 0.05, baseline, BODY, ha="right")
            for number, one in enumerate(row.cells if numbers else ()):
                ink = "white" if abs(one.shade) > 0.55 else INK
                page.line(one.text, left + (number + 0.5) * cell, baseline, SMALL - 1, color=ink, zorder=3)
            if row.rest is not None and place % every == 0:
                page.line(row.rest, right + 0.2, baseline, SMALL, color=GREY)
        if self.rest is not None:
            page.line(self.rest_name, right + 0.06, top - 0.05, SMALL, ha="left", color=GREY)


def _cut(name: str) -> str:
    return padded(name, _LONGEST_NAME).rstrip()


def _draw_cells(page: Page, table: Sequence[_Row], left: float, top: float, cell: float, height: float) -> None:
    """The shades of all cells as one picture, grey where nothing is seen."""
    colors = np.array([[_rgb(one) for one in row.cells] for row in table], np.uint8)
    right, bottom = left + len(table[0].cells) * cell, top + len(table) * height
    extent = (left, right, bottom, top)
    page.axes.imshow(colors, extent=extent, aspect="auto", origin="upper", interpolation="nearest", zorder=1)
    page.axes.add_patch(
        Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=RULE, linewidth=0.5, zorder=2)
    )


def _rgb(cell: _Cell) -> list[int]:
    color = color_of(cell.shade)
    return [236] * 3 if cell.unseen else [int(color[start : start + 2], 16) for start in (1, 3, 5)]
