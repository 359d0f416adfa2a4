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


def answers(tables: Tables) -> list[str]:
    return [answer.sentence for answer in verdict(tables)]


def test_each_question_has_its_best_map_and_a_fast_one():
    actual = measured(
        roc_auc={"gae": 0.92, "gradient_rollout": 0.88, "consensus": 0.95, "random": 0.5},
        grid_auc={"gae": 0.90, "gradient_rollout": 0.60, "consensus": 0.70, "random": 0.5},
    )
    actual.values["grid_auc"][25:] = np.nan
    assert answers(actual) == [
        "On 40 images, Consensus is most often on the object; GAE is the best of the fast methods.",
        "On 25 images, GAE separates one class from another best.",
    ]
    assert [answer.best for answer in verdict(actual)] == ["consensus", "gae"]


def test_maps_that_cannot_be_distinguished_are_named():
    same = DICE.normal(size=40)
    actual = measured(gap={"gae": 0.5, "gradient_rollout": 0.5, "rollout": 0.3, "random": 0.0})
    actual.values["gap"][:, 0] = 0.5 + 0.02 * same
    actual.values["gap"][:, 1] = 0.5 + 0.02 * same[::-1] - 1e-6
    assert answers(actual)[0].endswith("depends on; Gradient rollout is as good within the error.")


def test_on_few_images_nothing_is_clear():
    means = {
        "roc_auc": {"gae": 0.92, "rollout": 0.7, "random": 0.5},
        "gap": {"gae": 0.3, "rollout": 0.5, "random": 0.0},
    }
    few = verdict(measured(9, **means))
    assert [(answer.sentence[:14], answer.best) for answer in few] == [("Too few images", None)] * 2
    actual = measured(20, **means)
    actual.values["gap"][8:] = np.nan  # measured on eight of them
    assert " has a value for 8, " in answers(actual)[1]
    assert [answer.best for answer in verdict(actual)] == ["gae", None]


def test_classes_are_separated_by_grids_and_objects_only():
    """A map that changes with the class need not be on it: Grad-CAM, and every noisy one, would win."""
    changing = {"gae": 0.1, "gradcam": 0.8, "random": 0.0}
    assert verdict(measured(class_sensitivity=changing)) == verdict(measured(grid_energy=changing)) == []
    grids = {"class_sensitivity": changing, "grid_auc": {"gae": 0.7, "gradcam": 0.6, "random": 0.5}}
    assert [answer.best for answer in verdict(measured(**grids))] == ["gae"]
    assert "Too few images" in answers(measured(9, **grids))[0]
    with_objects = measured(grid_auc=changing, separation={"gae": 0.9, "gradcam": 0.6, "random": 0.5})
    with_objects.values["grid_auc"][4:] = np.nan
    assert [answer.best for answer in verdict(with_objects)] == ["gae"]


def test_lower_may_be_better_and_options_are_named():
    for first, second in (("gae:refine=0", "gae"), ("gae", "gae:refine=0")):
        [answer] = verdict(measured(deletion_auc={first: 0.4, second: 0.1, "random": 0.6}))
        assert answer.best == second and ("GAE (refine=0) ranks" in answer.sentence) == (second != "gae")


def test_a_map_that_is_not_clearly_better_than_a_random_one_is_not_named():
    actual = measured(roc_auc={"gae": 0.5, "random": 0.5})
    actual.values["roc_auc"][:, 1] = actual.values["roc_auc"][::-1, 0]
    for tables in (actual, measured(roc_auc={"gae": 0.3, "random": 0.5})):
        [answer] = verdict(tables)
        assert answer.best is None and "none is clearly better than a random one" in answer.sentence
    nothing = measured(grid_auc={"gae": 0.5, "random": 0.5})
    nothing.values["grid_auc"][:] = np.nan
    without = measured(roc_auc={"random": 0.5}), measured(class_sensitivity={"gae": 0.5, "random": 0.1}), nothing
    assert [verdict(tables) for tables in without] == [[]] * 3
