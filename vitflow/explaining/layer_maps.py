"""Maps layer by layer and head by head: what each layer looks at, and how a map comes of them, on one sheet."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from vitflow.errors import OptionError
from vitflow.explaining.captions import class_lines, departures, method_in_words, model_in_words
from vitflow.explaining.choices import choose_methods, default_method, has_targets
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.image_model import ImageInput
from vitflow.explaining.method_table import get_method, list_methods
from vitflow.explaining.options import OPTIONS, takes_method_options
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.strips import bars_of, in_rows, map_cell
from vitflow.explaining.targets import Contrast, Target
from vitflow.images import figures
from vitflow.images.figures import Block, Cell, Column, FigureResult, file_too
from vitflow.images.pen import Pen, takes_drawing_options
from vitflow.images.reading import image_name
from vitflow.methods.fusion import check_layer

_MOST_COLUMNS = 6


@dataclass(frozen=True, slots=True, repr=False)
class LayerMaps(FigureResult):
    """Maps of one image, layer by layer and head by head.

    Attributes:
        alone: the raw attention of each layer, first layer first.
        built_up: the method's map of the last layer only, then of one more below it each time; the last is the whole.
        heads: the raw attention of each head of one layer.
        layer: that layer, counted from 1.
    """

    alone: tuple[Saliency, ...]
    built_up: tuple[Saliency, ...]
    heads: tuple[Saliency, ...]
    layer: int

    def __repr__(self) -> str:
        whole = self.built_up[-1]
        counts = f"{len(self.alone)} layers, {len(self.heads)} heads"
        return f"LayerMaps({image_name(whole.source)!r}, {whole.method}, {counts})"

    @property
    def saliencies(self) -> tuple[Saliency, ...]:
        """All maps: layers alone, built up, heads."""
        return self.alone + self.built_up + self.heads

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: each map with its values on the patch grid."""
        parts = {"layers": self.alone, "built_up": self.built_up, "heads": self.heads}
        maps = {name: [one.to_dict() | {"grid": one.grid.tolist()} for one in part] for name, part in parts.items()}
        return {"input": self.alone[0].source, "model": self.alone[0].model, "layer": self.layer, **maps}

    @takes_drawing_options
    def figure(self, path: str | os.PathLike[str] | None = None, *, width: float = 1.15, **drawing: Any) -> Figure:
        """Draw all of them on one sheet, each in the colours of its own values.

        Args:
            path: also write the figure here: .png, .pdf or .svg.
            width: of an image, in inches.
            drawing: as for `Saliency.figure`.

        Raises:
            OptionError: a drawing option is out of range, or another file type.
        """
        pen = Pen.of(width, drawing)
        return file_too(path, lambda: self._draw(pen))

    def _draw(self, pen: Pen) -> Figure:
        limits = {id(one): pen.limits(one.grid) for one in self.saliencies}
        largest = max(abs(limit) for own in limits.values() for limit in own)
        thousandths = 1e-4 < largest < 0.1
        cells = [
            [(column, map_cell(one, limits[id(one)], pen, thousandths=thousandths)) for column, one in section]
            for section in self._sections()
        ]
        whole = self.built_up[-1]
        photograph = Cell(pen.photograph(whole.image), tuple(class_lines(whole.score)), (image_name(whole.source),))
        cells[0].insert(0, (Column("Photograph"), photograph))
        bands: list[tuple[list[Column], list[Block]]] = [
            ([column for column, _ in row], [[[cell] for _, cell in row]])
            for section in cells
            for row in in_rows(section, _MOST_COLUMNS)
        ]
        bars = bars_of([(one, limits[id(one)]) for one in self.saliencies], pen)
        return figures.draw_bands(bands, bars=bars, note=self._note(pen, thousandths), dpi=pen.dpi)

    def _sections(self) -> Iterator[list[tuple[Column, Saliency]]]:
        """The heads of the columns with their maps, section by section; first of all the whole map."""
        title = get_method(self.built_up[0].method).title
        yield [(Column(title, "all layers together"), self.built_up[-1])]
        count = len(self.alone)
        raw, own = get_method("attention"), {"layer": -1, "head": None}
        # The same of all layers: which one of them is no departure.
        told = f", {told}" if (told := departures(raw, {**self.alone[0].options, **own})) else ""
        yield [
            (Column(f"Layer {number}", group=f"raw attention of each layer{told}"), one)
            for number, one in enumerate(self.alone, start=1)
        ]
        built = f"{title} of these layers together"
        yield [
            (Column(f"Layers {first}–{count}" if first < count else f"Layer {count}", group=built), one)
            for first, one in zip(range(count, 0, -1), self.built_up, strict=True)
        ]
        yield [
            (Column(f"Head {number}", group=f"raw attention of each head of layer {self.layer}{told}"), one)
            for number, one in enumerate(self.heads)
        ]

    def _note(self, pen: Pen, thousandths: bool) -> str:
        whole = self.built_up[-1]
        return (
            "Each map has colours of its own: the values of the first and the last stand below it"
            f"{', in thousandths' if thousandths else ''}. {pen.contours}\n"
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
    **options: Any,
) -> LayerMaps:
    """Show one image's map layer by layer as it builds up, and the heads of one layer.

    Args:
        image: a path, bytes, a PIL image, or an RGB array.
        model: a model id (see `load_model`), a module of your own, or an `Explainer`.
        method: one that goes through the layers: "rollout", "gradient_rollout" or "gae"; by default gae with a
            target, and rollout without one.
        layer: whose heads are shown, counted from 1; -1 is the last.
        target: class index or name; by default the predicted class.
        options: of the method and of raw attention, such as patch=(3, 7).

    Raises:
        VitflowError: the image, the model or an option is wrong.

    >>> from vitflow.demo import sample_images
    >>> layer_maps(sample_images()[0], model="demo", layer=2).heads[0].grid.shape
    (12, 12)
    """
    through = [one.name for one in list_methods() if one.accepts("start_layer") and one.accepts("value_weighted")]
    asks = model.asks(target) if isinstance(model, Explainer) else has_targets(target)
    if method is None:  # an option of raw attention alone is not its own
        changed_options = {
            name: value for name, value in options.items() if any(get_method(m).accepts(name) for m in through)
        }
        choose_methods(None, changed_options, asks=asks)
        method = default_method(asks)
    if method not in through:
        raise OptionError(f"Expected a method that goes through the layers ({', '.join(through)}), got {method!r}.")
    if own := [name for name in options if name in OPTIONS and OPTIONS[name].selects_layers]:
        raise OptionError(f"Expected no {own[0]}: the sheet shows every one of them. Choose the layer of the heads.")
    choose_methods([method, "attention"], options)  # before the model runs
    explainer = model if isinstance(model, Explainer) else Explainer(model)
    # One pass that counts the heads of each layer, and one for all maps.
    heads = [own.shape[1] for own in explainer.record(image).heads(value_weighted=False)]
    number = check_layer("layer", layer, len(heads)) + 1
    # What one layer or head attends to is never refined, which would lay the same mean over all of them.
    choices: list[tuple[str, dict[str, Any]]] = [
        *(("attention", {"layer": one, "refine": 0}) for one in range(1, len(heads) + 1)),
        *((method, {"start_layer": one}) for one in range(len(heads), 0, -1)),
        *(("attention", {"layer": number, "head": one, "refine": 0}) for one in range(heads[number - 1])),
    ]
    maps = tuple(explainer.explain_batch([image], methods=choices, targets=target, **options))
    if len(maps) != len(choices):
        raise OptionError(f"Expected one class, got {target!r}, which asks for several.")
    count = len(heads)
    return LayerMaps(maps[:count], maps[count : 2 * count], maps[2 * count :], number)
