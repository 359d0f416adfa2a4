"""Measure class-specific methods on newly drawn images with exact masks.

    python -m benchmarks.class_specific [--images 500] [--occlusion] [--refine 0 | --affinity keys]

Every image has two objects or three, of different classes; each method explains two of them. The table shows, with
standard errors over images: the share of the map's energy (its mass above its minimum, or above 0 where that lies
below) inside the mask of the asked object and inside that of the other one, over pixels; how often the brightest pixel
lies in the asked object; and how much of the map moves when the other class is asked for (0: nothing, 1: all of it).
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from vitflow import Explainer
from vitflow.demo import DemoImage, draw_images, load_demo_model
from vitflow.methods.refinement import AFFINITIES
from vitflow.registry.method_table import get_method, list_methods

BATCH = 10
FIRST_SEED = 500_000  # far from the images of other tests, and below those that the model was trained on


def several_objects(count: int, seed: int = FIRST_SEED) -> Iterator[DemoImage]:
    """Images with at least two objects."""
    actual = (image for image in draw_images(20 * count, seed) if len(image.labels) > 1)
    for _ in range(count):
        yield next(actual)


def share(values: np.ndarray, mask: np.ndarray) -> float:
    """The share of a map's energy that lies in a mask; what it would be by area for a constant map."""
    energy = density(values)
    return float(energy[mask].sum()) if energy.any() else float(mask.mean())


def density(values: np.ndarray) -> np.ndarray:
    """A map's mass above its minimum, or above 0 where that lies below, as shares of the whole."""
    mass = np.clip(values - max(float(values.min()), 0.0), 0.0, None).astype(np.float64)
    return mass / max(float(mass.sum()), 1e-300)


def localise(
    count: int, methods: Sequence[str], seed: int = FIRST_SEED, **options: object
) -> dict[str, dict[str, np.ndarray]]:
    """Per method: "own", "other" and "pointing" as [images, 2 classes], "change" as [images]."""
    explainer, photos = Explainer(load_demo_model()), several_objects(count, seed)
    rows: dict[str, dict[str, list]] = {
        name: {key: [] for key in ("own", "other", "pointing", "change")} for name in methods
    }
    while batch := list(islice(photos, BATCH)):
        images = [image.image for image in batch]
        actual = []
        for which in (0, 1):  # one class after the other, also where the method does not care
            targets = np.array([image.labels[which] for image in batch])
            heatmaps = [s.heatmap for s in explainer.explain_batch(images, methods=methods, targets=targets, **options)]
            actual.append([heatmaps[start : start + len(methods)] for start in range(0, len(heatmaps), len(methods))])
        for number, image in enumerate(batch):
            masks = [image.mask_of(label) for label in image.labels[:2]]
            for place, name in enumerate(methods):
                maps, row = [actual[which][number][place] for which in (0, 1)], rows[name]
                row["own"].append([share(maps[k], masks[k]) for k in (0, 1)])
                row["other"].append([share(maps[k], masks[1 - k]) for k in (0, 1)])
                row["pointing"].append([float(masks[k].flat[maps[k].argmax()]) for k in (0, 1)])
                row["change"].append(float(np.abs(density(maps[0]) - density(maps[1])).sum()) / 2)
    return {name: {key: np.array(values) for key, values in row.items()} for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--occlusion", action="store_true", help="occlusion too: 145 forward passes per image")
    parser.add_argument("--refine", type=int, help="steps, instead of each method's default")
    parser.add_argument("--affinity", choices=AFFINITIES, help="of the refinement, instead of each method's default")
    given = parser.parse_args()
    options = {"refine": given.refine, "affinity": given.affinity}
    names = [method.name for method in list_methods() if given.occlusion or method.name != "occlusion"]
    actual = localise(given.images, names, **options)
    print(f"{given.images} fresh images with two or three objects, two classes asked of each.\n")
    print("| method | class-specific | energy in the asked object | in the other | pointing | change with the class |")
    print("|---|---|---|---|---|---|")
    for name in names:
        columns = []
        for key in ("own", "other", "pointing", "change"):
            values = actual[name][key].reshape(given.images, -1).mean(1)
            columns.append(f"{values.mean():.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}")
        print(f"| {name} | {'yes' if get_method(name).class_specific else 'no'} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
