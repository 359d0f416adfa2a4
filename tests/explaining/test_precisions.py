"""A model in another precision: the same maps to its rounding, and a run of its own."""

import numpy as np
import pytest
import torch

from vitflow import Explainer, load_model
from vitflow.demo import sample_images
from vitflow.errors import OptionError

HAS_GPU = torch.cuda.is_available()
METHODS = [("rollout", {}), ("rollout", {"preset": "paper"}), ("gae", {}), ("attention", {})]


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")])]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_maps_are_those_of_full_precision_to_its_rounding(dtype, tolerance, device):
    images = sample_images()[:2]
    expected = Explainer("demo", device="cpu").explain_batch(images, methods=METHODS)
    explainer = Explainer(load_model("demo"), dtype=dtype, device=device)
    assert {parameter.dtype for parameter in explainer.model.parameters()} == {getattr(torch, dtype)}
    actual = explainer.explain_batch(images, methods=METHODS)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.grid.dtype == np.float32
        assert ours.target == theirs.target
        assert abs(ours.probability - theirs.probability) < tolerance
        assert np.abs(ours.grid - theirs.grid).max() <= tolerance * np.abs(theirs.grid).max()


def test_an_unknown_precision_is_refused_before_a_model_is_loaded():
    with pytest.raises(OptionError, match="Unknown dtype 'half'.*bfloat16"):
        Explainer("no such model", dtype="half")
