"""Copies of a model side by side: the same maps, weights in the same memory, threads as before."""

import threading

import numpy as np
import pytest
import timm
import torch

from vitflow import Explainer
from vitflow.folder.batches import Lanes


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def explainer() -> Explainer:
    torch.manual_seed(0)
    return Explainer(timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64, depth=2).eval())


def pictures(count: int) -> list[np.ndarray]:
    return [np.random.default_rng(number).integers(0, 256, (70, 64, 3), dtype=np.uint8) for number in range(count)]


@pytest.mark.parametrize("method", ["rollout", "gae", "input_gradient"])
def test_lanes_work_at_once_and_give_the_maps_of_one(two_threads, explainer, method):
    lanes, both = Lanes(explainer, 4), threading.Barrier(2, timeout=30)
    assert lanes.count == 2 and [one.fits for one in lanes.batches] == [2, 2]
    seen = []

    def work(batches):
        both.wait()  # passes only if two are under way
        seen.append((batches, torch.get_num_threads()))
        return [
            explained.grid for one in parts for explained in batches.explainer.explain_batch([one], methods=[method])
        ]

    parts = pictures(3)
    found = [future.result() for future in [lanes.submit(work) for _ in range(2)]]
    lanes.close()
    assert {id(batches) for batches, _ in seen} == {id(one) for one in lanes.batches}
    assert [threads for _, threads in seen] == [1, 1] and torch.get_num_threads() == 2
    expected = [explainer.explain(one, method=method).grid for one in parts]
    for grids in found:
        np.testing.assert_allclose(grids, expected, rtol=1e-4, atol=1e-7)


def test_copies_share_weights_and_nothing_else(two_threads, explainer):
    lanes = Lanes(explainer, 4)
    first, second = (one.explainer.model for one in lanes.batches)
    lanes.close()
    assert first is explainer.model and second is not first
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert one is not other and one.data_ptr() == other.data_ptr() and one.requires_grad is other.requires_grad
    assert {id(module) for module in first.modules()}.isdisjoint(id(module) for module in second.modules())


def test_a_model_that_cannot_be_copied_has_one_lane_in_the_thread_that_calls(two_threads, explainer):
    explainer.model.guard = threading.Lock()
    lanes = Lanes(explainer, 4)
    assert lanes.count == 1 and lanes.batches[0].fits == 4
    assert lanes.submit(lambda _: threading.get_ident()).result() == threading.get_ident()
    lanes.close()
    assert torch.get_num_threads() == 2


def test_a_lane_that_fails_tells_its_error_and_is_free_again(two_threads, explainer):
    lanes = Lanes(explainer, 2)

    def fail(batches):
        raise ValueError("of this part")

    for _ in range(5):
        with pytest.raises(ValueError, match="of this part"):
            lanes.submit(fail).result()
    assert lanes.submit(lambda batches: batches).result() in lanes.batches
    lanes.close()
