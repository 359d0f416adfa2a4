"""The answer of an evaluation in one sentence, on values that are made up."""

import numpy as np

from vitflow.evaluation.metrics import METRICS
from vitflow.evaluation.tables import Tables
from vitflow.evaluation.verdict import verdict

DICE = np.random.default_rng(0)


def measured(count: int = 40, **means: dict[str, float]) -> Tables:
    """Values around these means by metric and method; those of `twins` are nearly the same."""
    methods = tuple(dict.fromkeys(name for entry in means.values() for name in entry))
    rows = tuple(
        {
            "status": "measured",
            "groups": ["localisation", "faithfulness", "sanity", "grid"],
            "values": {
                name: {metric: entry[name] + 0.02 * DICE.normal() for metric, entry in means.items()}
                for name in methods
            },
        }
        for _ in range(count)
    )
    metrics = tuple(METRICS[name] for name in means)
    return Tables("data", "model", methods, metrics, rows)


def test_each_question_has_its_best_map_and_a_fast_one():
    actual = measured(
        roc_auc={"gae": 0.92, "gradient_rollout": 0.88, "consensus": 0.95, "random": 0.5},
        grid_auc={"gae": 0.90, "gradient_rollout": 0.60, "consensus": 0.70, "random": 0.5},
    )
    actual.values["grid_auc"][25:] = np.nan
    assert verdict(actual) == (
        "On your 40 images. Where the object is: Consensus, or GAE if speed matters. "
        "One class against another (on 25 images): GAE."
    )


def test_maps_that_cannot_be_distinguished_are_named():
    same = DICE.normal(size=40)
    actual = measured(gap={"gae": 0.5, "gradient_rollout": 0.5, "rollout": 0.3, "random": 0.0})
    actual.values["gap"][:, 0] = 0.5 + 0.02 * same
    actual.values["gap"][:, 1] = 0.5 + 0.02 * same[::-1] - 1e-6
    assert verdict(actual) == (
        "On your 40 images. What the prediction depends on: GAE (cannot be distinguished from Gradient rollout)."
    )


def test_on_few_images_nothing_is_clear():
    values = {
        "roc_auc": {"gae": 0.92, "rollout": 0.7, "random": 0.5},
        "gap": {"gae": 0.3, "rollout": 0.5, "random": 0.0},
    }
    few = "too few images to distinguish maps; the best mean is that of"
    assert verdict(measured(9, **values)) == (
        f"On your 9 images. Where the object is: {few} GAE. What the prediction depends on: {few} Attention rollout."
    )
    actual = measured(20, **values)
    actual.values["gap"][8:] = np.nan  # measured on eight of them
    assert verdict(actual).startswith("On your 20 images. Where the object is: GAE. ")
    assert f"depends on (on 8 images): {few}" in verdict(actual)


def test_lower_may_be_better_and_options_are_named():
    best = "On your 40 images. What the prediction depends on: GAE"
    assert verdict(measured(deletion_auc={"gae:refine=0": 0.4, "gae": 0.1, "random": 0.6})) == f"{best}."
    assert verdict(measured(deletion_auc={"gae:refine=0": 0.1, "gae": 0.4, "random": 0.6})) == f"{best} (refine=0)."


def test_a_map_that_is_not_clearly_better_than_a_random_one_is_not_named():
    actual = measured(roc_auc={"gae": 0.5, "random": 0.5})
    actual.values["roc_auc"][:, 1] = actual.values["roc_auc"][::-1, 0]
    for tables in (actual, measured(roc_auc={"gae": 0.3, "random": 0.5})):
        assert verdict(tables) == "On your 40 images. Where the object is: no map is clearly better than a random one."


def test_without_a_method_or_an_answer_nothing_is_reported():
    assert verdict(measured(roc_auc={"random": 0.5})) == ""
    assert verdict(measured(shift_stability={"gae": 0.5, "random": 0.1})) == ""
    empty = measured(grid_auc={"gae": 0.5, "random": 0.5})
    empty.values["grid_auc"][:] = np.nan
    assert verdict(empty) == ""
