"""Graphs of attention between layers, as in Abnar & Zuidema (2020)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.images.typesetting import (
    BODY,
    GREY,
    INK,
    LEADING,
    MARGIN,
    SMALL,
    TITLE,
    framed,
    measure,
    new_chart,
    plain,
    wrap,
)
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.rollout import attention_rollout
from vitflow.methods.tokens import Causal
from vitflow.text.view import POSITIVE, ShadedText, View
from vitflow.text.words import RowSummary, Words, labels_of

#: Larger graphs are unreadable.
MOST_TOKENS, MOST_LAYERS = 40, 48
_GAP, _STEP = 0.35, 0.32


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph of a `GraphView`, with a line below it.

    Edge weights and highlighted edges are [layers, tokens, tokens], from token i after layer l to j after layer l − 1.
    """

    title: str
    matrices: Any
    paths: Any
    note: str = ""


def attention_graphs(
    matrices: NDArray[np.float32], selected: Sequence[int], *, residual: float, causal: Causal | None
) -> list[Panel]:
    """Return raw attention [layers, tokens, tokens], rollout and flow as graphs, with the paths of selected tokens."""
    options: dict[str, Any] = {"residual": residual, "causal": causal, "num_prefix_tokens": 0}
    layers = [torch.from_numpy(layer).unsqueeze(0) for layer in matrices]
    rolled = [attention_rollout(layers[:count], **options)[0].numpy() for count in range(1, len(layers) + 1)]
    flows = np.zeros(matrices.shape)  # from each token after each layer
    for layer, token in np.ndindex(*matrices.shape[:2]):
        flows[layer, token] = attention_flow(layers[: layer + 1], source=token, **options).normalized[0].numpy()
    rollout, chosen = np.stack(rolled), np.isin(np.arange(matrices.shape[1]), selected)[:, None]
    return [
        Panel("raw attention", matrices, _attention_paths(matrices, selected), "edges: each layer's attention"),
        Panel("attention rollout", rollout, chosen * rollout, "edges: rollout to the input"),
        Panel("attention flow", flows, chosen * flows, "edges: flow from the input"),
    ]


def _attention_paths(matrices: NDArray[Any], selected: Sequence[int]) -> NDArray[np.float64]:
    """Weight each edge by the product of attention from the selected tokens at the top down to it."""
    weighted, arriving = np.zeros(matrices.shape), np.zeros(matrices.shape[1])
    arriving[list(selected)] = 1 / len(selected)
    for layer in range(len(matrices) - 1, -1, -1):
        weighted[layer] = arriving[:, None] * matrices[layer]
        arriving = weighted[layer].sum(axis=0)
    return weighted


@dataclass(frozen=True)
class GraphView(View):
    """Attention graphs side by side: a node for each token after each layer, the input at the bottom.

    Attributes:
        words: the tokens.
        panels: the graphs.
        selected, hidden, title, caption: see `View`.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, Figure 1.

    >>> words = Words(("a", " key"), (0, 1), (False, False))
    >>> attention = np.array([[[1.0, 0.0], [0.4, 0.6]]])
    >>> GraphView(words, [Panel("raw attention", attention, 0 * attention)], selected=(1,)).strongest()
    ['  raw attention: a 40 %']
    """

    words: Words
    panels: Sequence[Panel]

    @property
    def _columns(self) -> list[int]:
        return [position for position in range(self.words.length) if position not in self.hidden]

    @property
    def summary(self) -> RowSummary:
        """Summary of the top layer of the last graph: of the selected tokens' row, or of the mean row."""
        return RowSummary.of(self._rows()[-1], self.words, selected=self.selected, hidden=self.hidden)

    @property
    def summary_line(self) -> str:
        """The summary as one line."""
        return f"{self.panels[-1].title}, top layer: {self.summary}"

    def _rows(self) -> list[NDArray[np.float64]]:
        """Return the selected tokens' row, or the mean row, of the top layer of each graph."""
        rows = list(self.selected) or slice(None)
        return [panel.matrices[-1][rows].mean(axis=0) for panel in self.panels]

    def strongest(self) -> list[str]:
        """Return the strongest tokens in the top layer of each graph."""
        return [
            f"  {panel.title}: {ShadedText(self.words, row, selected=self.selected, hidden=self.hidden).line}"
            for panel, row in zip(self.panels, self._rows(), strict=True)
        ]

    def figure(self) -> Figure:
        """Return the graphs as a figure."""
        labels = labels_of(self.words)
        texts = [labels[position].text for position in self._columns]
        names = [text if len(text) <= 14 else f"{text[:13]}…" for text in texts]
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
        return framed(figure, self.title, [legend, *self.footer])

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
