"""Maps layer by layer and head by head, in one figure."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from matplotlib.figure import Figure
from torch import nn

from vitflow.analysis.strips import SHARES, Strip, in_rows
from vitflow.errors import OptionError
from vitflow.explaining.captions import class_lines, departures, method_in_words, model_in_words
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.inputs import ImageInput
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Contrast, Target
from vitflow.images.figures import Band, Cell, Column, FigureResult, written
from vitflow.images.pen import Pen, takes_drawing_options
from vitflow.images.reading import image_name
from vitflow.methods.fusion import check_layer
from vitflow.registry.choices import choose_methods, default_method, has_targets
from vitflow.registry.method_table import get_method, list_methods
from vitflow.registry.option_types import LayerMapOptions
from vitflow.registry.options import OPTIONS, takes_method_options

_MOST_COLUMNS = 6


@dataclass(frozen=True, slots=True, repr=False)
class LayerMaps(FigureResult):
    """Maps of one image, layer by layer and head by head.

    Attributes:
        single: raw attention of each layer, first layer first.
        accumulated: the method's map of the last layer, then including one more layer below each time; the last map
            includes all layers.
        heads: raw attention of each head of one layer.
        layer: that layer, counted from 1.
    """

    single: tuple[Saliency, ...]
    accumulated: tuple[Saliency, ...]
    heads: tuple[Saliency, ...]
    layer: int

    def __repr__(self) -> str:
        whole = self.accumulated[-1]
        counts = f"{len(self.single)} layers, {len(self.heads)} heads"
        return f"LayerMaps({image_name(whole.source)!r}, {whole.method}, {counts})"

    @property
    def saliencies(self) -> tuple[Saliency, ...]:
        """All maps: single layers, accumulated, heads."""
        return self.single + self.accumulated + self.heads

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON: each map with its values on the patch grid."""
        parts = {"layers": self.single, "accumulated": self.accumulated, "heads": self.heads}
        maps = {name: [each.to_dict() | {"grid": each.grid.tolist()} for each in part] for name, part in parts.items()}
        return {"input": self.single[0].source, "model": self.single[0].model, "layer": self.layer, **maps}

    def records(self) -> list[dict[str, Any]]:
        """Return one record for JSON: the maps without values."""
        return [{"input": self.single[0].source, "maps": [saliency.to_dict() for saliency in self.saliencies]}]

    @takes_drawing_options
    def figure(self, path: str | os.PathLike[str] | None = None, *, width: float = 1.15, **drawing: Any) -> Figure:
        """Draw all maps in one figure, each with separate colour limits.

        Args:
            path: also write the figure here: .png, .pdf or .svg.
            width: width of an image, in inches.
            drawing: as for `Saliency.figure`.

        Raises:
            OptionError: a drawing option is out of range, or the file type is not supported.
        """
        pen = Pen(width, **drawing)
        strip = Strip(pen)
        cells = [[(column, strip.cell(each)) for column, each in section] for section in self._sections()]
        whole = self.accumulated[-1]
        photograph = pen.photograph(whole.image, whole.placement)
        named = Cell(photograph, tuple(class_lines(whole.score)), (image_name(whole.source),))
        cells[0].insert(0, (Column("Image"), named))
        bands: list[Band] = [
            ([column for column, _ in row], [[[cell] for _, cell in row]])
            for section in cells
            for row in in_rows(section, _MOST_COLUMNS)
        ]
        return written(strip.figure(bands, self._note(pen)), path)

    def _sections(self) -> Iterator[list[tuple[Column, Saliency]]]:
        """Yield the columns of each section with their maps; the first section is the map of all layers."""
        title = get_method(self.accumulated[0].method).title
        yield [(Column(title, "all layers together"), self.accumulated[-1])]
        count = len(self.single)
        raw, neutral = get_method("attention"), {"layer": -1, "head": None}
        # The choice of the layer is not a departure from the publication.
        changed = f", {changed}" if (changed := departures(raw, {**self.single[0].options, **neutral})) else ""
        yield [
            (Column(f"Layer {layer}", group=f"raw attention of each layer{changed}"), each)
            for layer, each in enumerate(self.single, start=1)
        ]
        built = f"{title} of these layers together"
        yield [
            (Column(f"Layers {first}–{count}" if first < count else f"Layer {count}", group=built), each)
            for first, each in zip(range(count, 0, -1), self.accumulated, strict=True)
        ]
        yield [
            (Column(f"Head {head}", group=f"raw attention of each head of layer {self.layer}{changed}"), each)
            for head, each in enumerate(self.heads)
        ]

    def _note(self, pen: Pen) -> str:
        whole = self.accumulated[-1]
        return (
            f"Each map has separate colour limits. Printed below each map: {SHARES}. {pen.note}\n"
            f"{method_in_words(get_method(whole.method), whole.options)}. "
            f"Model: {model_in_words(whole.model, whole.model_note)}."
        )


@takes_method_options
def layer_maps(
    image: ImageInput,
    *,
    model: str | Path | nn.Module | Explainer,
    method: str | None = None,
    layer: int = -1,
    target: Target | Contrast = None,
    **options: Unpack[LayerMapOptions],
) -> LayerMaps:
    """Compute the maps of single layers, the map accumulated over layers, and the heads of one layer.

    Args:
        image: a path, bytes, a PIL image, or an RGB array.
        model: a model id (see `load_model`), a module, or an `Explainer`.
        method: "rollout", "gradient_rollout" or "gae"; by default gae with a target, and rollout without one.
        layer: layer whose heads are shown, counted from 1; -1 is the last.
        target: class index or name; by default the predicted class.
        options: options of the method and of raw attention, such as patch=(3, 7).

    Raises:
        VitflowError: the image, the model or an option is invalid.

    >>> from vitflow.demo import sample_images
    >>> layer_maps(sample_images()[0], model="demo", layer=2).heads[0].grid.shape
    (12, 12)
    """
    layered = [each.name for each in list_methods() if each.accepts("start_layer") and each.accepts("value_weighted")]
    has_target = model.has_target(target) if isinstance(model, Explainer) else has_targets(target)
    if method is None:  # the default method need not accept options of raw attention
        accepted = {name: value for name, value in options.items() if any(get_method(m).accepts(name) for m in layered)}
        choose_methods(None, accepted, has_target=has_target)
        method = default_method(has_target)
    if method not in layered:
        raise OptionError(f"Expected one of the methods {', '.join(layered)}, got {method!r}.")
    if selecting := [name for name in options if name in OPTIONS and OPTIONS[name].selects_layers]:
        raise OptionError(
            f"{selecting[0]} cannot be used: all layers are shown. layer= selects the layer of the heads."
        )
    choose_methods([method, "attention"], options)  # before the model runs
    explainer = Explainer.of(model)
    # One pass to count the heads of each layer, and one for all maps.
    heads = [attention.shape[1] for attention in explainer.record(image).heads(value_weighted=False)]
    layer = check_layer("layer", layer, len(heads)) + 1
    # Single layers and heads are not refined: refinement makes them too similar to compare.
    choices: list[tuple[str, dict[str, Any]]] = [
        *(("attention", {"layer": each, "refine": 0}) for each in range(1, len(heads) + 1)),
        *((method, {"start_layer": each}) for each in range(len(heads), 0, -1)),
        *(("attention", {"layer": layer, "head": each, "refine": 0}) for each in range(heads[layer - 1])),
    ]
    maps = tuple(explainer.explain_batch([image], methods=choices, targets=target, **options))
    if len(maps) != len(choices):
        raise OptionError(f"Expected a single class, got {target!r}.")
    count = len(heads)
    return LayerMaps(maps[:count], maps[count : 2 * count], maps[2 * count :], layer)
