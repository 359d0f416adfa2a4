"""Compare methods on the same images: a figure of all maps, and their agreement."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from matplotlib.figure import Figure
from torch import nn

from vitflow.analysis.strips import Strip, columns_of, draw_comparison
from vitflow.errors import OptionError, printable
from vitflow.explaining.captions import method_label, top_share
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.inputs import ImageInput, at_least_one, name_of
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Contrast, ImageTargets, Targets, contrasts_among, is_per_image, requested_targets
from vitflow.images import figures
from vitflow.images.figures import FigureResult, written
from vitflow.images.pen import Pen
from vitflow.methods.similarity import spearman
from vitflow.registry.choices import DEFAULT_METHODS, MethodChoice, check_methods
from vitflow.registry.method_table import get_method
from vitflow.registry.option_types import MethodOptions

# Number of images that a notebook shows.
_SHOWN = 4


def compare(
    images: ImageInput | Sequence[ImageInput],
    model: str | Path | nn.Module | Explainer,
    *,
    methods: Sequence[MethodChoice] | None = None,
    targets: Targets | Contrast | Sequence[Contrast] = None,
    target: ImageTargets | Contrast = None,
    **options: Unpack[MethodOptions],
) -> "Comparison":
    """Explain one image or several with many methods, including baselines.

    Args:
        images: one image or a list: paths, bytes, PIL images, RGB arrays, or normalised tensors.
        model: a model id (see `load_model`), a module, or an `Explainer`, which has further settings.
        methods: names, or (name, options) pairs; by default `DEFAULT_METHODS`, without class-specific methods if the
            model has no classes, and without methods that the model does not support (with a warning). A custom
            list has no baselines unless it includes "random" and "centre".
        targets: several classes for every image, by index or name; or contrasts, which only class-specific methods
            explain. Methods that are not class-specific give one map per image.
        target: one class for all images, or "top5", or a list or array with the class of each image; by default the
            predicted class.
        options: options for every method that accepts them, such as head_fusion="max".

    Raises:
        VitflowError: an image, the model or an option is invalid.

    >>> from vitflow.demo import sample_images
    >>> comparison = compare(sample_images()[0], model="demo", methods=["rollout", "gae", "random"], targets="top2")
    >>> [saliency.method for saliency in comparison.saliencies]
    ['rollout', 'gae', 'gae', 'random']
    """
    sources = at_least_one(images)
    given: Any = requested_targets(target, targets)
    one_each = is_per_image(given)
    if one_each and len(given) != len(sources):
        raise OptionError(f"Expected one class for each of {len(sources)} images, got {len(given)}.")
    check_methods(DEFAULT_METHODS if methods is None else methods, options)  # before a model is loaded
    explainer = Explainer.of(model)
    has_classes = explainer.num_classes > 0
    contrasting = bool(contrasts_among(given))  # only for class-specific methods
    chosen: list[MethodChoice] = [
        name
        for name in DEFAULT_METHODS
        if (has_classes or not get_method(name).class_specific) and (get_method(name).class_specific or not contrasting)
    ]
    per_image = []
    for index, source in enumerate(sources):
        # One at a time, for memory and for the time of each image.
        arguments: dict[str, Any] = {"names": [name_of(source, index + 1)], **options}
        arguments["targets"] = given[index : index + 1] if one_each else given
        if methods is None:
            maps, chosen = explainer.explain_supported(source, chosen, **arguments)
        else:
            maps = explainer.explain_batch([source], methods=methods, **arguments)
        per_image.append(tuple(saliency for column in columns_of(maps) for saliency in column))
    return Comparison(tuple(per_image))


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(FigureResult):
    """Maps of the same images by several methods.

    Attributes:
        images: for each image its maps, in the order of methods and, for class-specific methods, classes.

    >>> from vitflow.demo import sample_images
    >>> comparison = compare(sample_images()[0], model="demo", methods=["rollout", "gae"])
    >>> [saliency.method for saliency in comparison.images[0]]
    ['rollout', 'gae']
    """

    images: tuple[tuple[Saliency, ...], ...]

    def __repr__(self) -> str:
        count = len(self.images)
        return f"Comparison({count} image{'s' if count > 1 else ''}: {printable(', '.join(self.labels))})"

    def _repr_mimebundle_(self, **_: Any) -> Any:
        """Return the figure of the first images for notebooks."""
        left_out = len(self.images) - _SHOWN
        text = f"{self!r}{f'; {left_out} more images are not shown' if left_out > 0 else ''}"
        figure = Comparison(self.images[:_SHOWN]).figure(dpi=figures.NOTEBOOK_DPI, width=figures.NOTEBOOK_WIDTH)
        return figures.bundle(text, figure)

    @property
    def saliencies(self) -> tuple[Saliency, ...]:
        """All maps, in the order of images, methods and classes."""
        return tuple(saliency for image in self.images for saliency in image)

    @property
    def labels(self) -> tuple[str, ...]:
        """Label of each column: the method, as published or by vitflow's defaults, with options that differ."""
        return tuple(method_label(maps[0].method, maps[0].options) for maps in columns_of(self.images[0]))

    def agreement(self) -> dict[str, Any]:
        """Return the Spearman correlation of each pair of methods, as rows of a matrix, and what they are.

        It is that of the patches, mean over images and classes, or None if a map is constant or the patch grids differ.
        Class-specific maps are compared for the same class; other maps with the map of each class.
        """
        columns = [columns_of(image) for image in self.images]
        rows = [
            [maps[min(row, len(maps) - 1)].grid for maps in column]
            for column in columns
            for row in range(max(map(len, column)))
        ]
        count = len(self.labels)
        matrix: list[list[float | None]] = [[1.0] * count for _ in self.labels]
        for i, j in combinations(range(count), 2):
            values = [spearman(row[i], row[j]) for row in rows if row[i].shape == row[j].shape]
            defined = [value for value in values if value is not None]
            matrix[i][j] = matrix[j][i] = float(np.mean(defined)) if defined else None
        return {"methods": list(self.labels), "spearman": matrix, "maps": len(rows)}

    def figure(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        same_scale: bool = False,
        width: float = 1.5,
        **drawing: Any,
    ) -> Figure:
        """Draw the maps over their images: one row per image and class, one column per method.

        More than five methods are split into several bands; methods with a map for each class come last.

        Args:
            path: also write the figure here: .png, .pdf or .svg.
            same_scale: use the same colour limits for all maps of a method, so that they can be compared; by default
                each map has separate limits. Methods never share limits, because their units differ.
            width: width of a column, in inches.
            drawing: as for `Saliency.figure`; vmin and vmax are those of all maps.

        Raises:
            OptionError: a drawing option out of range, or another file type.
        """
        strip = Strip(Pen(width, **drawing), same_scale=same_scale)
        return written(draw_comparison(self.images, strip), path)

    def records(self, *, values: bool = False) -> list[dict[str, Any]]:
        """Return a record of each image for JSON: its maps, with `values` on the patch grid, and their agreement."""
        return [
            {
                "input": image[0].source,
                "model": image[0].model,
                "maps": [each.to_dict(values=values) | {"top_share": top_share(each.grid)} for each in image],
                "agreement": Comparison((image,)).agreement(),
            }
            for image in self.images
        ]
