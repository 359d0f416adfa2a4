"""Agreement with references: rank correlation with occlusion and gradients by layer, and coverage of intervals."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import OptionError
from vitflow.evaluation.measures.faithfulness import shared_input
from vitflow.explaining.applying import affinity_of, recording_options
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.sampling import sample
from vitflow.explaining.targets import Target
from vitflow.images.reading import ImageSource
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.fusion import raw_attention
from vitflow.methods.rollout import attention_rollout
from vitflow.methods.sampling import NORMAL_95, mean_differences, regress
from vitflow.methods.similarity import spearman
from vitflow.recording.isolation import evaluating
from vitflow.registry.choices import choose_methods

LAYER_METHODS = ("attention", "rollout", "flow")
REFERENCES = ("occlusion", "input_gradient")

#: Number of masks of the reference of `coverage`.
MASKS = 2048


def rank_correlation(explainer: Explainer, image: ImageSource, *, target: Target = None) -> NDArray[np.float64]:
    """Return Spearman's ρ between the maps of each layer and reference maps of an image, as in the paper.

    Layer l is treated as the last layer: raw attention is qᵀ W_l, rollout qᵀ Â_l ⋯ Â_1, and flow runs from the
    readout of layer l down to the input of layer 1. Heads are fused by their mean, without value weighting.

    Args:
        explainer: explainer of the model.
        image: the image.
        target: class of the references; by default the predicted class.

    Returns:
        ρ, [references, methods, layers], with the references occlusion and input gradient, and the methods raw
        attention, rollout and flow; NaN if one of the two maps is constant.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, §4. Their Tables 1 to 3 show the
    means over sentences.

    >>> from vitflow.demo import sample_images
    >>> rank_correlation(Explainer("demo"), sample_images()[0]).shape
    (2, 3, 6)
    """
    references = explainer.explain_batch([image], methods=REFERENCES, targets=target)
    trace = explainer.record(image, head_fusion="mean", value_weighted=False)
    fused, prefix = trace.fused("mean", value_weighted=False), trace.layout.num_prefix_tokens
    rows: list[list[Tensor]] = [[], [], []]
    for layer in range(1, len(fused) + 1):
        below = fused[:layer]
        rows[0].append(raw_attention(below[-1], readout=trace.readout, num_prefix_tokens=prefix))
        rows[1].append(attention_rollout(below, readout=trace.readout, num_prefix_tokens=prefix))
        flow = attention_flow(below, source=trace.readout, layers=(1, layer), num_prefix_tokens=prefix)
        rows[2].append(torch.as_tensor(flow.values))
    grids = [[_rounded(trace.layout.to_grid(tokens)[0]) for tokens in of_method] for of_method in rows]
    values = [[[spearman(grid, each.grid) for grid in of_method] for of_method in grids] for each in references]
    return np.array(values, dtype=np.float64)  # None becomes NaN


def _rounded(grid: Tensor) -> NDArray[np.float64]:
    """Return a map rounded to a millionth of its maximum: the ranks of saturated flows ignore rounding errors."""
    values: NDArray[np.float64] = grid.double().cpu().numpy()
    largest = float(values.max())
    return np.round(values / largest, 6) if largest > 0 else values


def coverage(explainer: Explainer, saliency: Saliency, *, masks: int = MASKS) -> float:
    """Return the share of patches whose 95 % interval contains the difference of means of many other masks.

    The regression's weights imply a difference of means for each patch: D⁻¹ Xᵀ X w, where X are the centred masks of
    the reference and D is the sum of their squares for each patch. The intervals are those of these differences, before
    refinement, from the masks of the map. The reference has no prior, and masks of the same distribution. Correct
    intervals have a coverage of about 0.95.

    Args:
        explainer: the explainer that made the map.
        saliency: a map by sampling or consensus for a target.
        masks: number of masks of the reference, which has the next seed.

    Raises:
        OptionError: the method has no intervals, or the map has no target.

    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo")
    >>> saliency = explainer.explain(sample_images()[0], method="sampling", masks=32)
    >>> 0.0 < coverage(explainer, saliency, masks=64) < 1.0
    True
    """
    [method] = choose_methods([(saliency.method, saliency.options)], {})
    if "masks" not in method.options or saliency.target is None:
        raise OptionError(
            f"Expected a map by sampling or consensus for a class, got {saliency.method}, "
            "whose values have no intervals."
        )
    drawn = {name: method.options[name] for name in ("occlusion_batch",)}
    seed, target, affinity = method.options["random_seed"], saliency.target, method.options["affinity"]
    recorded = explainer.record(shared_input([saliency]), **recording_options([method], explainer.model))
    trace = explainer.targeted(recorded, torch.tensor([target]))
    with torch.no_grad(), evaluating(explainer.model):
        few = sample(trace, masks=method.options["masks"], random_seed=seed, affinity=affinity, **drawn)
        many = sample(trace, masks=masks, random_seed=seed + 1, affinity=affinity, **drawn)
    [kept], [scores] = many.kept, many.scores
    implied = mean_differences(kept, kept)  # of each patch's presence: D⁻¹ Xᵀ X
    prior = affinity_of(trace, affinity, few.grid).matrix[0]
    posterior = regress(few.kept[0], few.scores[0][:, target], prior, of=implied)
    reference = mean_differences(kept, scores[:, target])
    return float(((posterior.mean - reference).abs() <= NORMAL_95 * posterior.std).double().mean())
