"""Draw the chart of docs/evaluation.md and print one of its tables.

    python examples/draw_evaluation_figure.py --output FOLDER
    python examples/draw_evaluation_figure.py --output FOLDER --data BOXES --model ID --checkpoint FILE --table-only

FOLDER keeps what was measured: where `vitflow evaluate … --method all -o FOLDER` has run, nothing is measured again.
"""

import argparse
import sys
from pathlib import Path

import vitflow
from vitflow.evaluation import Evaluation, evaluate
from vitflow.evaluation.charts import draw_bars
from vitflow.evaluation.statistics import markdown_table
from vitflow.pictures.figures import save_figure

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DRAWN = ["pointing_game", "roc_auc", "deletion_auc", "gap", "randomisation", "class_sensitivity"]
TOLD = [
    *("pointing_game", "roc_auc", "energy", "mean_iou"),
    *("deletion_auc", "insertion_auc", "randomisation", "class_sensitivity"),
]


def table(found: Evaluation) -> str:
    """Means ± standard errors, a row per map, each followed by its blurred twin."""
    metrics = {metric.name: metric for metric in found.metrics}
    columns = [[str(row.estimate) for row in found.table(name)] for name in TOLD]
    head = ["method", *(f"{metrics[name].title} {metrics[name].arrow}" for name in TOLD)]
    return markdown_table([head, *map(list, zip(found.methods, *columns, strict=True))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="demo:500")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--sanity-pictures", type=int, default=24)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--table-only", action="store_true", help="leave the chart as it is")
    given = parser.parse_args()
    found = evaluate(
        given.data,
        model=vitflow.load_model(given.model, checkpoint=given.checkpoint),
        methods="all",
        sanity_pictures=given.sanity_pictures,
        output=given.output,
        progress=lambda state: print(f"\r{state.done} of {state.total}", end="", file=sys.stderr),
    )
    print(table(found))
    if not given.table_only:
        print(save_figure(draw_bars(found, DRAWN), ASSETS / "evaluation.png"))


if __name__ == "__main__":
    main()
