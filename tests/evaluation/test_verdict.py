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


def test_each_question_has_its_best_map_and_haste_its():
    actual = measured(
        roc_auc={"gae": 0.92, "gradient_rollout": 0.88, "consensus": 0.95, "random": 0.5},
        grid_auc={"gae": 0.70, "gradient_rollout": 0.60, "consensus": 0.90, "random": 0.5},
    )
    assert verdict(actual) == (
        "On your 40 images: Consensus for where the object is and one class against another, GAE if speed matters."
    )


def test_what_nothing_separates_is_reported():
    same = DICE.normal(size=40)
    actual = measured(gap={"gae": 0.5, "gradient_rollout": 0.5, "rollout": 0.3, "random": 0.0})
    actual.values["gap"][:, 0] = 0.5 + 0.02 * same
    actual.values["gap"][:, 1] = 0.5 + 0.02 * same[::-1] - 1e-6
    assert verdict(actual) == (
        "On your 40 images: GAE for what the prediction depends on; "
        "no clear difference between GAE and Gradient rollout."
    )


def test_on_few_images_nothing_is_clear():
    values = {
        "roc_auc": {"gae": 0.92, "rollout": 0.7, "random": 0.5},
        "gap": {"gae": 0.3, "rollout": 0.5, "random": 0.0},
    }
    assert verdict(measured(9, **values)) == (
        "On your 9 images: too few images to be clear: the best means are those of GAE for where the object is "
        "(9 images), Attention rollout for what the prediction depends on (9 images)."
    )
    actual = measured(20, **values)
    actual.values["gap"][8:] = np.nan  # measured on eight of them
    assert verdict(actual).startswith("On your 20 images: GAE for where the object is; too few images")
    assert "prediction depends on (8 images)" in verdict(actual)


def test_lower_may_be_better_and_options_are_named():
    actual = measured(deletion_auc={"gae:refine=0": 0.4, "gae": 0.1, "random": 0.6})
    assert verdict(actual) == "On your 40 images: GAE for what the prediction depends on."
    actual = measured(deletion_auc={"gae:refine=0": 0.1, "gae": 0.4, "random": 0.6})
    assert verdict(actual) == "On your 40 images: GAE (refine=0) for what the prediction depends on."


def test_where_no_map_is_better_than_a_random_one_none_is_named():
    actual = measured(roc_auc={"gae": 0.5, "random": 0.5})
    actual.values["roc_auc"][:, 1] = actual.values["roc_auc"][::-1, 0]
    reported = "On your 40 images: no map is clearly better than a random one for where the object is."
    assert verdict(actual) == reported


def test_a_map_that_is_clearly_worse_than_a_random_one_is_not_named():
    assert "no map is clearly better" in verdict(measured(roc_auc={"gae": 0.3, "random": 0.5}))


def test_without_a_method_or_an_answer_nothing_is_reported():
    assert verdict(measured(roc_auc={"random": 0.5})) == ""
    assert verdict(measured(shift_stability={"gae": 0.5, "random": 0.1})) == ""
    empty = measured(grid_auc={"gae": 0.5, "random": 0.5})
    empty.values["grid_auc"][:] = np.nan
    assert verdict(empty) == ""
