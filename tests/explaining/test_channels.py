"""Images with other channels than RGB: input, placement, display and errors."""

import json
import struct
import sys
import zlib

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner

import vitflow
from vitflow import Explainer
from vitflow.cli import cli
from vitflow.errors import ImageError, ModelError, OptionError, ShapeError
from vitflow.folder.draw import draw_run, read_grids
from vitflow.images.reading import bands_in_colour, read_bands, read_image

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


def tiff(path, bands: np.ndarray, *, separate: bool = False, packed: bool = False) -> None:
    """Write a TIFF file with all channels in a single page, pixel by pixel or channel by channel, as GDAL does."""
    height, width, channels = bands.shape
    parts = np.moveaxis(bands, 2, 0) if separate else bands[None]
    data = [zlib.compress(part.tobytes()) if packed else part.tobytes() for part in parts]
    content = bytearray(b"II*\0\0\0\0\0")
    offsets = [len(content) + sum(map(len, data[:index])) for index in range(len(data))]
    content += b"".join(data)

    def field(tag: int, kind: str, values: list[int]) -> bytes:
        packed_values = struct.pack(f"<{len(values)}{kind}", *values)
        if len(packed_values) > 4:
            content.extend(packed_values)
            packed_values = struct.pack("<I", len(content) - len(packed_values))
        return struct.pack("<HHI", tag, {"H": 3, "I": 4}[kind], len(values)) + packed_values.ljust(4, b"\0")

    form = {"u": 1, "i": 2, "f": 3}[bands.dtype.kind]
    fields = [field(256, "I", [width]), field(257, "I", [height]), field(258, "H", [8 * bands.itemsize] * channels)]
    fields += [field(259, "H", [8 if packed else 1]), field(262, "H", [1]), field(273, "I", offsets)]
    fields += [field(277, "H", [channels]), field(278, "I", [height]), field(279, "I", list(map(len, data)))]
    fields += [field(284, "H", [2 if separate else 1]), field(338, "H", [0] * (channels - 1))]
    fields += [field(339, "H", [form] * channels)]
    content[4:8] = struct.pack("<I", len(content))
    content += struct.pack("<H", len(fields)) + b"".join(fields) + bytes(4)
    path.write_bytes(content)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float32])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_tiff_files_keep_their_channels_and_units(tmp_path, dtype, separate, packed):
    pytest.importorskip("tifffile")
    bands = np.random.default_rng(0).uniform(0, 250, (20, 30, 5)).astype(dtype)
    tiff(tmp_path / "field.tif", bands, separate=separate, packed=packed)
    for content in (None, (tmp_path / "field.tif").read_bytes()):
        actual = read_bands(tmp_path / "field.tif", 5, content=content)
        assert actual.dtype == np.float32
        np.testing.assert_array_equal(actual, bands.astype(np.float32))


@pytest.mark.parametrize(("channels", "shape"), [(5, (5, 20, 30)), (5, (20, 30, 5)), (5, (5, 20, 5))])
def test_tiff_files_with_a_channel_per_page(tmp_path, channels, shape):
    tifffile = pytest.importorskip("tifffile")
    bands = np.random.default_rng(0).integers(0, 9000, shape, dtype=np.uint16)
    tifffile.imwrite(tmp_path / "field.tiff", bands, photometric="minisblack")
    expected = bands.transpose(1, 2, 0) if shape[0] == channels else bands
    np.testing.assert_array_equal(read_bands(tmp_path / "field.tiff", channels), expected)


def test_files_with_other_channels_or_too_many_pixels_are_refused_before_they_are_read(tmp_path):
    pytest.importorskip("tifffile")
    tiff(tmp_path / "field.tif", field())
    np.save(tmp_path / "field.npy", field())
    for name in ("field.tif", "field.npy"):
        with pytest.raises(ShapeError, match=rf"\[height, width, 13\].*got shape \(64, 64, 5\) in '{name}'"):
            read_bands(tmp_path / name, 13)
        with pytest.raises(ImageError, match=rf"Expected '{name}' to have at most 4,095 pixels.*max_pixels"):
            read_bands(tmp_path / name, 5, max_pixels=4095)


def test_a_missing_package_for_tiff_is_named(tmp_path, monkeypatch):
    tiff(tmp_path / "field.tif", field())
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(ImageError, match=r"requires tifffile.*pip install 'vitflow\[tiff\]'"):
        read_bands(tmp_path / "field.tif", 5)


def test_occlusion_reports_the_drop_without_each_channel_on_request():
    model = multispectral()
    explainer, bands = Explainer(model, data_config=CONFIG), field()
    saliency = explainer.explain(bands, method="occlusion", target=1, bands=True)
    pixels = explainer.pixels(bands)

    def log_odds(images: torch.Tensor) -> float:
        logits = model(images)[0].double()
        return float(logits[1] - torch.cat([logits[:1], logits[2:]]).logsumexp(dim=0))

    with torch.no_grad():
        for channel in range(5):
            hidden = pixels.clone()
            hidden[0, channel] = pixels[0, channel].mean()
            expected = log_odds(pixels) - log_odds(hidden)
            assert saliency.facts["bands"][channel] == pytest.approx(expected, abs=2e-4)
    assert saliency.to_dict()["facts"]["bands"] == saliency.facts["bands"]
    [note] = [note for note in saliency._notes() if note.startswith("Drop in the score without a channel: ")]
    highest = int(np.argmax(saliency.facts["bands"]))
    assert note.split(": ")[1] == str(highest)
    plain = explainer.explain(bands, method="occlusion", target=1)
    np.testing.assert_array_equal(plain.grid, saliency.grid)
    assert "bands" not in plain.facts
    pair = explainer.explain_batch(
        [bands, 600 - bands], methods=["occlusion"], targets=1, bands=True, occlusion_batch=2
    )
    np.testing.assert_allclose(pair[0].facts["bands"], saliency.facts["bands"], atol=2e-4)
    assert pair[1].facts["bands"] != pair[0].facts["bands"]


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
        ("photo.png", ImageError, r"\.npy or TIFF file"),
        (tmp_path / "absent.npy", ImageError, "no such file"),
        (field().astype(np.float32) * np.nan, ShapeError, "finite"),
    ]
    for name in ("broken.npy", "broken.tif"):
        (tmp_path / name).write_bytes(b"no array")
        cases.append((tmp_path / name, ImageError, rf"Could not read .*{name}"))
    for image, error, words in cases:
        with pytest.raises(error, match=words):
            explainer.explain(image)
    with pytest.raises(ModelError, match="5 channels, but mean has 3 values"):
        Explainer(multispectral())
    with pytest.raises(OptionError, match="three numbers from 0 to 4"):
        Explainer(multispectral(), data_config=CONFIG, channels=(1, 2, 5))
    with pytest.raises(OptionError, match="input other than RGB"):
        Explainer("demo", channels=(0, 1, 2))


@pytest.mark.parametrize("name", ["field.npy", "field.tif"])
def test_the_command_line_explains_an_array_or_a_tiff_file(tmp_path, name):
    if name == "field.tif":
        pytest.importorskip("tifffile")
    model = timm.create_model("test_vit", in_chans=5, num_classes=4, img_size=64)
    timm.models.save_for_hf(model, tmp_path / "model", model_config={})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["model_args"] = {"in_chans": 5, "img_size": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "data.json").write_text(json.dumps(CONFIG))
    np.save(tmp_path / "field.npy", field())
    tiff(tmp_path / "field.tif", field())
    arguments = ["explain", str(tmp_path / name), "--model", f"local-dir:{tmp_path / 'model'}"]
    settings = ["--data-config", str(tmp_path / "data.json"), "--channels", "3,2,1", "-o", str(tmp_path / "field.png")]
    result = CliRunner().invoke(cli, arguments + settings)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "field.png").exists()
    (tmp_path / "data.json").write_text("[]")
    refused = CliRunner().invoke(cli, arguments + settings)
    assert refused.exit_code == 2 and "JSON object" in refused.output


@pytest.mark.parametrize("workers", [0, 1])
def test_a_folder_of_tiff_files_is_explained_and_drawn_again(tmp_path, workers):
    pytest.importorskip("tifffile")
    (tmp_path / "in").mkdir()
    for index in range(2):
        tiff(tmp_path / "in" / f"{index}.tif", field() + np.uint16(50 * index))
    tiff(tmp_path / "in" / "other.tif", field()[:, :, :4])
    explainer = Explainer(multispectral(), data_config=CONFIG, channels=(3, 2, 1))
    summary = vitflow.explain_folder(
        tmp_path / "in", tmp_path / "out", model=explainer, methods=["gae"], target=1, workers=workers, report=True
    )
    assert (summary.explained, summary.failed) == (2, 1)
    assert "got shape (64, 64, 4) in 'other.tif'" in next(iter(summary.failures()))["message"]
    grids = {row["input"]: maps["gae"] for row, maps in read_grids(tmp_path / "out")}
    direct = explainer.explain(tmp_path / "in" / "1.tif", method="gae", target=1)
    np.testing.assert_allclose(grids["1.tif"], direct.grid, rtol=2e-3)
    drawn = draw_run(tmp_path / "out", tmp_path / "again", format="png")
    assert [each.error for each in drawn] == [None, None]
    assert np.abs(read_image(drawn[1].paths[0]).astype(int) - direct.overlay()).max() < 3  # grids are float16


def test_a_batch_of_arrays_with_channels_is_explained():
    explainer = Explainer(multispectral(), data_config=CONFIG)
    batch = vitflow.folder.BatchExplainer(lambda: explainer, methods=["gae"], target=1)
    result = batch({"id": np.array(["a", "b"]), "image": [field(), field()[:, :, :3]]})
    assert list(result["status"]) == ["explained", "failed"]
