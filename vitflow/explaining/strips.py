"""The strip of a comparison: photographs with their maps, in columns by method, and what stands around them."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from matplotlib.figure import Figure

from vitflow.explaining import captions
from vitflow.explaining.method_table import BASELINES
from vitflow.explaining.saliency import Saliency
from vitflow.images import figures, overlay
from vitflow.images.figures import Cell, Column
from vitflow.images.pen import Bar, Limits, Pen
from vitflow.images.reading import image_name
from vitflow.images.typesetting import readable

_Item = TypeVar("_Item")
# For each image its maps.
Images = Sequence[Sequence[Saliency]]

#: The share of saturated flows from which on it is told: below it the map says as much as one with none.
SATURATED_LABEL = 0.01

#: What a saturated flow is.
SATURATED = (
    "A saturated flow is as large as its first layer lets it be: for such a patch the map tells nothing of the layers "
    "above."
)

# Maps that stand side by side beside their photograph; more go into another row, where they are not too small.
_MOST_MAPS = 5


def columns_of(image: Sequence[Saliency]) -> list[list[Saliency]]:
    """One image's maps by method and options; a class that was asked for twice ("cat", "top1") appears once."""
    columns: list[list[Saliency]] = []
    for one in image:
        if not columns or (columns[-1][0].method, columns[-1][0].options) != (one.method, one.options):
            columns.append([one])
        elif one.score not in [other.score for other in columns[-1]]:
            columns[-1].append(one)
    return columns


def _limits(columns: Sequence[Sequence[Sequence[Saliency]]], pen: Pen, same_scale: bool) -> dict[int, Limits]:
    """The values of the first and the last colour of each map, by id()."""
    methods = [[one for maps in column for one in maps] for column in zip(*columns, strict=True)]
    groups = methods if same_scale else [[one] for maps in methods for one in maps]
    return {
        id(one): pen.limits(np.concatenate([other.grid.ravel() for other in maps])) for maps in groups for one in maps
    }


def draw_comparison(images: Images, pen: Pen, *, same_scale: bool = False, timings: bool = False) -> Figure:
    """Draw the maps of images as a strip; the options are those of `Comparison.strip`."""
    columns = [columns_of(image) for image in images]
    limits = _limits(columns, pen, same_scale)
    bands = [
        (
            [
                Column("Photograph"),
                *([Column("Compared with")] if images[0][0].reference is not None else []),
                *(_head(columns[0][index][0]) for index in members),
            ],
            [_block([maps[index] for index in members], limits, pen, timings) for maps in columns],
        )
        for members in _bands(columns)
    ]
    shown = [one for image in images for one in image if id(one) in limits]
    bars = bars_of([(one, limits[id(one)]) for one in shown], pen)
    return figures.draw_bands(bands, bars=bars, note=_note(images, pen, same_scale, bars), dpi=pen.dpi)


def bars_of(maps: Sequence[tuple[Saliency, Limits]], pen: Pen) -> list[Bar]:
    """The colour bars that maps with their limits need: from low to high, on both sides of 0, or one of each."""
    two_sided = [(one.score, one.class_specific) for one, limits in maps if overlay.has_two_sides(*limits)]
    one_sided = [pen.bar()] if len(two_sided) < len(maps) else []
    return one_sided + ([pen.bar(captions.ends_of_all(two_sided))] if two_sided else [])


def draw_words(maps: Sequence[Saliency], *, left_out: Sequence[str] = ()) -> Figure:
    """Draw the maps of written words side by side, after the photograph.

    Args:
        maps: one for each word, all of one image.
        left_out: what has no map, to be told.
    """
    pen = Pen.of(1.5, {})
    photograph = Cell(pen.photograph(maps[0].image), (), (image_name(maps[0].source),))
    bands = []
    for row in in_rows(maps, _MOST_MAPS):
        cells = [[map_cell(one, pen.limits(one.grid), pen)] for one in row]
        heads = [Column(one.label, f"{one.facts['on_image']:.0%} on the image") for one in row]
        bands.append(([Column("Photograph"), *heads], [[[photograph], *cells]]))
    told = f"{captions.method_in_words(maps[0].definition, maps[0].options)}. "
    rest = f"\nNo map: {', '.join(left_out)}" if left_out else ""
    bars = bars_of([(one, pen.limits(one.grid)) for one in maps], pen)
    return figures.draw_bands(bands, bars=bars, note=told + _note([maps], pen, False, bars) + rest, dpi=pen.dpi)


def in_rows(items: Sequence[_Item], most: int) -> list[list[_Item]]:
    """Items in as few rows of at most so many as will do, all of about the same length."""
    parts = np.array_split(np.arange(len(items)), -(-len(items) // most))
    return [[items[number] for number in part] for part in parts]


def _bands(columns: Sequence[Sequence[Sequence[Saliency]]]) -> list[list[int]]:
    """Which columns stand side by side: not too many, and those with a row for each class apart from those without."""
    every = range(len(columns[0]))
    several = [index for index in every if any(len(maps[index]) > 1 for maps in columns)]
    groups = [[index for index in every if index not in several], several]
    return [row for group in sorted(filter(None, groups)) for row in in_rows(group, _MOST_MAPS)]


def _block(
    columns: Sequence[Sequence[Saliency]], limits: Mapping[int, Limits], pen: Pen, timings: bool
) -> list[list[Cell]]:
    """One image's cells: itself, with the class that each row explains, and its maps."""
    first = columns[0][0]
    named = max(columns, key=lambda maps: (len(maps), maps[0].class_specific))
    name, lines = (image_name(first.source),), [tuple(captions.class_lines(one.score)) for one in named]
    maps = [[map_cell(one, limits[id(one)], pen, timings=timings) for one in column] for column in columns]
    if first.reference is None:
        return [[Cell(pen.photograph(one.image), told, name) for one, told in zip(named, lines, strict=True)], *maps]
    photographs = [Cell(pen.photograph(one.image), (), name) for one in named]
    compared = [one.reference for one in named if one.reference is not None]
    return [photographs, [Cell(pen.photograph(one), told) for one, told in zip(compared, lines, strict=True)], *maps]


def map_cell(saliency: Saliency, limits: Limits, pen: Pen, *, timings: bool = False, thousandths: bool = False) -> Cell:
    """A map with the values of its first and last colour, and with the time it took where that is asked for.

    In thousandths the values stand without a unit: the caller tells it once for all of them.
    """
    (low, high), unit = readable(*limits, power=-3 if thousandths else None)
    details = [f"{low} to {high} {'' if thousandths else unit}".strip()]
    if timings:
        details.append(captions.duration(saliency.seconds))
    if (share := saliency.facts.get("saturated", 0.0)) >= SATURATED_LABEL:
        details.append(f"{share:.0%} saturated")
    if told := captions.unsure(saliency.facts):
        details.append(told.partition(":")[0])
    drawn = pen.overlay(saliency.grid, saliency.placement, saliency.image, limits, saliency.patch_box)
    return Cell(drawn, (), tuple(details))


def _head(saliency: Saliency) -> Column:
    group = "class-specific" if saliency.class_specific else "not class-specific"
    if saliency.method in BASELINES:
        group = "baselines, not class-specific"
    method = saliency.definition
    return Column(method.title, captions.departures(method, saliency.options), group)


def _note(images: Images, pen: Pen, same_scale: bool, bars: Sequence[Bar]) -> str:
    low, high = overlay.ROBUST_PERCENTILES
    ends = f"{low:g}nd to the {high:g}th percentile" if pen.robust else "smallest to the largest value"
    taken = "the same for all maps of a method" if same_scale else "for each map by itself"
    if pen.vmin is not None and pen.vmax is not None:
        limits = f"Colours run from {pen.vmin:g} to {pen.vmax:g}."
    else:
        limits = f"Colours run from the {ends} of the patches, {taken}; these limits stand below each map."
    if pen.soft:
        limits += " Values beyond them near the last colour."
    seen = "" if all(p[0].placement.sees_everything for p in images) else (" The line bounds what the model saw.")
    seen += f"\n{pen.contours}" if pen.contours else ""
    two_sides = any(bar.two_sides for bar in bars)
    around = "\nA map with negative values has colours on both sides of 0, which is clear." if two_sides else ""
    shown = [one for image in images for one in image]
    if any(one.facts.get("saturated", 0.0) >= SATURATED_LABEL for one in shown):
        around += f"\n{SATURATED}"
    against = next((one.facts["against"] for one in shown if "against" in one.facts), None)
    around += f"\nClass-specific maps are of a number less {against}." if against else ""
    return f"{limits}{seen}{around}\nModel: {captions.model_in_words(shown[0].model, shown[0].model_note)}."
