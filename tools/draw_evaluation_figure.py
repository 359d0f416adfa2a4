"""Draw the chart of docs/how-to/evaluate.md, or print what blurring the maps of the methods changes.

    python -m tools.draw_evaluation_figure --output FOLDER
    python -m tools.draw_evaluation_figure --output FOLDER --data BOXES --model ID --checkpoint FILE --blur

FOLDER keeps what was measured.
"""

import argparse
import sys
from pathlib import Path

import vitflow
from vitflow.evaluation import Evaluation, evaluate
from vitflow.evaluation.metrics import blurred_label
from vitflow.evaluation.results import draw_bars
from vitflow.evaluation.tables import Table
from vitflow.images.figures import save_figure

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DRAWN = ["pointing_game", "roc_auc", "deletion_auc", "gap", "randomisation", "class_sensitivity"]


def blur_table(actual: Evaluation) -> str:
    """Effect of blurring: the blurred copy's mean minus the method's, with its interval."""
    head = ("method", "ROC-AUC, blurred − original", "deletion AUC, blurred − original")
    rows = [
        (name, *(_change(actual, metric, name) for metric in ("roc_auc", "deletion_auc")))
        for name in actual.main_methods
    ]
    return Table(head, rows).to_markdown()


def _change(actual: Evaluation, metric: str, method: str) -> str:
    change = actual.difference(metric, blurred_label(method), method).estimate
    return f"{change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]".replace("-", "−")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="demo:100")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--blur", action="store_true", help="print what blur changes instead")
    given = parser.parse_args()
    actual = evaluate(
        given.data,
        model=vitflow.load_model(given.model, checkpoint=given.checkpoint),
        methods="all" if given.blur else None,
        metrics=["roc_auc", "deletion_auc"] if given.blur else DRAWN,
        blurred_control=given.blur,
        output=given.output,
        progress=lambda state: print(f"\r{state.done} of {state.total}", end="", file=sys.stderr),
    )
    print(blur_table(actual) if given.blur else save_figure(draw_bars(actual, DRAWN), ASSETS / "evaluation.png"))


if __name__ == "__main__":
    main()
