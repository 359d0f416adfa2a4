"""Without --model: a model that knows photographs where the hub or its cache has it, and never another in silence."""

import re

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image

import vitflow
from tests.typed import typed_here
from vitflow.cli.options import DEFAULT_MODEL
from vitflow.demo import sample_images
from vitflow.errors import ModelError
from vitflow.models import hub

VERBS = {"explain": ["-o", "out"], "compare": ["-o", "out/strip.png"], "folder": ["-o", "out"]}
LIMITS = "model: vitflow_demo knows eight drawn shapes only"


@pytest.fixture
def here(monkeypatch, capsys, tmp_path):
    """A command in this process and in an empty folder: its exit code, stdout and stderr."""

    def call(verb: str, *arguments: object) -> tuple[int, str, str]:
        words = [verb, sample_images()[0], "--method", "centre", *VERBS[verb], *arguments]
        return typed_here(monkeypatch, capsys, tmp_path, *words)

    return call


@pytest.fixture
def away(monkeypatch, tmp_path):
    """The hub is away, and its cache is empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "hub_responds", lambda: False)


@pytest.fixture
def there(monkeypatch):
    """The hub hands out every model: a small one under the name that was asked for."""
    requested, build = [], timm.create_model

    def create(name: str, *, pretrained: bool, **options: object) -> torch.nn.Module:
        requested.append((name, pretrained))
        torch.manual_seed(0)
        model = build("vit_tiny_patch16_224", depth=2, img_size=64, num_classes=5)
        architecture, _, tag = name.partition(".")
        model.pretrained_cfg = {**model.pretrained_cfg, "architecture": architecture, "tag": tag, "num_classes": 5}
        return model

    monkeypatch.setattr(hub.timm, "create_model", create)
    return requested


def test_without_a_hub_the_demo_model_is_offered_and_not_taken(here, away, tmp_path):
    code, out, err = here("explain")
    assert (code, out) == (2, "")
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert f"The weights of {DEFAULT_MODEL!r} cannot be fetched" in error
    assert "--checkpoint FILE" in error and "which knows eight drawn shapes only (--model demo)" in error
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("verb", ["explain", "folder"])
def test_by_default_the_model_knows_photographs_and_its_name_is_reported(verb, here, there):
    code, _, err = here(verb)
    assert code == 0, err
    assert there == [(DEFAULT_MODEL, True)]
    assert err.startswith(f"model: {DEFAULT_MODEL} (change with --model)\n") and "shapes" not in err


@pytest.mark.parametrize("verb", ["explain", "folder"])
def test_the_demo_model_says_what_it_knows_once(verb, here):
    code, _, err = here(verb, "--model", "demo")
    assert code == 0, err
    assert err.count(LIMITS) == 1 == err.count("model: ")


def test_a_model_of_the_users_carries_a_note_into_figures_and_runs(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, depth=2)
    model.note = "trained on noise"
    explainer = vitflow.Explainer(model, name="mine", device="cpu")
    image = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    assert explainer.explain(image).model_note == "trained on noise"
    sheet = vitflow.layer_maps(image, model=explainer)
    sheet.save(tmp_path / "sheet.svg")
    vitflow.compare(image, model=explainer, methods=["rollout"]).save(tmp_path / "strip.svg")
    vitflow.feature_maps(image, model=explainer).save(tmp_path / "features.svg")
    for file in ("sheet.svg", "strip.svg", "features.svg"):
        words = re.sub(r"<[^>]*>", " ", (tmp_path / file).read_text()).split()  # without tags and line breaks
        assert "mine (trained on noise)" in " ".join(words), file
    vitflow.explore(image, model=explainer).save(tmp_path / "page.html")
    Image.fromarray(image).save(tmp_path / "noise.png")
    run = vitflow.explain_folder(tmp_path / "noise.png", tmp_path / "out", model=explainer, report=True)
    for file in (tmp_path / "page.html", run.report):
        assert "mine (trained on noise)" in file.read_text(), file


def test_a_resume_never_switches_the_model(here, there, monkeypatch):
    assert here("folder")[0] == 0
    code, _, err = here("folder", "--model", "demo")
    assert code == 2 and f"model was '{DEFAULT_MODEL}' and is 'vitflow_demo'" in err
    monkeypatch.setattr(hub.timm, "create_model", _no_hub)
    code, _, err = here("folder")
    assert code == 2 and "cannot be fetched" in err


def _no_hub(*_: object, **__: object) -> None:
    raise OSError("no route")


def test_weights_without_a_model_are_those_of_the_default_one(here, monkeypatch, tmp_path):
    def load(name: str, *, checkpoint: object, **_: object) -> None:
        raise ModelError(f"{checkpoint} into {name}")

    monkeypatch.setattr("vitflow.models.loading.load_model", load)
    (tmp_path / "mine.pth").touch()
    code, _, err = here("explain", "--checkpoint", "mine.pth")
    assert code == 2 and f"error: mine.pth into {DEFAULT_MODEL}" in err


def test_the_hub_is_requested_only_for_what_it_has_and_its_silence_costs_seconds(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    requested, states = [], []
    monkeypatch.setattr(hub, "hub_responds", lambda: bool(requested.append(1)))
    monkeypatch.setattr(hub.timm, "create_model", lambda *_, **__: states.append(constants.HF_HUB_OFFLINE))
    hub.create_model("vit_tiny_patch16_224", pretrained=False)
    (tmp_path / "config.json").write_text('{"architecture": "test_vit"}')
    hub.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert (requested, states) == ([], [False, False])
    hub.create_model("vit_tiny_patch16_224", pretrained=True)
    hub.create_model("hf-hub:somebody/a-model", pretrained=False)
    assert (len(requested), states[2:], constants.HF_HUB_OFFLINE) == (2, [True, True], False)


@pytest.mark.parametrize("does", ["answers", "fails"])
def test_whether_the_hub_answers(does, monkeypatch):
    class Client:
        def head(self, address: str, timeout: float) -> str:
            if does == "fails":
                raise OSError("no such host")
            return "503"

    monkeypatch.setattr(hub, "get_session", Client)
    assert hub.hub_responds(0.2) == (does == "answers")
