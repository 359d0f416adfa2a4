"""Images with other channels than RGB: input, placement, display and errors."""

import json

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner

from vitflow import Explainer
from vitflow.cli import cli
from vitflow.errors import ImageError, ModelError, OptionError, ShapeError
from vitflow.images.reading import bands_in_colour

CONFIG = {
    "input_size": (5, 64, 64),
    "mean": [100.0, 200.0, 300.0, 400.0, 500.0],
    "std": [10.0, 20.0, 30.0, 40.0, 50.0],
    "crop_pct": 1.0,
    "interpolation": "bilinear",
}


def multispectral() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", in_chans=5, num_classes=4, img_size=64).eval()


def field(height: int = 64, width: int = 64) -> np.ndarray:
    return np.random.default_rng(0).uniform(0, 600, (height, width, 5)).astype(np.uint16)


def test_the_model_input_is_normalised_in_the_units_of_the_array():
    explainer = Explainer(multispectral(), data_config=CONFIG)
    bands = field()
    expected = (bands.astype(np.float64) - CONFIG["mean"]) / CONFIG["std"]
    np.testing.assert_allclose(explainer.pixels(bands)[0].numpy(), expected.transpose(2, 0, 1), rtol=1e-5, atol=1e-5)


def test_each_channel_is_resized_and_cropped_as_one_of_an_rgb_image_is():
    bands = np.repeat(np.arange(0, 200, 2, dtype=np.uint8)[:, None, None], 128, axis=1)  # [100, 128, 1]
    explainer = Explainer(multispectral(), data_config=CONFIG | {"mean": [0.0] * 5, "std": [255.0] * 5})
    rgb = Explainer(
        timm.create_model("test_vit", img_size=64), data_config=CONFIG | {"mean": [0.0] * 3, "std": [1.0] * 3}
    )
    actual, expected = explainer.pixels(np.repeat(bands, 5, axis=2)), rgb.pixels(np.repeat(bands, 3, axis=2))
    assert (actual[:, :3] - expected).abs().max() < 1.0 / 255  # RGB is rounded to 8 bits
    padded = Explainer(multispectral(), data_config=CONFIG, fit="pad").pixels(field(64, 32))
    assert padded[0, :, :, 0].abs().max() == 0 and padded[0, :, :, 32].abs().min() > 0


@pytest.mark.parametrize("method", ["rollout", "gae", "occlusion", "sampling"])
def test_an_array_a_file_and_a_tensor_have_the_same_map(method, tmp_path):
    explainer = Explainer(multispectral(), data_config=CONFIG)
    bands = field(80, 64)
    np.save(tmp_path / "field.npy", bands)
    maps = [explainer.explain(each, method=method, target=1) for each in (bands, tmp_path / "field.npy")]
    maps.append(explainer.explain(explainer.pixels(bands), method=method, target=1))
    assert maps[0].image.shape == (80, 64, 3) and maps[2].image.shape == (64, 64, 3)
    for other in maps[1:]:
        np.testing.assert_allclose(maps[0].grid, other.grid, rtol=1e-4, atol=1e-6)


def test_three_channels_are_displayed_between_their_percentiles():
    bands = field()
    actual = Explainer(multispectral(), data_config=CONFIG, channels=(4, 0, 2)).explain(bands, method="rollout").image
    np.testing.assert_array_equal(actual, bands_in_colour(bands, (4, 0, 2)))
    for place, channel in enumerate((4, 0, 2)):
        low, high = np.percentile(bands[:, :, channel], (2, 98))
        expected = np.rint(255 * np.clip((bands[:, :, channel] - low) / (high - low), 0, 1))
        assert np.abs(actual[:, :, place] - expected).max() <= 1
    original = np.zeros((64, 64, 3), np.uint8)
    explainer = Explainer(multispectral(), data_config=CONFIG)
    np.testing.assert_array_equal(explainer.explain(bands, original=original, method="rollout").image, original)
    with pytest.raises(ShapeError, match=r"original of \(64, 64\)"):
        explainer.explain(bands, original=original[:32], method="rollout")


def test_an_array_with_three_axes_is_one_image():
    explainer = Explainer("demo")
    with pytest.raises(ShapeError, match=r"got \(96, 96, 9\)"):
        explainer.explain_batch(np.zeros((96, 96, 9), np.uint8))
    assert len(explainer.explain_batch(list(np.zeros((2, 96, 96), np.uint8)), methods=["rollout"])) == 2


def test_wrong_channels_are_refused_with_a_remedy(tmp_path):
    explainer = Explainer(multispectral(), data_config=CONFIG)
    cases = [
        (field()[:, :, :4], ShapeError, r"\[height, width, 5\].*got shape \(64, 64, 4\)"),
        (field().transpose(2, 0, 1), ShapeError, r"transpose\(1, 2, 0\)"),
        ("photo.png", ImageError, r"\.npy file"),
        (tmp_path / "absent.npy", ImageError, "no such file"),
        (field().astype(np.float32) * np.nan, ShapeError, "finite"),
    ]
    (tmp_path / "broken.npy").write_bytes(b"no array")
    cases.append((tmp_path / "broken.npy", ImageError, r"Could not read .*broken\.npy"))
    for image, error, words in cases:
        with pytest.raises(error, match=words):
            explainer.explain(image)
    with pytest.raises(ModelError, match="5 channels, but mean has 3 values"):
        Explainer(multispectral())
    with pytest.raises(OptionError, match="three numbers from 0 to 4"):
        Explainer(multispectral(), data_config=CONFIG, channels=(1, 2, 5))
    with pytest.raises(OptionError, match="other inputs than RGB"):
        Explainer("demo", channels=(0, 1, 2))
    with pytest.raises(OptionError, match="shifts require an image"):
        explainer.explain(field(), method="rollout", shifts=4)


def test_the_command_line_explains_an_array(tmp_path):
    model = timm.create_model("test_vit", in_chans=5, num_classes=4, img_size=64)
    timm.models.save_for_hf(model, tmp_path / "model", model_config={})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["model_args"] = {"in_chans": 5, "img_size": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "data.json").write_text(json.dumps(CONFIG))
    np.save(tmp_path / "field.npy", field())
    arguments = ["explain", str(tmp_path / "field.npy"), "--model", f"local-dir:{tmp_path / 'model'}"]
    settings = ["--data-config", str(tmp_path / "data.json"), "--channels", "3,2,1", "-o", str(tmp_path / "field.png")]
    result = CliRunner().invoke(cli, arguments + settings)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "field.png").exists()
    (tmp_path / "data.json").write_text("[]")
    refused = CliRunner().invoke(cli, arguments + settings)
    assert refused.exit_code == 2 and "JSON object" in refused.output
