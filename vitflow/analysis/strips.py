"""Figures of comparisons: images with their maps in columns by method, with captions and colour bars."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from matplotlib.figure import Figure

from vitflow.analysis.clips import Clip
from vitflow.explaining import captions
from vitflow.explaining.saliency import Saliency
from vitflow.images import figures, overlay
from vitflow.images.figures import Band, Block, Cell, Column
from vitflow.images.pen import Limits, Pen
from vitflow.images.reading import image_name
from vitflow.images.typesetting import readable
from vitflow.registry.choices import is_signed
from vitflow.registry.method_table import BASELINES

_Item = TypeVar("_Item")
# Maps of each image.
Images = Sequence[Sequence[Saliency]]

#: Minimum saturated share of a flow that is displayed.
SATURATED_LABEL = 0.01

# Notes on the marked region, by key of `facts`.
_MARKS = {"detection": "The frames mark the detections.", "region": "The outline marks the region."}
# Maximum number of maps per row.
_MOST_MAPS = 5


def columns_of(image: Sequence[Saliency]) -> list[list[Saliency]]:
    """Group an image's maps by method and options; a class given twice ("cat", "top1") appears once."""
    columns: list[list[Saliency]] = []
    for saliency in image:
        shown = saliency.score, saliency.facts.get("detection")
        if not columns or (columns[-1][0].method, columns[-1][0].options) != (saliency.method, saliency.options):
            columns.append([saliency])
        elif shown not in [(each.score, each.facts.get("detection")) for each in columns[-1]]:
            columns[-1].append(saliency)
    return columns


class Strip:
    """Draws the cells of maps for one figure, and then the figure with the colour bars that they need.

    With `same_scale`, all maps of a method have the same limits, which the caller gives.
    """

    def __init__(self, pen: Pen, *, same_scale: bool = False) -> None:
        self.pen, self.same_scale = pen, same_scale
        # Limits that are not a map's own are printed below it.
        self._prints_limits = same_scale or pen.vmin is not None or pen.vmax is not None
        self._drawn: list[tuple[Saliency, Limits]] = []

    def cell(self, saliency: Saliency, limits: Limits | None = None) -> Cell:
        """Draw a map between these limits, by default its own."""
        limits = limits or self.pen.limits(saliency.grid, signed=is_signed(saliency.method))
        self._drawn.append((saliency, limits))
        (low, high), unit = readable(*limits)
        details = [f"{low} to {high} {unit}".strip()] if self._prints_limits else []
        if (share := saliency.facts.get("saturated", 0.0)) >= SATURATED_LABEL:
            details.append(f"{share:.0%} saturated")
        if warning := captions.unreliable(saliency.facts):
            details.append(warning)
        drawn = self.pen.overlay(saliency.grid, saliency.placement, saliency.image, limits, saliency.marked)
        return Cell(drawn, (), tuple(details))

    def block(self, columns: Sequence[Sequence[Saliency]], limits: Sequence[Limits | None]) -> Block:
        """Draw an image with the target of each row, then its maps, each column between its limits."""
        named, first = max(columns, key=lambda maps: (len(maps), maps[0].class_specific)), columns[0][0]
        labels = [tuple(captions.class_lines(each.score, each.class_specific)) for each in named]
        marks = bool(first.facts.keys() & _MARKS)
        references: list[list[Cell]] = []
        if compared := [each.reference for each in named if each.reference is not None]:
            references.append(
                [Cell(self.pen.photograph(image), label) for image, label in zip(compared, labels, strict=True)]
            )
            labels, marks = [()] * len(named), False
        photographs = [
            Cell(
                self.pen.photograph(each.image, each.placement, each.marked if marks else None),
                label,
                (image_name(first.source),),
            )
            for each, label in zip(named, labels, strict=True)
        ]
        maps = [[self.cell(each, ends) for each in column] for column, ends in zip(columns, limits, strict=True)]
        return [photographs, *references, *maps]

    def figure(self, bands: Sequence[Band], note: str) -> Figure:
        """Lay out the cells above a sequential colour bar, a diverging one, or both."""
        two_sided = [(each.score, each.class_specific) for each, ends in self._drawn if overlay.has_two_sides(*ends)]
        bars = [self.pen.bar()] if len(two_sided) < len(self._drawn) else []
        bars += [self.pen.bar(captions.common_sign_labels(two_sided))] if two_sided else []
        return figures.draw_bands(bands, bars=bars, note=note, dpi=self.pen.dpi)

    def note(self, images: Images) -> str:
        """Describe the colours and the marks of the maps that were drawn, and the model."""
        pen, shown = self.pen, [each for image in images for each in image]
        low, high = overlay.ROBUST_PERCENTILES
        ends = f"{low:g}nd to the {high:g}th percentile" if pen.robust else "smallest to the largest value"
        taken = "common to all maps of a method" if self.same_scale else "for each map separately"
        limits = f"Colours run from the {ends} of the patches, {taken}."
        if pen.vmin is not None and pen.vmax is not None:
            limits = f"Colours run from {pen.vmin:g} to {pen.vmax:g}."
        limits += " Its limits are printed below each map." if self._prints_limits else ""
        if pen.soft:
            limits += " Values beyond the limits approach the last colour."
        if pen.marks_unseen and not all(image[0].placement.sees_everything for image in images):
            limits += " The line marks the region the model saw."
        lines = [limits + "".join(f" {note}" for fact, note in _MARKS.items() if fact in shown[0].facts)]
        if any(overlay.has_two_sides(*ends) for _, ends in self._drawn):
            lines.append("Colours of maps with negative values diverge from 0, which is transparent.")
        if against := next((each.facts["against"] for each in shown if "against" in each.facts), None):
            lines.append(f"Class-specific maps explain the score minus {against}.")
        lines.append(f"Model: {captions.model_in_words(shown[0].model, shown[0].model_note)}.")
        return "\n".join(filter(None, lines))


def draw_comparison(images: Images, strip: Strip) -> Figure:
    """Draw one row per image and class, one column per method; methods with several rows are in separate bands."""
    columns = [columns_of(image) for image in images]
    limits: list[Limits | None] = [None] * len(columns[0])
    if strip.same_scale:
        grids = [[each.grid.ravel() for maps in column for each in maps] for column in zip(*columns, strict=True)]
        methods = [column[0].method for column in columns[0]]
        limits = [
            strip.pen.limits(np.concatenate(of_method), signed=is_signed(method))
            for of_method, method in zip(grids, methods, strict=True)
        ]
    first, single = images[0][0], len(columns[0]) == 1 and max(map(len, images)) > 1
    if single and first.reference is None and not first.facts.keys() & _MARKS:
        return strip.figure(list(_by_class(columns, limits[0], strip)), strip.note(images))
    every = range(len(columns[0]))
    several = [index for index in every if any(len(maps[index]) > 1 for maps in columns)]
    parts = sorted(filter(None, ([index for index in every if index not in several], several)))
    heads = [Column("Image"), *([Column("Compared with")] if first.reference is not None else [])]
    bands = [
        (
            [*heads, *(_head(columns[0][index][0]) for index in members)],
            [strip.block([maps[index] for index in members], [limits[index] for index in members]) for maps in columns],
        )
        for part in parts
        for members in in_rows(part, _MOST_MAPS)
    ]
    return strip.figure(bands, strip.note(images))


def _by_class(columns: Sequence[Sequence[Sequence[Saliency]]], limits: Limits | None, strip: Strip) -> Iterator[Band]:
    """Yield a row for each image: its photograph, and the maps of one method for several classes."""
    for [maps] in columns:
        first = maps[0]
        photograph = strip.pen.photograph(first.image, first.placement)
        group = captions.method_in_words(first.definition, first.options)
        for row in in_rows(maps, _MOST_MAPS):
            cells = [[Cell(photograph, (), (image_name(first.source),))]]
            for each in row:
                label = tuple(captions.class_lines(each.score, each.class_specific))
                cells.append([replace(strip.cell(each, limits), caption=label)])
            yield [Column("Image"), *(Column("", group=group) for _ in row)], [cells]


def draw_words(maps: Sequence[Saliency], *, left_out: Sequence[str] = ()) -> Figure:
    """Draw the maps of generated words of an image, and name the words without a map."""
    strip = Strip(Pen(1.5))
    photograph = Cell(strip.pen.photograph(maps[0].image), (), (image_name(maps[0].source),))
    bands: list[Band] = []
    for row in in_rows(maps, _MOST_MAPS):
        heads = [Column(each.label, f"{each.facts['on_image']:.0%} on the image") for each in row]
        bands.append(([Column("Image"), *heads], [[[photograph], *([strip.cell(each)] for each in row)]]))
    method = captions.method_in_words(maps[0].definition, maps[0].options)
    rest = f"\nNo map: {', '.join(left_out)}" if left_out else ""
    return strip.figure(bands, f"{method}. {strip.note([maps])}{rest}")


def draw_clip_words(clips: Sequence[Clip], *, left_out: Sequence[str] = ()) -> Figure:
    """Draw the maps of generated words over key frames of a video: a row per word, a column per frame."""
    strip, first = Strip(Pen(1.25)), clips[0]
    limits = [strip.pen.limits(clip.grid) for clip in clips]
    columns = []
    for index in first.key_frames:
        cells = [Cell(strip.pen.photograph(first.frames[index].image))]
        for clip, ends in zip(clips, limits, strict=True):
            drawn = strip.cell(replace(clip.frames[index], grid=clip.grid[index]), ends)
            cells.append(replace(drawn, caption=(clip.score.name,), details=(f"{clip.shares[index]:.0%} of the map",)))
        columns.append(cells)
    heads = [Column(f"Frame {index * first.span + 1}") for index in first.key_frames]
    frame = first.frames[0]
    notes = [
        f"{captions.method_in_words(frame.definition, frame.options)}.",
        f"The maps of a word have common colours. {first.notes()[0]}",
        f"Model: {captions.model_in_words(frame.model, frame.model_note)}.",
        *([f"No map: {', '.join(left_out)}"] if left_out else []),
    ]
    return strip.figure([(heads, [columns])], "\n".join(notes))


def in_rows(items: Sequence[_Item], most: int) -> list[list[_Item]]:
    """Split items into rows of similar length, at most `most` each."""
    parts = np.array_split(np.arange(len(items)), -(-len(items) // most))
    return [[items[index] for index in part] for part in parts]


def _head(saliency: Saliency) -> Column:
    group = "class-specific" if saliency.class_specific else captions.NOT_SPECIFIC
    if saliency.method in BASELINES:
        group = f"baselines, {captions.NOT_SPECIFIC}"
    described = saliency.definition, saliency.options
    return Column(captions.method_title(*described), captions.departures(*described), group)
