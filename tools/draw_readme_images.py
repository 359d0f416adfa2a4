"""Draw the images of the README: photographs with a trained model, drawn shapes with the bundled one.

    python -m tools.draw_readme_images [--checkpoint WEIGHTS] [--model ID]

The photographs come with scikit-image: pip install "vitflow[examples]" or scikit-image. Without --checkpoint the
model's weights come from the hub.
"""

import argparse
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

import vitflow
from tools.drawn import keep
from vitflow.demo import sample_images
from vitflow.images.figures import figure_bytes

ASSETS = Path(__file__).resolve().parent.parent / "assets"
STRIP_QUALITY = 80
MODEL = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
CLASSES = ["orange disc", "yellow star", "pink crescent"]
# What the two images show.
ARGUED = ["gae", "random"]
REQUESTED = ["gradient_rollout", "gradcam", "sampling"]


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(__doc__, arguments)
    explainer = vitflow.Explainer(
        vitflow.load_model(given.model, checkpoint=given.checkpoint), fit="squash", device="cpu"
    )
    with tempfile.TemporaryDirectory() as desk:
        photographs = load_photographs(Path(desk))
        photograph, views = argued(explainer, stacked(photographs["cat"], photographs["coffee"]), given.classes)
    still = draw_views([("A photograph", photograph), *views])
    argument = write_jpeg(figure_bytes(still, ".png"), given.output / "two-things.jpg")
    print(keep(argument, ARGUED, given.output))
    frames = [draw_views([("A photograph", photograph), view]) for view in views]
    print(write_webp([figure_bytes(frame, ".png") for frame in frames], given.output / "two-things.webp"))
    classes = write_jpeg(draw_classes(), given.output / "classes.jpg", STRIP_QUALITY)
    print(keep(classes, REQUESTED, given.output))


def draw_classes() -> bytes:
    """One bundled image, asked for three classes."""
    demo = vitflow.Explainer("demo", device="cpu")
    return strip_bytes(vitflow.compare(sample_images()[0], model=demo, methods=REQUESTED, targets=CLASSES))


def stacked(first: Path, second: Path, side: int = 448) -> Image.Image:
    """The middle of two square photographs, one above the other, as one square image."""
    image = Image.new("RGB", (side, side))
    for place, path in enumerate((first, second)):
        with Image.open(path) as photograph:
            half = photograph.resize((side, side)).crop((0, side // 4, side, side // 4 * 3))
        image.paste(half, (0, place * side // 2))
    return image


def argued(
    explainer: vitflow.Explainer, image: Image.Image, classes: Sequence[str]
) -> tuple[NDArray[np.uint8], list[tuple[str, NDArray[np.uint8]]]]:
    """Return an image of two things, and by title a map for each by GAE, their difference, and a random map."""
    first, second = classes
    of_first, of_second = explainer.explain_batch(image, method="gae", targets=classes)
    difference = explainer.explain(image, target=vitflow.Contrast(first, against=second))
    random = explainer.explain(image, method="random")
    return random.image, [
        (f"What speaks for “{first}”", of_first.overlay()),
        (f"What speaks for “{second}”", of_second.overlay()),
        (f"“{first}” (red) against “{second}” (blue)", difference.overlay()),
        ("A random map, for comparison", random.overlay()),
    ]


def draw_views(views: Sequence[tuple[str, NDArray[np.uint8]]], width: float = 3.6) -> Figure:
    """Images side by side, each with a title and air around it."""
    figure = Figure(figsize=(width * len(views), width + 0.35), dpi=110)
    for axes, (title, pixels) in zip(figure.subplots(1, len(views), squeeze=False)[0], views, strict=True):
        axes.imshow(pixels)
        axes.set_title(title, fontsize=11, pad=9)
        axes.axis("off")
    figure.subplots_adjust(left=0.02, right=0.98, top=0.88, bottom=0.02, wspace=0.06)
    return figure


def write_webp(pngs: Sequence[bytes], path: Path, seconds: float = 2.2, steps: int = 4) -> Path:
    """Write images as an animation in which each fades into the next."""
    images = [Image.open(io.BytesIO(png)).convert("RGB") for png in pngs]
    frames, durations = [], []
    for image, other in zip(images, images[1:] + images[:1], strict=True):
        frames += [image, *(Image.blend(image, other, step / (steps + 1)) for step in range(1, steps + 1))]
        durations += [round(1000 * seconds), *[60] * steps]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, quality=62, method=6)
    return path


def parse(description: str | None, arguments: Sequence[str] | None, *, only: bool = False) -> argparse.Namespace:
    """Parse the options of scripts that draw photographs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="timm's id of a model that knows ImageNet")
    parser.add_argument("--checkpoint", type=Path, help="its weights")
    parser.add_argument("--classes", nargs=2, default=["tabby", "espresso"], help="two things of one image")
    parser.add_argument("--output", type=Path, default=ASSETS)
    if only:
        parser.add_argument("--only", metavar="NAME", help="draw this image alone")
    return parser.parse_args(arguments)


def load_photographs(folder: Path) -> dict[str, Path]:
    """The photographs that may be shown freely, cut to squares, as files in a folder, by their names."""
    try:
        from skimage import data
    except ImportError as error:
        raise SystemExit('The photographs come with scikit-image: pip install "vitflow[examples]".') from error
    # CC0 by Stefan van der Walt, CC0 by Rachel Michetti, and public domain by NASA.
    actual = {
        "cat": data.chelsea(),
        "coffee": data.coffee(),
        "astronaut": data.astronaut(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, image in actual.items():
        side = min(image.shape[:2])
        top, left = ((length - side) // 2 for length in image.shape[:2])
        files[name] = folder / f"{name}.png"
        Image.fromarray(image[top : top + side, left : left + side]).save(files[name])
    return files


def strip_bytes(comparison: vitflow.Comparison, **options: Any) -> bytes:
    """A strip as PNG."""
    return figure_bytes(comparison.figure(**{"dpi": 125, **options}), ".png")


def write_jpeg(png: bytes, path: Path, quality: int = 85) -> Path:
    """Write an image that is there as PNG as JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").save(path, quality=quality, subsampling=0, optimize=True)
    return path


if __name__ == "__main__":
    main()
