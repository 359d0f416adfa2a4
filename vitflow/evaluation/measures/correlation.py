"""Rank correlation of raw attention, rollout and flow with occlusion and input gradients, by layer.

Abnar & Zuidema report the correlation of raw attention, attention rollout and attention flow of each layer with
occlusion scores and input gradients (their Tables 1 to 3, on sentences). This module computes it for images.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import OptionError, check_known
from vitflow.evaluation.statistics import Table
from vitflow.explaining.choices import MethodChoice, choose_methods
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.image_model import at_least_one
from vitflow.explaining.targets import Target
from vitflow.files import find_images, write_atomically
from vitflow.images import FIGURE_FORMATS, figures
from vitflow.images.charts import Series, draw_lines
from vitflow.images.reading import ImageSource
from vitflow.images.typesetting import decimal
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.fusion import HeadFusion, check_layer, raw_attention
from vitflow.methods.gradients import ValueWeighting
from vitflow.methods.rollout import attention_rollout
from vitflow.methods.similarity import spearman
from vitflow.recording.trace import Trace

LAYER_METHODS = ("attention", "rollout", "flow")
REFERENCES = ("occlusion", "input_gradient")

_LABELS = {
    "attention": "raw attention",
    "rollout": "attention rollout",
    "flow": "attention flow",
    "input_gradient": "input gradient",
}


def rank_correlation(
    images: ImageSource | Sequence[ImageSource],
    *,
    model: str | Path | nn.Module | Explainer,
    layers: Sequence[int] | None = None,
    methods: Sequence[str] = LAYER_METHODS,
    references: Sequence[MethodChoice] = REFERENCES,
    target: Target = None,
    fit: str = "crop",
    device: str | torch.device | None = None,
    head_fusion: HeadFusion = "mean",
    value_weighted: ValueWeighting = False,
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> "RankCorrelation":
    """Correlate raw attention, rollout and flow of each layer with references, over images.

    Layer l is treated as the last layer: raw attention is qᵀ W_l, rollout qᵀ Â_l ⋯ Â_s, and flow runs from the
    readout of layer l down to the input of layer s. The defaults are those of the paper: heads fused by their mean, no
    value weighting, and all layers down to the first.

    Args:
        images: a folder or a list of images.
        model: a model id, a module, or an `Explainer`, whose fit and device are used.
        layers: layer numbers, 1 for the first; by default all from start_layer on.
        methods: any of "attention", "rollout", "flow".
        references: names of the reference methods, or (name, options) pairs.
        target: class for class-specific references; by default the predicted class of each image.
        fit: "crop" (the model's own preprocessing), "squash", "pad" or "native".
        device: torch device.
        head_fusion, value_weighted, discard_ratio, residual, start_layer: as for the methods.
        progress: called after each image with the numbers of finished and of all images.

    Raises:
        VitflowError: an image, the model or an option is invalid.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, §4.

    >>> from vitflow.demo import sample_images
    >>> images = sample_images()[:2]
    >>> result = rank_correlation(images, model="demo", methods=["rollout"], references=["input_gradient"])
    >>> result.values.shape  # references, methods, layers, images
    (1, 1, 6, 2)
    """
    for method in methods:
        check_known("method by layer", method, LAYER_METHODS)
    if not methods or not references:
        raise OptionError("Expected at least one method and one reference, got none.")
    sources = at_least_one(find_images(images) if isinstance(images, str | os.PathLike) else images)
    explainer = model if isinstance(model, Explainer) else Explainer(model, device=device, fit=fit)
    correlations, numbers = [], list[int]()
    for done, source in enumerate(sources, start=1):
        maps = explainer.explain_batch([source], methods=references, targets=target)
        trace = explainer.record(source, head_fusion=head_fusion, value_weighted=value_weighted)
        fused = trace.fused(head_fusion, value_weighted=value_weighted)
        numbers = _chosen_layers(layers, start_layer, len(fused))
        options: dict[str, Any] = {"discard_ratio": discard_ratio, "residual": residual, "start_layer": start_layer}
        grids = [[_layer_map(method, trace, fused[:n], **options) for n in numbers] for method in methods]
        correlations.append([[[spearman(grid, reference.grid) for grid in row] for row in grids] for reference in maps])
        if progress is not None:
            progress(done, len(sources))
    values = np.moveaxis(np.array(correlations, dtype=float), 0, -1)  # None becomes NaN
    names = tuple(reference.name for reference in choose_methods(references, {}))
    return RankCorrelation(explainer.model_id, tuple(methods), names, tuple(numbers), values)


def _chosen_layers(layers: Sequence[int] | None, start_layer: int, count: int) -> list[int]:
    first = check_layer("start_layer", start_layer, count) + 1
    if layers is None:
        return list(range(first, count + 1))
    numbers = [check_layer("layers", layer, count) + 1 for layer in layers]
    if not numbers or min(numbers) < first:
        raise OptionError(f"Expected layers from {first} (start_layer) to {count}, got {list(layers)}.")
    return numbers


def _layer_map(
    method: str, trace: Trace, fused: Sequence[Tensor], *, residual: float, start_layer: int, **discard: Any
) -> NDArray[np.float64]:
    """Return the map of the last of these layers on the patch grid, rounded to a millionth of the maximum.

    Saturated flows are equal up to rounding errors, which must not affect their ranks.
    """
    readout, options = trace.readout, discard | {"num_prefix_tokens": trace.layout.num_prefix_tokens}
    if method == "attention":
        tokens = raw_attention([fused[-1]], readout=readout, **options)
    else:
        options["residual"] = residual
        if method == "rollout":
            tokens = attention_rollout(fused, readout=readout, start_layer=start_layer, **options)
        else:
            window = (check_layer("start_layer", start_layer, len(fused)) + 1, len(fused))
            tokens = torch.as_tensor(attention_flow(fused, source=readout, layers=window, **options).values)
    grid: NDArray[np.float64] = trace.layout.to_grid(tokens)[0].double().cpu().numpy()
    largest = float(grid.max())
    return np.round(grid / largest, 6) if largest > 0 else grid


@dataclass(frozen=True, slots=True, eq=False)
class RankCorrelation:
    """Spearman's rank correlation of each method and layer with each reference, over images.

    Attributes:
        model: the model's id.
        methods: attention, rollout, flow.
        references: the reference methods.
        layers: layer numbers, 1 for the first.
        values: float64 [references, methods, layers, images]; NaN if one of the two maps is constant.
    """

    model: str
    methods: tuple[str, ...]
    references: tuple[str, ...]
    layers: tuple[int, ...]
    values: NDArray[np.float64]

    @property
    def images(self) -> int:
        """Number of images."""
        return int(self.values.shape[-1])

    def mean(self, reference: str, method: str, layer: int) -> float | None:
        """Return the mean over images; None if no image has a value."""
        defined = self._defined(reference, method, layer)
        return float(defined.mean()) if len(defined) else None

    def spread(self, reference: str, method: str, layer: int) -> float | None:
        """Return the sample standard deviation over images; None for fewer than two."""
        defined = self._defined(reference, method, layer)
        return float(defined.std(ddof=1)) if len(defined) > 1 else None

    def _defined(self, reference: str, method: str, layer: int) -> NDArray[np.float64]:
        index = self.references.index(reference), self.methods.index(method), self.layers.index(layer)
        values: NDArray[np.float64] = self.values[index]
        return values[~np.isnan(values)]

    def to_dict(self) -> dict[str, Any]:
        """Return means, standard deviations and the value of each image (None if undefined) as JSON data."""
        names = product(self.references, self.methods, self.layers)
        rows = [
            {
                "reference": reference,
                "method": method,
                "layer": layer,
                "mean": self.mean(reference, method, layer),
                "standard_deviation": self.spread(reference, method, layer),
                "values": [None if np.isnan(value) else value for value in values],
            }
            for (reference, method, layer), values in zip(
                names, self.values.reshape(-1, self.images).tolist(), strict=True
            )
        ]
        return {"model": self.model, "images": self.images, "spearman": rows}

    def tables(self) -> list[Table]:
        """Return a table per reference, as in the paper: a row per method, a column per layer."""
        layers = [f"L{layer}" for layer in self.layers]
        return [
            Table(
                (f"Spearman with {_label(reference)}", *layers),
                [
                    (_label(name), *(self._cell(reference, name, layer) for layer in self.layers))
                    for name in self.methods
                ],
            )
            for reference in self.references
        ]

    def to_markdown(self) -> str:
        """Return the tables of means ± standard deviations, with model and number of images."""
        caption = f"Mean ± standard deviation over {self.images} image{'s' * (self.images > 1)}, {self.model}."
        return "\n\n".join([*(table.to_markdown() for table in self.tables()), caption]) + "\n"

    def _cell(self, reference: str, method: str, layer: int) -> str:
        mean, spread = self.mean(reference, method, layer), self.spread(reference, method, layer)
        return decimal(mean, 2) + ("" if spread is None else f" ± {spread:.2f}")

    def figure(self) -> Figure:
        """Draw a chart per reference: a line per method over the layers, with a band of ± one standard deviation."""
        charts = {
            f"with {_label(reference)}": [
                Series(
                    _label(method),
                    self.layers,
                    [self.mean(reference, method, layer) for layer in self.layers],
                    [self.spread(reference, method, layer) for layer in self.layers],
                )
                for method in self.methods
            ]
            for reference in self.references
        }
        return draw_lines(charts, x_label="layer", y_label="Spearman's rank correlation")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the chart (.png, .pdf, .svg), the tables (.md) or all values (.json)."""
        path = Path(path)
        suffix = figures.check_format(path, (*FIGURE_FORMATS, ".md", ".json"))
        if suffix in FIGURE_FORMATS:
            return figures.save_figure(self.figure(), path)
        text = self.to_markdown() if suffix == ".md" else json.dumps(self.to_dict())
        with write_atomically(path) as file:
            file.write(text.encode())
        return path


def _label(name: str) -> str:
    return _LABELS.get(name, name.replace("_", " "))
