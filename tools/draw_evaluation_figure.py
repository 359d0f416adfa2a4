"""Draw the chart of docs/how-to/evaluate.md, or print what blurring the maps of the methods changes.

    python -m tools.draw_evaluation_figure --output FOLDER
    python -m tools.draw_evaluation_figure --output FOLDER --data BOXES --model ID --checkpoint FILE --blur

With --blur, each method has a copy whose maps are blurred by a Gaussian of one patch: a gain that blur alone achieves
is no evidence for a method. FOLDER keeps what was measured.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from scipy.ndimage import gaussian_filter

import vitflow
from vitflow.evaluation import Evaluation, evaluate
from vitflow.evaluation.results import draw_bars
from vitflow.evaluation.tables import Table
from vitflow.explaining.applying import make_maps
from vitflow.explaining.maps import TargetedTrace
from vitflow.images.figures import save_figure
from vitflow.registry.method_table import BASELINES, get_method, list_methods, register_method

ASSETS = Path(__file__).resolve().parent.parent / "assets"
BLURRED = "_blurred"
DRAWN = ["pointing_game", "roc_auc", "deletion_auc", "gap", "randomisation", "class_sensitivity"]


def register_blurred(name: str) -> None:
    """Add a method whose maps are those of a method after a Gaussian blur with σ of one patch."""
    method = get_method(name)

    def blurred(trace: TargetedTrace, **options: object) -> torch.Tensor:
        grids = make_maps(method, method.complete(options), trace)[0].grids.double().cpu().numpy()
        return torch.from_numpy(gaussian_filter(grids, (0.0, 1.0, 1.0), mode="reflect"))

    register_method(replace(method, name=name + BLURRED, title="", function=blurred, refine_stage="none"))


def blur_table(actual: Evaluation) -> str:
    """Effect of blurring: the blurred copy's mean minus the method's, with its interval."""
    head = ("method", "ROC-AUC, blurred − original", "deletion AUC, blurred − original")
    rows = [
        (name, *(_change(actual, metric, name) for metric in ("roc_auc", "deletion_auc")))
        for name in actual.main_methods
        if not name.endswith(BLURRED)
    ]
    return Table(head, rows).to_markdown()


def _change(actual: Evaluation, metric: str, method: str) -> str:
    change = actual.difference(metric, method + BLURRED, method).estimate
    return f"{change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]".replace("-", "−")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="demo:100")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--blur", action="store_true", help="print what blur changes instead")
    given = parser.parse_args()
    for method in list_methods() if given.blur else ():
        if method.name not in BASELINES:
            register_blurred(method.name)
    actual = evaluate(
        given.data,
        model=vitflow.load_model(given.model, checkpoint=given.checkpoint),
        methods="all" if given.blur else None,
        metrics=["roc_auc", "deletion_auc"] if given.blur else DRAWN,
        output=given.output,
        progress=lambda state: print(f"\r{state.done} of {state.total}", end="", file=sys.stderr),
    )
    print(blur_table(actual) if given.blur else save_figure(draw_bars(actual, DRAWN), ASSETS / "evaluation.png"))


if __name__ == "__main__":
    main()
