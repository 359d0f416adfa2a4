"""Copies of a model side by side: the same maps, weights in the same memory, threads as before."""

import threading
import types

import numpy as np
import pytest
import timm
import torch

from tests.folder.test_run import fill, run, tiny_model
from vitflow import Explainer
from vitflow.folder import pipeline
from vitflow.folder.pipeline import Lanes
from vitflow.folder.work import compute_maps


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


def photos(count: int) -> list[np.ndarray]:
    return [np.random.default_rng(number).integers(0, 256, (70, 64, 3), dtype=np.uint8) for number in range(count)]


@pytest.mark.parametrize("method", ["rollout", "gae"])
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

    parts = photos(3)
    actual = [future.result() for future in [lanes.submit(work) for _ in range(2)]]
    lanes.close()
    assert {id(batches) for batches, _ in seen} == {id(one) for one in lanes.batches}
    assert [threads for _, threads in seen] == [1, 1] and torch.get_num_threads() == 2
    expected = [explainer.explain(one, method=method).grid for one in parts]
    for grids in actual:
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


SHARED: dict[str, torch.Tensor] = {}


class Custom(torch.nn.Module):
    """A class of the user, which keeps a token outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = tiny_model()
        torch.nn.init.normal_(self.vit.head.weight)
        self.pretrained_cfg = self.vit.pretrained_cfg

    def forward(self, x):
        features = self.vit.forward_features(x)
        SHARED["token"] = features[:, 0]
        return self.vit.head(features[:, 0] + SHARED["token"])


def hooks_into_a_dict():
    model, kept = tiny_model(), {}
    torch.nn.init.normal_(model.head.weight)
    model.blocks[0].register_forward_hook(lambda module, x, y: kept.__setitem__(0, y[:, 0]))
    model.head.register_forward_pre_hook(lambda module, x: (x[0] + kept[0],))
    return model


def a_forward():
    model = tiny_model()
    torch.nn.init.normal_(model.head.weight)
    plain, kept = model.head.forward, {}

    def forward(x):
        kept["x"] = x
        return plain(kept["x"])

    model.head.forward = forward
    return model


def a_method():
    model, kept = tiny_model(), {}

    def forward_features(self, x, **options):
        kept["features"] = type(self).forward_features(self, x, **options)
        return kept["features"]

    model.forward_features = types.MethodType(forward_features, model)
    return model


def a_parameter_of_another_type():
    model = tiny_model()
    model.head.weight = type("Weight", (torch.nn.Parameter,), {})(torch.randn(5, 24))
    return model


MIXING = [Custom, hooks_into_a_dict, a_forward, a_method, a_parameter_of_another_type]


@pytest.mark.parametrize("make", MIXING)
def test_where_copies_would_mix_their_images_there_is_one_lane(two_threads, make):
    lanes = Lanes(Explainer(make().eval()), 4)
    lanes.close()
    assert (lanes.count, torch.get_num_threads()) == (1, 2)


def test_the_last_batch_is_divided_among_the_lanes_as_well(two_threads, tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(pipeline, "compute_maps", lambda *given: sizes.append(len(given[1])) or compute_maps(*given))
    assert run(fill(tmp_path / "in", 6), tmp_path / "out", batch_size=4).explained == 6
    assert sizes == [2, 2, 1, 1]


def test_a_lane_that_fails_reports_its_error_and_is_free_again(two_threads, explainer):
    lanes = Lanes(explainer, 2)

    def fail(batches):
        raise ValueError("of this part")

    for _ in range(5):
        with pytest.raises(ValueError, match="of this part"):
            lanes.submit(fail).result()
    assert lanes.submit(lambda batches: batches).result() in lanes.batches
    lanes.close()
