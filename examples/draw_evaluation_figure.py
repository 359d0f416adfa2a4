"""Draw the README's chart of an evaluation: python examples/draw_evaluation_figure.py --output FOLDER

FOLDER keeps what was measured: where `vitflow evaluate demo:500 --method all -o FOLDER` has run, nothing is measured
again.
"""

import argparse
import sys
from pathlib import Path

import vitflow
from vitflow.evaluation import evaluate
from vitflow.evaluation.charts import draw_bars
from vitflow.pictures.figures import save_figure

ASSETS = Path(__file__).resolve().parent.parent / "assets"
SHOWN = ["pointing_game", "roc_auc", "deletion_auc", "gap", "randomisation", "class_sensitivity"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="demo:500")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    found = evaluate(
        given.data,
        model=vitflow.load_model(given.model, checkpoint=given.checkpoint),
        methods="all",
        output=given.output,
        progress=lambda state: print(f"\r{state.done} of {state.total}", end="", file=sys.stderr),
    )
    print(save_figure(draw_bars(found, SHOWN), ASSETS / "evaluation.png"))


if __name__ == "__main__":
    main()
