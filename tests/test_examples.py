"""The scripts that draw the documentation's images."""

import importlib
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def script():
    """One of the scripts as a module, by its name."""
    return lambda name: importlib.import_module(f"tools.{name}")


def test_the_readmes_images_are_drawn_by_one_command(script, tmp_path, capsys, monkeypatch):
    module = script("draw_readme_images")
    monkeypatch.setattr(module, "write_webp", partial(module.write_webp, steps=1))  # quick, if not as smooth
    monkeypatch.setattr(module, "REQUESTED", ["gradcam"])
    module.main(["--model", "demo", "--classes", "orange disc", "yellow star", "--output", str(tmp_path)])
    files = capsys.readouterr().out.split()
    assert [Path(file).name for file in files] == ["two-things.jpg", "two-things.webp", "classes.jpg"]
    for file in files:
        with Image.open(file) as image:
            assert image.width > 500


@pytest.mark.parametrize("library", ["as_torchvision", "as_transformers"])
def test_the_gallery_shows_the_same_weights_in_other_libraries(script, library):
    model = timm.create_model("vit_tiny_patch16_224", depth=2).eval()
    same = getattr(script("draw_gallery"), library)(model)
    pixels = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        logits = same(pixels)
        torch.testing.assert_close(getattr(logits, "logits", logits), model(pixels), atol=1e-4, rtol=1e-4)


def test_the_images_of_the_documentation_are_small():
    sizes = {file.name: file.stat().st_size for file in (ROOT / "assets").rglob("*.*")}
    assert len(sizes) >= 10
    assert {name: size for name, size in sizes.items() if size > 200_000} == {}
    assert {file.name for file in (ROOT / "assets" / "gallery").iterdir() if file.stat().st_size > 150_000} == set()


def test_the_list_of_models_says_what_applies(script, tmp_path):
    listing = script("list_models")
    names = ("test_vit", "resnet18", "swin_tiny_patch4_window7_224", "twins_svt_base")
    support = [listing.support_of(name)[:2] for name in names]
    assert support == [("yes", "yes"), ("no", "no"), ("by stages", "no"), ("by stages", "no")]
    assert "cross-covariance" in listing.support_of("xcit_nano_12_p16_224").reason
    listing.main(["deit_tiny_distilled*", "-o", str(tmp_path / "list.md")])
    row = "| `deit` | yes | yes |  | `deit_tiny_distilled_patch16_224` |"
    assert row in (tmp_path / "list.md").read_text().splitlines()
