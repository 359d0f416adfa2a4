"""Explanations on a simulated GPU, and on a real one: the maps of the CPU, and no waiting for single images."""

import numpy as np
import pytest
import torch

from tests.accelerator import simulated
from tests.small import DATA, custom_model, photo
from vitflow import Explainer, explain_folder, list_methods, load_model
from vitflow.demo import SAMPLE_FOLDER
from vitflow.folder import read_grids

IMAGES = [photo(32, 32, seed) for seed in range(8)]
OPTIONS = {"sampling": {"masks": 8}, "consensus": {"masks": 8}}
# Waiting for each further pass of a model for seven more images: for the copy of its outputs, and of the kept patches.
FURTHER = {"sampling": 14, "consensus": 14, "occlusion": 3}
METHODS = [method.name for method in list_methods()]


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    torch.manual_seed(0)
    return Explainer(custom_model(), data_config=DATA)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("method", METHODS)
def test_maps_are_those_of_the_cpu_and_a_batch_waits_as_often_as_an_image(explainer, method):
    chosen = [(method, OPTIONS.get(method, {}))]
    expected = explainer.explain_batch(IMAGES, methods=chosen, targets=[1])
    with simulated(explainer) as accelerator:
        actual = explainer.explain_batch(IMAGES, methods=chosen, targets=[1])
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours.grid, theirs.grid, rtol=1e-4, atol=1e-5 * np.abs(theirs.grid).max())
        assert ours.facts.keys() == theirs.facts.keys()
    waits = []
    for count in (1, 8):  # the same image, as the rounds of a solver depend on the image
        with simulated(explainer) as accelerator:
            explainer.explain_batch(IMAGES[:1] * count, methods=chosen, targets=[1])
        waits.append(accelerator.waits)
    assert not any("inputs.py" in place for place in waits[1])  # images are copied while the device is busy
    further = waits[1] - waits[0]
    assert further.total() <= FURTHER.get(method, 0), further


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("method", METHODS)
def test_maps_of_a_gpu_are_those_of_the_cpu(explainer, method):
    chosen = [(method, OPTIONS.get(method, {}))]
    expected = explainer.explain_batch(IMAGES, methods=chosen, targets=[1])
    with torch.backends.cudnn.flags(allow_tf32=False):
        there = Explainer(custom_model(), data_config=DATA, device="cuda")
        actual = there.explain_batch(IMAGES, methods=chosen, targets=[1])
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours.grid, theirs.grid, rtol=1e-3, atol=1e-3 * np.abs(theirs.grid).max())


@pytest.mark.gpu
@needs_gpu
def test_a_folder_run_on_a_gpu_has_the_maps_of_the_cpu(tmp_path):
    grids = []
    for device in ("cpu", "cuda"):
        explainer = Explainer(load_model("demo"), device=device)
        explain_folder(SAMPLE_FOLDER, tmp_path / device, model=explainer, overlays=False, limit=4)
        grids.append(np.stack([maps["rollout"] for _, maps in read_grids(tmp_path / device)]))
    np.testing.assert_allclose(grids[1], grids[0], atol=0.02 * grids[0].max())
