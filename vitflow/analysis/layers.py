"""Views of a model's layers: maps of single layers and heads, and principal components of a layer's features."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.ndimage import binary_erosion, distance_transform_edt
from torch import nn

from vitflow.analysis.strips import Strip, in_rows
from vitflow.errors import OptionError
from vitflow.explaining import captions
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.features import layer_features
from vitflow.explaining.inputs import ImageInput, PlacedImage, at_least_one, name_of
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Contrast, Target
from vitflow.images import overlay
from vitflow.images.figures import Band, Cell, Column, FigureResult, draw_bands, written
from vitflow.images.geometry import Placement
from vitflow.images.pen import Pen
from vitflow.images.preprocessing import upsample
from vitflow.images.reading import image_name
from vitflow.methods.fusion import check_layer
from vitflow.methods.similarity import Components, principal_components
from vitflow.models.blocks import block_norms, block_paths, layer_output
from vitflow.registry.choices import choose_methods, default_method, has_targets
from vitflow.registry.method_table import get_method, list_methods
from vitflow.registry.option_types import LayerMapOptions
from vitflow.registry.options import OPTIONS

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
        method, counts = captions.method_label(whole.method, whole.options), (len(self.single), len(self.heads))
        return f"LayerMaps({image_name(whole.source)!r}, {method}, {counts[0]} layers, {counts[1]} heads)"

    @property
    def saliencies(self) -> tuple[Saliency, ...]:
        """All maps: single layers, accumulated, heads."""
        return self.single + self.accumulated + self.heads

    def records(self, *, values: bool = False) -> list[dict[str, Any]]:
        """Return one record for JSON: the maps, with `values` on the patch grid."""
        maps = [saliency.to_dict(values=values) for saliency in self.saliencies]
        return [{"input": self.single[0].source, "model": self.single[0].model, "layer": self.layer, "maps": maps}]

    def figure(self, path: str | os.PathLike[str] | None = None, *, width: float = 1.15, **drawing: Any) -> Figure:
        """Draw all maps in one figure, each with separate colour limits.

        Args:
            path: also write the figure here: .png, .pdf or .svg.
            width: width of an image, in inches.
            drawing: as for `Saliency.figure`.

        Raises:
            OptionError: a drawing option is out of range, or the file type is not supported.
        """
        pen, whole = Pen(width, **drawing), self.accumulated[-1]
        strip = Strip(pen)
        cells = [[(column, strip.cell(each)) for column, each in section] for section in self._sections()]
        photograph = pen.photograph(whole.image, whole.placement)
        named = Cell(
            photograph, tuple(captions.class_lines(whole.score, whole.class_specific)), (image_name(whole.source),)
        )
        cells[0].insert(0, (Column("Image"), named))
        bands: list[Band] = [
            ([column for column, _ in row], [[[cell] for _, cell in row]])
            for section in cells
            for row in in_rows(section, _MOST_COLUMNS)
        ]
        note = (
            f"Each map has separate colour limits.\n"
            f"{captions.method_in_words(whole.definition, whole.options)}. "
            f"Model: {captions.model_in_words(whole.model, whole.model_note)}."
        )
        return written(strip.figure(bands, note), path)

    def _sections(self) -> Iterator[list[tuple[Column, Saliency]]]:
        """Yield the columns of each section with their maps; the first section is the map of all layers."""
        whole, count = self.accumulated[-1], len(self.single)
        title = captions.method_title(whole.definition, whole.options)
        yield [(Column(title, "all layers together"), whole)]
        # The choice of the layer is not a departure from the publication.
        changed = captions.departures(get_method("attention"), {**self.single[0].options, "layer": -1, "head": None})
        changed = f", {changed}" if changed else ""
        group = f"raw attention of each layer{changed}"
        yield [(Column(f"Layer {layer}", group=group), each) for layer, each in enumerate(self.single, start=1)]
        group = f"{title} of these layers together"
        yield [
            (Column(f"Layers {first}–{count}" if first < count else f"Layer {count}", group=group), each)
            for first, each in zip(range(count, 0, -1), self.accumulated, strict=True)
        ]
        group = f"raw attention of each head of layer {self.layer}{changed}"
        yield [(Column(f"Head {head}", group=group), each) for head, each in enumerate(self.heads, start=1)]


def layer_maps(
    image: ImageInput,
    model: str | Path | nn.Module | Explainer,
    *,
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
    method = get_method(method).name
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
        *(("attention", {"layer": layer, "head": each, "refine": 0}) for each in range(1, heads[layer - 1] + 1)),
    ]
    maps = tuple(explainer.explain_batch([image], methods=choices, targets=target, **options))
    if len(maps) != len(choices):
        raise OptionError(f"Expected a single class, got {target!r}.")
    count = len(heads)
    return LayerMaps(maps[:count], maps[count : 2 * count], maps[2 * count :], layer)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Features(FigureResult):
    """First three principal components of the patch features of all images.

    Attributes:
        images: the images, with the position of the model input on each.
        components: components of each image, float32 [rows, cols, 3]; NaN for patches in the padding.
        shown: patches from which the components were computed: those of the image, or of its foreground; bool
            [rows, cols].
        shares: share of the variance explained by each component.
        model: the model's id.
        layer: layer of the features, counted from 1.
        foreground: whether the components are those of the foreground.
        model_note: note for readers that the model carries, or an empty string.
    """

    images: tuple[PlacedImage, ...]
    components: tuple[NDArray[np.float32], ...]
    shown: tuple[NDArray[np.bool_], ...]
    shares: tuple[float, ...]
    model: str
    layer: int
    foreground: bool
    model_note: str = ""

    def __repr__(self) -> str:
        count = len(self.images)
        shares = ", ".join(f"{share:.0%}" for share in self.shares)
        return f"Features({count} image{'s' if count > 1 else ''}, layer {self.layer}, {shares} of the variance)"

    @property
    def summary(self) -> str:
        """The sentence below the figure."""
        together = "" if len(self.images) == 1 else " over all images"
        return (
            f"First three principal components of the {'foreground ' if self.foreground else ''}patch features"
            f"{together} as red, green and blue: {', '.join(f'{each:.0%}' for each in self.shares)} of the variance."
        )

    @property
    def colours(self) -> tuple[NDArray[np.float32], ...]:
        """Components of each image as red, green and blue from 0 to 1, [rows, cols, 3]; NaN in the padding.

        0 and 1 are the 2nd and the 98th percentile of each component over all images, so that colours are comparable.
        """
        shown = np.concatenate([each[mask] for each, mask in zip(self.components, self.shown, strict=True)])
        low, high = np.percentile(shown, overlay.ROBUST_PERCENTILES, axis=0)
        spread = np.where(high > low, high - low, np.inf)
        middle = np.where(high > low, 0.0, 0.5)
        return tuple(np.clip((each - low) / spread + middle, 0.0, 1.0).astype(np.float32) for each in self.components)

    def figure(self, path: str | os.PathLike[str] | None = None, *, width: float = 1.5, **drawing: Any) -> Figure:
        """Draw each image with its components as colours below it.

        Args:
            path: also write the figure here: .png, .pdf or .svg.
            width: width of an image, in inches.
            drawing: alpha (by default 1), dpi and interpolation as for `Saliency.figure`.
        """
        pen = Pen(width, **{"alpha": 1.0, **drawing})
        cells = [
            [
                Cell(pen.photograph(image.image), (), (image_name(image.name),)),
                Cell(_coloured(image, colours, shown, pen)),
            ]
            for image, colours, shown in zip(self.images, self.colours, self.shown, strict=True)
        ]
        bands = [([Column("")] * len(row), [row]) for row in in_rows(cells, _MOST_COLUMNS)]
        note = f"{self.summary}\nModel: {captions.model_in_words(self.model, self.model_note)}, layer {self.layer}."
        return written(draw_bands(bands, note=note, dpi=pen.dpi), path)

    def records(self, *, values: bool = False) -> list[dict[str, Any]]:
        """Return a record of each image for JSON; with `values` also its components, null in the padding."""
        shared = {"model": self.model, "layer": self.layer, "foreground": self.foreground, "shares": list(self.shares)}
        records = []
        for image, components, mask in zip(self.images, self.components, self.shown, strict=True):
            placed = {"placement": image.placement.to_dict(), "patches_shown": int(mask.sum())}
            records.append({"input": image.name, **shared, **placed})
            if values:
                listed = components.astype(object)
                listed[np.isnan(components)] = None
                records[-1] |= {"components": listed.tolist(), "shown": mask.tolist()}
        return records


def _coloured(
    image: PlacedImage, colours: NDArray[np.float32], shown: NDArray[np.bool_], pen: Pen
) -> NDArray[np.uint8]:
    """Draw the colours [rows, cols, 3] of the shown patches over their image; other patches show the background."""
    photograph = pen.photograph(image.image)
    placement = replace(image.placement, image_size=photograph.shape[:2])
    # Outside the image the colours of its edge are repeated, so that interpolation does not mix in others.
    nearest = tuple(distance_transform_edt(np.isnan(colours[..., 0]), return_distances=False, return_indices=True))
    *channels, covered = (
        upsample(values[nearest], placement, interpolation=pen.interpolation)
        for values in (*np.moveaxis(colours, 2, 0), shown)
    )
    plain = np.where(np.isnan(covered), covered, 0)
    drawn = overlay.blend(photograph, plain, **pen.blending)
    alpha, coloured = pen.blending["alpha"], covered > 0.5
    mixed = alpha * 255 * np.stack(channels, axis=-1) + (1 - alpha) * photograph
    drawn[coloured] = np.rint(mixed[coloured]).clip(0, 255)
    return drawn


def feature_maps(
    images: ImageInput | Sequence[ImageInput],
    model: str | Path | nn.Module | Explainer,
    *,
    layer: int = -1,
    foreground: bool = False,
) -> Features:
    """Compute the first three principal components of patch features over all images.

    Features are the output of a block after the model's last norm, without prefix and register tokens; for a model with
    stages, the output of a stage. Patches in the padding of an image are excluded.

    Args:
        images: one image or a list, with common components: paths, bytes, PIL images, RGB arrays, or normalised
            tensors.
        model: a model id (see `load_model`), a module, or an `Explainer`, which has further settings.
        layer: layer of the features, counted from 1; -1 is the last.
        foreground: two steps: the first component of all patches separates foreground from background at its mean, and
            the components are those of the foreground. Foreground is the side that covers less of the image borders.

    Raises:
        VitflowError: an image, the model or an option is invalid, or there are fewer than four patches.

    Source: Oquab et al., "DINOv2: Learning Robust Visual Features without Supervision", TMLR 2024, §7.4 and Figure 1.

    >>> from vitflow.demo import sample_images
    >>> features = feature_maps(sample_images()[:2], model="demo")
    >>> [components.shape for components in features.components]
    [(12, 12, 3), (12, 12, 3)]
    """
    explainer = Explainer.of(model)
    placed, vectors = [], []
    for index, source in enumerate(at_least_one(images), start=1):
        image = explainer.placed(source, name_of(source, index))
        trace = explainer.record(image, attention=False, features=[layer_output(explainer.model, layer)[0]])
        tokens, layout = layer_features(trace, layer)
        vectors.append(tokens[0, layout.patches].cpu().view(layout.rows, layout.cols, -1))
        extent = trace.extent_of((layout.rows, layout.cols))
        placed.append(replace(image, placement=replace(image.placement, extent=extent)))
    inside = [_inside(image.placement, *each.shape[:2]) for image, each in zip(placed, vectors, strict=True)]
    shown, basis = inside, _components(vectors, inside, "patches")
    if foreground:
        first = [basis.of(each)[..., 0].numpy() for each in vectors]
        borders = [mask & ~binary_erosion(mask) for mask in inside]
        edge = np.concatenate([values[border] for values, border in zip(first, borders, strict=True)])
        other = np.concatenate([each[m & ~border] for each, m, border in zip(first, inside, borders, strict=True)])
        side = -1 if len(other) and other.mean() < edge.mean() else 1
        shown = [mask & (side * values > 0) for mask, values in zip(inside, first, strict=True)]
        basis = _components(vectors, shown, "foreground patches")
    components = tuple(
        np.where(mask[..., None], basis.of(vector).numpy(), np.nan).astype(np.float32)
        for vector, mask in zip(vectors, inside, strict=True)
    )
    layer = check_layer("layer", layer, len(block_paths(explainer.model) or block_norms(explainer.model))) + 1
    about = explainer.model_id, layer, foreground, explainer.model_info.note
    return Features(tuple(placed), components, tuple(shown), tuple(basis.shares.tolist()), *about)


def _inside(placement: Placement, rows: int, cols: int) -> NDArray[np.bool_]:
    """Return the patches with their centre on the image, not in its padding, bool [rows, cols]."""
    (top, tall), (left, wide) = placement.cells((rows, cols))
    y, x = placement.to_image(top + (np.arange(rows) + 0.5) * tall / rows, left + (np.arange(cols) + 0.5) * wide / cols)
    height, width = placement.image_size
    mask: NDArray[np.bool_] = ((y >= 0) & (y < height))[:, None] & ((x >= 0) & (x < width))
    return mask


def _components(vectors: Sequence[torch.Tensor], kept: Sequence[NDArray[np.bool_]], what: str) -> Components:
    """Compute the components of the kept patches of all images from their features [rows, cols, width]."""
    together = torch.cat([each[torch.from_numpy(mask)] for each, mask in zip(vectors, kept, strict=True)])
    if len(together) < 4:
        raise OptionError(
            f"Three components require at least four {what}, got {len(together)}: use more images, or a larger input."
        )
    return principal_components(together)
