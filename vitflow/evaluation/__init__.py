"""Measure maps instead of only looking at them: against objects, against the model's own answers, against each other.

`evaluate` does all of it on a folder of pictures; the parts can be used alone. Names are loaded when they are first
used, so that the tables of metrics load no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitflow.evaluation.agreement import Agreement, measure_agreement, spearman, top_overlap
    from vitflow.evaluation.correlation import RankCorrelation, rank_correlation
    from vitflow.evaluation.datasets import Dataset, Labelled, Sample, open_dataset
    from vitflow.evaluation.faithfulness import Curves, faithfulness_curves
    from vitflow.evaluation.localisation import (
        Localisation,
        accumulated_iou,
        average_precision,
        energy_in_region,
        localise,
        mean_iou,
        pointing_game,
        roc_auc,
    )
    from vitflow.evaluation.metrics import METRICS, Metric
    from vitflow.evaluation.regions import Region, box_region, mask_region, polygon_region, run_length_region
    from vitflow.evaluation.results import Evaluation, TableRow
    from vitflow.evaluation.run import evaluate
    from vitflow.evaluation.running import EvaluationProgress
    from vitflow.evaluation.sanity import (
        cascading_randomisation,
        class_sensitivity,
        flip_stability,
        shift_stability,
        stage_names,
    )
    from vitflow.evaluation.statistics import Difference, Estimate, estimate_means, paired_differences
    from vitflow.evaluation.token_dropping import can_drop_tokens, run_on_patches

_HOMES = {
    "METRICS": "metrics",
    "Agreement": "agreement",
    "Curves": "faithfulness",
    "Dataset": "datasets",
    "Difference": "statistics",
    "Estimate": "statistics",
    "Evaluation": "results",
    "EvaluationProgress": "running",
    "Labelled": "datasets",
    "Localisation": "localisation",
    "Metric": "metrics",
    "RankCorrelation": "correlation",
    "Region": "regions",
    "Sample": "datasets",
    "TableRow": "results",
    "accumulated_iou": "localisation",
    "average_precision": "localisation",
    "box_region": "regions",
    "can_drop_tokens": "token_dropping",
    "cascading_randomisation": "sanity",
    "class_sensitivity": "sanity",
    "energy_in_region": "localisation",
    "estimate_means": "statistics",
    "evaluate": "run",
    "faithfulness_curves": "faithfulness",
    "flip_stability": "sanity",
    "localise": "localisation",
    "mask_region": "regions",
    "mean_iou": "localisation",
    "measure_agreement": "agreement",
    "open_dataset": "datasets",
    "paired_differences": "statistics",
    "pointing_game": "localisation",
    "polygon_region": "regions",
    "rank_correlation": "correlation",
    "roc_auc": "localisation",
    "run_length_region": "regions",
    "run_on_patches": "token_dropping",
    "shift_stability": "sanity",
    "spearman": "agreement",
    "stage_names": "sanity",
    "top_overlap": "agreement",
}

__all__ = [
    "METRICS",
    "Agreement",
    "Curves",
    "Dataset",
    "Difference",
    "Estimate",
    "Evaluation",
    "EvaluationProgress",
    "Labelled",
    "Localisation",
    "Metric",
    "RankCorrelation",
    "Region",
    "Sample",
    "TableRow",
    "accumulated_iou",
    "average_precision",
    "box_region",
    "can_drop_tokens",
    "cascading_randomisation",
    "class_sensitivity",
    "energy_in_region",
    "estimate_means",
    "evaluate",
    "faithfulness_curves",
    "flip_stability",
    "localise",
    "mask_region",
    "mean_iou",
    "measure_agreement",
    "open_dataset",
    "paired_differences",
    "pointing_game",
    "polygon_region",
    "rank_correlation",
    "roc_auc",
    "run_length_region",
    "run_on_patches",
    "shift_stability",
    "spearman",
    "stage_names",
    "top_overlap",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
