"""The bundled captioner loads without a network and is as good as it says; what trains the models of words runs."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors import safe_open

from vitflow.demo import DEMO_CAPTION, FIRST_TRAINING_SEED, Scene, draw_scenes

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["--pictures", "40", "--minutes", "0.03", "--tower-minutes", "0.03", "--workers", "1", "--fresh-pictures", "12"]


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    """Pictures that no training has seen, and that the measured numbers are not of."""
    return list(draw_scenes(64, seed=FIRST_TRAINING_SEED // 2))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """One of the training scripts as a module, by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module


def header(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.metadata()


def test_the_captioner_is_small_half_precision_and_says_what_it_is() -> None:
    folder = DEMO_CAPTION
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_000_000
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
    told = header(folder)
    assert told["trained_by"].startswith("python examples/train_demo_caption.py --pictures ")
    assert told["measured_on"] == "2000 fresh pictures" and told["license"] == "MIT"


def test_every_weight_is_found_and_computed_in_single_precision() -> None:
    kind = transformers.AutoModelForImageTextToText
    model, found = kind.from_pretrained(DEMO_CAPTION, local_files_only=True, output_loading_info=True)
    assert not any(found.values())
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert type(model).__name__ == "LlavaForConditionalGeneration"


def test_captions_are_right(scenes: list[Scene]) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(DEMO_CAPTION, local_files_only=True).eval()
    processor = transformers.AutoProcessor.from_pretrained(DEMO_CAPTION, local_files_only=True)
    told = header(DEMO_CAPTION)
    inputs = processor(text=[told["prompt"]] * 64, images=[scene.image for scene in scenes], return_tensors="pt")
    assert (inputs["input_ids"] == model.config.image_token_index).sum() == 64 * 64  # pictures × patches
    written = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
    said = processor.batch_decode(written, skip_special_tokens=True)
    right = np.mean([one == scene.caption for one, scene in zip(said, scenes, strict=True)])
    assert right >= float(told["captions_right"]) - 0.1


@pytest.mark.parametrize("name", ["text", "caption"])
def test_training_writes_a_folder_that_loads_and_says_how_it_was_trained(
    name: str, script: Callable[[str], ModuleType], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module, threads = script(f"train_demo_{name}"), torch.get_num_threads()
    try:
        module.main([*TINY, "--kept", str(tmp_path / "kept"), "--output", str(tmp_path / "out")])
    finally:
        torch.set_num_threads(threads)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"preprocessor_config.json", "tokenizer.json"}
    assert "--workers 1 --tower-minutes 0.03 --minutes 0.03" in header(tmp_path / "out")["trained_by"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "out"]  # nothing else is left behind
    assert str(tmp_path / "out") in capfd.readouterr().out


def test_mirrored_scenes_are_told_as_they_are_seen(script: Callable[[str], ModuleType]) -> None:
    loaded = script("demo_scenes").Scenes.drawn(0, 8)
    plain, mirrored = loaded.batch(np.arange(8)), loaded.batch(np.arange(8), mirrored=8)
    torch.testing.assert_close(mirrored.pixels, plain.pixels.flip(3))
    for batch in (plain, mirrored):
        for things, patches in zip(batch.things, batch.patches.reshape(-1, 8, 8), strict=True):
            for number, thing in enumerate(things, start=1):
                rows, columns = np.nonzero(patches == number)
                middle = (columns.mean() + 0.5) / 8, (rows.mean() + 0.5) / 8
                np.testing.assert_allclose(middle, thing.middle, atol=0.1)
