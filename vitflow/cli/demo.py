"""The first look at vitflow: the bundled pictures explained with the bundled model, offline."""

from pathlib import Path

from vitflow.demo import load_demo_model, sample_pictures
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.showing.comparison import compare

# The map that each picture's own overlay shows: it answers for the class that the model finds first.
_METHOD = "gae"


def run_demo(output: Path) -> list[Path]:
    """Write one overlay for each sample picture, and one strip of every method over all of them.

    Args:
        output: folder for the files; it is made as needed.

    Returns:
        The files: overlays first, the strip last.

    Raises:
        ModelError: the demo model's weights are missing.
        OSError: a file cannot be written.
    """
    explainer = Explainer(load_demo_model())
    pictures = sample_pictures()
    files = []
    for picture in pictures:
        saliency = explainer.explain(picture, method=_METHOD)
        files.append(saliency.save(output / f"{picture.stem}-{_METHOD}.png"))
    strip = compare(pictures, model=explainer)
    return [*files, strip.save(output / "strip.png")]
