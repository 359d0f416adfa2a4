"""Deletion by dropping tokens beside hiding patches: how much faster, and whether they rank methods alike.

    python -m benchmarks.faithfulness [--model ID --checkpoint FILE --images FOLDER] [--count N] [--methods …]
    python -m benchmarks.faithfulness --parts --methods rollout gae gradcam --count 20 [--model … --images …]

First the time of the curves of every method's map of one image, at equal points, for each way to take patches away,
in turn, so that a busy machine slows all of them. Then means over images of the area between the curves (least − most
relevant removed first, higher is better), how the ways agree about the order of the methods, and about the order of
methods image by image (Spearman's ρ). Without --images these are drawn by the demo, for its model.

With --parts it prints instead where the time of a whole `vitflow.evaluate` goes, in seconds and in plain forward passes
of one image, timed in the same run.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import timm
import torch

import vitflow
from vitflow import Explainer
from vitflow.analysis.removal import REPLACEMENTS
from vitflow.demo import draw_images
from vitflow.evaluation.measures.faithfulness import faithfulness_curves
from vitflow.explaining.saliency import Saliency
from vitflow.files import find_images
from vitflow.methods.similarity import spearman

METHODS = ("rollout", "attention", "flow", "gradient_rollout", "gae", "gradcam", "input_gradient", "random", "centre")
FIRST_SEED = 800_000  # far from the images of other tests, and below those that the demo model was trained on


def time_curves(explainer: Explainer, maps: Sequence[Saliency], points: int, rounds: int) -> np.ndarray:
    """Seconds on the clock and of the processor for the curves of all maps, [2, rounds, ways]: the ways in turn."""
    seconds = np.empty((2, rounds, len(REPLACEMENTS)))
    for how in REPLACEMENTS:
        faithfulness_curves(explainer, maps, replace=how, points=points)  # warms up
    for number in range(rounds):
        for column, how in enumerate(REPLACEMENTS):
            started = time.perf_counter(), time.process_time()
            faithfulness_curves(explainer, maps, replace=how, points=points)
            seconds[:, number, column] = time.perf_counter() - started[0], time.process_time() - started[1]
    return seconds


def print_times(name: str, seconds: np.ndarray, count: int, points: int) -> None:
    """A row per way, with medians over the rounds, and how many times as long as dropping it takes."""
    print(f"{name}: curves of {count} map{'s' * (count > 1)} of one image, {points} points each\n")
    print("| removed by | seconds | × dropping | processor seconds | × dropping |\n|---|---:|---:|---:|---:|")
    times, ratios = np.median(seconds, axis=1), np.median(seconds / seconds[:, :, :1], axis=1)  # [2, ways]
    for column, how in enumerate(REPLACEMENTS):
        cells = (f"{times[clock, column]:.3f} | {ratios[clock, column]:.2f}" for clock in (0, 1))
        print(f"| {how} | {' | '.join(cells)} |")
    print()


def measure(explainer: Explainer, images: Sequence[object], methods: Sequence[str], points: int) -> np.ndarray:
    """The area between the curves, [images, ways, methods]."""
    rows = []
    for image in images:
        maps = explainer.explain_batch([image], methods=methods)
        rows.append(
            [[c.gap for c in faithfulness_curves(explainer, maps, replace=how, points=points)] for how in REPLACEMENTS]
        )
    return np.array(rows)


def print_gaps(gaps: np.ndarray, methods: Sequence[str]) -> None:
    """Means and standard errors of each method by each way, and how the ways agree."""
    means, errors = gaps.mean(0), gaps.std(0, ddof=1) / np.sqrt(len(gaps))
    print(f"| method | {' | '.join(REPLACEMENTS)} |\n|---|{'---|' * len(REPLACEMENTS)}")
    for column, method in enumerate(methods):
        cells = (f"{m:.3f} ± {e:.3f}" for m, e in zip(means[:, column], errors[:, column], strict=True))
        print(f"| {method} | {' | '.join(cells)} |".replace("-0.", "−0."))
    print("\n| ways | ρ of the methods' means | ρ within an image, mean | same best method |\n|---|---:|---:|---:|")
    for a, b in combinations(range(len(REPLACEMENTS)), 2):
        within = np.mean([rho for one in gaps if (rho := spearman(one[a], one[b])) is not None])
        best = float((gaps[:, a].argmax(1) == gaps[:, b].argmax(1)).mean())
        names = f"{REPLACEMENTS[a]}, {REPLACEMENTS[b]}"
        print(f"| {names} | {spearman(means[a], means[b]):.2f} | {within:.2f} | {best:.0%} |")
    print()


def print_parts(explainer: Explainer, images: Sequence[object], methods: Sequence[str], points: int) -> None:
    """Time of the parts of an evaluation: maps, faithfulness, sanity, and writing."""

    def clocked(work: Callable[[], object]) -> np.ndarray:
        """Seconds on the clock and of the processor."""
        started = time.perf_counter(), time.process_time()
        work()
        return np.array([time.perf_counter(), time.process_time()]) - started

    def evaluated(*metrics: str, output: Path | None = None) -> np.ndarray:
        options = {"model": explainer, "methods": methods, "metrics": metrics, "points": points, "output": output}
        return clocked(lambda: vitflow.evaluate(images, **options))

    def mapped() -> np.ndarray:
        every = [*methods, "random", "centre"]
        return sum(
            clocked(lambda part=images[start : start + 8]: explainer.explain_batch(part, methods=every))
            for start in range(0, len(images), 8)
        )

    def plain() -> None:
        with torch.no_grad():
            for _ in range(5):
                explainer.model(batch)

    batch = torch.cat([explainer.pixels(image) for image in images[:8]])
    evaluated("faithfulness", "sanity")  # warms up
    plain()
    one = clocked(plain) / (5 * len(batch))
    maps, faithfulness, sanity = mapped(), evaluated("faithfulness"), evaluated("sanity")
    with tempfile.TemporaryDirectory() as folder:
        whole = evaluated("faithfulness", "sanity", output=Path(folder))
    parts = {"maps": maps, "faithfulness": faithfulness - maps, "sanity": sanity - maps}
    parts["tables, figures, page and files"] = whole - sum(parts.values())
    print(f"{explainer.model_id}: {len(images)} images, {', '.join(methods)}; a forward pass takes {one[0]:.4f} s\n")
    print("| part | s | of all | forward passes an image | in processor time |\n|---|---:|---:|---:|---:|")
    for name, seconds in (*parts.items(), ("all", whole)):
        passes = seconds / one / len(images)
        print(f"| {name} | {seconds[0]:.1f} | {seconds[0] / whole[0]:.0%} | {passes[0]:.0f} | {passes[1]:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    parser.add_argument("--checkpoint", type=Path, help="its weights; without, it is timed with random ones")
    parser.add_argument("--images", type=Path, help="folder of photographs to rank the methods on, with --checkpoint")
    parser.add_argument("--count", type=int, default=40, help="images")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--points", type=int, default=11)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", action="store_true", help="print where the time of an evaluation goes, and no more")
    given = parser.parse_args()
    warnings.simplefilter("ignore", vitflow.VitflowWarning)
    demo = Explainer("demo")
    drawn = [image.image for image in draw_images(2 * given.count, FIRST_SEED) if image.labels][: given.count]
    if given.checkpoint:
        other = Explainer(vitflow.load_model(given.model, checkpoint=given.checkpoint))
    else:
        other = Explainer(timm.create_model(given.model, pretrained=False).eval())
    photographs = find_images(given.images)[: given.count] if given.images else drawn[:1]
    if given.parts:
        print_parts(other, photographs if given.images else drawn, given.methods, given.points)
        return
    for name, explainer, image in (("demo", demo, drawn[0]), (other.model_id, other, photographs[0])):
        for methods in (given.methods, given.methods[:1]):
            maps = explainer.explain_batch([image], methods=methods)
            print_times(name, time_curves(explainer, maps, given.points, given.rounds), len(maps), given.points)
    ranked = [("demo", demo, drawn)]
    if given.checkpoint and given.images:
        ranked.append((other.model_id, other, photographs))
    for name, explainer, images in ranked:
        print(f"{name}, {len(images)} images: area between the curves, mean ± standard error\n")
        print_gaps(measure(explainer, images, given.methods, given.points), given.methods)


if __name__ == "__main__":
    main()
