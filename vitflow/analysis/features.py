"""Principal components of patch features as colours, for one or several images together."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.ndimage import binary_erosion, distance_transform_edt
from torch import nn

from vitflow.analysis.strips import in_rows
from vitflow.errors import OptionError
from vitflow.explaining.captions import model_in_words
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.inputs import ImageInput, PlacedImage, at_least_one, name_of
from vitflow.explaining.similarity import layer_features
from vitflow.images import figures, overlay
from vitflow.images.figures import Cell, Column, FigureResult, written
from vitflow.images.geometry import Placement
from vitflow.images.pen import Pen
from vitflow.images.reading import image_name
from vitflow.images.upsampling import upsample
from vitflow.methods.fusion import check_layer
from vitflow.methods.similarity import Components, principal_components
from vitflow.models.blocks import block_norms, block_paths, layer_output

_MOST_COLUMNS = 6


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
        columns = []
        for image, colours, shown in zip(self.images, self.colours, self.shown, strict=True):
            photograph = Cell(pen.photograph(image.image), (), (image_name(image.name),))
            columns.append((Column(""), [photograph, Cell(_coloured(image, colours, shown, pen))]))
        bands = [([head for head, _ in row], [[cells for _, cells in row]]) for row in in_rows(columns, _MOST_COLUMNS)]
        together = "" if len(self.images) == 1 else " over all images"
        note = (
            f"First three principal components of the {'foreground ' if self.foreground else ''}patch features"
            f"{together} as red, green and blue: {', '.join(f'{each:.0%}' for each in self.shares)} of the variance.\n"
            f"Model: {model_in_words(self.model, self.model_note)}, layer {self.layer}."
        )
        return written(figures.draw_bands(bands, note=note, dpi=pen.dpi), path)

    def records(self) -> list[dict[str, Any]]:
        """Return a record of each image for JSON, without values."""
        shared = {"model": self.model, "layer": self.layer, "foreground": self.foreground, "shares": list(self.shares)}
        return [
            {"input": image.name, **shared, "placement": image.placement.to_dict(), "patches_shown": int(mask.sum())}
            for image, mask in zip(self.images, self.shown, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON: the records with the components of each patch, null in the padding."""
        patches = [
            [[None if np.isnan(patch[0]) else patch.tolist() for patch in row] for row in each]
            for each in self.components
        ]
        images = [
            {**record, "components": values, "shown": mask.tolist()}
            for record, values, mask in zip(self.records(), patches, self.shown, strict=True)
        ]
        return {"model": self.model, "layer": self.layer, "images": images}


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
    drawn = overlay.blend(photograph, plain, **pen.blending | {"mark_unseen": False})
    alpha, coloured = pen.blending["alpha"], covered > 0.5
    mixed = alpha * 255 * np.stack(channels, axis=-1) + (1 - alpha) * photograph
    drawn[coloured] = np.rint(mixed[coloured]).clip(0, 255)
    return overlay.blend(drawn, plain, alpha=0)


def feature_maps(
    images: ImageInput | Sequence[ImageInput],
    *,
    model: str | Path | nn.Module | Explainer,
    layer: int = -1,
    foreground: bool = False,
    fit: str = "crop",
    device: str | torch.device | None = None,
) -> Features:
    """Compute the first three principal components of patch features over all images.

    Features are the output of a block after the model's last norm, without prefix and register tokens; for a model with
    stages, the output of a stage. Patches in the padding of an image are excluded.

    Args:
        images: one image or a list, with common components: paths, bytes, PIL images, RGB arrays, or normalised
            tensors.
        model: a model id (see `load_model`), a module, or an `Explainer` with its fit and device.
        layer: layer of the features, counted from 1; -1 is the last.
        foreground: two steps: the first component of all patches separates foreground from background at its mean, and
            the components are those of the foreground. Foreground is the side that covers less of the image borders.
        fit, device: as for `vitflow.explain`.

    Raises:
        VitflowError: an image, the model or an option is invalid, or there are fewer than four patches.

    Source: Oquab et al., "DINOv2: Learning Robust Visual Features without Supervision", TMLR 2024, §7.4 and Figure 1.

    >>> from vitflow.demo import sample_images
    >>> features = feature_maps(sample_images()[:2], model="demo")
    >>> [components.shape for components in features.components]
    [(12, 12, 3), (12, 12, 3)]
    """
    sources = at_least_one(images)
    explainer = Explainer.of(model, device=device, fit=fit)
    placed, vectors = [], []
    for index, source in enumerate(sources, start=1):
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
        side = _side(first, inside)
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
    """Mask of the patches with their centre on the image, not in its padding, [rows, cols]."""
    down, across = (np.arange(count) + 0.5 for count in (rows, cols))
    (top, tall), (left, wide) = placement.cells((rows, cols))
    y, x = placement.to_image(top + down * tall / rows, left + across * wide / cols)
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


def _side(first: Sequence[NDArray[np.float64]], inside: Sequence[NDArray[np.bool_]]) -> int:
    """Return the sign of the first component on the foreground, the side that covers less of the image borders."""
    edges, others = [], []
    for values, mask in zip(first, inside, strict=True):
        middle = binary_erosion(mask)
        edges.append(values[mask & ~middle])
        others.append(values[middle])
    edge, other = (np.concatenate(each) for each in (edges, others))
    return -1 if len(other) and other.mean() < edge.mean() else 1
