"""Measure how many masks `masks="auto"` uses, and how close its maps are to those of 512 other masks.

python -m benchmarks.masks --checkpoint FILE --images FOLDER [--count 10]
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

import vitflow
from benchmarks.defaults import CHECKPOINT
from vitflow.demo import draw_image

REFERENCE = {"masks": 512, "random_seed": 1}
FIRST_SEED = 950_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--count", type=int, default=10)
    given = parser.parse_args()
    warnings.simplefilter("ignore", vitflow.VitflowWarning)
    drawn = [draw_image(FIRST_SEED + seed).image for seed in range(given.count)]
    files = sorted(path for path in given.images.iterdir() if path.suffix in (".png", ".jpg"))
    tiny = vitflow.load_model(CHECKPOINT, checkpoint=given.checkpoint)
    print("| model | estimator | masks | used | correlation | overlap |\n|---|---|---|---|---|---|")
    for model, images in (("demo", drawn), (tiny, files[-given.count :])):
        explainer = vitflow.Explainer(model)
        for estimator in ("difference", "regression"):
            for masks in (96, "auto", 256):
                rows = [compared(explainer, image, masks, estimator) for image in images]
                used, correlation, overlap = np.mean(rows, axis=0)
                print(
                    f"| {explainer.model_id} | {estimator} | {masks} | {used:.0f} | {correlation:.3f} | {overlap:.3f} |"
                )


def compared(explainer: vitflow.Explainer, image: object, masks: int | str, estimator: str) -> tuple[float, ...]:
    """The number of masks, and correlation and overlap with the reference."""
    reference = explainer.explain(image, method="sampling", target="top1", **REFERENCE).grid.ravel()
    saliency = explainer.explain(image, method="sampling", target="top1", masks=masks, estimator=estimator)
    grid, count = saliency.grid.ravel(), round(0.1 * saliency.grid.size)
    strongest = [set(np.argsort(-each)[:count].tolist()) for each in (grid, reference)]
    used = saliency.facts.get("masks_used", masks)
    return used, float(spearmanr(grid, reference)[0]), len(strongest[0] & strongest[1]) / count


if __name__ == "__main__":
    main()
