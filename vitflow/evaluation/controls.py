"""The control of every table: each map blurred, to tell what comes of its being smooth from what it says."""

from dataclasses import replace

import numpy as np
from scipy.ndimage import gaussian_filter

from vitflow.explaining.saliency import Saliency

# Standard deviation of the blur, in patches.
SIGMA = 1.0

_SUFFIX = " (blurred)"

SAYS = (
    "Each method stands beside its blurred twin, the same map under a Gaussian of one patch: blur buys localisation, "
    "for objects are wider than a patch, and pays in deletion, for it knows nothing of the model; what gains in both "
    "is more than blur."
)


def twin_of(label: str) -> str:
    """The label of a method's blurred twin."""
    return f"{label}{_SUFFIX}"


def is_twin(label: str) -> bool:
    """Whether a label is that of a blurred twin."""
    return label.endswith(_SUFFIX)


def blurred(saliency: Saliency) -> Saliency:
    """The map under a Gaussian with a standard deviation of one patch; at the border it is mirrored, so sums are kept.

    >>> from vitflow.explaining.explainer import explain
    >>> from vitflow.demo import sample_pictures
    >>> saliency = explain(sample_pictures()[0], model="demo")
    >>> bool(np.isclose(blurred(saliency).grid.sum(), saliency.grid.sum()))
    True
    """
    smooth = gaussian_filter(saliency.grid.astype(np.float64), SIGMA, mode="reflect")
    return replace(saliency, grid=smooth.astype(np.float32))
