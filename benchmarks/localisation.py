"""Localisation of every method with default and published options, against boxes or masks.

    python -m benchmarks.localisation --model ID --checkpoint FILE --boxes DATA [--methods NAME[:paper] …]

DATA is whatever `vitflow evaluate` takes, which does the same with `--metric localisation --method NAME:preset=paper`;
here every method with a published definition of its own is measured both ways. Prints means and standard errors as a
Markdown table.
"""

import argparse
import sys
import warnings
from pathlib import Path

import vitflow
from vitflow.evaluation import evaluate
from vitflow.registry.method_table import list_methods


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--boxes", required=True)
    parser.add_argument("--methods", nargs="+", help="NAME for its defaults, NAME:paper for the published definition")
    given = parser.parse_args()
    warnings.simplefilter("ignore", vitflow.VitflowWarning)  # saturation has a table of its own
    every = [m.name + suffix for m in list_methods() for suffix in ("", ":paper") if not suffix or m.presets]
    names = [name.partition(":") for name in given.methods or every]
    actual = evaluate(
        given.boxes,
        model=vitflow.load_model(given.model, checkpoint=given.checkpoint),
        methods=[(name, {"preset": preset}) if preset else name for name, _, preset in names],
        metrics=["localisation"],
        progress=lambda state: print(f"\r{state.done} of {state.total}", end="", file=sys.stderr),
    )
    print(actual.to_markdown())


if __name__ == "__main__":
    main()
