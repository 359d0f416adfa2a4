"""Draw the chart of docs/evaluation.md and print two of its tables: the methods, and what blurring their maps changes.

    python -m tools.draw_evaluation_figure --output FOLDER
    python -m tools.draw_evaluation_figure --output FOLDER --data BOXES --model ID --checkpoint FILE --table-only

FOLDER keeps what was measured: after `vitflow evaluate … --method all --blurred-control -o FOLDER`, nothing is measured
again.
"""

import argparse
import sys
from pathlib import Path

import vitflow
from vitflow.evaluation import Evaluation, evaluate
from vitflow.evaluation.metrics import blurred_label, is_blurred
from vitflow.evaluation.results import draw_bars
from vitflow.evaluation.tables import Table
from vitflow.images.figures import save_figure

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DRAWN = ["pointing_game", "roc_auc", "deletion_auc", "gap", "randomisation", "class_sensitivity"]
REPORTED = [
    *("pointing_game", "roc_auc", "energy", "mean_iou"),
    *("deletion_auc", "insertion_auc", "randomisation", "class_sensitivity"),
]


def table(actual: Evaluation) -> str:
    """Means ± standard errors, a row per method and baseline."""
    metrics = {metric.name: metric for metric in actual.metrics}
    head = ("method", *(f"{metrics[name].title} {metrics[name].arrow}" for name in REPORTED))
    rows = zip(*map(actual.table, REPORTED), strict=True)
    cells = [(row[0].method, *(str(one.estimate) for one in row)) for row in rows if not is_blurred(row[0].method)]
    return Table(head, cells).to_markdown()


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
    parser.add_argument("--data", default="demo:500")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--sanity-images", type=int, default=24)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--table-only", action="store_true", help="leave the chart as it is")
    given = parser.parse_args()
    actual = evaluate(
        given.data,
        model=vitflow.load_model(given.model, checkpoint=given.checkpoint),
        methods="all",
        sanity_images=given.sanity_images,
        blurred_control=True,
        output=given.output,
        progress=lambda state: print(f"\r{state.done} of {state.total}", end="", file=sys.stderr),
    )
    print(table(actual), blur_table(actual), sep="\n\n")
    if not given.table_only:
        print(save_figure(draw_bars(actual, DRAWN), ASSETS / "evaluation.png"))


if __name__ == "__main__":
    main()
