"""Patch features: similarity to a patch, a box and the class token, and components, against loops in float64."""

import json

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from torch import nn

import vitflow
from tests import literal_vit
from tests.models.test_libraries import FAMILIES, NORMALISATION, built
from tests.small import DATA, custom_model, photo
from vitflow import Explainer
from vitflow.analysis.layers import _coloured
from vitflow.cli import cli
from vitflow.errors import OptionError, OutsideGridError, OutsideImageError, ShapeError, UnsupportedModelError
from vitflow.images.pen import Pen
from vitflow.methods import similarity as mathematics
from vitflow.methods.rollout import attention_rollout

CONFIG = {"input_size": (3, 32, 32), "crop_pct": 1.0, **NORMALISATION}


def explainer_of(readout: str = "class token", **options) -> Explainer:
    return Explainer(literal_vit.timm_model(readout), data_config=CONFIG, **options)


def tokens_of(explainer: Explainer, image: np.ndarray, layer: int = 3) -> np.ndarray:
    """The tokens behind a layer after the last norm, [tokens, width], as a loop over the model's own parts."""
    model = explainer.model
    with torch.no_grad():
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(explainer.pixels(image)))))
        for number in range(layer):
            tokens = model.blocks[number](tokens)
        return model.norm(tokens)[0].numpy()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


@pytest.mark.parametrize(("readout", "prefix"), [("class token and registers", 4), ("average", 0), ("distilled", 2)])
@pytest.mark.parametrize("layer", [3, 1])
def test_similarity_is_the_cosine_to_a_patch_and_to_the_class_token(readout, prefix, layer):
    explainer, image = explainer_of(readout), photo(64, 64)
    tokens = tokens_of(explainer, image, layer)
    whole = tokens[0] if prefix else tokens.mean(axis=0)
    for patch, other in (((1, 2), tokens[prefix + 1 * 4 + 2]), (None, whole)):
        actual = explainer.explain(image, method="similarity", patch=patch, layer=layer)
        wanted = [[cosine(tokens[prefix + 4 * row + col], other) for col in range(4)] for row in range(4)]
        assert actual.grid == pytest.approx(np.array(wanted), abs=1e-6)
        assert actual.facts["compared_with"] == (
            "patch (1, 2)" if patch else "the class token" if prefix else "the mean of the patches"
        )


@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_a_box_is_compared_by_the_part_of_it_that_lies_in_each_patch(fit):
    explainer, image, box = explainer_of(fit=fit), photo(60, 90), (33.0, 11.5, 61.0, 40.25)
    actual = explainer.explain(image, method="similarity", box=box)
    patches, total, reference = tokens_of(explainer, image)[1:], 0.0, np.zeros(24)
    # Points of the box, as many as make the parts exact to some thousandths.
    for y in np.linspace(box[1], box[3], 201)[:-1] + (box[3] - box[1]) / 400:
        for x in np.linspace(box[0], box[2], 201)[:-1] + (box[2] - box[0]) / 400:
            down, across = actual.placement.to_input(float(y), float(x))
            if 0 <= down < 32 and 0 <= across < 32:
                total, reference = total + 1, reference + patches[4 * int(down // 8) + int(across // 8)]
    wanted = np.array([cosine(patch, reference / total) for patch in patches]).reshape(4, 4)
    assert actual.grid == pytest.approx(wanted, abs=6e-3)
    assert actual.patch_box == box


@pytest.mark.parametrize("name", ["Dinov2WithRegistersModel", "DINOv3ViTModel", "CLIPVisionModel"])
def test_models_of_transformers_are_compared_after_their_last_norm(name):
    model, image = built(name), photo(64, 64)
    explainer = Explainer(model, data_config={"input_size": (3, 32, 32), **NORMALISATION})
    actual = explainer.explain(image, method="similarity", patch=(0, 1)).grid
    with torch.no_grad():
        tokens = model(explainer.pixels(image)).last_hidden_state[0]
        if name == "CLIPVisionModel":  # which norms its class token alone
            [norm] = [module for path, module in model.named_modules() if path.endswith("post_layernorm")]
            tokens = norm(tokens)
    patches = tokens[FAMILIES[name][2] :].double().numpy()
    wanted = np.array([cosine(patch, patches[1]) for patch in patches]).reshape(actual.shape)
    assert actual == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"patch": (4, 0)}, OutsideGridError, "grid of 4 × 4"),
        ({"layer": 4}, OptionError, "layer from 1 to 3"),
        ({"box": (float("nan"), 5, 6, 9)}, OptionError, "left < right"),
        ({"box": (200, 0, 300, 9)}, OutsideImageError, "90 × 60"),
        ({"box": (0, 0, 9, 9)}, OutsideImageError, "the region that the model saw"),
        ({"box": (30, 5, 40, 9), "patch": (0, 0)}, OptionError, "got both"),
    ],
)
def test_what_cannot_be_compared_with_is_said(options, error, words):
    with pytest.raises(error, match=words):
        explainer_of().explain(photo(60, 90), method="similarity", **options)


def test_features_that_do_not_lie_on_the_image_are_refused():
    flat = nn.Sequential(nn.Conv2d(3, 16, (63, 8)), nn.Flatten(), nn.Linear(16 * 2 * 25, 2))
    explainer = Explainer(flat, data_config={"input_size": (3, 64, 32), **NORMALISATION})
    with pytest.raises(UnsupportedModelError, match="has no patch grid"):
        explainer.explain(photo(64, 64), method="similarity")


def test_rollout_ends_at_the_layer_that_is_requested():
    explainer, image = explainer_of(), photo(64, 64)
    trace = explainer.record(image)
    options = {"discard_ratio": 0.0, "refine": 0, "value_weighted": False, "head_fusion": "mean"}
    for end in (1, 2, -1):
        actual = explainer.explain(image, method="rollout", end_layer=end, **options).grid
        layers = trace.attentions[:end] if end > 0 else trace.attentions
        wanted = trace.layout.to_grid(attention_rollout(layers, readout=trace.readout))[0]
        assert actual == pytest.approx(wanted.numpy(), abs=1e-6)
    for wrong in ({"end_layer": 4}, {"end_layer": 1, "start_layer": 2}):
        with pytest.raises(OptionError, match="_layer from 1 to"):
            explainer.explain(image, method="rollout", **wrong)


def test_rollout_of_stages_ends_where_their_answer_is_read():
    sizes = {"img_size": 64, "window_size": 2, "depths": (1, 1, 1, 1), "num_classes": 3}
    swin = timm.create_model("swin_tiny_patch4_window7_224", **sizes)
    with pytest.raises(UnsupportedModelError, match="end_layer=-1"):
        Explainer(swin.eval()).explain(photo(64, 64), method="rollout", end_layer=2)


def test_components_are_those_of_a_singular_value_decomposition():
    for count in (200, 9):  # more samples than channels, and fewer
        samples = np.random.default_rng(3).normal(size=(count, 24)) @ np.diag(np.linspace(3, 1, 24)) + 5
        actual = mathematics.principal_components(torch.from_numpy(samples))
        _, values, rows = np.linalg.svd(samples - samples.mean(axis=0), full_matrices=False)
        for number in range(3):
            direction = actual.directions[:, number].numpy()
            sign = np.sign(direction @ rows[number])
            assert direction == pytest.approx(sign * rows[number], abs=1e-9)
            assert direction[np.abs(direction).argmax()] > 0
        assert actual.shares.numpy() == pytest.approx(values[:3] ** 2 / (values**2).sum(), rel=1e-9)
        assert actual.of(torch.from_numpy(samples)).mean(dim=0).numpy() == pytest.approx(np.zeros(3), abs=1e-9)


def test_signs_do_not_depend_on_the_order_or_on_rounding():
    samples = torch.randn(100, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first = mathematics.principal_components(samples).directions
    for other in (samples.flip(0), samples + 1e-10 * torch.randn_like(samples), samples.repeat(2, 1)):
        assert torch.allclose(mathematics.principal_components(other).directions, first, atol=1e-7)


def test_what_does_not_differ_has_components_of_zero():
    line = torch.outer(torch.arange(6.0), torch.ones(5)) + 2
    actual = mathematics.principal_components(line)
    assert actual.shares[0] == pytest.approx(1) and (actual.directions[:, 1:] == 0).all()
    assert (mathematics.principal_components(torch.ones(6, 5)).directions == 0).all()
    with pytest.raises(ShapeError, match="more than 3 samples"):
        mathematics.principal_components(torch.ones(3, 5))


@pytest.mark.parametrize(("readout", "prefix"), [("class token and registers", 4), ("attention pooling", 0)])
def test_images_of_all_sizes_get_their_components_together(readout, prefix):
    explainer, images = explainer_of(readout), [photo(64, 64, 1), photo(40, 90, 2), photo(70, 33, 3)]
    actual = vitflow.feature_maps(images, model=explainer, layer=2)
    patches = [tokens_of(explainer, image, 2)[prefix:] for image in images]
    mean = np.concatenate(patches).mean(axis=0)
    rows = np.linalg.svd(np.concatenate(patches) - mean, full_matrices=False)[2][:3]
    rows = rows * np.sign(np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1))
    for entry, wanted in zip(actual.components, patches, strict=True):
        assert entry == pytest.approx(((wanted - mean) @ rows.T).reshape(4, 4, 3), abs=1e-5)
    assert actual.layer == 2 and vitflow.feature_maps(images[0], model=explainer).layer == 3
    colours = np.stack(actual.colours)
    assert colours.min(axis=(0, 1, 2)).tolist() == [0] * 3 and colours.max(axis=(0, 1, 2)).tolist() == [1] * 3


def test_padding_has_no_part_in_the_components():
    explainer, image = explainer_of(fit="pad"), photo(32, 64)
    actual = vitflow.feature_maps(image, model=explainer)
    patches = tokens_of(explainer, image)[1:].reshape(4, 4, 24)[1:3].reshape(8, 24)  # the image's own rows
    wanted = mathematics.principal_components(torch.from_numpy(patches))
    [components], [image] = actual.components, actual.images
    assert np.isnan(components[[0, 3]]).all() and actual.shown[0].all(axis=1).tolist() == [False, True, True, False]
    assert components[1:3].reshape(8, 3) == pytest.approx(wanted.of(torch.from_numpy(patches)).numpy(), abs=1e-5)
    pen = Pen(1.0, dpi=64, interpolation="nearest", alpha=1.0)
    drawn = _coloured(image, actual.colours[0], actual.shown[0], pen)
    assert drawn.shape == (32, 64, 3)
    assert drawn[4, 4].tolist() == np.rint(255 * actual.colours[0][1, 0]).tolist()


def test_the_foreground_is_the_side_that_has_less_of_the_edge():
    # A square in the middle of another colour: it is the foreground, whatever the sign of the eigenvector.
    explainer = explainer_of()
    for disc, ground in ((30, 220), (220, 30)):
        image = np.full((64, 64, 3), ground, np.uint8)
        image[16:48, 16:48] = disc
        actual = vitflow.feature_maps(image, model=explainer, foreground=True)
        wanted = np.zeros((4, 4), bool)
        wanted[1:3, 1:3] = True
        assert (actual.shown[0] == wanted).all()
        assert actual.foreground and actual.records()[0]["patches_shown"] == 4


def test_an_image_of_one_patch_reports_no_components():
    model = literal_vit.timm_model(img_size=8)
    explainer = Explainer(model, data_config={**CONFIG, "input_size": (3, 8, 8)})
    assert explainer.explain(photo(64, 64), method="similarity").grid.shape == (1, 1)
    with pytest.raises(OptionError, match="at least one image"):
        vitflow.feature_maps([], model=explainer)
    with pytest.raises(OptionError, match="at least four patches"):
        vitflow.feature_maps([photo(64, 64)] * 3, model=explainer)
    assert len(vitflow.feature_maps([photo(64, 64, seed) for seed in range(4)], model=explainer).components) == 4


def test_the_command_line_shows_features(tmp_path):
    from vitflow.demo import sample_images

    images = [str(path) for path in sample_images()[:2]]
    words = ["features", *images, "--model", "demo", "--layer", "4", "--foreground"]
    done = CliRunner().invoke(cli, [*words, "--json", "-o", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    reported = [json.loads(line) for line in done.stdout.splitlines()]
    kept = json.loads((tmp_path / "found.json").read_text())
    assert [one["input"] for one in reported] == images == [one["input"] for one in kept]
    assert reported[0]["layer"] == 4 and np.array(kept[0]["components"]).shape == (12, 12, 3)
    done = CliRunner().invoke(cli, [*words, "--alpha", "0.5", "--interpolation", "nearest", "-o", f"{tmp_path}/"])
    assert done.stdout.strip().endswith("-and-1-more-features.png")


class Delegating(nn.Module):
    """A wrapper that has the attributes of the model inside, as those of peft."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.base_model(images)


@pytest.mark.parametrize("method", ["gradcam", "legrad", "similarity", "frozen_gradient", "rollout"])
def test_a_wrapper_with_the_attributes_of_its_model_has_its_maps(method):
    models = [Delegating(custom_model()), custom_model()]
    wrapped, expected = (Explainer(m.eval(), data_config=DATA).explain(photo(32, 32), method=method) for m in models)
    np.testing.assert_allclose(wrapped.grid, expected.grid, rtol=1e-5, atol=1e-7)
