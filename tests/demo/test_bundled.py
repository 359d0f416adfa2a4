"""The bundled models of words load without a network and are as good as they say; what trains them runs."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tools.scenes import Scene, draw_scenes
from vitflow import Explainer, VitflowWarning, prompts
from vitflow.demo import DEMO_CAPTION, DEMO_TEXT, FIRST_TRAINING_SEED

transformers = pytest.importorskip("transformers")

TINY = ["--images", "40", "--minutes", "0.03", "--workers", "1", "--fresh-images", "12"]


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    """Images that no training has seen, and that the measured numbers are not of."""
    return list(draw_scenes(64, seed=FIRST_TRAINING_SEED // 2))


@pytest.fixture
def script() -> Callable[[str], ModuleType]:
    """One of the training scripts as a module, by its name."""
    return lambda name: import_module(f"tools.{name}")


def header(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize(
    ("folder", "kind", "name"),
    [
        (DEMO_CAPTION, "AutoModelForImageTextToText", "LlavaForConditionalGeneration"),
        (DEMO_TEXT, "AutoModel", "SiglipModel"),
    ],
)
def test_every_weight_is_detected_and_computed_in_single_precision(folder: Path, kind: str, name: str) -> None:
    load = getattr(transformers, kind).from_pretrained
    model, actual = load(folder, local_files_only=True, output_loading_info=True)
    assert not any(actual.values())
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert type(model).__name__ == name


def test_captions_are_right(scenes: list[Scene]) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(DEMO_CAPTION, local_files_only=True).eval()
    processor = transformers.AutoProcessor.from_pretrained(DEMO_CAPTION, local_files_only=True)
    reported = header(DEMO_CAPTION)
    inputs = processor(text=[reported["prompt"]] * 64, images=[scene.image for scene in scenes], return_tensors="pt")
    assert (inputs["input_ids"] == model.config.image_token_index).sum() == 64 * 64  # images × patches
    written = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
    said = processor.batch_decode(written, skip_special_tokens=True)
    right = np.mean([one == scene.caption for one, scene in zip(said, scenes, strict=True)])
    assert right >= float(reported["captions_right"]) - 0.1


def test_of_ten_sentences_the_right_one_is_detected_and_what_is_not_there_reads_low(
    scenes: list[Scene], script: Callable[[str], ModuleType]
) -> None:
    module, reported = script("train_demo_text"), header(DEMO_TEXT)
    random, right, there, absent = np.random.default_rng(0), [], [], []
    model = transformers.AutoModel.from_pretrained(DEMO_TEXT, local_files_only=True).eval()
    processor = transformers.AutoProcessor.from_pretrained(DEMO_TEXT, local_files_only=True)
    for scene in scenes:
        sentences = module.choices(scene.things, random)  # nine differ from the first by a side, a colour or a shape
        texts = [*sentences, str(scene.things[0].phrase)]
        inputs = processor(text=texts, images=[scene.image], padding="max_length", return_tensors="pt")
        with torch.inference_mode():
            [logits] = model(**inputs).logits_per_image
        right.append(int(logits[:10].argmax()) == 0)
        there.append(logits[10].item())
        absent += logits[1:10].tolist()
    assert np.mean(right) >= float(reported["retrieval_among_ten"]) - 0.1
    assert np.mean(np.array(there) > 0) > 0.9 and np.mean(np.array(absent) < 0) > 0.8


def test_the_pair_is_requested_by_its_name(scenes: list[Scene]) -> None:
    scene = next(scene for scene in scenes if len(scene.things) == 2)
    absent = next(str(other.things[0].phrase) for other in scenes if not scene.holds(str(other.things[0].phrase)))
    texts = [*(str(thing.phrase) for thing in scene.things), absent]
    explainer = Explainer("demo-text", outputs=prompts(texts))
    read = explainer.explain_batch([scene.image], methods=["gae"], targets=[0, 1, 2])
    assert read[0].model == "demo-text"
    assert min(one.probability for one in read[:2]) > 0.5 > read[2].probability


def test_words_that_it_does_not_know_are_reported() -> None:
    with pytest.warns(VitflowWarning, match="does not know the words 'grey', 'circle'"):
        Explainer("demo-text", outputs=prompts(["a red heart", "a grey circle"]))


@pytest.mark.parametrize("name", ["text", pytest.param("caption", marks=pytest.mark.slow)])
def test_training_writes_a_folder_that_loads_and_says_how_it_was_trained(
    name: str, script: Callable[[str], ModuleType], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module, threads = script(f"train_demo_{name}"), torch.get_num_threads()
    try:
        tower = ["--tower-minutes", "0.03"] if name == "caption" else []
        module.main([*TINY, *tower, "--kept", str(tmp_path / "kept"), "--output", str(tmp_path / "out")])
    finally:
        torch.set_num_threads(threads)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"preprocessor_config.json", "tokenizer.json"}
    assert " --minutes 0.03 --learning-rate 0.002" in header(tmp_path / "out")["trained_by"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "out"]  # nothing else is left behind
    assert str(tmp_path / "out") in capfd.readouterr().out
