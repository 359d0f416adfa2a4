"""Weights of several layers or generated tokens: as a table, or as graphs of attention between layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import OptionError, ShapeError, printable
from vitflow.images import charts
from vitflow.images.charts import new_chart
from vitflow.images.typesetting import BODY, GREY, INK, LEADING, MARGIN, RULE, SMALL, TITLE, measure, plain, wrap
from vitflow.text.view import POSITIVE, SHADES, RowSummary, View, check_weights, fractions, percent
from vitflow.text.words import Words, labels_of

#: Figures with more cells print no numbers.
MOST_NUMBERS = 700
_CELL = 0.235
_REST = "generated"  # header of the extra column
_ITSELF = "·"  # in the cell of the query token, if its share is reported separately
_STRONGEST = 5  # tokens of each row in plain text


@dataclass(frozen=True)
class Sheet(View):
    """Table of weights: a column per token, and a row per layer or generated token.

    Attributes:
        words: the tokens of the columns.
        weights: [rows, tokens], NaN for unseen tokens; all rows share one colour scale.
        rows: name of each row, first row first.
        rest: weight of generated tokens in each row, [rows], shown in an extra column.
        self_tokens: position of the query token of the first rows, excluded from the colour scale.
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
    self_tokens: Sequence[int] = ()
    self_share: float | None = None
    upwards: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", check_weights(self.weights, ("rows", self.words.length)))
        if self.rest is not None:
            object.__setattr__(self, "rest", check_weights(self.rest, (len(self.rows),)))
        object.__setattr__(self, "rows", [printable(name) for name in self.rows])
        super().__post_init__()
        if len(self.rows) != len(self.weights):
            raise ShapeError(f"Expected a name for each of {len(self.weights)} rows, got {len(self.rows)}.")

    @property
    def trust(self) -> RowSummary:
        """Summary of the last row if rows are layers, else of the mean row."""
        row = self.weights[-1] if self.upwards else np.nan_to_num(self.weights).mean(axis=0)
        return RowSummary.of(row, self.words, selected=self.selected, self_share=self.self_share, hidden=self.hidden)

    @property
    def scale(self) -> str:  # type: ignore[override]
        """Line below the table on what its numbers are."""
        note = "" if self.self_share is None else f"; {_ITSELF} is the query token, reported separately"
        return f"percent of each row's weight{note}"

    @cached_property
    def _columns(self) -> list[int]:
        return [position for position in range(self.words.length) if position not in self.hidden]

    @cached_property
    def _shares(self) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """Weights and rest of each row as shares of the sum of its absolute weights."""
        totals = np.nansum(np.abs(self.weights), axis=1) + (0 if self.rest is None else np.abs(self.rest))
        totals = np.where(totals > 0, totals, 1.0)
        return self.weights / totals[:, None], None if self.rest is None else self.rest / totals

    @cached_property
    def _shades(self) -> NDArray[np.float64]:
        counted = np.zeros(self.weights.shape, dtype=bool)
        counted[:, self._columns] = True
        counted[:, list(self.selected)] = False
        for row, position in zip(counted, self.self_tokens, strict=False):
            row[position : position + 1] = False
        return fractions(self._shares[0], counted)

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
        return percent(float(self._shares[0][row, column]))

    def strongest(self) -> list[str]:
        """Return the strongest tokens of each row, in percent of the row's weight."""
        labels, rest = labels_of(self.words), self._shares[1]
        lines = []
        for row in self._order:
            shades = self._shades[row]
            columns = sorted(self._columns, key=lambda column: -abs(shades[column]))[:_STRONGEST]
            tokens = [f"{labels[column].text} {self._number(row, column)} %" for column in columns if shades[column]]
            other = "" if rest is None else f"; {_REST} {percent(rest[row])} %"
            lines.append(f"  {self.rows[row]}: {', '.join(tokens) or 'nothing'}{other}")
        return lines

    def figure(self) -> Figure:
        """Return the sheet as a figure; column names that do not fit are omitted."""
        order, labels, rest = self._order, labels_of(self.words), self._shares[1]
        names = [_cut(labels[column].text) for column in self._columns]
        shades = np.where(np.isnan(self.weights), np.nan, self._shades)[np.ix_(order, self._columns)]
        columns = max(len(names), 1)
        width, height = max(min(_CELL, 9.0 / columns), 0.03), max(min(_CELL, 9.0 / len(order)), 0.03)  # of a cell
        room = max(measure(_cut(row), BODY) for row in self.rows) + 0.06
        room += 0.0 if rest is None else measure(_REST, SMALL) + 0.06
        header = max((measure(name, BODY) for name in names), default=0.0) + 0.06
        figure = new_chart((max(room + width * columns + 2 * MARGIN, 3.6), header + height * len(order) + MARGIN))
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
        if rest is not None:
            place, style = columns - 0.5 + 0.06 / width, plain(SMALL) | {"color": GREY}
            axes.text(place, -0.5, _REST, va="bottom", **style)
            for y in ys:
                axes.text(place, y, percent(rest[order[y]]), va="center_baseline", **style)
        return charts.framed(figure, self.title, self.footer)


def _cut(name: str, length: int = 18) -> str:
    """Return a name of at most `length` characters, truncated with an ellipsis."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


#: Larger graphs are unreadable.
MOST_TOKENS, MOST_LAYERS = 40, 48
_GAP, _STEP = 0.35, 0.32


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph of a `GraphView`.

    Attributes:
        title: title, such as "attention rollout".
        matrices: edge weights [layers, tokens, tokens], from token i after layer l to token j after layer l − 1.
        paths: highlighted edges, of the same shape.
        note: line below the graph.
    """

    title: str
    matrices: Any
    paths: Any
    note: str = ""


@dataclass(frozen=True)
class GraphView(View):
    """Attention graphs side by side: a node for each token after each layer, the input at the bottom.

    Attributes:
        words: the tokens.
        panels: the graphs.
        selected, hidden, title, caption: see `View`.

    Raises:
        ShapeError: the shape of a matrix does not match the tokens.
        OptionError: no graph, or more than `MOST_TOKENS` tokens or `MOST_LAYERS` layers.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, Figure 1.

    >>> words = Words(("a", " key"), (0, 1), (False, False))
    >>> attention = np.array([[[1.0, 0.0], [0.4, 0.6]]])
    >>> GraphView(words, [Panel("raw attention", attention, 0 * attention)], selected=(1,)).strongest()
    ['  raw attention: a 40 %']
    """

    words: Words
    panels: Sequence[Panel]

    def __post_init__(self) -> None:
        shape = ("layers", self.words.length, self.words.length)
        checked = [
            Panel(
                printable(panel.title),
                np.nan_to_num(check_weights(panel.matrices, shape)),
                np.nan_to_num(check_weights(panel.paths, shape)),
                printable(panel.note),
            )
            for panel in self.panels
        ]
        object.__setattr__(self, "panels", checked)
        super().__post_init__()
        shown, layers = len(self._columns), max((len(panel.matrices) for panel in checked), default=0)
        if not checked or shown > MOST_TOKENS or layers > MOST_LAYERS:
            raise OptionError(
                f"Expected at least one graph of at most {MOST_TOKENS} tokens and {MOST_LAYERS} layers, got "
                f"{len(checked)} of {shown} tokens and {layers} layers: use a shorter text, or draw a sheet."
            )

    @property
    def _columns(self) -> list[int]:
        return [position for position in range(self.words.length) if position not in self.hidden]

    @property
    def trust(self) -> RowSummary:
        """Summary of the top layer of the last graph: of the selected tokens' row, or of the mean row."""
        return RowSummary.of(self._rows()[-1], self.words, selected=self.selected, hidden=self.hidden)

    @property
    def _trust_line(self) -> str:
        return f"{self.panels[-1].title}, top layer: {self.trust}"

    def _rows(self) -> list[NDArray[np.float64]]:
        """Return the selected tokens' row, or the mean row, of the top layer of each graph."""
        rows = list(self.selected) or slice(None)
        return [panel.matrices[-1][rows].mean(axis=0) for panel in self.panels]

    def strongest(self) -> list[str]:
        """Return the strongest tokens in the top layer of each graph."""
        names = [panel.title for panel in self.panels]
        return Sheet(self.words, self._rows(), names, selected=self.selected, hidden=self.hidden).strongest()

    def figure(self) -> Figure:
        """Return the graphs as a figure."""
        labels = labels_of(self.words)
        names = [_cut(labels[position].text, 14) for position in self._columns]
        layers = max(len(panel.matrices) for panel in self.panels)
        # Layers run from left to right, so that tokens can be labelled horizontally.
        panel_width, row = max(layers * max(min(_STEP, 7.0 / layers), 0.2), 1.4), min(0.2, 7.5 / len(names))
        titles = [wrap(panel.title, panel_width, TITLE, weight="bold") for panel in self.panels]
        notes = [wrap(panel.note, panel_width, SMALL, lines=3) for panel in self.panels]
        width = max(map(measure, names, [BODY] * len(names))) + len(self.panels) * (panel_width + _GAP) + 2 * MARGIN
        text_height = max(map(len, titles)) * TITLE + (1 + max(map(len, notes))) * SMALL
        figure = new_chart((max(width, 4.0), row * len(names) + text_height * LEADING + 0.2))
        plots = figure.subplots(1, len(self.panels), sharey=True, squeeze=False)[0]
        for axes, panel, title, note in zip(plots, self.panels, titles, notes, strict=True):
            axes.set_title("\n".join(title), loc="left", pad=3, **plain(TITLE), weight="bold")
            axes.set_xlabel("\n".join(note), loc="left", labelpad=2, **plain(SMALL) | {"color": GREY})
            self._draw_panel(axes, panel, panel_width)
        plots[0].set_ylim(len(names) - 0.5, -0.5)
        plots[0].set_yticks(range(len(names)), names, **plain(BODY))
        for label, position in zip(plots[0].get_yticklabels(), self._columns, strict=True):
            label.set_fontweight("bold" if position in self.selected else "normal")
        legend = "edges: thicker and darker for larger weights; blue: paths of the explained token"
        return charts.framed(figure, self.title, [legend, *self.footer])

    def _draw_panel(self, axes: Axes, panel: Panel, panel_width: float) -> None:
        """Draw one graph, the input at the left and the top layer at the right."""
        layers, columns = len(panel.matrices), self._columns
        chosen = np.ix_(range(layers), columns, columns)
        _draw_edges(axes, panel.matrices[chosen], (0.35, 0.35, 0.35), 0.18)
        _draw_edges(axes, panel.paths[chosen], POSITIVE, 0.9)
        xs, ys = np.meshgrid(np.arange(layers + 1), np.arange(len(columns)))
        axes.scatter(xs, ys, s=4, color=INK, linewidths=0, zorder=4)
        selected = [column for column, position in enumerate(columns) if position in self.selected]
        axes.scatter([layers] * len(selected), selected, s=22, color=[POSITIVE], linewidths=0, zorder=5)
        axes.set_xlim(-0.08 * layers / panel_width, (1 + 0.08 / panel_width) * layers)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, pad=2)
        every = range(0, layers + 1, round(0.14 * layers / panel_width + 0.49) or 1)
        axes.set_xticks(every, [str(layer) if layer else "in" for layer in every], **plain(SMALL) | {"color": GREY})


def _draw_edges(axes: Axes, matrices: NDArray[np.float64], color: tuple[float, ...], opacity: float) -> None:
    """Draw edges; width and darkness are the square of the weight divided by the largest weight of the layer."""
    largest = matrices.max(axis=(1, 2), keepdims=True)
    shares = (matrices / np.where(largest > 0, largest, 1.0)) ** 2
    layer, above, below = np.nonzero(shares > 0.01)
    strength = shares[layer, above, below]
    order = np.argsort(strength, kind="stable")  # draws the strongest on top
    layer, above, below, strength = layer[order], above[order], below[order], strength[order]
    lines = np.stack([np.stack([layer + 1, above], 1), np.stack([layer, below], 1)], 1)
    colors = np.concatenate([np.tile(color, (len(lines), 1)), (strength * opacity)[:, None]], 1)
    axes.add_collection(LineCollection(list(lines), linewidths=0.2 + 1.8 * strength, colors=colors, zorder=2))
