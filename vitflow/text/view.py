"""Base class and helpers of the views of a text: HTML for notebooks, figures and plain text."""

import base64
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import ShapeError, printable
from vitflow.images.figures import figure_bytes, save_figure
from vitflow.text.layout import Words

#: RGB of positive and of negative weights; 0 is white.
POSITIVE, NEGATIVE = (43, 95, 179), (179, 82, 32)


@dataclass(frozen=True, kw_only=True)
class View(ABC):
    """Tokens with their weights, as HTML, a figure or plain text.

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
    def html(self) -> str:
        """Return a self-contained HTML fragment with inline CSS, without scripts or external files."""

    @abstractmethod
    def figure(self, *, framed: bool = True) -> Figure:
        """Return the figure; without title and caption if not `framed`."""

    @abstractmethod
    def text(self) -> str:
        """Return the strongest tokens as plain text, one per line."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the figure as .png, .pdf or .svg; return the path.

        Raises:
            OptionError: unsupported suffix.
        """
        return save_figure(self.figure(), path)

    def __str__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: Collection[str] | None = None, exclude: Collection[str] | None = None) -> Any:
        """Return the HTML and plain text that a notebook displays."""
        renderers = {"text/html": self.html, "text/plain": self.text}
        return {
            kind: renderer()
            for kind, renderer in renderers.items()
            if (not include or kind in include) and kind not in (exclude or ())
        }


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
    end = POSITIVE if shade >= 0 else NEGATIVE
    return "#" + "".join(f"{round(255 + (channel - 255) * abs(shade)):02x}" for channel in end)


def render(name: str, **values: Any) -> str:
    """Render a template of vitflow.text with autoescaping."""
    return _environment().get_template(name).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vitflow.text"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = percent
    return environment


def embedded(figure: Figure) -> dict[str, Any]:
    """Return a figure as a PNG data URI, "image", and its "width" in CSS pixels."""
    data = base64.b64encode(figure_bytes(figure, ".png")).decode()
    return {"image": f"data:image/png;base64,{data}", "width": round(96 * figure.get_size_inches()[0])}


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
class Trust:
    """Summary of a row of weights, as shares of the sum of their absolute values.

    Attributes:
        special: share of special tokens; None if the text has none.
        first: share of the first token.
        self_share: share of the explained token; None if there is none.
        hidden: share of the hidden tokens by reason.
        entropy: entropy in bits.
        most: entropy of a uniform distribution over the seen tokens, in bits.

    >>> str(Trust.of([0.5, 0.25, 0.25], Words(("<s>", "key", " is"), (0, 1, 2), (True, False, False))))
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
        cls, weights: Any, words: Words, *, self_share: float | None = None, hidden: Mapping[int, str] | None = None
    ) -> "Trust":
        """Summarise a row of weights [tokens]; `self_share` is the share of the explained token."""
        shares = np.abs(np.nan_to_num(check_weights(weights, (words.length,))))
        shares = shares / (shares.sum() or 1.0)
        positive, special = shares[shares > 0], np.array(words.special, dtype=bool)
        reasons = dict(hidden or {})
        seen = words.length - int(np.isnan(check_weights(weights, (words.length,))).sum())
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
