"""What all views of words have in common: they are HTML, a figure and plain text, and show themselves in a notebook."""

import base64
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import printable
from vitflow.pictures.figures import figure_bytes, save_figure
from vitflow.pictures.typesetting import GREY, LEADING, SMALL, TITLE, Page, wrap

#: A weight's own colour, and that of a negative one; the paper between them is white.
FOR, AGAINST = (43, 95, 179), (179, 82, 32)
#: Inches around a figure.
MARGIN = 0.12


@dataclass(frozen=True, kw_only=True)
class View(ABC):
    """A drawing of words with their weights, in any of three forms.

    Attributes:
        asked: positions of the tokens that are asked about: they are marked, and what lies on them sets no scale.
        hidden: positions that are left out or get no shade, and why, as `hide` gives them.
        title: a line above.
        caption: a line below, such as the method and its options.
    """

    asked: Sequence[int] = ()
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
    def text(self, *, color: bool = False, width: int = 80, plain: bool = False) -> str:
        """Lines for a terminal.

        Args:
            color: shade words by colour, for terminals that can.
            width: characters of a line.
            plain: draw bars with ASCII alone.
        """

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


def draw_title(page: Page, title: str) -> float:
    """Set a title at the top of a page; returns where the drawing may begin."""
    y = MARGIN
    for line in wrap(title, page.width - 2 * MARGIN, TITLE, lines=3, weight="bold") if title else ():
        y += TITLE * LEADING
        page.line(line, MARGIN, y, TITLE, ha="left", weight="bold")
    return y


def draw_foot(page: Page, paragraphs: Iterable[str], y: float) -> Figure:
    """Set small lines below a drawing that ends at y; returns the finished figure."""
    for paragraph in paragraphs:
        for line in wrap(paragraph, page.width - 2 * MARGIN, SMALL, lines=4):
            y += SMALL * LEADING
            page.line(line, MARGIN, y, SMALL, ha="left", color=GREY)
    return page.finish(y + MARGIN)


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
