"""Saliency: the result of every method for images."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, log, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, SameClassError
from vitflow.explaining import captions
from vitflow.explaining.inputs import crop_note
from vitflow.explaining.targets import Score
from vitflow.files import write_atomically
from vitflow.images.geometry import Placement
from vitflow.images.pen import Mark, Pen, check_marks
from vitflow.images.preprocessing import upsample
from vitflow.images.reading import image_name, write_image
from vitflow.registry.choices import is_signed
from vitflow.registry.method_table import Method, get_method

if TYPE_CHECKING:  # matplotlib is loaded only to draw a figure
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

_EMPTY = "the map is 0 everywhere and shows nothing"


@dataclass(frozen=True, slots=True, eq=False)
class Saliency:
    """Saliency map of one image by one method.

    Attributes:
        grid: the map on the patch grid, float32 [rows, cols], unscaled.
        placement: position of the model input on the image, and the pixels of it that the grid covers.
        image: the original image, uint8 RGB [height, width, 3].
        source: the image's name.
        model: the model's id.
        method: the method's name.
        options: every option of the method with the value used.
        class_specific: whether the map depends on the target.
        score: the target, by default the predicted class, with its probability; or a contrast of two classes with the
            difference of their logits.
        facts: further facts about the map, by the keys below; only those that apply.
        reference: reference image of a similarity, uint8 RGB [height, width, 3]; else None.
        region: region of the image that a class was explained in, bool [height, width]; else None.
        pixels: the map at the size of the model input, float32 [height, width], if the method gives one: overlays
            and figures draw it; `heatmap`, strips and evaluations use the grid.
        significant: patches whose value is above 0 at 95 %, bool [rows, cols], which figures outline; None if unknown.
        model_input: the tensor that was explained, [channels, height, width]; None if the input was made from `image`.
        seconds: time of the forward pass (the image's share of its batch) and of the method.

    Facts:
        readout: the tokens at which the map starts.
        model_note: note for readers that the model carries.
        random: True if the model used random numbers, as Monte-Carlo dropout does.
        note: the map is 0 everywhere, the outputs may be probabilities already, or the class is very improbable.
        cosine, against: similarity behind a softmax over prompts, and what is subtracted from the score.
        blank: value and display of the score of the image replaced by its mean colour; for a word also with_image.
        refinement, patch_box: why the map is not refined, and edges of the option `patch` if it is on another grid.
        layers, flow_layers, below: first and last layer of a rollout, of a flow, and of the rollout below a flow.
        saturated, compared_with: share of saturated flows, and what each patch is compared with by similarity.
        cam_layer, cam_partial: module of Grad-CAM, and True if the output is also computed from other layers.
        reliability, hidden: split-half correlation of sampling, and how patches were hidden.
        detection: box, probability and query; also requested and iou if a box was given.
        region: kind (of), mean_logit and pixels.
        on_image, on_first_patch, on_edges, on_video, layer: of a generated word, see `Generation.image` and `clip`.

    >>> from vitflow import explain
    >>> from vitflow.demo import sample_images
    >>> saliency = explain(sample_images()[0], model="demo", method="gae")
    >>> saliency.grid.shape, saliency.heatmap.shape, saliency.overlay().shape, saliency.label
    ((12, 12), (320, 320), (320, 320, 3), 'orange disc')
    """

    grid: NDArray[np.float32]
    placement: Placement
    image: NDArray[np.uint8]
    source: str
    model: str
    method: str
    options: Mapping[str, Any]
    class_specific: bool = False
    score: Score = field(default_factory=Score)
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    reference: NDArray[np.uint8] | None = None
    region: NDArray[np.bool_] | None = None
    pixels: NDArray[np.float32] | None = None
    significant: NDArray[np.bool_] | None = None
    model_input: "Tensor | None" = field(default=None, repr=False)

    def __post_init__(self) -> None:
        note = self.facts.get("note", "")
        if not self.grid.any() and _EMPTY not in note:
            object.__setattr__(self, "facts", {**self.facts, "note": f"{note}; {_EMPTY}" if note else _EMPTY})

    def __repr__(self) -> str:
        rows, cols = self.grid.shape
        height, width = self.image.shape[:2]
        target = f", class={self.label!r}" if self.class_specific and self.label else ""
        if self.label and not self.class_specific:
            target = f"; {', '.join(captions.class_lines(self.score, False))}"
        patches = f"{rows} × {cols} patches on {width} × {height} pixels"
        method = captions.method_label(self.method, self.options, class_specific=self.class_specific)
        return f"Saliency({image_name(self.source)!r}, {method}, {patches}{target})"

    def _repr_mimebundle_(self, **_: Any) -> Any:
        """Return the figure for notebooks."""
        from vitflow.images.figures import NOTEBOOK_DPI, bundle

        return bundle(repr(self), self.figure(dpi=NOTEBOOK_DPI))

    @property
    def model_note(self) -> str:
        """Note for readers that the model carries, or an empty string."""
        return str(self.facts.get("model_note", ""))

    @property
    def definition(self) -> Method:
        """Entry of the method table."""
        return get_method(self.method)

    @property
    def label(self) -> str:
        """Name of the target, or "class 3" if names are unknown; empty if the model has no classes."""
        return self.score.name

    @property
    def target(self) -> int | None:
        """Index of the target; None for a contrast, or if the model has no classes."""
        return self.score.index

    @property
    def class_name(self) -> str | None:
        """Name of the target class, or None."""
        return self.score.class_name

    @property
    def probability(self) -> float | None:
        """Probability of the target, or None."""
        return self.score.probability

    @property
    def heatmap(self) -> NDArray[np.float32]:
        """Map upsampled to the original image, float32 [height, width], unscaled; NaN where the model saw nothing."""
        return upsample(self.grid, self.placement)

    @property
    def drawn(self) -> NDArray[np.float32]:
        """The map that figures show: `pixels` or, without them, `grid`."""
        return self.grid if self.pixels is None else self.pixels

    def overlay(self, **drawing: Any) -> NDArray[np.uint8]:
        """Draw the map in colour over the original image, uint8 RGB [height, width, 3], with a detection or region.

        Args:
            interpolation: "smooth", "linear" (as `heatmap` is), or "nearest" to see the patches.
            vmin, vmax: values of the first and last colour; by default the range of the map. If 0 is between them, as
                for a map with negative values, 0 is transparent and the colours diverge from it.
            robust: use percentiles for that range, so that a single artefact patch does not determine it; values
                beyond them approach the last colour.
            background: image under the colours; "none" gives RGBA [height, width, 4] with the colours alone.
            unseen: "line" along the border of the part that the model saw, or "off"; by default off on grey, which is
                lighter there.
            crop_to_seen: draw only that part.
            drawing: cmap, alpha and fade as for `vitflow.images.overlay.blend`.
        """
        pen = Pen(None, **drawing)
        limits = pen.limits(self.drawn, signed=is_signed(self.method))
        marked = self.marked if self.region is not None or "detection" in self.facts else None
        return pen.overlay(self.drawn, self.placement, self.image, limits, marked)

    @property
    def patch_box(self) -> tuple[float, float, float, float] | None:
        """Query patch, box or detection of the map, (left, top, right, bottom) in pixels of the image; else None."""
        if detection := self.facts.get("detection"):
            return tuple(detection["box"])
        patch, box = self.options.get("patch"), self.options.get("box")
        if patch is None:
            return None if box is None else tuple(box)
        rows, cols = self.grid.shape
        return tuple(self.facts.get("patch_box") or self.placement.patch_box(patch, (rows, cols)))

    @property
    def marked(self) -> Mark | None:
        """Region, query patch or detection that figures mark, or the significant patches."""
        if self.region is not None or self.patch_box is not None or self.significant is None:
            return self.patch_box if self.region is None else self.region
        return upsample(self.significant.astype(np.float32), self.placement, interpolation="nearest") > 0.5

    def figure(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        width: float = 3.5,
        ax: "Axes | None" = None,
        boxes: Any = (),
        mask: Any = None,
        **drawing: Any,
    ) -> "Figure":
        """Draw a figure: the overlay with its method, target and colour bar.

        Args:
            path: also write the figure here: .png, .pdf or .svg.
            width: width of the image, in inches.
            ax: axes of matplotlib to draw into, in pixels of the image, instead of a new figure.
            boxes: boxes (left, top, right, bottom) to outline, in pixels of the image.
            mask: region to outline, bool [height, width].
            drawing: as for `overlay`; and dpi, pixels per inch of the image.

        Raises:
            OptionError: a drawing option is out of range, or the file type is not supported.
        """
        from vitflow.images.figures import Cell, Column, bar_with_values, draw_bands, draw_into, written

        pen = Pen(width, **drawing)
        limits = pen.limits(self.drawn, signed=is_signed(self.method))
        marked = check_marks(self.image, boxes, mask)
        marked += [self.marked] if self.marked is not None else []
        drawn = pen.overlay(self.drawn, self.placement, self.image, limits, marked)
        title = captions.method_title(self.definition, self.options, class_specific=self.class_specific)
        heads = [Column(title, captions.departures(self.definition, self.options))]
        lines = tuple(captions.class_lines(self.score, self.class_specific))
        bar, percentiles = bar_with_values(self.drawn, pen, limits, captions.ends(self.score, self.class_specific))
        if ax is not None:
            shown = pen.shown(self.placement, (self.image.shape[0], self.image.shape[1]))
            return written(draw_into(ax, drawn, [title, *lines], bar, shown), path)
        cells = [[Cell(drawn, lines)]]
        if self.reference is not None:
            heads.insert(0, Column("Compared with"))
            cells.insert(0, [Cell(pen.photograph(self.reference))])
        notes = filter(None, (percentiles, *self._notes(marks_unseen=pen.marks_unseen)))
        return written(draw_bands([(heads, [cells])], bars=[bar], note="\n".join(notes), dpi=pen.dpi), path)

    def show(self, **options: Any) -> None:
        """Display the figure, with options as for `figure`: below a cell of a notebook, else in the system's viewer."""
        from vitflow.images.figures import show_figure

        show_figure(self.figure(**options))

    def _notes(self, *, marks_unseen: bool = True) -> Iterator[str]:
        """Yield the notes below the figure."""
        if crop := crop_note(self.placement):
            yield f"{crop[0].upper()}{crop[1:]}."
        if "," in (readout := self.facts.get("readout", "")):  # not the model's default pooling
            yield f"Readout: {readout}."
        yield from captions.notes_of(self.facts)
        if compared := self.facts.get("compared_with"):
            yield f"Each patch is compared with {compared}."
        elif detection := self.facts.get("detection"):
            yield f"The frame marks the detection (query {detection['query']})."
        elif region := self.facts.get("region"):
            yield f"The outline marks the region: {region['of']}."
        elif self.patch_box is not None:
            yield "The frame marks the query patch."
        elif self.significant is not None:
            yield "The outline marks patches that raise the score, significant at 95 %."
        if marks_unseen and not self.placement.sees_everything:
            yield "The line marks the region that the model saw."
        yield f"{image_name(self.source)} · {captions.model_in_words(self.model, self.model_note)}"

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the overlay (.png, .jpg, .webp; options as for `overlay`) or the map (.npz, .npy); return the path.

        The `.npz` contains `grid` and `heatmap` (unscaled) and `metadata`, a JSON string with everything else; the
        `.npy` only `heatmap`. Files are written atomically.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix in (".pdf", ".svg"):
            raise OptionError(f"save writes the overlay or the map; figure({str(path)!r}) writes {suffix[1:].upper()}.")
        if suffix not in (".npz", ".npy"):
            write_image(path, self.overlay(**options))
            return path
        if options:
            raise OptionError(f"{suffix} is unscaled and has no drawing options; got {', '.join(options)}.")
        with write_atomically(path) as file:
            if suffix == ".npy":
                np.save(file, self.heatmap)
            else:
                metadata = np.array(json.dumps(self.to_dict(), ensure_ascii=False))
                np.savez_compressed(file, grid=self.grid, heatmap=self.heatmap, metadata=metadata)
        return path

    def to_dict(self, *, values: bool = False) -> dict[str, Any]:
        """Return everything except the arrays, for JSON; with `values` also the `grid`.

        `seen` is in pixels of the image, right and bottom exclusive. `placement` has the format of folder runs: sizes
        [height, width] and offset [top, left].
        """
        rows, cols = self.grid.shape
        return {
            "input": self.source,
            "model": self.model,
            **captions.method_record(self.definition, self.options),
            "class_specific": self.class_specific,
            **self.score.to_dict(),
            "grid_rows": rows,
            "grid_columns": cols,
            "image_width": self.placement.image_size[1],
            "image_height": self.placement.image_size[0],
            "input_width": self.placement.input_size[1],
            "input_height": self.placement.input_size[0],
            "placement": self.placement.to_dict(),
            "seen": dict(zip(("left", "top", "right", "bottom"), self.placement.seen_box, strict=True)),
            "facts": dict(self.facts),
            "seconds": round(self.seconds, 4),
            **({"grid": self.grid.tolist()} if values else {}),
        }


def contrasted(first: Saliency, second: Saliency, activation: str = "softmax") -> Saliency:
    """Return the difference of two maps of different classes, each divided by the sum of its absolute values."""
    if first.target is None or second.target is None or first.target == second.target:
        raise SameClassError(f"Expected two different classes in a contrast, got {first.label} twice.")
    value = _logit(first.score, activation) - _logit(second.score, activation)
    grids = [each.grid.astype(np.float64) for each in (first, second)]
    one, other = (grid / max(np.abs(grid).sum(), np.finfo(np.float64).tiny) for grid in grids)
    score = Score(
        f"{first.label} against {second.label}",
        value if isfinite(value) else None,
        {"probability": "logits", "cosine": "in cosine"}.get(first.score.unit, first.score.unit),
        predicted=first.score.predicted,
        sides=(first.target, second.target),
        opposed=(first.label, second.label),
    )
    return replace(
        first,
        grid=(one - other).astype(np.float32),
        pixels=None,
        significant=None,
        score=score,
        facts={name: fact for name, fact in first.facts.items() if name != "note"},
        seconds=first.seconds + second.seconds,
    )


def _logit(score: Score, activation: str) -> float:
    """Return the logit of a probability (of a softmax up to a constant), or NaN of 0 and 1; other scores unchanged."""
    if score.value is None or score.unit != "probability":
        return nan if score.value is None else score.value
    rest = 1.0 if activation == "softmax" else 1.0 - score.value
    return log(score.value) - log(rest) if score.value > 0 < rest else nan
