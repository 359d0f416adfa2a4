"""Which refinement the methods have by default: chosen on half of the images by a rule, told for the other half.

    python -m benchmarks.defaults --checkpoint FILE --boxes DATA -o FOLDER [--methods …] [--drawn demo:100:2000]

The rule, written down before anything was measured by it:

1. Two models: the trained ViT-Tiny on photographs with boxes, the demo model on drawn images that no table shows. Two
   measures: ROC-AUC (where the object is) and deletion AUC (whether the answer goes with it, patches dropped, curves of
   6 points).
2. The images of each are split in halves by the SHA-256 of their names: even first byte, to choose on; odd, to tell.
3. Candidates are refine=1 with each affinity. The gain of a candidate in a measure is its paired difference from
   refine=0, counted so that more is better. One candidate is chosen for all methods: the one with the largest sum of
   mean gains over models, measures and methods, on the choosing halves.
4. A method takes it as its default if on the choosing halves, for both models, its mean gain is positive in both
   measures, and clear (the 95 % interval leaves out 0) in at least one of them. Else its default stays 0.
5. A default falls back to 0 if a gain on the telling half of a model is clearly negative.

The same can be asked of other options. `--of earlier`: those that the methods had before refinement, each against its
published definition; `--of beneath`: the same where both are refined, as the defaults are now.
"""

import argparse
import hashlib
import sys
import warnings
from pathlib import Path

import numpy as np

import vitflow
from vitflow.evaluation import evaluate
from vitflow.evaluation.results import Evaluation
from vitflow.evaluation.statistics import estimate_means
from vitflow.registry.method_table import get_method

METHODS = ("rollout", "attention", "flow", "gradient_rollout", "gae")
#: What can be asked: the options that candidates are measured against, and the candidates.
QUESTIONS: dict[str, tuple[dict, list[dict]]] = {
    "refine": ({"refine": 0}, [{"refine": 1, "affinity": affinity} for affinity in ("attention", "keys", "both")]),
    "earlier": ({"preset": "paper"}, [{"refine": 0}]),
    "beneath": ({"preset": "paper", "refine": 1}, [{"refine": 1}, {"refine": 1, "head_fusion": "mean"}]),
}
MEASURES = {"roc_auc": 1.0, "deletion_auc": -1.0}
CHECKPOINT = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


def choosing(name: str) -> bool:
    """Return True for images of the half on which defaults are chosen."""
    return hashlib.sha256(Path(name).name.encode()).digest()[0] % 2 == 0


def label(method: str, entry: dict) -> str:
    return f"{method}:{reported(entry)}"


def reported(entry: dict) -> str:
    return ",".join(f"{name}={value}" for name, value in entry.items())


def measured(data: str, model: object, methods: list, output: Path) -> Evaluation:
    return evaluate(
        data,
        model=model,
        methods=methods,
        metrics=list(MEASURES),
        points=6,
        output=output,
        progress=lambda state: print(f"\r{output.name}: {state.done} of {state.total}", end="", file=sys.stderr),
    )


def gains(actual: Evaluation, first: str, base: str, half: bool) -> dict[str, object]:
    """The gain of one label over another in each measure, on one half of the images."""
    rows = [number for number, image in enumerate(actual.images) if choosing(image["input"]) is half]
    one, other = actual.methods.index(first), actual.methods.index(base)
    return {
        name: estimate_means((sign * (actual.values[name][rows, one] - actual.values[name][rows, other]))[:, None])[0]
        for name, sign in MEASURES.items()
    }


def words(actual: dict) -> str:
    return " | ".join(f"{e.mean:+.3f} [{e.low:+.3f}, {e.high:+.3f}]" for e in actual.values())


def choose(runs: dict[str, Evaluation], methods: list[str], base: dict, candidates: list[dict]) -> None:
    """Apply the rule and print what it finds."""
    totals = []
    for candidate in candidates:
        entry = [
            gains(actual, label(method, candidate), label(method, base), True)
            for actual in runs.values()
            for method in methods
        ]
        totals.append(sum(one.mean for each in entry for one in each.values()))
        print(f"{reported(candidate)}: summed gain {totals[-1]:+.3f}")
    best = candidates[int(np.argmax(totals))]
    print(f"\nchosen: {reported(best)}; gains over {reported(base)}\n")
    print("| method | data | half | gain in ROC-AUC | gain in deletion AUC |\n|---|---|---|---|---|")
    for method in methods:
        held = True
        for name, actual in runs.items():
            chosen, other = (gains(actual, label(method, best), label(method, base), half) for half in (True, False))
            held &= all(one.mean > 0 for one in chosen.values()) and any(one.low > 0 for one in chosen.values())
            held &= all(one.high >= 0 for one in other.values())
            for half, entry in (("chosen on", chosen), ("other", other)):
                print(f"| {method} | {name} | {half} | {words(entry)} |")
        print(f"| **{method}** | default {reported(best if held else base)} | | | |", flush=True)


def means(actual: Evaluation) -> None:
    """All labels on all images."""
    print("| map | ROC-AUC ↑ | deletion AUC ↓ |\n|---|---|---|")
    for number, name in enumerate(actual.methods):
        print(f"| {name} | " + " | ".join(f"{np.nanmean(actual.values[m][:, number]):.3f}" for m in MEASURES) + " |")
    print(flush=True)


def data_parser(description: str) -> argparse.ArgumentParser:
    """The options that say what is measured, and where its rows go."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--boxes", required=True)
    parser.add_argument("--drawn", default="demo:100:2000")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="folder for the rows: a run goes on from there"
    )
    return parser


def main() -> None:
    parser = data_parser(__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--of", choices=QUESTIONS, default="refine", help="which options are asked about")
    given = parser.parse_args()
    warnings.simplefilter("ignore", vitflow.VitflowWarning)
    base, candidates = QUESTIONS[given.of]
    methods = [name for name in given.methods if "preset" not in base or get_method(name).presets]
    requested = [(name, entry) for name in methods for entry in (base, *candidates)]
    kind = "-".join([given.of, *methods])
    photographs = vitflow.load_model(CHECKPOINT, checkpoint=given.checkpoint)
    runs = {
        "drawn": measured(given.drawn, "demo", requested, given.output / f"{kind}-drawn"),
        "photographs": measured(given.boxes, photographs, requested, given.output / f"{kind}-photographs"),
    }
    choose(runs, methods, base, candidates)
    for name, actual in runs.items():
        print(f"\nAll images, {name}:\n")
        means(actual)


if __name__ == "__main__":
    main()
