"""Shaded text: each token on a shade of its weight, also shown as an underline and, for the largest, a number."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import DrawingArea, HPacker, OffsetBox
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from numpy.typing import NDArray

from vitflow.errors import OptionError
from vitflow.images import DPI
from vitflow.images.typesetting import GREY, INK, MARGIN, RULE, SMALL, TITLE, measure, page, plain, words
from vitflow.text.view import RowSummary, View, check_weights, color_of, fractions, percent
from vitflow.text.words import Label, Words, labels_of

#: The number of largest weights printed as numbers.
NUMBERS = 8
_WIDTH, _SIZE = 6.0, 9.0
_POINTS = 72 * (_WIDTH - 2 * MARGIN)
_BASELINE = 10.5  # points from the bottom of a line of tokens


@dataclass(frozen=True, slots=True)
class _Token:
    """A drawn token: its shade from −1 to 1, and its share as text if it is one of the largest."""

    position: int
    label: Label
    shade: float
    share: float
    number: str
    selected: bool
    plain: bool


@dataclass(frozen=True)
class ShadedText(View):
    """A text whose tokens are shaded by one weight each.

    Attributes:
        words: the tokens.
        weights: one weight per token; NaN for unseen tokens.
        self_share: share of the selected tokens, if it is not among the weights.
        selected, hidden, title, caption: see `View`; hidden special tokens are omitted, other hidden tokens are drawn
            without a shade.

    Raises:
        ShapeError: weights are not finite, or not one per token.
        OptionError: position out of range.

    >>> words = Words(("the", " key", " to", " doors", " is"), (0, 1, 2, 3, 4), (False,) * 5)
    >>> view = ShadedText(words, [0.1, 0.6, 0.05, 0.2, 0.05], selected=(4,))
    >>> print(view.text().splitlines()[0])
       60.0 %  key  (1)
    """

    words: Words
    weights: Any
    self_share: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", check_weights(self.weights, (self.words.length,)))
        super().__post_init__()
        for position in (*self.selected, *self.hidden):
            if not 0 <= position < self.words.length:
                raise OptionError(f"Expected positions from 0 to {self.words.length - 1}, got {position}.")

    @property
    def trust(self) -> RowSummary:
        """Summary of the weights."""
        return RowSummary.of(
            self.weights, self.words, selected=self.selected, self_share=self.self_share, hidden=self.hidden
        )

    @cached_property
    def _counted(self) -> NDArray[np.bool_]:
        """Mask of the tokens that are drawn with a shade."""
        counted = np.isfinite(self.weights)
        counted[[*self.hidden, *self.selected]] = False
        return np.asarray(counted)

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        shares: NDArray[np.float64] = self.weights / (float(np.nansum(np.abs(self.weights))) or 1.0)
        return shares

    @property
    def shades(self) -> NDArray[np.float64]:
        """Shade of each token from −1 to 1; 0 for selected and hidden tokens."""
        return fractions(self._shares, self._counted)

    @cached_property
    def _tokens(self) -> list[_Token]:
        """The drawn tokens: all but hidden special tokens."""
        shades = self.shades
        largest = [p for p in np.argsort(-np.abs(shades), kind="stable") if shades[p]][:NUMBERS]
        return [
            _Token(
                position,
                label,
                float(shades[position]),
                float(self._shares[position]),
                percent(float(self._shares[position])) if position in largest else "",
                position in self.selected,
                not self._counted[position],
            )
            for position, label in enumerate(labels_of(self.words))
            if position not in self.hidden or not self.words.special[position] or position in self.selected
        ]

    def text(self) -> str:
        """Return the strongest tokens as plain text: share of the weight, token, and position."""
        strongest = sorted((token for token in self._tokens if token.number), key=lambda token: -abs(token.shade))
        lines = [f"  {100 * token.share:5.1f} %  {token.label.text}  ({token.position})" for token in strongest]
        return "\n".join([*([self.title] if self.title else []), *lines, *([""] if lines else []), *self._footer])

    @property
    def _footer(self) -> list[str]:
        return [line for line in (str(self.trust), self.trust.left_out, self.caption) if line]

    def figure(self) -> Figure:
        """Return the text as a figure."""
        lines = []
        for line in self._set_lines():
            lines.append(DrawingArea(_POINTS, 2.3 * _SIZE))
            for token, left, width in line:
                _draw_token(lines[-1], token, 72 * left, 72 * width)
        room = _WIDTH - 2 * MARGIN
        head = words(self.title, size=TITLE, width=room, lines=3, weight="bold")
        below = words(*self._footer, size=SMALL, width=room, lines=4, color=GREY)
        return page([*head, *lines, self._legend(), *below], DPI)

    def _set_lines(self) -> list[list[tuple[_Token, float, float]]]:
        """Break tokens into lines, keeping words together: each token with its left edge and width in inches."""
        lines: list[list[tuple[_Token, float, float]]] = [[]]
        space = measure("n n", _SIZE) - 2 * measure("n", _SIZE)
        x = 0.0
        for word in _by_word(self._tokens):
            widths = [measure(token.label.text, _SIZE) + 0.02 for token in word]
            gap = space if word[0].label.space and lines[-1] else 0.0
            if lines[-1] and x + gap + sum(widths) > _WIDTH - 2 * MARGIN:
                lines.append([])
                x, gap = 0.0, 0.0
            x += gap
            for token, width in zip(word, widths, strict=True):
                if lines[-1] and x + width > _WIDTH - 2 * MARGIN:  # a word longer than a line
                    lines.append([])
                    x = 0.0
                lines[-1].append((token, x, width))
                x += width
            if word[-1].label.newline:
                lines.append([])
                x = 0.0
        return [line for line in lines if line]

    def _legend(self) -> OffsetBox:
        most = percent(float(np.abs(self._shares[self._counted]).max(initial=0.0)))
        legend = f"shade and line: 0 to {most} % of the weight; numbers: the {NUMBERS} largest shares, in %"
        if any(token.shade < 0 for token in self._tokens):
            legend += "; hatched: negative"
        if self.selected:
            legend += "; outlined: the explained token"
        shades = DrawingArea(60, 14)
        for step in range(6):
            _shade_box(shades, step / 5, 9.4 * step, 8.6)
        text = words(legend, size=SMALL, width=_WIDTH - 2 * MARGIN - 0.9, color=GREY)
        return HPacker(children=[shades, *text], align="center", sep=2)


def _by_word(tokens: Sequence[_Token]) -> list[list[_Token]]:
    """Group tokens into words."""
    groups: list[list[_Token]] = []
    for token in tokens:
        if groups and not token.label.space and not groups[-1][-1].label.newline:
            groups[-1].append(token)
        else:
            groups.append([token])
    return groups


def _draw_token(area: DrawingArea, token: _Token, left: float, width: float) -> None:
    """Draw a token into a line; lengths in points."""
    _shade_box(area, token.shade, left, width - 0.7, selected=token.selected)
    grey = token.plain and not token.selected
    ink = {"color": GREY if grey else "white"} if grey or abs(token.shade) > 0.62 else {}
    style = plain(_SIZE) | ink
    area.add_artist(Text(left + 0.4, _BASELINE, token.label.text, **style))
    if token.number:
        style = plain(SMALL - 1.0) | {"color": GREY, "horizontalalignment": "center"}
        area.add_artist(Text(left + width / 2, 0.5, token.number, **style))


def _shade_box(area: DrawingArea, shade: float, left: float, width: float, *, selected: bool = False) -> None:
    """Draw the shade behind a token, an underline as thick as the shade is dark, and the outline if selected."""
    edge: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.8} if selected else {"linewidth": 0}
    area.add_artist(Rectangle((left, _BASELINE - 2.5), width, 10, facecolor=color_of(shade), zorder=0, **edge))
    below = _BASELINE - 3.2
    if shade:
        line: dict[str, Any] = {"hatch": "////", "edgecolor": "white"} if shade < 0 else {}
        thick = max(2.2 * abs(shade), 0.36)
        area.add_artist(Rectangle((left, below - thick), width, thick, facecolor=INK, linewidth=0, **line))
    elif not selected:
        area.add_artist(Line2D([left, left + width], [below] * 2, color=RULE, linewidth=0.2, solid_capstyle="butt"))
