"""The images of the documentation are those that today's code draws."""

import importlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitflow

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "assets"
CHECKPOINT = ROOT.parent / "shared" / "data" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"

#: Images of which no method is kept, and why.
OTHERS = {
    "evaluation.png": "drawn from a run of some minutes",
    "flow-saturation.png": "drawn from photographs with boxes; docs/methods.md has its numbers",
    "gallery/boxes.jpg": "of a detector that tools/train_detector.py trains for five minutes",
    "gallery/clip.png": "drawn by benchmarks/clips.py --figure",
    "gallery/video.png": "of a video model that benchmarks/clips.py trains for 25 minutes",
    "words-text.png": "of all-MiniLM-L6-v2, which is not bundled: the example in README.md",
}

#: Redrawn images are compared in this width: rounding, fonts and JPEG leave less than this between them, in steps of
#: 255: on average, and at the hundredth part of the pixels that lies farthest apart.
WIDTH, MEAN, FAR = 160, 2.5, 24


@pytest.fixture
def script():
    """One of the scripts as a module, by its name."""
    return lambda name: importlib.import_module(f"tools.{name}")


def kept() -> dict[str, list[dict]]:
    return json.loads((ASSETS / "drawn.json").read_text(encoding="utf-8"))


def test_every_image_says_by_what_it_was_drawn():
    drawn = {file.relative_to(ASSETS).as_posix() for file in ASSETS.rglob("*.*") if file.suffix in (".png", ".jpg")}
    assert drawn == {*kept(), *OTHERS} and not kept().keys() & OTHERS.keys()
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
    shown = {name for page in pages for name in re.findall(r"\]\([./]*assets/([^)]+)\)", page.read_text("utf-8"))}
    assert shown == drawn, "an image that no page shows, or a page without its image"


@pytest.mark.parametrize("name", sorted(kept()))
def test_its_methods_give_today_what_they_gave_when_it_was_drawn(script, name):
    reported = [departed for one in kept()[name] if (departed := script("drawn").departs(one))]
    assert not reported, f"assets/{name} is of an older version: {'; '.join(reported)}. Draw it anew."


def agrees(name: str, today: bytes) -> None:
    """Fail unless an image of the documentation looks as one that was drawn now."""
    with Image.open(ASSETS / name) as old, Image.open(io.BytesIO(today)) as new:
        sizes = [image.size for image in (old, new)]
        assert np.abs(np.subtract(*sizes)).max() <= 2, f"assets/{name} is laid out otherwise, {sizes}: draw it anew."
        height = round(WIDTH * new.height / new.width)
        shrunk = [
            np.asarray(image.convert("RGB").resize((WIDTH, height), Image.Resampling.BOX)).astype(float)
            for image in (old, new)
        ]
    apart = np.abs(np.subtract(*shrunk)).max(axis=-1)
    actual = apart.mean(), np.percentile(apart, 99)
    assert actual[0] <= MEAN and actual[1] <= FAR, f"assets/{name} is not what is drawn today, {actual}: draw it anew."


def test_images_of_the_bundled_model_are_drawn_the_same_today(script):
    agrees("classes.jpg", script("draw_readme_images").draw_classes())
    for name, drawing in script("draw_gallery").BUNDLED.items():  # to draw one anew: draw_gallery.py --only NAME
        agrees(f"gallery/{name}.jpg", drawing.draw())
    with pytest.raises(AssertionError, match="otherwise|not what is drawn today"):
        agrees("gallery/fine-tune.jpg", script("draw_readme_images").draw_classes())


@pytest.mark.skipif(not CHECKPOINT.is_file(), reason="the trained weights are not at ../shared/data")
@pytest.mark.parametrize(
    "name", ["methods", "contrast", "no-classes", "transformers", "torchvision", "folder", "paper"]
)
def test_images_of_photographs_are_drawn_the_same_today(script, name, tmp_path):
    model = vitflow.load_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", checkpoint=CHECKPOINT)
    agrees(f"gallery/{name}.jpg", script("draw_gallery").gallery(model, tmp_path)[name].draw())
