"""The attention graph: tokens as nodes, layer upon layer, and what passes between them as edges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import OptionError, printable
from vitflow.images import charts
from vitflow.images.charts import new_chart
from vitflow.images.typesetting import BODY, GREY, INK, LEADING, MARGIN, SMALL, TITLE, measure, plain, wrap
from vitflow.text.labels import labels_of, padded, shown_positions
from vitflow.text.layout import Words
from vitflow.text.view import FOR, Trust, View, check_weights, embedded, percent, render

#: A graph of more tokens or layers than this would be a grey area.
MOST_TOKENS, MOST_LAYERS = 40, 48
_GAP, _STEP = 0.35, 0.32
_STRONGEST = 3  # edges of a layer that are told in words
_BLUE = tuple(channel / 255 for channel in FOR)


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph among those that stand side by side.

    Attributes:
        title: such as "attention rollout".
        matrices: the weight of each edge, [layers, tokens, tokens]: from token i after layer l to token j below.
        paths: of the same shape, the edges of one node, drawn strong; None to draw all edges alike.
        note: a line below.
    """

    title: str
    matrices: Any
    paths: Any = None
    note: str = ""


@dataclass(frozen=True)
class GraphView(View):
    """Attention graphs side by side: a node for each token after each layer, the input at the bottom.

    Attributes:
        words: the tokens.
        panels: the graphs; the paths of the asked tokens are drawn strong.
        selected, hidden, title, caption: as of every `View`.

    Raises:
        ShapeError: matrices that do not fit the tokens.
        OptionError: more tokens or layers than can be told apart.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, Figure 1.

    >>> words = Words(("a", " key"), (0, 1), (False, False))
    >>> GraphView(words, [Panel("raw attention", [[[1.0, 0.0], [0.4, 0.6]]])], selected=(1,)).panels[0].matrices.shape
    (1, 2, 2)
    """

    words: Words
    panels: Sequence[Panel]

    def __post_init__(self) -> None:
        shape = ("layers", self.words.length, self.words.length)
        checked = [
            Panel(
                printable(panel.title),
                np.nan_to_num(check_weights(panel.matrices, shape)),
                None if panel.paths is None else np.nan_to_num(check_weights(panel.paths, shape)),
                printable(panel.note),
            )
            for panel in self.panels
        ]
        object.__setattr__(self, "panels", checked)
        super().__post_init__()
        shown, layers = len(self._columns), max((len(panel.matrices) for panel in checked), default=0)
        if not checked or shown > MOST_TOKENS or layers > MOST_LAYERS:
            raise OptionError(
                f"Expected one graph or more of at most {MOST_TOKENS} tokens and {MOST_LAYERS} layers, got "
                f"{len(checked)} of {shown} tokens and {layers} layers: take a shorter text, or draw a sheet."
            )

    @property
    def _columns(self) -> list[int]:
        return shown_positions(self.words, self.hidden)

    @property
    def trust(self) -> Trust | None:
        """What the asked token's row of the last graph says of itself."""
        if not self.selected:
            return None
        row = self.panels[-1].matrices[-1][list(self.selected)].mean(axis=0)
        self_share = float(row[list(self.selected)].sum() / (row.sum() or 1.0))
        return Trust.of(row, self.words, self_share=self_share, hidden=self.hidden)

    @property
    def _foot(self) -> list[str]:
        trust = self.trust
        told = "edges: the thicker and darker, the more passes; blue: the paths of the token that is asked about"
        last = "" if trust is None else f"{self.panels[-1].title}, top layer: {trust}"
        return [line for line in (told, last, trust.left_out if trust else "", self.caption) if line]

    def html(self) -> str:
        """The graphs as an image in HTML, described in words."""
        return render("graph.html", view=self, text=self.text(), **embedded(self.figure(framed=False)))

    def text(self) -> str:
        """For each graph the strongest edges of the asked token, or of all, layer by layer."""
        labels = labels_of(self.words)
        lines = [self.title] if self.title else []
        for panel in self.panels:
            lines.append(panel.title)
            drawn = panel.matrices if panel.paths is None else panel.paths
            for layer in range(len(drawn) - 1, -1, -1):
                edges = drawn[layer][np.ix_(self._columns, self._columns)]
                strongest = [
                    place
                    for place in np.argsort(-edges, axis=None, kind="stable")[:_STRONGEST]
                    if edges.flat[place] > 0
                ]
                told = []
                for place in strongest:
                    above, below = (
                        labels[self._columns[int(node)]].text for node in np.unravel_index(place, edges.shape)
                    )
                    told.append(f"{above} ← {below} {percent(edges.flat[place])} %")
                lines.append(f"  layer {layer + 1}: {', '.join(told)}")
        return "\n".join([*lines, "", *self._foot[1:]])

    def figure(self, *, framed: bool = True) -> Figure:
        """The graphs as a figure."""
        labels = labels_of(self.words)
        names = [padded(labels[position].text, 14).rstrip() for position in self._columns]
        layers = max(len(panel.matrices) for panel in self.panels)
        # Tokens stand below each other and layers beside each other, so that words can be read.
        wide, row = max(layers * max(min(_STEP, 7.0 / layers), 0.2), 1.4), min(0.2, 7.5 / len(names))
        titles = [wrap(panel.title, wide, TITLE, weight="bold") for panel in self.panels]
        notes = [wrap(panel.note, wide, SMALL, lines=3) for panel in self.panels]
        width = max(map(measure, names, [BODY] * len(names))) + len(self.panels) * (wide + _GAP) + 2 * MARGIN
        around = max(map(len, titles)) * TITLE + (1 + max(map(len, notes))) * SMALL
        figure = new_chart((max(width, 4.0), row * len(names) + around * LEADING + 0.2))
        plots = figure.subplots(1, len(self.panels), sharey=True, squeeze=False)[0]
        for axes, panel, title, note in zip(plots, self.panels, titles, notes, strict=True):
            axes.set_title("\n".join(title), loc="left", pad=3, **plain(TITLE), weight="bold")
            axes.set_xlabel("\n".join(note), loc="left", labelpad=2, **plain(SMALL) | {"color": GREY})
            self._draw_panel(axes, panel, wide)
        plots[0].set_ylim(len(names) - 0.5, -0.5)
        plots[0].set_yticks(range(len(names)), names, **plain(BODY))
        for label, position in zip(plots[0].get_yticklabels(), self._columns, strict=True):
            label.set_fontweight("bold" if position in self.selected else "normal")
        return charts.framed(figure, self.title if framed else "", self._foot if framed else ())

    def _draw_panel(self, axes: Axes, panel: Panel, wide: float) -> None:
        """Draw one graph, the input at its left edge and the top layer at its right."""
        layers, columns = len(panel.matrices), self._columns
        chosen = np.ix_(range(layers), columns, columns)
        _draw_edges(axes, panel.matrices[chosen], (0.35, 0.35, 0.35), panel.paths is not None)
        if panel.paths is not None:
            _draw_edges(axes, panel.paths[chosen], _BLUE, False)
        xs, ys = np.meshgrid(np.arange(layers + 1), np.arange(len(columns)))
        axes.scatter(xs, ys, s=4, color=INK, linewidths=0, zorder=4)
        selected = [place for place, position in enumerate(columns) if position in self.selected]
        axes.scatter([layers] * len(selected), selected, s=22, color=[_BLUE], linewidths=0, zorder=5)
        axes.set_xlim(-0.08 * layers / wide, (1 + 0.08 / wide) * layers)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, pad=2)
        every = range(0, layers + 1, round(0.14 * layers / wide + 0.49) or 1)
        axes.set_xticks(every, [str(layer) if layer else "in" for layer in every], **plain(SMALL) | {"color": GREY})


def _draw_edges(axes: Axes, matrices: NDArray[np.float64], color: tuple[float, ...], faint: bool) -> None:
    """Lines between neighbouring layers, as thick and dark as their squared share of the layer's largest weight."""
    largest = matrices.max(axis=(1, 2), keepdims=True)
    shares = (matrices / np.where(largest > 0, largest, 1.0)) ** 2
    layer, above, below = np.nonzero(shares > 0.01)
    strength = shares[layer, above, below]
    order = np.argsort(strength, kind="stable")  # the strongest lie on top
    layer, above, below, strength = layer[order], above[order], below[order], strength[order]
    lines = np.stack([np.stack([layer + 1, above], 1), np.stack([layer, below], 1)], 1)
    colors = np.concatenate([np.tile(color, (len(lines), 1)), (strength * (0.18 if faint else 0.9))[:, None]], 1)
    axes.add_collection(LineCollection(list(lines), linewidths=0.2 + 1.8 * strength, colors=colors, zorder=2))


def only_rows(matrices: NDArray[Any], selected: tuple[int, ...]) -> NDArray[np.float64]:
    """The asked tokens' rows alone, layer by layer."""
    kept = np.zeros(matrices.shape)
    kept[:, selected] = matrices[:, selected]
    return kept


def walked(matrices: NDArray[Any], selected: tuple[int, ...]) -> NDArray[np.float64]:
    """Each edge times what of the asked tokens' top row arrives at it from above."""
    walked, arrives = np.zeros(matrices.shape), np.zeros(matrices.shape[1])
    arrives[list(selected)] = 1 / len(selected)
    for layer in range(len(matrices) - 1, -1, -1):
        walked[layer] = arrives[:, None] * matrices[layer]
        arrives = walked[layer].sum(axis=0)
    return walked
