"""Base class of the views of a text, which are figures and plain text, their caption, and the summary of a row."""

import base64
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import Colormap, LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import ShapeError, printable
from vitflow.explaining.captions import method_in_words
from vitflow.images.figures import bundle, figure_bytes, save_figure
from vitflow.text.method_table import TEXT_METHODS
from vitflow.text.words import Words

#: RGB of positive weights.
POSITIVE = (43 / 255, 95 / 255, 179 / 255)
_NEGATIVE, _WHITE, _GREY = (179 / 255, 82 / 255, 32 / 255), (1.0, 1.0, 1.0), (236 / 255,) * 3
#: Colours of shades from −1 to 1; 0 is white, NaN (unseen) is grey. The odd number of colours includes white itself.
SHADES: Colormap = LinearSegmentedColormap.from_list("shades", np.array([_NEGATIVE, _WHITE, POSITIVE]), N=511)
SHADES = SHADES.with_extremes(bad=_GREY)


def caption(
    method: str,
    options: Mapping[str, Any],
    model: str,
    *,
    what: str | None = None,
    target: str | None = None,
    probability: float | None = None,
) -> str:
    """Return a one-line caption: method, target of a class-specific method, and model.

    Args:
        method: name of a method for texts.
        options: its options.
        model: model id.
        what: title to use instead of the method's.
        target: target of a class-specific method.
        probability: the model's probability of the target.

    >>> options = {"head_fusion": "max", "value_weighted": False}
    >>> caption("gae", options, "bert", target="table", probability=0.25)
    'GAE (max over heads) · for “table”, probability 25.0% · bert'
    """
    chosen = TEXT_METHODS[method]
    likely = "" if probability is None else f", probability {probability:.1%}"
    explained = "" if target is None else f"for “{target}”{likely}"
    shown = method_in_words(replace(chosen, title=what or chosen.title), options)
    return " · ".join(filter(None, [shown, explained, model]))


@dataclass(frozen=True, kw_only=True)
class View(ABC):
    """Tokens with their weights, as a figure or plain text.

    Attributes:
        selected: positions of the explained tokens: outlined, and excluded from the colour scale.
        hidden: positions to leave out or to draw without a shade, with the reason, as returned by `hide`.
        title: line above the view.
        caption: line below the view, such as the method and its options.
    """

    selected: Sequence[int] = ()
    hidden: Mapping[int, str] = field(default_factory=dict)
    title: str = ""
    caption: str = ""

    def __post_init__(self) -> None:
        for name in ("title", "caption"):  # printed to terminals
            object.__setattr__(self, name, printable(getattr(self, name), lines=True))

    @abstractmethod
    def figure(self) -> Figure:
        """Return the figure."""

    @abstractmethod
    def text(self) -> str:
        """Return the strongest tokens as plain text, one per line."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the figure as .png, .pdf or .svg; return the path.

        Raises:
            OptionError: unsupported suffix.
        """
        return save_figure(self.figure(), path)

    def html_image(self) -> str:
        """Return the figure as an HTML image with the plain text as its description."""
        figure = self.figure()
        data = base64.b64encode(figure_bytes(figure, ".png")).decode()
        width = round(96 * figure.get_size_inches()[0])
        return f'<img src="data:image/png;base64,{data}" alt="{escape(self.text())}" width="{width}">'

    def __str__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return bundle(self.text(), self.figure())


def fractions(weights: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the weights divided by the largest absolute counted weight, from −1 to 1; 0 for weights not counted."""
    kept = np.where(counted & np.isfinite(weights), weights, 0.0)
    shades: NDArray[np.float64] = kept / (np.abs(kept).max(initial=0.0) or 1.0)
    return shades


def percent(share: float) -> str:
    """Format a share in whole percent; shares that would round to 0 as "<1".

    >>> percent(0.234), percent(0.002), percent(-0.1), percent(0.0)
    ('23', '<1', '−10', '0')
    """
    if not np.isfinite(share):
        return "–"
    number = round(100 * share)
    return "<1" if number == 0 and share > 0 else f"{number}".replace("-", "−")


def color_of(shade: float) -> str:
    """Return the colour of a shade from −1 to 1 as #rrggbb.

    >>> color_of(0.0), color_of(1.0)
    ('#ffffff', '#2b5fb3')
    """
    return to_hex(SHADES((shade + 1) / 2))


def check_weights(weights: Any, shape: tuple[int | str, ...]) -> NDArray[np.float64]:
    """Return weights as float64 after checking their shape; a name in `shape` matches any length, NaN means not seen.

    Raises:
        ShapeError: wrong shape, infinite values, or empty.
    """
    array = np.asarray(weights.detach().cpu() if hasattr(weights, "detach") else weights)
    fits = array.ndim == len(shape) and all(
        isinstance(size, str) or size == actual for size, actual in zip(shape, array.shape, strict=True)
    )
    if array.dtype.kind not in "fiub" or not fits or not array.size:
        expected = ", ".join(map(str, shape))
        raise ShapeError(f"Expected weights [{expected}], one per token, got {array.dtype} {list(array.shape)}.")
    if np.isinf(array).any():
        raise ShapeError("Expected finite weights, or NaN for unseen tokens, got infinite values.")
    return array.astype(np.float64)


@dataclass(frozen=True, slots=True)
class RowSummary:
    """Summary of a row of weights, as shares of the sum of their absolute values.

    Attributes:
        special: share of special tokens; None if the text has none.
        first: share of the first token.
        self_share: share of the explained token; None if there is none.
        hidden: share of the hidden tokens by reason.
        entropy: entropy in bits.
        most: entropy of a uniform distribution over the seen tokens, in bits.

    >>> str(RowSummary.of([0.5, 0.25, 0.25], Words(("<s>", "key", " is"), (0, 1, 2), (True, False, False))))
    'special tokens 50 % · first token 50 % · entropy 1.50 of 1.58 bits'
    """

    special: float | None
    first: float
    self_share: float | None
    hidden: Mapping[str, float]
    entropy: float
    most: float

    @classmethod
    def of(
        cls,
        weights: Any,
        words: Words,
        *,
        selected: Sequence[int] = (),
        self_share: float | None = None,
        hidden: Mapping[int, str] | None = None,
    ) -> "RowSummary":
        """Summarise a row of weights [tokens].

        Args:
            weights: the row, NaN for unseen tokens.
            words: the tokens.
            selected: positions of the explained token.
            self_share: its share, if it is not among the weights.
            hidden: hidden positions with the reason.
        """
        checked = check_weights(weights, (words.length,))
        shares = np.abs(np.nan_to_num(checked))
        shares = shares / (shares.sum() or 1.0)
        if selected and self_share is None:
            self_share = float(shares[list(selected)].sum())
        positive, special = shares[shares > 0], np.array(words.special, dtype=bool)
        reasons = dict(hidden or {})
        seen = words.length - int(np.isnan(checked).sum())
        return cls(
            float(shares[special].sum()) if special.any() else None,
            float(shares[0]),
            self_share,
            {
                why: float(sum(shares[p] for p in reasons if reasons[p] == why))
                for why in dict.fromkeys(reasons.values())
            },
            float(-(positive * np.log2(positive)).sum()) + 0.0,
            float(np.log2(max(seen, 1))),
        )

    def __str__(self) -> str:
        parts = [] if self.special is None else [f"special tokens {self.special:.0%}"]
        parts.append(f"first token {self.first:.0%}")
        if self.self_share is not None:
            parts.append(f"query token {self.self_share:.0%}")
        parts.append(f"entropy {self.entropy:.2f} of {self.most:.2f} bits")
        return " · ".join(parts).replace("%", " %").replace("-", "−")

    @property
    def left_out(self) -> str:
        """Sentence on the hidden tokens and their share of the weight; empty if nothing is hidden."""
        parts = [f"{why} ({share:.0%} of the weight)".replace("%", " %") for why, share in self.hidden.items()]
        return f"Not shown: {', '.join(parts)}." if parts else ""
