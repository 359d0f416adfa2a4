"""The demo: drawn images and their exact masks, the bundled model, the training script, the sample images."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from timm.data import create_transform, resolve_model_data_config
from timm.models.vision_transformer import VisionTransformer

from vitflow import demo
from vitflow.demo import CLASS_NAMES, FIRST_TRAINING_SEED, draw_ground, draw_image, draw_images
from vitflow.demo.model import DEMO_WEIGHTS
from vitflow.errors import OptionError

SIZES = [96, (64, 97)]


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return demo.load_demo_model()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_masks_are_exact(size: int | tuple[int, int]) -> None:
    """Without its objects an image is the same outside the masks, and another inside them."""
    changed_share = []
    for seed in range(200, 220):
        image, ground = draw_image(seed, size), draw_ground(seed, size)
        changed = (image.image != ground).any(axis=-1)
        assert not (changed & ~image.masks.any(axis=0)).any()
        changed_share += [changed[mask].mean() for mask in image.masks]
    # A pixel at the rim of an object may take so little of its colour that nothing is left after rounding.
    assert min(changed_share) > 0.9 and np.mean(changed_share) > 0.98


def test_objects_lie_apart_and_whole_in_the_image() -> None:
    for image in draw_images(40, seed=300):
        assert len(set(image.labels)) == len(image.labels) == len(image.masks)
        assert image.masks.sum(axis=0).max() == 1
        for mask in image.masks:
            assert mask.sum() > 100
            border = np.concatenate([mask[0], mask[-1], mask[:, 0], mask[:, -1]])
            assert not border.any()


def test_bad_seed_and_size_are_reported() -> None:
    with pytest.raises(OptionError, match="seed of at least 0, got -1"):
        draw_image(-1)
    with pytest.raises(OptionError, match="at least 16 x 16 pixels, got 8 x 40"):
        draw_ground(0, (8, 40))


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def test_the_file_is_small_half_precision_and_says_what_it_is() -> None:
    assert DEMO_WEIGHTS.stat().st_size <= 3_000_000
    with safe_open(DEMO_WEIGHTS, framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
    metadata = metadata_of(DEMO_WEIGHTS)
    assert tuple(json.loads(metadata["class_names"])) == CLASS_NAMES
    assert json.loads(metadata["input_size"]) == [3, 96, 96]
    assert metadata["activation"] == "sigmoid" and metadata["license"] == "MIT"
    assert "train_demo_model" in metadata["trained_by"]
    assert float(metadata["accuracy"]) >= 0.99
    assert int(metadata["images"]) > 0


def test_the_model_is_a_stock_timm_model_ready_to_use(model: VisionTransformer) -> None:
    assert type(model) is VisionTransformer
    assert not model.training
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert 1_000_000 <= sum(value.numel() for value in model.parameters()) <= 1_500_000
    assert model.num_prefix_tokens == 1 and len(model.blocks) == 6 and model.patch_embed.grid_size == (12, 12)
    config = resolve_model_data_config(model)
    assert (config["input_size"], config["mean"], config["std"]) == ((3, 96, 96), (0.5,) * 3, (0.5,) * 3)
    assert (config["interpolation"], config["crop_pct"]) == ("bicubic", 1.0)
    assert tuple(model.pretrained_cfg["label_names"]) == CLASS_NAMES


def test_fresh_images_are_read_right(model: VisionTransformer) -> None:
    right = []
    with torch.inference_mode():
        for photo in draw_images(100, seed=FIRST_TRAINING_SEED // 2):
            image = torch.from_numpy(photo.image).permute(2, 0, 1)[None].float() / 127.5 - 1.0
            present = (model(image)[0].sigmoid() > 0.5).nonzero().flatten().tolist()
            right += [(label in present) == (label in photo.labels) for label in range(len(CLASS_NAMES))]
    assert np.mean(right) >= 0.985


@pytest.mark.parametrize("dynamic", [False, True])
def test_sample_images_are_read_right_through_timms_custom_preprocessing(dynamic: bool) -> None:
    model = demo.load_demo_model(dynamic_img_size=dynamic)
    config = resolve_model_data_config(model)
    transform = create_transform(**config)
    for image_path in demo.sample_images():
        image, mask_path = Image.open(image_path), demo.SAMPLE_FOLDER / "masks" / image_path.name
        if dynamic:  # the whole image, its sides a multiple of the patches
            image = image.resize((round(image.width / 32) * 8, round(image.height / 32) * 8), Image.Resampling.BICUBIC)
            tensor = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 127.5 - 1.0
        else:
            tensor = transform(image)
        with torch.inference_mode():
            probabilities = model(tensor[None])[0].sigmoid()
        present = {int(value) - 1 for value in np.unique(np.asarray(Image.open(mask_path))) if value}
        assert {int(label) for label in (probabilities > 0.5).nonzero()} == present, image_path.name


TINY_TRAINING = ["--images", "48", "--batch-size", "16", "--evaluation-images", "10", "--workers", "0"]


def test_training_writes_a_file_that_loads_and_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module("tools.train_demo_model")
    threads = torch.get_num_threads()
    try:
        for name in ("first", "second"):
            script.main([*TINY_TRAINING, "--output", str(tmp_path / name / "model.safetensors")])
    finally:
        torch.set_num_threads(threads)
    assert "of labels" in capsys.readouterr().out
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    # The order of the entries in the header is the writer's own affair.
    assert metadata_of(first) == metadata_of(second)
    torch.testing.assert_close(load_file(first), load_file(second), rtol=0, atol=0)
    assert list(first.parent.iterdir()) == [first]  # nothing else is left behind
    monkeypatch.setattr("vitflow.demo.model.DEMO_WEIGHTS", first)
    trained = demo.load_demo_model()
    assert trained(torch.zeros(1, 3, 96, 96)).shape == (1, len(CLASS_NAMES))
    assert metadata_of(first)["trained_by"].endswith("--images 48 --seed 0 --batch-size 16")


def test_sample_images_can_be_drawn_again(tmp_path: Path) -> None:
    importlib.import_module("tools.draw_assets").main(["--output", str(tmp_path)])
    shipped = sorted(demo.SAMPLE_FOLDER.rglob("*.png"))
    assert len(shipped) == 12 and sum(path.stat().st_size for path in shipped) < 700_000
    for path in shipped:
        again = tmp_path / path.relative_to(demo.SAMPLE_FOLDER)
        old, new = np.asarray(Image.open(path)).astype(int), np.asarray(Image.open(again)).astype(int)
        # OpenCV's vector code may round the last bit another way on another processor.
        assert np.abs(old - new).max() <= 1 if path.parent.name != "masks" else (old != new).mean() < 1e-4
