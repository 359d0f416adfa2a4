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


def of_object(tables: Tables) -> str:
    """The answer to where the object is."""
    return verdict(tables).partition("Where the object is: ")[2]


def test_each_question_has_its_best_map_and_a_fast_one():
    actual = measured(
        roc_auc={"gae": 0.92, "gradient_rollout": 0.88, "consensus": 0.95, "random": 0.5},
        grid_auc={"gae": 0.90, "gradient_rollout": 0.60, "consensus": 0.70, "random": 0.5},
    )
    actual.values["grid_auc"][25:] = np.nan
    assert of_object(actual).startswith("Consensus, or GAE if speed matters.")
    assert verdict(actual).endswith("(on 25 images): GAE.")


def test_maps_that_cannot_be_distinguished_are_named():
    same = DICE.normal(size=40)
    actual = measured(gap={"gae": 0.5, "gradient_rollout": 0.5, "rollout": 0.3, "random": 0.0})
    actual.values["gap"][:, 0] = 0.5 + 0.02 * same
    actual.values["gap"][:, 1] = 0.5 + 0.02 * same[::-1] - 1e-6
    assert verdict(actual).endswith("GAE (cannot be distinguished from Gradient rollout).")


def test_on_few_images_nothing_is_clear():
    means = {
        "roc_auc": {"gae": 0.92, "rollout": 0.7, "random": 0.5},
        "gap": {"gae": 0.3, "rollout": 0.5, "random": 0.0},
    }
    assert verdict(measured(9, **means)).count("too few images") == 2
    actual = measured(20, **means)
    actual.values["gap"][8:] = np.nan  # measured on eight of them
    assert of_object(actual).startswith("GAE. ") and verdict(actual).count("too few images") == 1


def test_lower_may_be_better_and_options_are_named():
    assert verdict(measured(deletion_auc={"gae:refine=0": 0.4, "gae": 0.1, "random": 0.6})).endswith(": GAE.")
    assert verdict(measured(deletion_auc={"gae:refine=0": 0.1, "gae": 0.4, "random": 0.6})).endswith("GAE (refine=0).")


def test_a_map_that_is_not_clearly_better_than_a_random_one_is_not_named():
    actual = measured(roc_auc={"gae": 0.5, "random": 0.5})
    actual.values["roc_auc"][:, 1] = actual.values["roc_auc"][::-1, 0]
    for tables in (actual, measured(roc_auc={"gae": 0.3, "random": 0.5})):
        assert of_object(tables) == "no map is clearly better than a random one."
    nothing = measured(grid_auc={"gae": 0.5, "random": 0.5})
    nothing.values["grid_auc"][:] = np.nan
    without = measured(roc_auc={"random": 0.5}), measured(shift_stability={"gae": 0.5, "random": 0.1}), nothing
    assert [verdict(tables) for tables in without] == [""] * 3
