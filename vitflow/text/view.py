"""What all views of words have in common: they are HTML, a figure and plain text, and show themselves in a notebook."""

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

#: A weight's own colour, and that of a negative one; the paper between them is white.
FOR, AGAINST = (43, 95, 179), (179, 82, 32)


@dataclass(frozen=True, kw_only=True)
class View(ABC):
    """A drawing of words with their weights, in any of three forms.

    Attributes:
        selected: positions of the tokens that are asked about: they are marked, and what lies on them sets no scale.
        hidden: positions that are left out or get no shade, and why, as `hide` gives them.
        title: a line above.
        caption: a line below, such as the method and its options.
    """

    selected: Sequence[int] = ()
    hidden: Mapping[int, str] = field(default_factory=dict)
    title: str = ""
    caption: str = ""

    def __post_init__(self) -> None:
        for name in ("title", "caption"):  # they go to terminals as they are
            object.__setattr__(self, name, printable(getattr(self, name), lines=True))

    @abstractmethod
    def html(self) -> str:
        """A fragment of HTML that brings its own style, needs no script and no network, and may stand in any page."""

    @abstractmethod
    def figure(self, *, framed: bool = True) -> Figure:
        """A figure for papers and screens; not framed, it lacks the title and the lines below."""

    @abstractmethod
    def text(self) -> str:
        """Return the strongest tokens as a plain list, one line each, for a terminal."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the figure as .png, .pdf or .svg; return the path.

        Raises:
            OptionError: another suffix.
        """
        return save_figure(self.figure(), path)

    def __str__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: Collection[str] | None = None, exclude: Collection[str] | None = None) -> Any:
        """What a notebook shows."""
        made = {"text/html": self.html, "text/plain": self.text}
        return {
            kind: make()
            for kind, make in made.items()
            if (not include or kind in include) and kind not in (exclude or ())
        }


def fractions(weights: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Weights as shades from −1 to 1 of the largest size that is counted; 0 for those that are not."""
    kept = np.where(counted & np.isfinite(weights), weights, 0.0)
    shades: NDArray[np.float64] = kept / (np.abs(kept).max(initial=0.0) or 1.0)
    return shades


def percent(share: float) -> str:
    """A share as it is printed: whole percents, and what is smaller by its sign.

    >>> percent(0.234), percent(0.002), percent(-0.1), percent(0.0)
    ('23', '<1', '−10', '0')
    """
    if not np.isfinite(share):
        return "–"
    number = round(100 * share)
    return "<1" if number == 0 and share > 0 else f"{number}".replace("-", "−")


def color_of(shade: float) -> str:
    """The colour of a shade from −1 to 1, as #rrggbb on white.

    >>> color_of(0.0), color_of(1.0)
    ('#ffffff', '#2b5fb3')
    """
    end = FOR if shade >= 0 else AGAINST
    return "#" + "".join(f"{round(255 + (channel - 255) * abs(shade)):02x}" for channel in end)


def render(name: str, **values: Any) -> str:
    """A template of this room, filled in; whatever is put in is escaped."""
    return _environment().get_template(name).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vitflow.text"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = percent
    return environment


def embedded(figure: Figure) -> dict[str, Any]:
    """A figure as a data URI, for pages that must need nothing else, and its width in pixels of a page."""
    data = base64.b64encode(figure_bytes(figure, ".png")).decode()
    return {"image": f"data:image/png;base64,{data}", "width": round(96 * figure.get_size_inches()[0])}


def check_weights(weights: Any, shape: tuple[int | str, ...]) -> NDArray[np.float64]:
    """Weights as float64 of a shape, of which a name stands for any length; NaN where a token is not seen.

    Raises:
        ShapeError: another shape, infinite values, or nothing.
    """
    array = np.asarray(weights.detach().cpu() if hasattr(weights, "detach") else weights)
    fits = array.ndim == len(shape) and all(
        isinstance(want, str) or want == have for want, have in zip(shape, array.shape, strict=True)
    )
    if array.dtype.kind not in "fiub" or not fits or not array.size:
        wanted = ", ".join(map(str, shape))
        raise ShapeError(f"Expected weights [{wanted}], one for each token, got {array.dtype} {list(array.shape)}.")
    if np.isinf(array).any():
        raise ShapeError("Expected finite weights, or NaN for tokens that are not seen, got an infinite one.")
    return array.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Trust:
    """Shares of a row of weights, without their signs.

    Attributes:
        special: on special tokens; None where the text has none.
        first: on the first token.
        self_share: on the token that is asked about; None where none is.
        hidden: on what the view leaves out, by the reason.
        entropy: in bits.
        most: the entropy of equal weights on as many tokens.

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
        """What a row of weights [tokens] says of itself; `self_share` is the share of the token that is asked about."""
        shares = np.abs(np.nan_to_num(check_weights(weights, (words.length,))))
        shares = shares / (shares.sum() or 1.0)
        positive, special = shares[shares > 0], np.array(words.special, dtype=bool)
        given = dict(hidden or {})
        seen = words.length - int(np.isnan(check_weights(weights, (words.length,))).sum())
        return cls(
            float(shares[special].sum()) if special.any() else None,
            float(shares[0]),
            self_share,
            {why: float(sum(shares[p] for p in given if given[p] == why)) for why in dict.fromkeys(given.values())},
            float(-(positive * np.log2(positive)).sum()) + 0.0,
            float(np.log2(max(seen, 1))),
        )

    def __str__(self) -> str:
        told = [] if self.special is None else [f"special tokens {self.special:.0%}"]
        told.append(f"first token {self.first:.0%}")
        if self.self_share is not None:
            told.append(f"its own token {self.self_share:.0%}")
        told.append(f"entropy {self.entropy:.2f} of {self.most:.2f} bits")
        return " · ".join(told).replace("%", " %").replace("-", "−")

    @property
    def left_out(self) -> str:
        """What the view leaves out and how much of the weight lies there; empty where it shows all."""
        told = [f"{why} ({share:.0%} of the weight)".replace("%", " %") for why, share in self.hidden.items()]
        return f"Not shown: {', '.join(told)}." if told else ""
