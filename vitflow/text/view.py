"""A text with each token on a shade of its weight, as a figure and as plain text."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import DrawingArea, HPacker, OffsetBox
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from numpy.typing import NDArray

from vitflow.errors import OptionError, printable
from vitflow.images import DPI
from vitflow.images.figures import bundle, save_figure
from vitflow.images.typesetting import GREY, INK, MARGIN, RULE, SMALL, TITLE, measure, page, plain, words
from vitflow.text.words import PATCHES, Label, RowSummary, Words, check_weights, labels_of, percent

# RGB of the largest weight; a weight of 0 is white.
_DARKEST = (43 / 255, 95 / 255, 179 / 255)
#: The number of largest weights printed as numbers, and in one line.
NUMBERS, _IN_A_LINE = 8, 5
_WIDTH, _SIZE = 6.0, 9.0
_ROOM = _WIDTH - 2 * MARGIN
_BASELINE = 10.5  # points from the bottom of a line of tokens


@dataclass(frozen=True)
class ShadedText:
    """A text whose tokens are shaded by one weight each, with an underline and, for the largest weights, a number.

    Attributes:
        words: the tokens.
        weights: one weight per token, at least 0; NaN for unseen tokens.
        self_share: share of the selected tokens, if it is not among the weights.
        selected: positions of the explained tokens: outlined, and excluded from the colour scale.
        hidden: positions with the reason, as returned by `hide`: special tokens are omitted, others are drawn without
            a shade.
        title: line above the text.
        caption: line below the text, such as the method and its options.

    Raises:
        ShapeError: weights are negative or infinite, or not one per token.
        OptionError: position out of range.

    >>> words = Words(("the", " key", " to", " doors", " is"), (0, 1, 2, 3, 4), (False,) * 5)
    >>> view = ShadedText(words, [0.1, 0.6, 0.05, 0.2, 0.05], selected=(4,))
    >>> print(view.text().splitlines()[0])
       60.0 %  key  (1)
    """

    words: Words
    weights: Any
    self_share: float | None = None
    selected: Sequence[int] = ()
    hidden: Mapping[int, str] = field(default_factory=dict)
    title: str = ""
    caption: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", check_weights(self.weights, self.words.length))
        for name in ("title", "caption"):  # printed to terminals
            object.__setattr__(self, name, printable(getattr(self, name), lines=True))
        for position in (*self.selected, *self.hidden):
            if not 0 <= position < self.words.length:
                raise OptionError(f"Expected positions from 0 to {self.words.length - 1}, got {position}.")

    @property
    def summary(self) -> RowSummary:
        """Summary of the weights."""
        left_out = {position for position, reason in self.hidden.items() if reason == PATCHES}
        left_out |= set(self.selected if self.self_share is not None else ())
        given: dict[str, Any] = {"selected": self.selected, "self_share": self.self_share, "hidden": self.hidden}
        return RowSummary.of(self.weights, self.words, left_out=left_out, **given)

    @cached_property
    def _counted(self) -> NDArray[np.bool_]:
        """Mask of the tokens that are drawn with a shade."""
        counted = np.isfinite(self.weights)
        counted[[*self.hidden, *self.selected]] = False
        return np.asarray(counted)

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        shares: NDArray[np.float64] = self.weights / (float(np.nansum(self.weights)) or 1.0)
        return shares

    @cached_property
    def shades(self) -> NDArray[np.float64]:
        """Shade of each token from 0 to 1; 0 for selected and hidden tokens."""
        kept = np.where(self._counted, self._shares, 0.0)
        return np.asarray(kept / (kept.max(initial=0.0) or 1.0))

    @cached_property
    def _largest(self) -> list[int]:
        """Positions of the largest weights, in descending order."""
        return [int(p) for p in np.argsort(-self.shades, kind="stable") if self.shades[p]][:NUMBERS]

    @property
    def line(self) -> str:
        """The strongest tokens in one line, in percent of the weight."""
        labels = labels_of(self.words)
        tokens = [f"{labels[p].text} {percent(float(self._shares[p]))} %" for p in self._largest[:_IN_A_LINE]]
        return ", ".join(tokens) or "nothing"

    @property
    def _footer(self) -> list[str]:
        """The lines below the text."""
        return [line for line in (str(self.summary), self.summary.hidden_shares, self.caption) if line]

    def text(self) -> str:
        """Return the strongest tokens as plain text: share of the weight, token, and position."""
        labels = labels_of(self.words)
        strongest = [f"  {100 * self._shares[p]:5.1f} %  {labels[p].text}  ({p})" for p in self._largest]
        return "\n".join([*([self.title] if self.title else []), *strongest, "", *self._footer])

    def __str__(self) -> str:
        return self.text()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the figure as .png, .pdf or .svg; return the path.

        Raises:
            OptionError: unsupported suffix.
        """
        return save_figure(self.figure(), path)

    def _repr_mimebundle_(self, **_: Any) -> Any:
        return bundle(self.text(), self.figure())

    def figure(self) -> Figure:
        """Return the text as a figure."""
        lines = []
        for line in self._set_lines():
            lines.append(DrawingArea(72 * _ROOM, 2.3 * _SIZE))
            for position, label, left, width in line:
                self._draw_token(lines[-1], position, label, 72 * left, 72 * width)
        head = words(self.title, size=TITLE, width=_ROOM, lines=3, weight="bold")
        below = words(*self._footer, size=SMALL, width=_ROOM, lines=4, color=GREY)
        return page([*head, *lines, self._legend(), *below], DPI)

    def _set_lines(self) -> list[list[tuple[int, Label, float, float]]]:
        """Break tokens into lines, keeping words together: position, label, left edge and width of each, in inches."""
        lines: list[list[tuple[int, Label, float, float]]] = [[]]
        space, x = measure("n n", _SIZE) - 2 * measure("n", _SIZE), 0.0
        for word in self._by_word():
            widths = [measure(label.text, _SIZE) + 0.02 for _, label in word]
            gap = space if word[0][1].space and lines[-1] else 0.0
            if lines[-1] and x + gap + sum(widths) > _ROOM:
                lines.append([])
                x, gap = 0.0, 0.0
            x += gap
            for (position, label), width in zip(word, widths, strict=True):
                if lines[-1] and x + width > _ROOM:  # a word longer than a line
                    lines.append([])
                    x = 0.0
                lines[-1].append((position, label, x, width))
                x += width
            if word[-1][1].newline:
                lines.append([])
                x = 0.0
        return [line for line in lines if line]

    def _by_word(self) -> list[list[tuple[int, Label]]]:
        """Group the drawn tokens, all but hidden special ones, into words."""
        groups: list[list[tuple[int, Label]]] = []
        for position, label in enumerate(labels_of(self.words)):
            if position in self.hidden and self.words.special[position] and position not in self.selected:
                continue
            if groups and not label.space and not groups[-1][-1][1].newline:
                groups[-1].append((position, label))
            else:
                groups.append([(position, label)])
        return groups

    def _draw_token(self, area: DrawingArea, position: int, label: Label, left: float, width: float) -> None:
        """Draw a token into a line; lengths in points."""
        shade, selected = float(self.shades[position]), position in self.selected
        _shade_box(area, shade, left, width - 0.7, selected=selected)
        grey = not self._counted[position] and not selected
        ink = {"color": GREY if grey else "white"} if grey or shade > 0.62 else {}
        area.add_artist(Text(left + 0.4, _BASELINE, label.text, **plain(_SIZE) | ink))
        if position in self._largest:
            style = plain(SMALL - 1.0) | {"color": GREY, "horizontalalignment": "center"}
            area.add_artist(Text(left + width / 2, 0.5, percent(float(self._shares[position])), **style))

    def _legend(self) -> OffsetBox:
        most = percent(float(self._shares[self._counted].max(initial=0.0)))
        legend = f"shade and line: 0 to {most} % of the weight; numbers: the {NUMBERS} largest shares, in %"
        if self.selected:
            legend += "; outlined: the explained token"
        shades = DrawingArea(60, 14)
        for step in range(6):
            _shade_box(shades, step / 5, 9.4 * step, 8.6)
        return HPacker(
            children=[shades, *words(legend, size=SMALL, width=_ROOM - 0.9, color=GREY)], align="center", sep=2
        )


def _shade_box(area: DrawingArea, shade: float, left: float, width: float, *, selected: bool = False) -> None:
    """Draw the shade behind a token, an underline as thick as the shade is dark, and the outline if selected."""
    edge: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.8} if selected else {"linewidth": 0}
    color = tuple(1 - shade * (1 - channel) for channel in _DARKEST)
    area.add_artist(Rectangle((left, _BASELINE - 2.5), width, 10, facecolor=color, zorder=0, **edge))
    below = _BASELINE - 3.2
    if shade:
        thick = max(2.2 * shade, 0.36)
        area.add_artist(Rectangle((left, below - thick), width, thick, facecolor=INK, linewidth=0))
    elif not selected:
        area.add_artist(Line2D([left, left + width], [below] * 2, color=RULE, linewidth=0.2, solid_capstyle="butt"))
