"""Sheets of layers and heads: which maps they hold, and how they are drawn and asked for."""

import json
from functools import partial

import numpy as np
import pytest
import timm
from PIL import Image

import vitflow
from tests.typed import typed_here
from vitflow import Explainer
from vitflow.demo import sample_images
from vitflow.errors import OptionError

IMAGE = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64, depth=3).eval()
    return Explainer(model)


@pytest.mark.parametrize("method", ["rollout", "gae"])
def test_the_maps_are_those_of_each_layer_of_the_layers_together_and_of_each_head(explainer, method):
    actual = vitflow.layer_maps(IMAGE, model=explainer, method=method, layer=2, target=3, patch=(1, 2))
    assert isinstance(actual, vitflow.analysis.layers.LayerMaps) and actual.layer == 2
    assert [len(maps) for maps in (actual.single, actual.accumulated, actual.heads)] == [3, 3, 3]
    one = partial(explainer.explain, IMAGE, patch=(1, 2))  # an option that reaches all of them
    expected = [one(method="attention", layer=layer) for layer in (1, 2, 3)]
    expected += [one(method=method, target=3, start_layer=start) for start in (3, 2, 1)]
    expected += [one(method="attention", layer=2, head=head) for head in range(1, 4)]
    for one, alone in zip(actual.saliencies, expected, strict=True):
        np.testing.assert_allclose(one.grid, alone.grid, rtol=1e-4, atol=1e-7)


def test_json_holds_the_grid_of_every_map(explainer, tmp_path):
    actual = vitflow.layer_maps(IMAGE, model=explainer, layer=1)
    assert f"{len(actual.single)} layers, {len(actual.heads)} heads" in repr(actual)
    [kept] = json.loads(actual.save(tmp_path / "sheet.json").read_text())
    for one, saliency in zip(kept["maps"], actual.saliencies, strict=True):
        np.testing.assert_array_equal(np.float32(one["grid"]), saliency.grid)
        assert one["method"] == saliency.method and one["options"] == saliency.to_dict()["options"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gradcam"}, r"one of the methods rollout, gradient_rollout, gae, got 'gradcam'"),
        ({"layer": 4}, "Expected layer from 1 to 3"),
        ({"head": 1}, "head cannot be used"),
        ({"method": "gae", "target": [0, 1]}, "Expected a single class"),
    ],
)
def test_what_makes_no_sheet_is_refused(explainer, options, message):
    with pytest.raises(OptionError, match=message):
        vitflow.layer_maps(IMAGE, model=explainer, **options)


def test_the_command_writes_a_sheet(monkeypatch, tmp_path, capsys):
    run = partial(typed_here, monkeypatch, capsys, tmp_path, "layers", sample_images()[0], "--model", "demo")
    code, out, err = run("--layer", "2")
    assert (code, out) == (0, f"{sample_images()[0].stem}-layers.png\n"), err
    with Image.open(tmp_path / out.strip()) as file:
        assert file.width > 800
    code, out, err = run("-o", "sheet.jpg")
    assert (code, out) == (2, "") and "ends in .png" in err


def test_heads_count_from_1_like_layers(explainer):
    first, third, last = (explainer.explain(IMAGE, method="attention", head=head).grid for head in (1, 3, -1))
    assert (last == third).all() and (last != first).any()
    for missing in (0, 4):
        with pytest.raises(OptionError, match=f"head from 1 to 3 .* got {missing}"):
            explainer.explain(IMAGE, method="attention", head=missing)
