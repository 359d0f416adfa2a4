"""Coverage of the 95 % intervals of sampling, against the values from many more masks."""

from collections.abc import Mapping
from typing import Any

import torch

from vitflow.errors import OptionError
from vitflow.explaining.applying import recorded_for
from vitflow.explaining.choices import choose_methods
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.refining import affinity_of
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.sampling import sample
from vitflow.explaining.targeted_trace import TargetedTrace
from vitflow.methods.sampling import NORMAL_95, Posterior, regress
from vitflow.recording.isolation import evaluating

#: Number of masks of the reference.
MASKS = 1024


def has_intervals(options: Mapping[str, Any]) -> bool:
    """Return True if values with these options have intervals: sampling and consensus with estimator="regression"."""
    return bool(options.get("estimator") == "regression")


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
    if not has_intervals(method.options) or saliency.target is None:
        raise OptionError(
            f"Expected a map by sampling or consensus with estimator=regression for a class, got {saliency.method}, "
            "whose values have no intervals."
        )
    drawn = {name: method.options[name] for name in ("keep", "cells", "occlusion_batch")}
    seed, target = method.options["random_seed"], saliency.target

    def posterior(count: int, seed: int) -> Posterior:
        kept, [scores], grid, _ = sample(trace, masks=count, random_seed=seed, **drawn)
        return regress(kept, scores[:, target], affinity_of(trace, method.options["affinity"], grid).matrix[0])

    recorded = explainer.record(saliency.image, **recorded_for([method], explainer.model))
    of_model = {"run": explainer.logits, "outputs": explainer.outputs, "facts": explainer.facts}
    trace = TargetedTrace.of(recorded, torch.tensor([target]), **of_model)
    with torch.no_grad(), evaluating(explainer.model):
        few = posterior(saliency.facts.get("masks_used", method.options["masks"]), seed)
        many = posterior(masks, seed + 1)
    return float(((few.mean - many.mean).abs() <= NORMAL_95 * few.std).double().mean())
