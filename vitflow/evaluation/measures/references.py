"""Agreement with references: rank correlation with occlusion and gradients by layer, and coverage of intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import OptionError, check_known
from vitflow.evaluation.measures.faithfulness import shared_input
from vitflow.explaining.applying import affinity_of, recording_options
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.sampling import sample
from vitflow.explaining.targets import Target
from vitflow.images.reading import ImageSource
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.fusion import HeadFusion, check_layer, raw_attention
from vitflow.methods.gradients import ValueWeighting
from vitflow.methods.rollout import attention_rollout
from vitflow.methods.sampling import NORMAL_95, Posterior, regress
from vitflow.methods.similarity import spearman
from vitflow.recording.isolation import evaluating
from vitflow.recording.trace import Trace
from vitflow.registry.choices import MethodChoice, choose_methods

LAYER_METHODS = ("attention", "rollout", "flow")
REFERENCES = ("occlusion", "input_gradient")

#: Number of masks of the reference of `coverage`.
MASKS = 1024


def rank_correlation(
    explainer: Explainer,
    image: ImageSource,
    *,
    methods: Sequence[str] = LAYER_METHODS,
    references: Sequence[MethodChoice] = REFERENCES,
    target: Target = None,
    head_fusion: HeadFusion = "mean",
    value_weighted: ValueWeighting = False,
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 1,
) -> NDArray[np.float64]:
    """Return Spearman's ρ between the maps of each layer and reference maps of an image.

    Layer l is treated as the last layer: raw attention is qᵀ W_l, rollout qᵀ Â_l ⋯ Â_s, and flow runs from the
    readout of layer l down to the input of layer s. The defaults are those of the paper: heads fused by their mean, no
    value weighting, and all layers down to the first.

    Args:
        explainer: explainer of the model.
        image: the image.
        methods: any of "attention", "rollout", "flow".
        references: names of the reference methods, or (name, options) pairs.
        target: class for class-specific references; by default the predicted class.
        head_fusion, value_weighted, discard_ratio, residual, start_layer: as for the methods.

    Returns:
        ρ, [references, methods, layers from start_layer on]; NaN if one of the two maps is constant.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, §4. Their Tables 1 to 3 show the
    means over sentences.

    >>> from vitflow.demo import sample_images
    >>> explainer, images = Explainer("demo"), sample_images()[:2]
    >>> np.mean([rank_correlation(explainer, image, methods=["rollout"]) for image in images], axis=0).shape
    (2, 1, 6)
    """
    for method in methods:
        check_known("method by layer", method, LAYER_METHODS)
    maps = explainer.explain_batch([image], methods=references, targets=target)
    trace = explainer.record(image, head_fusion=head_fusion, value_weighted=value_weighted)
    fused = trace.fused(head_fusion, value_weighted=value_weighted)
    layers = range(check_layer("start_layer", start_layer, len(fused)) + 1, len(fused) + 1)
    options: dict[str, Any] = {"discard_ratio": discard_ratio, "residual": residual, "start_layer": start_layer}
    grids = [[_layer_map(method, trace, fused[:layer], **options) for layer in layers] for method in methods]
    values = [[[spearman(grid, reference.grid) for grid in row] for row in grids] for reference in maps]
    return np.array(values, dtype=np.float64)  # None becomes NaN


def _layer_map(
    method: str, trace: Trace, fused: Sequence[Tensor], *, residual: float, start_layer: int, **discard: Any
) -> NDArray[np.float64]:
    """Return the map of the last of these layers on the patch grid, rounded to a millionth of the maximum.

    Saturated flows are equal up to rounding errors, which must not affect their ranks.
    """
    readout, options = trace.readout, discard | {"num_prefix_tokens": trace.layout.num_prefix_tokens}
    if method == "attention":
        tokens = raw_attention(fused[-1], readout=readout, **options)
    elif method == "rollout":
        tokens = attention_rollout(fused, readout=readout, start_layer=start_layer, residual=residual, **options)
    else:
        window = (check_layer("start_layer", start_layer, len(fused)) + 1, len(fused))
        flow = attention_flow(fused, source=readout, layers=window, residual=residual, **options)
        tokens = torch.as_tensor(flow.values)
    grid: NDArray[np.float64] = trace.layout.to_grid(tokens)[0].double().cpu().numpy()
    largest = float(grid.max())
    return np.round(grid / largest, 6) if largest > 0 else grid


def coverage(explainer: Explainer, saliency: Saliency, *, masks: int = MASKS) -> float:
    """Return the share of patches whose 95 % interval contains the mean from many masks of another seed.

    The intervals are those of the weights of the patches before refinement, from the masks of the map. Correct
    intervals have a coverage of about 0.95.

    Args:
        explainer: the explainer that made the map.
        saliency: a map by sampling or consensus with estimator="regression", for a target.
        masks: number of masks of the reference, which has the next seed.

    Raises:
        OptionError: the method has no intervals, or the map has no target.

    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo")
    >>> saliency = explainer.explain(sample_images()[0], method="sampling", estimator="regression", masks=32)
    >>> coverage(explainer, saliency, masks=64) > 0.5
    True
    """
    [method] = choose_methods([(saliency.method, saliency.options)], {})
    if method.options.get("estimator") != "regression" or saliency.target is None:
        raise OptionError(
            f"Expected a map by sampling or consensus with estimator=regression for a class, got {saliency.method}, "
            "whose values have no intervals."
        )
    drawn = {name: method.options[name] for name in ("keep", "cells", "occlusion_batch")}
    seed, target = method.options["random_seed"], saliency.target

    def posterior(count: int, seed: int) -> Posterior:
        kept, [scores], grid, _ = sample(trace, masks=count, random_seed=seed, **drawn)
        return regress(kept, scores[:, target], affinity_of(trace, method.options["affinity"], grid).matrix[0])

    recorded = explainer.record(shared_input([saliency]), **recording_options([method], explainer.model))
    trace = explainer.targeted(recorded, torch.tensor([target]))
    with torch.no_grad(), evaluating(explainer.model):
        few = posterior(saliency.facts.get("masks_used", method.options["masks"]), seed)
        many = posterior(masks, seed + 1)
    return float(((few.mean - many.mean).abs() <= NORMAL_95 * few.std).double().mean())
