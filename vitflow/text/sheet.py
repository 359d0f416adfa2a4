"""Tables of weights: one row per layer, or one row per generated token."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import ShapeError, printable
from vitflow.images import charts
from vitflow.images.charts import new_chart
from vitflow.images.typesetting import BODY, GREY, MARGIN, RULE, SMALL, measure, plain
from vitflow.text.view import SHADES, RowSummary, View, check_weights, fractions, percent
from vitflow.text.words import Words, labels_of, shortened, shown_positions

#: Figures with more cells print no numbers.
MOST_NUMBERS = 700
_CELL, _LONGEST_NAME = 0.235, 18
_ITSELF = "·"  # in the cell of the query token, if its share is reported separately
_STRONGEST = 5  # tokens of each row in plain text


@dataclass(frozen=True)
class Sheet(View):
    """Table of weights: a column per token, and a row per layer or generated token.

    Attributes:
        words: the tokens of the columns.
        weights: [rows, tokens], NaN for unseen tokens; all rows share one colour scale.
        rows: name of each row, first row first.
        rest: weight of other tokens in each row, [rows], shown in an extra column.
        rest_name: header of that column.
        self_tokens: position of the query token of each row, excluded from the colour scale; rows without an entry
            have none.
        self_share: share of the selected tokens, or of the query token of each row, if it is not among the
            weights; those cells then show no number.
        upwards: draw the first row at the bottom, as for layers.
        selected, hidden, title, caption: see `View`.

    Raises:
        ShapeError: the shapes of weights, rows and tokens do not match.

    >>> words = Words(("the", " key"), (0, 1), (False, False))
    >>> print(Sheet(words, [[0.5, 0.5], [0.1, 0.9]], ["layer 1", "layer 2"], upwards=True).text().splitlines()[0])
      layer 2: key 90 %, the 10 %
    """

    words: Words
    weights: Any
    rows: Sequence[str]
    rest: Any = None
    rest_name: str = "elsewhere"
    self_tokens: Sequence[int] = ()
    self_share: float | None = None
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
    def trust(self) -> RowSummary:
        """Summary of the last row if rows are layers, else of the mean row."""
        row = self.weights[-1] if self.upwards else np.nan_to_num(self.weights).mean(axis=0)
        return RowSummary.of(row, self.words, selected=self.selected, self_share=self.self_share, hidden=self.hidden)

    @cached_property
    def _shades(self) -> NDArray[np.float64]:
        counted = np.zeros(self.weights.shape, dtype=bool)
        counted[:, self._columns] = True
        counted[:, list(self.selected)] = False
        for row, position in zip(counted, self.self_tokens, strict=False):
            row[position : position + 1] = False
        return fractions(self._shares, counted)

    @cached_property
    def _totals(self) -> NDArray[np.float64]:
        """Sum of the absolute weights of each row, including its rest."""
        totals = np.nansum(np.abs(self.weights), axis=1) + (0 if self.rest is None else np.abs(self.rest))
        return np.where(totals > 0, totals, 1.0)

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        shares: NDArray[np.float64] = self.weights / self._totals[:, None]
        return shares

    @cached_property
    def _columns(self) -> list[int]:
        return shown_positions(self.words, self.hidden)

    @property
    def _order(self) -> list[int]:
        """Indices of the rows from top to bottom."""
        order = list(range(len(self.rows)))
        return order[::-1] if self.upwards else order

    def _number(self, row: int, column: int) -> str:
        """Return the text of a cell: its share of the row in percent."""
        selected = column in self.selected or list(self.self_tokens[row : row + 1]) == [column]
        if self.self_share is not None and selected and not self.weights[row, column]:
            return _ITSELF  # its share is not 0, but not in this row
        return percent(float(self._shares[row, column]))

    def _rest(self, row: int) -> str:
        """Return the share of other tokens in a row, in percent."""
        return percent(float(self.rest[row] / self._totals[row]))

    @property
    def _names(self) -> list[str]:
        labels = labels_of(self.words)
        return [labels[position].text for position in self._columns]

    def text(self) -> str:
        """Return the strongest tokens of each row as plain text, in percent of the row's weight."""
        lines = [self.title] if self.title else []
        for row in self._order:
            shades = self._shades[row, self._columns]
            strongest = [int(index) for index in np.argsort(-np.abs(shades), kind="stable")[:_STRONGEST]]
            tokens = [
                f"{self._names[index]} {self._number(row, self._columns[index])} %"
                for index in strongest
                if shades[index]
            ]
            rest = "" if self.rest is None else f"; {self.rest_name} {self._rest(row)} %"
            lines.append(f"  {self.rows[row]}: {', '.join(tokens) or 'nothing'}{rest}")
        return "\n".join([*lines, "", *self._footer])

    @property
    def _footer(self) -> list[str]:
        note = "" if self.self_share is None else f"; {_ITSELF} is the query token, reported separately"
        scale = f"percent of each row's weight{note}"
        return [line for line in (scale, str(self.trust), self.trust.left_out, self.caption) if line]

    def figure(self) -> Figure:
        """Return the sheet as a figure; column names that do not fit are omitted."""
        order, names = self._order, [_cut(name) for name in self._names]
        shades = np.where(np.isnan(self.weights), np.nan, self._shades)[np.ix_(order, self._columns)]
        columns = max(len(names), 1)
        width, height = max(min(_CELL, 9.0 / columns), 0.03), max(min(_CELL, 9.0 / len(order)), 0.03)  # of a cell
        labels = max(measure(_cut(row), BODY) for row in self.rows) + 0.06
        labels += 0.0 if self.rest is None else max(measure(self.rest_name, SMALL), 0.3) + 0.06
        header = max((measure(name, BODY) for name in names), default=0.0) + 0.06
        figure = new_chart((max(labels + width * columns + 2 * MARGIN, 3.6), header + height * len(order) + MARGIN))
        axes = figure.subplots()
        aspect = height / width
        axes.imshow(shades, cmap=SHADES, vmin=-1, vmax=1, aspect=aspect, origin="upper", interpolation="nearest")
        axes.set_anchor("NW")
        axes.spines[:].set(edgecolor=RULE, linewidth=0.5)
        axes.tick_params(length=0, pad=2, top=True, labeltop=True, bottom=False, labelbottom=False)
        xs, ys = (range(0, n, round(0.1 / step + 0.49)) for n, step in ((columns, width), (len(order), height)))
        axes.set_xticks(xs, [names[x] for x in xs], rotation=90, **plain(BODY))
        axes.set_yticks(ys, [_cut(self.rows[order[y]]) for y in ys], **plain(BODY))
        if shades.size <= MOST_NUMBERS and width > 0.15 and height > 0.1:
            for (y, x), shade in np.ndenumerate(shades):
                ink = {"color": "white"} if abs(shade) > 0.55 else {}
                number = self._number(order[y], self._columns[x])
                axes.text(x, y, number, ha="center", va="center_baseline", **plain(SMALL - 1) | ink)
        if self.rest is not None:
            rest_labels: list[tuple[float, str, str]] = [
                (-0.5, self.rest_name, "bottom"),
                *((y, self._rest(order[y]), "center_baseline") for y in ys),
            ]
            for row_y, text, align in rest_labels:
                axes.text(columns - 0.5 + 0.06 / width, row_y, text, va=align, **plain(SMALL) | {"color": GREY})
        return charts.framed(figure, self.title, self._footer)


def _cut(name: str) -> str:
    return shortened(name, _LONGEST_NAME)
