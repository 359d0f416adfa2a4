"""Saliency: the one result of every method, and what can be done with it."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, SameClassError
from vitflow.explaining import captions
from vitflow.explaining.method import Method
from vitflow.explaining.method_table import get_method
from vitflow.explaining.targets import Contrast, Score
from vitflow.files import write_atomically
from vitflow.images import Interpolation, overlay
from vitflow.images.geometry import Placement
from vitflow.images.pen import Pen, takes_drawing_options
from vitflow.images.reading import image_name, write_image
from vitflow.images.upsampling import upsample

if TYPE_CHECKING:  # drawing a figure loads matplotlib, and most who ask for a map draw none
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, eq=False)
class Saliency:
    """One map of one image by one method.

    Attributes:
        grid: the map on the patch grid, float32 [rows, cols], unscaled.
        placement: where the model input lies on the image.
        image: the original image, uint8 RGB [height, width, 3].
        source: the image's name.
        model: the model's id.
        method: the method's name.
        options: every option of the method with the value used.
        class_specific: whether the map depends on the target.
        score: the class that was asked for, by default the predicted one, with the model's probability of it; or the
            two that were set against each other, with the difference of their logits.
        facts: what else belongs beside the map, such as how the answer is read out or the saturated share of a flow.
        reference: the image that was compared with, uint8 RGB [height, width, 3], where one was.
        seconds: time of the forward pass (the image's share of its batch) and of the method.
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

    def __repr__(self) -> str:
        rows, cols = self.grid.shape
        height, width = self.image.shape[:2]
        target = f", class={self.label!r}" if self.label else ""
        patches = f"{rows} × {cols} patches on {width} × {height} pixels"
        return f"Saliency({image_name(self.source)!r}, {self.method}, {patches}{target})"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """What a notebook shows: the figure that stands alone."""
        from vitflow.images.figures import NOTEBOOK_DPI, bundle

        return bundle(repr(self), self.figure(dpi=NOTEBOOK_DPI))

    @property
    def model_note(self) -> str:
        """What a reader must know of the model, if it carries such a note."""
        return str(self.facts.get("model_note", ""))

    @property
    def definition(self) -> Method:
        """The row of the table of methods that made this map."""
        return get_method(self.method)

    @property
    def label(self) -> str:
        """The target's name, or its number where names are not known; empty where the model has no classes."""
        return self.score.name

    @property
    def target(self) -> int | None:
        """Index of the class that was asked for; None for a contrast, and where the model has no classes."""
        return self.score.index

    @property
    def class_name(self) -> str | None:
        """Its name, where known."""
        return self.score.class_name

    @property
    def probability(self) -> float | None:
        """The model's probability of it."""
        return self.score.probability

    @property
    def predicted(self) -> int | None:
        """Index of the class that the model finds most probable."""
        return self.score.predicted

    @property
    def contrast(self) -> Contrast | None:
        """The classes that were set against each other, with the difference of their logits."""
        answer = self.score
        return Contrast(*answer.sides, name=answer.name, value=answer.value) if answer.sides else None

    @property
    def heatmap(self) -> NDArray[np.float32]:
        """The map over the original image, float32 [height, width], unscaled; NaN where the model saw nothing."""
        return upsample(self.grid, self.placement)

    def overlay(
        self,
        *,
        interpolation: Interpolation = "smooth",
        vmin: float | None = None,
        vmax: float | None = None,
        robust: bool = True,
        **options: Any,
    ) -> NDArray[np.uint8]:
        """The map in colour over the original image, uint8 RGB [height, width, 3].

        Args:
            interpolation: "smooth", "linear" (as `heatmap` is), "cubic", or "nearest" to see the patches.
            vmin, vmax: values that get the first and last colour; by default the range of the map's patches. Where it
                holds 0 between them, as of a map with negative values, 0 is clear and each side has its own colours.
            robust: take that range between percentiles, so that one artefact patch does not own it; what lies beyond
                them nears the last colour.
            options: cmap, alpha, fade, background, contours and mark_unseen as for `vitflow.images.overlay.blend`.
        """
        heatmap = upsample(self.grid, self.placement, interpolation=interpolation)
        low, high = overlay.scale_range(self.grid, vmin=vmin, vmax=vmax, robust=robust)
        soft = overlay.is_soft(vmin, vmax, robust)
        return overlay.blend(self.image, heatmap, vmin=low, vmax=high, soft=soft, **options)

    @property
    def patch_box(self) -> tuple[float, float, float, float] | None:
        """The patch or the box that the map was asked of, (left, top, right, bottom) in pixels of the image.

        None where the model's own readout was taken.
        """
        patch, box = self.options.get("patch"), self.options.get("box")
        if patch is None:
            return None if box is None else tuple(box)
        rows, cols = self.facts.get("patch_grid", self.grid.shape)
        height, width = self.placement.input_size[0] / rows, self.placement.input_size[1] / cols
        top, left = self.placement.to_image(patch[0] * height, patch[1] * width)
        bottom, right = self.placement.to_image((patch[0] + 1) * height, (patch[1] + 1) * width)
        return left, top, right, bottom

    @takes_drawing_options
    def figure(self, path: str | os.PathLike[str] | None = None, *, width: float = 3.5, **drawing: Any) -> "Figure":
        """Draw a figure that stands alone: the overlay with its method, what was asked, and a bar of its colours.

        Args:
            path: also write the figure here: .png, .pdf or .svg.
            width: of the image, in inches.
            drawing: vmin, vmax, robust and interpolation as for `overlay`; dpi, pixels per inch of the image; cmap,
                alpha, fade, background, contours and mark_unseen as for `vitflow.images.overlay.blend`.

        Raises:
            OptionError: a drawing option is out of range, or another file type.
        """
        from vitflow.images.figures import file_too
        from vitflow.images.map_figure import draw_map

        pen = Pen.of(width, drawing)
        return file_too(
            path,
            lambda: draw_map(
                pen,
                self.grid,
                self.placement,
                self.image,
                title=self.definition.title,
                lines=tuple(captions.class_lines(self.score)),
                details=captions.departures(self.definition, self.options),
                notes=tuple(self._notes()),
                ends=captions.ends(self.score, self.class_specific),
                box=self.patch_box,
                alongside=self.reference,
            ),
        )

    def _notes(self) -> Iterator[str]:
        """What a reader of the figure must know, line by line."""
        if self.target is not None and not self.class_specific:
            yield "The map is the same for every class."
        if "," in (readout := self.facts.get("readout", "")):  # not the model's own pooling
            yield f"Readout: {readout}."
        yield from captions.notes_of(self.facts)
        if told := captions.unsure(self.facts):
            yield f"{told[0].upper()}{told[1:]}."
        if compared := self.facts.get("compared_with"):
            yield f"Each patch is compared with {compared}."
        elif self.patch_box is not None:
            yield "The frame is the patch whose attention is shown."
        if not self.placement.sees_everything:
            yield "The line bounds what the model saw."
        yield f"{image_name(self.source)} · {captions.model_in_words(self.model, self.model_note)}"

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the overlay (.png, .jpg, .webp; options as for `overlay`) or the map itself (.npz); return the path.

        The `.npz` holds `grid` and `heatmap` (unscaled) and `metadata`, a JSON string with everything else. Nothing
        half-written ever stands under the final name.
        """
        path = Path(path)
        if path.suffix.lower() != ".npz":
            write_image(path, self.overlay(**options))
            return path
        if options:
            raise OptionError(f"A saved map is unscaled and takes no drawing options, got {', '.join(options)}.")
        metadata = np.array(json.dumps(self.to_dict(), ensure_ascii=False))
        with write_atomically(path) as file:
            np.savez_compressed(file, grid=self.grid, heatmap=self.heatmap, metadata=metadata)
        return path

    def to_dict(self) -> dict[str, Any]:
        """Everything but the arrays, ready for JSON.

        `seen` is in pixels of the image, right and bottom exclusive. `placement` is exact and as rows of a folder run
        have it, its sizes [height, width] and its offset [top, left].
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
        }


def contrasted(first: Saliency, second: Saliency, activation: str = "softmax") -> Saliency:
    """What speaks for one class less what speaks for another, each map scaled by the sum of its absolute values.

    Raises:
        SameClassError: both maps are of one class.
    """
    if first.target is None or second.target is None or first.target == second.target:
        raise SameClassError(
            f"Expected two classes to set against each other, got {first.label} twice: choose another one on one side."
        )
    value = _number(first.score, activation) - _number(second.score, activation)
    answer = Score(
        f"{first.label} against {second.label}",
        value if isfinite(value) else None,  # a probability was rounded to 0 or 1
        {"probability": "logits", "cosine": "in cosine"}.get(first.score.unit, first.score.unit),
        predicted=first.predicted,
        sides=(first.target, second.target),
        opposed=(first.label, second.label),
    )
    return replace(
        first,
        grid=(_shares(first.grid) - _shares(second.grid)).astype(np.float32),
        score=answer,
        facts={name: fact for name, fact in first.facts.items() if name != "note"},
        seconds=first.seconds + second.seconds,
    )


def _shares(grid: NDArray[np.float32]) -> NDArray[np.float64]:
    values = grid.astype(np.float64)
    total = np.abs(values).sum()
    return values / total if total > 0 else values


def _number(answer: Score, activation: str) -> float:
    """A logit from its probability, that of a softmax up to what all classes have in common; others as they are."""
    probability = answer.value
    if probability is not None and answer.unit != "probability":
        return probability
    if not probability:
        return -inf
    if activation == "softmax":
        return log(probability)
    return inf if probability == 1.0 else log(probability) - log(1.0 - probability)
