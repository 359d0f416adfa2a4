"""The features of patches as colours: the first three principal components of one or several images together."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.ndimage import binary_erosion
from torch import nn

from vitflow.errors import OptionError
from vitflow.explaining.captions import model_in_words
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.image_model import ImageInput, at_least_one, name_of
from vitflow.explaining.similarity import layer_features
from vitflow.explaining.strips import in_rows
from vitflow.explaining.targeted_trace import PlacedImage
from vitflow.images import DPI, Interpolation, figures, overlay
from vitflow.images.figures import Cell, Column, FigureResult, file_too
from vitflow.images.geometry import Placement
from vitflow.images.pen import Pen
from vitflow.images.reading import image_name
from vitflow.methods.features import Components, principal_components
from vitflow.methods.fusion import check_layer
from vitflow.models.blocks import block_norms, block_paths, layer_output

_MOST_COLUMNS = 6


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ImageFeatures:
    """What the patches of one image hold, as three numbers each.

    Attributes:
        source: the image's name.
        image: the image, uint8 RGB [height, width, 3].
        placement: where the model input lies on it.
        components: float32 [rows, cols, 3]; NaN for patches that lie beside the image, in its padding.
        shown: which patches the components were made of, and are drawn: those of the image, or of its foreground;
            bool [rows, cols].
    """

    source: str
    image: NDArray[np.uint8]
    placement: Placement
    components: NDArray[np.float32]
    shown: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Features(FigureResult):
    """The first three principal components of the patch features of images, taken together.

    Attributes:
        images: each with its components.
        shares: of the variance of what is shown that the three components hold.
        model: the model's id.
        layer: whose features they are, counted from 1.
        foreground: whether they are those of the foreground alone.
        model_note: what a reader must know of the model, if it carries such a note.
    """

    images: tuple[ImageFeatures, ...]
    shares: tuple[float, float, float]
    model: str
    layer: int
    foreground: bool
    model_note: str = ""

    def __repr__(self) -> str:
        count = len(self.images)
        shares = ", ".join(f"{share:.0%}" for share in self.shares)
        return f"Features({count} image{'s' if count > 1 else ''}, layer {self.layer}, {shares} of the variance)"

    @property
    def components(self) -> tuple[NDArray[np.float32], ...]:
        """The components of each image, [rows, cols, 3]; NaN in its padding."""
        return tuple(image.components for image in self.images)

    @property
    def colours(self) -> tuple[NDArray[np.float32], ...]:
        """The components of each image as red, green and blue from 0 to 1, [rows, cols, 3]; NaN in its padding.

        Of each component 0 and 1 are the 2nd and the 98th percentile of what is shown, over all images, so that one
        colour means the same in all of them.
        """
        shown = np.concatenate([image.components[image.shown] for image in self.images])
        low, high = np.percentile(shown, overlay.ROBUST_PERCENTILES, axis=0)
        spread = np.where(high > low, high - low, np.inf)
        middle = np.where(high > low, 0.0, 0.5)
        return tuple(np.clip((own - low) / spread + middle, 0.0, 1.0).astype(np.float32) for own in self.components)

    def figure(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        width: float = 1.5,
        dpi: int = DPI,
        alpha: float = 1.0,
        interpolation: Interpolation = "smooth",
    ) -> Figure:
        """Draw each image with its components as colours below it.

        Args:
            path: also write the figure here: .png, .pdf or .svg.
            width: of an image, in inches.
            dpi: pixels per inch of the images.
            alpha: opacity of the colours, from 0 to 1.
            interpolation: how patches become pixels: "smooth", "linear", "cubic", or "nearest" to see the patches.

        Raises:
            OptionError: a drawing option is out of range, or another file type.
        """
        pen = Pen.of(width, {"dpi": dpi, "interpolation": interpolation, "alpha": alpha})
        return file_too(path, lambda: self._draw(pen))

    def _draw(self, pen: Pen) -> Figure:
        columns = []
        for image, colours in zip(self.images, self.colours, strict=True):
            drawn = pen.colours(colours, image.shown, image.placement, image.image)
            photograph = Cell(pen.photograph(image.image), (), (image_name(image.source),))
            columns.append((Column(""), [photograph, Cell(drawn)]))
        bands = [([head for head, _ in row], [[cells for _, cells in row]]) for row in in_rows(columns, _MOST_COLUMNS)]
        return figures.draw_bands(bands, note=self._note(), dpi=pen.dpi)

    def _note(self) -> str:
        together = "" if len(self.images) == 1 else " over all images together"
        what = "foreground patches" if self.foreground else "patches"
        red, green, blue = (f"{share:.0%}" for share in self.shares)
        return (
            f"The first three principal components of the {what}' features{together}, as red, green and blue: {red}, "
            f"{green} and {blue} of their variance.\n"
            f"Model: {model_in_words(self.model, self.model_note)}, layer {self.layer}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: the records with the components of each patch, and which patches are shown."""
        images = [
            record
            | {
                "components": [
                    [None if np.isnan(patch[0]) else patch.tolist() for patch in row] for row in own.components
                ],
                "shown": own.shown.tolist(),
            }
            for record, own in zip(self.records(), self.images, strict=True)
        ]
        return {"model": self.model, "layer": self.layer, "images": images}

    def records(self) -> list[dict[str, Any]]:
        """What a log keeps of each image, ready for JSON."""
        return [
            {
                "input": own.source,
                "model": self.model,
                "layer": self.layer,
                "foreground": self.foreground,
                "shares": list(self.shares),
                "grid_rows": own.shown.shape[0],
                "grid_columns": own.shown.shape[1],
                "patches_shown": int(own.shown.sum()),
                "placement": own.placement.to_dict(),
            }
            for own in self.images
        ]


def feature_maps(
    images: ImageInput | Sequence[ImageInput],
    *,
    model: str | Path | nn.Module | Explainer,
    layer: int = -1,
    foreground: bool = False,
    fit: str = "crop",
    device: str | torch.device | None = None,
) -> Features:
    """Show what patches hold: the first three principal components of their features, as colours.

    Features are the output of a block after the model's last norm, without prefix and register tokens; of a model with
    stages, what a stage gives. Patches that lie in the padding of an image have no part in it.

    Args:
        images: one image, or a list of them, which get their components together: paths, bytes, PIL images, or RGB
            arrays.
        model: a model id (see `load_model`), a module of your own, or an `Explainer`, whose own fit and device hold.
        layer: whose features, counted from 1; -1 is the last.
        foreground: take two steps: the first component of all patches parts foreground from background at its mean, and
            the components are those of the foreground. Foreground is the side that has less of the images' edges.
        fit, device: as for `vitflow.explain`.

    Raises:
        VitflowError: an image, the model or an option is wrong; fewer than four patches.

    Source: Oquab et al., "DINOv2: Learning Robust Visual Features without Supervision", TMLR 2024, §7.4 and Figure 1.

    >>> from vitflow.demo import sample_images
    >>> found = feature_maps(sample_images()[:2], model="demo")
    >>> [own.shape for own in found.components]
    [(12, 12, 3), (12, 12, 3)]
    """
    sources = at_least_one(images)
    explainer = model if isinstance(model, Explainer) else Explainer(model, device=device, fit=fit)
    placed = [explainer.placed(source, name_of(source, number)) for number, source in enumerate(sources, start=1)]
    vectors = [_vectors(explainer, image, layer) for image in placed]
    inside = [_inside(one.placement, *own.shape[:2]) for one, own in zip(placed, vectors, strict=True)]
    shown, found = inside, _components(vectors, inside, "patches")
    if foreground:
        first = [found.of(own)[..., 0].numpy() for own in vectors]
        side = _side(first, inside)
        shown = [own & (side * values > 0) for own, values in zip(inside, first, strict=True)]
        found = _components(vectors, shown, "foreground patches")
    told = []
    for image, vector, own, kept in zip(placed, vectors, inside, shown, strict=True):
        components = np.where(own[..., None], found.of(vector).numpy(), np.nan).astype(np.float32)
        told.append(ImageFeatures(image.name, image.image, image.placement, components, kept))
    red, green, blue = found.shares.tolist()
    number = check_layer("layer", layer, len(block_paths(explainer.model) or block_norms(explainer.model))) + 1
    return Features(tuple(told), (red, green, blue), explainer.model_id, number, foreground, explainer.facts.note)


def _vectors(explainer: Explainer, image: PlacedImage, layer: int) -> torch.Tensor:
    """The features of the patches of an image, [rows, cols, width]."""
    trace = explainer.record(image, attention=False, features=[layer_output(explainer.model, layer)[0]])
    tokens, layout = layer_features(trace, layer)
    patches = tokens[0, layout.patches].cpu()
    return patches.view(layout.rows, layout.cols, -1)


def _inside(placement: Placement, rows: int, cols: int) -> NDArray[np.bool_]:
    """Which patches have their centre on the image, and not in its padding, [rows, cols]."""
    down, across = (np.arange(count) + 0.5 for count in (rows, cols))
    y, x = placement.to_image(down * placement.input_size[0] / rows, across * placement.input_size[1] / cols)
    height, width = placement.image_size
    found: NDArray[np.bool_] = ((y >= 0) & (y < height))[:, None] & ((x >= 0) & (x < width))
    return found


def _components(vectors: Sequence[torch.Tensor], kept: Sequence[NDArray[np.bool_]], what: str) -> Components:
    """The components of the patches [rows, cols, width] of all images that are kept, [rows, cols]."""
    together = torch.cat([own[torch.from_numpy(which)] for own, which in zip(vectors, kept, strict=True)])
    if len(together) < 4:
        raise OptionError(
            f"Expected at least four {what} to tell three components, got {len(together)}: take more "
            "images, or a larger model input."
        )
    return principal_components(together)


def _side(first: Sequence[NDArray[np.float64]], inside: Sequence[NDArray[np.bool_]]) -> int:
    """The sign of the first component on the foreground: on the other side lies more of the images' edges."""
    edges, others = [], []
    for values, own in zip(first, inside, strict=True):
        middle = binary_erosion(own)
        edges.append(values[own & ~middle])
        others.append(values[middle])
    edge, other = (np.concatenate(own) for own in (edges, others))
    return -1 if len(other) and other.mean() < edge.mean() else 1
