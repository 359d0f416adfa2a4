"""Figures of comparisons: images with their maps in columns by method, with captions and colour bars."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure

from vitflow.explaining import captions
from vitflow.explaining.clips import Clip
from vitflow.explaining.method_table import BASELINES
from vitflow.explaining.saliency import Saliency
from vitflow.images import figures, overlay
from vitflow.images.figures import Cell, Column
from vitflow.images.pen import Bar, Limits, Pen
from vitflow.images.reading import image_name
from vitflow.images.typesetting import readable

_Item = TypeVar("_Item")
# Maps of each image.
Images = Sequence[Sequence[Saliency]]

#: Minimum saturated share that is displayed.
SATURATED_LABEL = 0.01

#: Explanation of saturated flows.
SATURATED = (
    "A saturated flow is limited by its first layer: for such a patch the map does not depend on the layers above."
)

#: What is printed below maps without common limits.
SHARES = "the share of its sum in the top 10% of patches"

# Notes on the marked region, by key of `facts`.
_MARKS = {"detection": "The frames mark the detections.", "region": "The outline marks the region."}

# Maximum number of maps per row.
_MOST_MAPS = 5


def columns_of(image: Sequence[Saliency]) -> list[list[Saliency]]:
    """Group an image's maps by method and options; a class given twice ("cat", "top1") appears once."""
    columns: list[list[Saliency]] = []
    for saliency in image:
        if not columns or (columns[-1][0].method, columns[-1][0].options) != (saliency.method, saliency.options):
            columns.append([saliency])
        elif _shown(saliency) not in map(_shown, columns[-1]):
            columns[-1].append(saliency)
    return columns


def _shown(saliency: Saliency) -> tuple[Any, ...]:
    """Return what a map is of: a class with its score, and a detection."""
    return saliency.score, saliency.facts.get("detection")


def _limits(columns: Sequence[Sequence[Sequence[Saliency]]], pen: Pen, same_scale: bool) -> dict[int, Limits]:
    """Return the values of the first and the last colour of each map, by id()."""
    methods = [[each for maps in column for each in maps] for column in zip(*columns, strict=True)]
    groups = methods if same_scale else [[each] for maps in methods for each in maps]
    return {
        id(each): pen.limits(np.concatenate([other.grid.ravel() for other in maps])) for maps in groups for each in maps
    }


def draw_comparison(images: Images, pen: Pen, *, same_scale: bool = False, timings: bool = False) -> Figure:
    """Draw the maps of images; options as for `Comparison.figure`."""
    columns = [columns_of(image) for image in images]
    limits = _limits(columns, pen, same_scale)
    bands = [
        (
            [
                Column("Image"),
                *([Column("Compared with")] if images[0][0].reference is not None else []),
                *(_head(columns[0][index][0]) for index in members),
            ],
            [_block([maps[index] for index in members], limits, pen, timings, same_scale) for maps in columns],
        )
        for members in _bands(columns)
    ]
    shown = [each for image in images for each in image if id(each) in limits]
    bars = bars_of([(each, limits[id(each)]) for each in shown], pen)
    return figures.draw_bands(bands, bars=bars, note=_note(images, pen, same_scale, bars), dpi=pen.dpi)


def bars_of(maps: Sequence[tuple[Saliency, Limits]], pen: Pen) -> list[Bar]:
    """Return the colour bars for maps with their limits: sequential, diverging, or both."""
    two_sided = [(each.score, each.class_specific) for each, limits in maps if overlay.has_two_sides(*limits)]
    one_sided = [pen.bar()] if len(two_sided) < len(maps) else []
    return one_sided + ([pen.bar(captions.ends_of_all(two_sided))] if two_sided else [])


def draw_words(maps: Sequence[Saliency], *, left_out: Sequence[str] = ()) -> Figure:
    """Draw the maps of generated words side by side, after the image.

    Args:
        maps: one for each word, all of the same image.
        left_out: words without a map, for the caption.
    """
    pen = Pen.of(1.5, {})
    photograph = Cell(pen.photograph(maps[0].image), (), (image_name(maps[0].source),))
    bands = []
    for row in in_rows(maps, _MOST_MAPS):
        cells = [[map_cell(each, pen.limits(each.grid), pen)] for each in row]
        heads = [Column(each.label, f"{each.facts['on_image']:.0%} on the image") for each in row]
        bands.append(([Column("Image"), *heads], [[[photograph], *cells]]))
    method = f"{captions.method_in_words(maps[0].definition, maps[0].options)}. "
    rest = f"\nNo map: {', '.join(left_out)}" if left_out else ""
    bars = bars_of([(each, pen.limits(each.grid)) for each in maps], pen)
    return figures.draw_bands(bands, bars=bars, note=method + _note([maps], pen, False, bars) + rest, dpi=pen.dpi)


def draw_clip_words(clips: Sequence[Clip], *, left_out: Sequence[str] = ()) -> Figure:
    """Draw the maps of generated words over key frames of a video: a row per word, a column per frame.

    Args:
        clips: one for each word, all of the same video.
        left_out: words without a map, for the caption.
    """
    pen, first = Pen.of(1.25, {}), clips[0]
    limits = [pen.limits(clip.grid) for clip in clips]
    columns = []
    for index in first.key_frames:
        cells = [Cell(pen.photograph(first.frames[index].image))]
        for clip, ends in zip(clips, limits, strict=True):
            drawn = map_cell(replace(clip.frames[index], grid=clip.grid[index]), ends, pen)
            cells.append(replace(drawn, caption=(clip.score.name,), details=(f"{clip.shares[index]:.0%} of the map",)))
        columns.append(cells)
    heads = [Column(f"Frame {index * first.span + 1}") for index in first.key_frames]
    maps = [clip.frames[0] for clip in clips]
    bars = bars_of(list(zip(maps, limits, strict=True)), pen)
    notes = [
        f"{captions.method_in_words(maps[0].definition, maps[0].options)}.",
        f"The maps of a word have common colours. {first.notes()[0]}",
        f"Model: {captions.model_in_words(maps[0].model, maps[0].model_note)}.",
        *([f"No map: {', '.join(left_out)}"] if left_out else []),
    ]
    return figures.draw_bands([(heads, [columns])], bars=bars, note="\n".join(notes), dpi=pen.dpi)


def in_rows(items: Sequence[_Item], most: int) -> list[list[_Item]]:
    """Split items into rows of similar length, at most `most` each."""
    parts = np.array_split(np.arange(len(items)), -(-len(items) // most))
    return [[items[index] for index in part] for part in parts]


def _bands(columns: Sequence[Sequence[Sequence[Saliency]]]) -> list[list[int]]:
    """Split column indices into bands; columns with a row for each class are separate from the others."""
    every = range(len(columns[0]))
    several = [index for index in every if any(len(maps[index]) > 1 for maps in columns)]
    groups = [[index for index in every if index not in several], several]
    return [row for group in sorted(filter(None, groups)) for row in in_rows(group, _MOST_MAPS)]


def _block(
    columns: Sequence[Sequence[Saliency]], limits: Mapping[int, Limits], pen: Pen, timings: bool, same_scale: bool
) -> list[list[Cell]]:
    """Return the cells of an image: the image with the target of each row, and its maps."""
    first = columns[0][0]
    named = max(columns, key=lambda maps: (len(maps), maps[0].class_specific))
    name, labels = (image_name(first.source),), [tuple(captions.class_lines(each.score)) for each in named]
    shown = {"timings": timings, "same_scale": same_scale}
    maps = [[map_cell(each, limits[id(each)], pen, **shown) for each in column] for column in columns]
    if first.reference is None:
        about_region = first.facts.keys() & set(_MARKS)
        marked = [pen.marked_photograph(each.image, each.marked if about_region else None) for each in named]
        return [[Cell(image, label, name) for image, label in zip(marked, labels, strict=True)], *maps]
    photographs = [Cell(pen.photograph(each.image), (), name) for each in named]
    compared = [each.reference for each in named if each.reference is not None]
    references = [Cell(pen.photograph(image), label) for image, label in zip(compared, labels, strict=True)]
    return [photographs, references, *maps]


def map_cell(saliency: Saliency, limits: Limits, pen: Pen, *, timings: bool = False, same_scale: bool = False) -> Cell:
    """Return the cell of a map with the share in its highest patches and, with `timings`, its computation time.

    Limits that are not the map's own, by `same_scale` or set by the caller, are printed instead.
    """
    (low, high), unit = readable(*limits)
    details = [
        f"{low} to {high} {unit}".strip() if _common_limits(pen, same_scale) else captions.top_share(saliency.grid)
    ]
    if timings:
        details.append(captions.duration(saliency.seconds))
    if (share := saliency.facts.get("saturated", 0.0)) >= SATURATED_LABEL:
        details.append(f"{share:.0%} saturated")
    if warning := captions.unreliable(saliency.facts):
        details.append(warning.partition(":")[0])
    drawn = pen.overlay(saliency.grid, saliency.placement, saliency.image, limits, saliency.marked)
    return Cell(drawn, (), tuple(details))


def _common_limits(pen: Pen, same_scale: bool) -> bool:
    """Return True if the colours of several maps have common limits."""
    return same_scale or pen.vmin is not None or pen.vmax is not None


def _head(saliency: Saliency) -> Column:
    group = "class-specific" if saliency.class_specific else "not class-specific"
    if saliency.method in BASELINES:
        group = "baselines, not class-specific"
    method = saliency.definition
    return Column(method.title, captions.departures(method, saliency.options), group)


def _note(images: Images, pen: Pen, same_scale: bool, bars: Sequence[Bar]) -> str:
    low, high = overlay.ROBUST_PERCENTILES
    ends = f"{low:g}nd to the {high:g}th percentile" if pen.robust else "smallest to the largest value"
    taken = "common to all maps of a method" if same_scale else "for each map separately"
    if pen.vmin is not None and pen.vmax is not None:
        limits = f"Colours run from {pen.vmin:g} to {pen.vmax:g}."
    else:
        limits = f"Colours run from the {ends} of the patches, {taken}."
    limits += f" Printed below each map: {'its limits' if _common_limits(pen, same_scale) else SHARES}."
    if pen.soft:
        limits += " Values beyond the limits approach the last colour."
    seen = "" if all(p[0].placement.sees_everything for p in images) else " The line marks the region the model saw."
    seen += "".join(f" {note}" for fact, note in _MARKS.items() if fact in images[0][0].facts)
    seen += f"\n{pen.note}" if pen.note else ""
    two_sides = any(bar.two_sides for bar in bars)
    further = "\nColours of maps with negative values diverge from 0, which is transparent." if two_sides else ""
    shown = [each for image in images for each in image]
    if any(each.facts.get("saturated", 0.0) >= SATURATED_LABEL for each in shown):
        further += f"\n{SATURATED}"
    against = next((each.facts["against"] for each in shown if "against" in each.facts), None)
    further += f"\nClass-specific maps explain the score minus {against}." if against else ""
    return f"{limits}{seen}{further}\nModel: {captions.model_in_words(shown[0].model, shown[0].model_note)}."
