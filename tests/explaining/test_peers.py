"""Methods of other packages equal a direct call, and leave the model as it was."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner

import vitflow
from tests.recording.test_recorder import generators, state_of
from tests.small import jitter
from tests.typed import typed_here
from vitflow.cli import cli
from vitflow.demo import draw_image
from vitflow.errors import OptionError, UnsupportedModelError
from vitflow.explaining.peers import external_method
from vitflow.methods.cells import sum_cells
from vitflow.registry.method_table import get_method

captum = pytest.importorskip("captum.attr")
cams = pytest.importorskip("pytorch_grad_cam")

IMAGES = [draw_image(seed).image for seed in (1, 2)]
TARGETS = [0, 3]


@pytest.fixture(scope="module")
def explainer() -> vitflow.Explainer:
    torch.manual_seed(0)
    return vitflow.Explainer(timm.create_model("test_vit", num_classes=5, img_size=96).eval())


def pixels_of(explainer: vitflow.Explainer) -> torch.Tensor:
    return torch.cat([explainer.pixels(image) for image in IMAGES])


def explained(explainer: vitflow.Explainer, name: str, **options: object) -> list[vitflow.Saliency]:
    return explainer.explain_batch(IMAGES, methods=[name], targets=np.array(TARGETS), **options)


def test_gradient_behind_batch_norms_equals_that_of_a_batch():
    torch.manual_seed(0)
    model = jitter(timm.models.xcit.Xcit(img_size=64, embed_dim=16, depth=1, num_heads=2, num_classes=4), 0.5)
    explainer = vitflow.Explainer(model, data_config={"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3})
    actual = explained(explainer, "captum:Saliency")
    pixels = pixels_of(explainer).requires_grad_()
    expected = torch.autograd.grad(model(pixels)[[0, 1], TARGETS].sum(), pixels)[0].abs().sum(dim=1)
    torch.testing.assert_close(torch.stack([torch.from_numpy(each.pixels) for each in actual]), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("IntegratedGradients", {"n_steps": 8}),
        ("Saliency", {"abs": False}),
        ("DeepLift", {"multiply_by_inputs": False}),
    ],
)
def test_attributions_of_pixels_equal_those_of_captum(explainer, name, options):
    actual = explained(explainer, f"captum:{name}", peer_options=options)
    made = {key: value for key, value in options.items() if key == "multiply_by_inputs"}
    called = {key: value for key, value in options.items() if key not in made}
    inputs = pixels_of(explainer).requires_grad_()
    with pytest.warns() if name == "DeepLift" else torch.enable_grad():
        expected = getattr(captum, name)(explainer.model, **made).attribute(inputs, target=TARGETS, **called)
    expected = expected.detach().sum(dim=1)
    explainer.model.zero_grad()
    for saliency, pixels in zip(actual, expected, strict=True):
        largest = float(pixels.abs().max())
        np.testing.assert_allclose(saliency.pixels, pixels, rtol=0, atol=1e-6 * largest)
        grid = sum_cells(pixels.double(), *saliency.grid.shape)
        np.testing.assert_allclose(saliency.grid, grid, rtol=0, atol=1e-5 * float(grid.abs().max()))
        np.testing.assert_array_equal(saliency.heatmap, replace(saliency, pixels=None).heatmap)  # of the patches
        assert not np.array_equal(saliency.overlay(), replace(saliency, pixels=None).overlay())


def test_perturbations_change_whole_patches(explainer):
    [actual, _] = explained(explainer, "captum:FeatureAblation")
    pixels = explainer.pixels(IMAGES[0])
    rows, cols = actual.grid.shape
    side = pixels.shape[-1] // cols
    with torch.no_grad():
        whole = explainer.model(pixels)[0, TARGETS[0]]
        for row, col in ((0, 0), (rows // 2, cols // 2)):
            without = pixels.clone()
            without[..., row * side : (row + 1) * side, col * side : (col + 1) * side] = 0
            drop = float(whole - explainer.model(without)[0, TARGETS[0]])
            assert actual.grid[row, col] == pytest.approx(drop, abs=1e-5)


@pytest.mark.parametrize("name", ["GradCAM", "EigenCAM"])
def test_class_activation_maps_equal_those_of_grad_cam(explainer, name):
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    actual = explained(explainer, f"cam:{name}", peer_options={"eigen_smooth": False})
    model, rows = explainer.model, actual[0].grid.shape[0]

    def on_grid(tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, 1:].reshape(len(tokens), rows, rows, -1).permute(0, 3, 1, 2)

    with getattr(cams, name)(model=model, target_layers=[model.blocks[-1].norm1], reshape_transform=on_grid) as cam:
        expected = cam(pixels_of(explainer), [ClassifierOutputTarget(target) for target in TARGETS])
    model.zero_grad()
    for saliency, pixels in zip(actual, expected, strict=True):
        np.testing.assert_allclose(saliency.pixels, pixels, rtol=0, atol=1e-6)
    assert actual[0].grid.max() <= 1.0


@pytest.mark.parametrize("name", ["captum:GuidedBackprop", "captum:KernelShap", "cam:GradCAM", "cam:RandomCAM"])
def test_the_model_and_the_random_state_are_unchanged(explainer, name):
    model = explainer.model
    parameter = next(model.parameters())
    parameter.grad, parameter.requires_grad = torch.ones_like(parameter), False
    gradient, before, numbers = parameter.grad, state_of(model), np.random.get_state()[1].copy()  # noqa: NPY002
    torch.manual_seed(3)
    random = generators()
    try:
        first = explained(explainer, name)[0]
        assert state_of(model) == before and generators() == random
        np.testing.assert_array_equal(np.random.get_state()[1], numbers)  # noqa: NPY002
        assert parameter.grad is gradient and not parameter.requires_grad
    finally:
        parameter.grad, parameter.requires_grad = None, True
    np.testing.assert_array_equal(explained(explainer, name)[0].grid, first.grid)


def test_what_a_package_cannot_do_is_refused_with_its_words(explainer):
    with pytest.raises(UnsupportedModelError, match="captum:LRP failed on VisionTransformer: TypeError"):
        explained(explainer, "captum:LRP")
    with pytest.raises(UnsupportedModelError, match="unexpected keyword argument 'steps'"):
        explained(explainer, "captum:IntegratedGradients", peer_options={"steps": 3})
    with pytest.raises(OptionError, match="Unknown class of captum 'LayerGradCam'"):
        explained(explainer, "captum:LayerGradCam")
    for name in ("captum:IntegratedGradient", "cam:LayerCam"):
        with pytest.raises(OptionError, match="Did you mean"):
            get_method(name)
    with pytest.raises(OptionError, match="Unknown captum:Saliency option 'layer'"):
        explainer.explain(IMAGES[0], method="captum:Saliency", layer=2)


def test_a_missing_package_prints_its_command(monkeypatch):
    external_method.cache_clear()
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(OptionError, match=r"--method captum:Saliency requires captum.*pip install 'vitflow\[captum\]'"):
        get_method("captum:Saliency")
    external_method.cache_clear()


def test_commands_take_them_like_other_methods(tmp_path, monkeypatch, capfd):
    paths = []
    for number, image in enumerate(IMAGES):
        paths.append(str(tmp_path / f"{number}.png"))
        vitflow.images.reading.write_image(paths[-1], image)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cli, list(arguments))
        assert result.exit_code == 0, result.output
        return result.stdout

    given = ["--model", "demo", "--method", "captum:IntegratedGradients", "--peer-options", '{"n_steps": 4}']
    out = str(tmp_path / "out")
    [printed] = map(json.loads, run("explain", paths[0], *given, "-o", f"{out}/", "--json").splitlines())
    assert printed["method"] == "captum:IntegratedGradients"
    assert printed["options"] == {"peer_options": {"n_steps": 4}}
    assert printed["output"].endswith("0-captum-IntegratedGradients.png")
    run("folder", str(tmp_path), "--model", "demo", "--method", "cam:LayerCAM", "-o", str(tmp_path / "run"))
    assert (tmp_path / "run" / "1-cam-LayerCAM.jpg").exists()
    code, _, said = typed_here(monkeypatch, capfd, tmp_path, "explain", paths[0], *given[:-1], "n_steps=4")
    assert code == 2 and "expected a JSON object" in said


@pytest.mark.parametrize("name", ["GradientShap", "KernelShap"])
def test_a_random_peer_does_not_depend_on_the_other_images(explainer, name):
    options = {"peer_options": {"n_samples": 4}}
    together = explained(explainer, f"captum:{name}", **options)
    alone = explainer.explain(IMAGES[1], method=f"captum:{name}", target=TARGETS[1], **options)
    np.testing.assert_allclose(together[1].grid, alone.grid, rtol=1e-5, atol=1e-7)


def test_lists_of_numbers_from_json_are_the_tuples_of_captum():
    explainer, options = vitflow.Explainer("demo"), {"sliding_window_shapes": [3, 32, 32], "strides": [3, 32, 32]}
    actual, expected = (
        explained(explainer, "captum:Occlusion", peer_options=each)
        for each in (json.loads(json.dumps(options)), {name: tuple(value) for name, value in options.items()})
    )
    np.testing.assert_array_equal(actual[0].grid, expected[0].grid)
