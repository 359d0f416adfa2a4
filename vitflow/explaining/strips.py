"""The strip of a comparison: photographs with their maps, in columns by method, and what stands around them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.demo import limits_of
from vitflow.explaining.method_table import BASELINES, get_method
from vitflow.explaining.saliency import Saliency
from vitflow.pictures import figures, overlay
from vitflow.pictures.figures import Bar, Cell, Column
from vitflow.pictures.images import image_name
from vitflow.pictures.options import Interpolation, Scaling

# For each picture its maps.
Pictures = Sequence[Sequence[Saliency]]

_TITLES = {
    "attention": "Raw attention",
    "rollout": "Attention rollout",
    "flow": "Attention flow",
    "gradient_rollout": "Gradient rollout",
    "gae": "GAE",
    "consensus": "Consensus",
    "gradcam": "Grad-CAM",
    "input_gradient": "Input gradient",
    "occlusion": "Blank-out",
    "random": "Random map",
    "centre": "Centre prior",
}
_SCALED = {
    "picture": "taken for each method and picture, over all classes of the picture",
    "column": "taken for each method, over all pictures and classes",
    "map": "taken for each map",
}


def columns_of(picture: Sequence[Saliency]) -> list[list[Saliency]]:
    """One picture's maps by method and options; a class that was asked for twice ("cat", "top1") appears once."""
    columns: list[list[Saliency]] = []
    for one in picture:
        if not columns or (columns[-1][0].method, columns[-1][0].options) != (one.method, one.options):
            columns.append([one])
        elif (one.target, one.contrast) not in [(other.target, other.contrast) for other in columns[-1]]:
            columns[-1].append(one)
    return columns


def _limits(pictures: Pictures, scaling: Scaling, **limits: Any) -> dict[int, tuple[float, float]]:
    """The values of the first and the last colour of each map, by id()."""
    groups: dict[tuple[int, ...], list[Saliency]] = {}
    for number, picture in enumerate(pictures):
        for column, maps in enumerate(columns_of(picture)):
            for row, one in enumerate(maps):
                key = {"picture": (number, column), "column": (column,), "map": (number, column, row)}[scaling]
                groups.setdefault(key, []).append(one)
    return {
        id(one): overlay.scale_range(np.concatenate([other.grid.ravel() for other in maps]), **limits)
        for maps in groups.values()
        for one in maps
    }


@dataclass(frozen=True)
class Pen:
    """How maps are drawn."""

    width: float
    dpi: int
    interpolation: Interpolation
    soft: bool
    blending: Mapping[str, Any]

    def photograph(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The picture in the size that it has in the strip."""
        height, width = figures.panel_size((image.shape[0], image.shape[1]), width=self.width, dpi=self.dpi)
        smaller = height <= image.shape[0]
        resized = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if smaller else cv2.INTER_CUBIC)
        return np.asarray(resized, dtype=np.uint8)

    def overlay(self, saliency: Saliency, limits: tuple[float, float]) -> NDArray[np.uint8]:
        """The map over the picture, both in the size that they have in the strip."""
        picture = self.photograph(saliency.image)
        # The placement's coordinates are continuous, so that it fits the picture in any size.
        placement = replace(saliency.placement, image_size=picture.shape[:2])
        heatmap = overlay.upsample(saliency.grid, placement, interpolation=self.interpolation)
        return overlay.blend(picture, heatmap, vmin=limits[0], vmax=limits[1], soft=self.soft, **self.blending)

    def bar(self, two_sides: bool) -> Bar:
        """The colours from low to high, or from below 0 to above it, as they look over a photograph's mid-grey."""
        size = round(0.07 * self.dpi), round(1.1 * self.dpi)
        labels = ("below 0", "above 0") if two_sides else ("low", "high")
        reach = 1.5 if self.soft else 1.0  # beyond a soft limit colours go on
        low = -1 if two_sides else 0
        blending = {**self.blending, "contours": False}
        ramp = np.tile(np.linspace(low * reach, reach, size[1]), (size[0], 1))
        grey = np.full((*size, 3), 128, np.uint8)
        return Bar(overlay.blend(grey, ramp, vmin=low, vmax=1, soft=self.soft, **blending), labels)


def draw_comparison(
    pictures: Pictures, pen: Pen, scaling: Scaling, *, vmin: float | None, vmax: float | None, robust: bool
) -> Figure:
    """Draw the maps of pictures as a strip; the options are those of `Comparison.strip`."""
    limits = _limits(pictures, scaling, vmin=vmin, vmax=vmax, robust=robust)
    columns = [columns_of(picture) for picture in pictures]
    blocks = [
        [[_photograph(maps, pen)], *([_cell(one, limits[id(one)], pen, len(c) > 1) for one in c] for c in maps)]
        for maps in columns
    ]
    heads = [Column("Photograph"), *(_head(maps[0]) for maps in columns[0])]
    sides = sorted({overlay.has_two_sides(low, high) for low, high in limits.values()})
    note = _note(pictures, scaling, robust, (vmin, vmax), True in sides)
    return figures.draw_strip(heads, blocks, bars=[pen.bar(two) for two in sides], note=note, dpi=pen.dpi)


def _photograph(columns: Sequence[Sequence[Saliency]], pen: Pen) -> Cell:
    """The picture itself, with the class that its row explains; where there are several, each map names its own."""
    first = columns[0][0]
    classes = [maps for maps in columns if len(maps) > 1]
    caption = () if classes else tuple(_class_lines(next((m[0] for m in columns if m[0].class_specific), first)))
    return Cell(pen.photograph(first.image), caption, (image_name(first.source),))


def _class_lines(saliency: Saliency) -> Iterator[str]:
    if saliency.contrast is not None:
        yield from (saliency.label, saliency.contrast.told)
    if saliency.target is not None and saliency.probability is not None:
        chance = "<0.1%" if saliency.probability < 0.0005 else f"{saliency.probability:.1%}"
        # The probability of a long name gets a line of its own, so that it is not cut off.
        yield from (saliency.label, chance) if len(saliency.label) > 40 else (f"{saliency.label}, {chance}",)


def _cell(saliency: Saliency, limits: tuple[float, float], pen: Pen, name_class: bool) -> Cell:
    low, high = limits
    details = [f"{format_number(low)} – {format_number(high)} · {_duration(saliency.seconds)}"]
    share = saliency.facts.get("saturated")
    if share is not None:
        details.append(f"{share:.0%} saturated")
    caption = tuple(_class_lines(saliency)) if name_class else ()
    return Cell(pen.overlay(saliency, limits), caption, tuple(details))


def format_number(value: float) -> str:
    """A number in a few characters, such as 0.042 or 9.9e−5."""
    return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def _head(saliency: Saliency) -> Column:
    method = saliency.method
    title = _TITLES.get(method, method)  # a registered method is called what its author called it
    group = "class-specific" if saliency.class_specific else "not class-specific"
    if method in BASELINES:
        group = "baselines, not class-specific"
    return Column(title, own_options(saliency), group)


def own_options(saliency: Saliency) -> str:
    """What differs from the method's defaults, such as "discard ratio 0.9", or the preset that this amounts to."""
    method = get_method(saliency.method)
    differing = {name: value for name, value in saliency.options.items() if value != method.defaults.get(name)}
    for name, preset in method.presets.items():
        if differing and {**method.defaults, **preset} == saliency.options:
            return "as in the paper" if name == "paper" else f"preset {name}"
    return ", ".join(_option(name, value) for name, value in differing.items())


def _option(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"not {words}"
    if isinstance(value, tuple | list):
        value = ", ".join(str(part) for part in value)
        return f"{words} ({value})"
    return f"{words} {value}"


def _note(
    pictures: Pictures, scaling: Scaling, robust: bool, given: tuple[float | None, float | None], two_sides: bool
) -> str:
    low, high = overlay.ROBUST_PERCENTILES
    ends = f"{low:g}nd to the {high:g}th percentile" if robust else "smallest to the largest value"
    if None not in given:
        limits = f"Colours run from {given[0]:g} to {given[1]:g}."
    else:
        limits = f"Colours run from the {ends} of the patches, {_SCALED[scaling]}; these limits stand below each map."
    seen = "" if all(p[0].placement.sees_everything for p in pictures) else (" The line bounds what the model saw.")
    around = "\nA map with negative values has colours on both sides of 0, which is clear." if two_sides else ""
    first = pictures[0][0]
    known = f", which {told}" if (told := limits_of(first.model)) else ""
    return f"{limits}{seen}{around}\nModel: {first.model}{known}."
