"""Measure if the map of a prompt is on the object that it names, on newly drawn images of two or three objects.

    python -m benchmarks.prompts [--images 500] [--model demo-text] [--methods gae sampling …]

Each thing of an image is asked for by its phrase ("a red heart"). Beside it stand the phrases of the image's other
things; the map is either of the prompt's number alone, or of it less the mean of the others' (the default). Told are,
with 95 % intervals over images: of the map's mass (above its minimum, or above 0 where that lies below), the share in
the named thing, and the share in it of what lies in all things; and how often the named thing has the largest mean.

"exact" is no method: it has the share of each patch that the named thing covers, and shows what the patches allow.

Then how prompts are read, for things that are there and for others that differ from one of them in colour or in shape.
Options are each method's defaults.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice

import numpy as np

import vitflow
from tools.scenes import COLOURS, SHAPES, Scene, draw_scene
from vitflow import Explainer, load_model
from vitflow.evaluation.measures.localisation import localise, score_object
from vitflow.evaluation.statistics import estimate_means

METHODS = ["gae", "sampling", "consensus", "gradcam", "legrad", "gradient_rollout", "rollout", "random", "centre"]
FIRST_SEED = 700_000  # far from the images that other tables show, and below those that the model was trained on
SIDE = 256  # pixels


def several_things(first_seed: int = FIRST_SEED) -> Iterator[Scene]:
    return (scene for scene in (draw_scene(seed, SIDE) for seed in count(first_seed)) if len(scene.things) > 1)


def measure(images: int, name: str, methods: list[str]) -> None:
    model, random = load_model(name), np.random.default_rng(0)
    scores: dict[tuple[str, bool], list[np.ndarray]] = {
        (method, alone): [] for method in methods for alone in (False, True)
    } | {("exact", True): []}
    there: list[float] = []
    absent: list[float] = []
    for number, scene in enumerate(islice(several_things(), images)):
        prompts = [str(thing.phrase) for thing in scene.things]
        changed = [
            phrase
            for thing in scene.things
            for phrase in (
                replace(thing.phrase, colour=str(random.choice(COLOURS))),
                replace(thing.phrase, shape=str(random.choice(SHAPES))),
            )
        ]
        wrong = [str(phrase) for phrase in changed if not scene.holds(str(phrase))]
        for alone in (False, True):
            explainer = Explainer(model, outputs=vitflow.prompts(prompts, raw=alone))
            actual = explainer.explain_batch([scene.image], methods=methods, targets=list(range(len(prompts))))
            for method in methods:
                maps = [saliency for saliency in actual if saliency.method == method]
                by_thing = maps * (len(prompts) if len(maps) == 1 else 1)  # of rollout there is one for all
                scores[method, alone].append(scored([one.heatmap for one in by_thing], scene.masks))
            if alone:
                read(explainer, scene, there)
                shares = [blocks(mask, actual[0].grid.shape).mean(axis=(1, 3)) for mask in scene.masks]
                exact = [replace(actual[0], grid=share.astype(np.float32)).heatmap for share in shares]
                scores["exact", alone].append(scored(exact, scene.masks))
        if wrong:
            read(Explainer(model, outputs=vitflow.prompts(list(dict.fromkeys(wrong)), raw=True)), scene, absent)
        print(f"\r{number + 1} of {images}", end="", flush=True)
    print("\n\n| map | of | in the named thing | of what lies in things | named thing wins |\n|---|---|---:|---:|---:|")
    for (method, alone), rows in scores.items():
        reported = (f"{one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]" for one in estimate_means(np.array(rows)))
        print(f"| {method} | {'the prompt alone' if alone else 'against the others'} | {' | '.join(reported)} |")
    for words, read_as in (("there", there), ("not there", absent)):
        values = np.array(read_as)
        print(
            f"\nPrompts for what is {words}: {len(values)}, median {np.median(values):.3f}, "
            f"above 0.5: {(values > 0.5).mean():.3f}"
        )


def scored(heatmaps: Sequence[np.ndarray], masks: np.ndarray) -> np.ndarray:
    """Means over the things of an image, each by its own map: the three numbers of the table."""
    entry = [
        (localise(one, mask).energy, *score_object(one, list(masks), requested))
        for requested, (one, mask) in enumerate(zip(heatmaps, masks, strict=True))
    ]
    return np.mean(entry, axis=0)


def blocks(mask: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The pixels of each patch, [rows, height, columns, width]."""
    return mask.reshape(grid[0], -1, grid[1], mask.shape[1] // grid[1])


def read(explainer: Explainer, scene: Scene, outputs: list[float]) -> None:
    """Add the probabilities of all prompts."""
    requested = list(range(len(explainer.outputs.names)))
    outputs += [one.probability for one in explainer.explain_batch([scene.image], methods=["gae"], targets=requested)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--model", default="demo-text")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    given = parser.parse_args()
    measure(given.images, given.model, given.methods)


if __name__ == "__main__":
    main()
