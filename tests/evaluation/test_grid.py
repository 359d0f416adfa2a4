"""The grid pointing game and the objects of one image: scores by definition, which images make grids, the run."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest
from torch import nn

from vitflow.demo import CLASS_NAMES, draw_image
from vitflow.errors import ShapeError
from vitflow.evaluation import evaluate, open_dataset, results
from vitflow.evaluation.measures.localisation import score_cell, score_object
from vitflow.evaluation.samples import Dataset, Labelled, Sample
from vitflow.evaluation.targets import make_grids
from vitflow.evaluation.verdict import verdict
from vitflow.images.reading import write_image

DICE = np.random.default_rng(0)


def literal_cell(grid: np.ndarray, cell: int) -> tuple[float, float, float]:
    """Energy, AUC and wins, patch by patch and pair by pair."""
    rows, cols = grid.shape
    values: list[list[float]] = [[], [], [], []]
    for row in range(rows):
        for col in range(cols):
            if (rows % 2 and row == rows // 2) or (cols % 2 and col == cols // 2):
                continue  # it lies in two cells
            values[2 * (2 * row >= rows) + (2 * col >= cols)].append(float(grid[row, col]))
    mass = [sum(max(value, 0.0) for value in entry) for entry in values]
    others = [value for number, entry in enumerate(values) if number != cell for value in entry]
    pairs = [(mine > other) + 0.5 * (mine == other) for mine in values[cell] for other in others]
    means = [sum(entry) / len(entry) for entry in values]
    return mass[cell] / sum(mass) if any(mass) else 0.25, sum(pairs) / len(pairs), float(means[cell] == max(means))


@pytest.mark.parametrize("shape", [(2, 2), (6, 4), (7, 4), (5, 5), (3, 8)])
def test_cells_are_scored_as_a_loop_over_patches_does(shape):
    for _ in range(5):
        grid = DICE.normal(size=shape).astype(np.float32)
        for cell in range(4):
            assert score_cell(grid, cell) == pytest.approx(literal_cell(grid, cell), abs=1e-12)


def test_a_right_map_wins_and_constant_and_empty_ones_have_chance():
    right = np.zeros((4, 6), np.float32)
    right[2:, :3] = 1.0
    assert score_cell(right, 2) == (1.0, 1.0, 1.0)
    assert score_cell(right, 1)[::2] == (0.0, 0.0)
    for constant in (np.full((4, 6), 0.1, np.float32), np.zeros((4, 6), np.float32), np.full((5, 7), -2.0)):
        assert score_cell(constant, 3) == (0.25, 0.5, 0.25)
    whatever = DICE.random((4, 4))
    assert np.mean([score_cell(whatever, cell)[0] for cell in range(4)]) == pytest.approx(0.25)
    with pytest.raises(ShapeError, match=r"at least 2 × 2 patches, got \(1, 4\)"):
        score_cell(np.zeros((1, 4)), 0)


def test_objects_are_scored_by_their_mass_and_their_mean():
    heatmap = np.array([[4.0, 2.0, 1.0], [np.nan, 3.0, 1.0]])
    first = np.array([[True, True, False], [True, False, False]])
    second = np.array([[False, False, False], [False, True, False]])
    # Above the minimum of 1: 3 + 1 on two seen pixels of the first, 2 on the only one of the second.
    assert score_object(heatmap, [first, second], 0) == pytest.approx((4 / 6, 0.5))
    assert score_object(heatmap, [first, second], 1) == pytest.approx((2 / 6, 0.5))
    assert score_object(heatmap - 2.0, [first, second], 0) == pytest.approx((2 / 3, 0.5))  # what is below 0 is cut
    unseen = np.array([[False] * 3, [True, False, False]])
    assert score_object(heatmap, [first, unseen], 0) is None
    assert score_object(np.ones((2, 3)), [first, second], 0) == (0.75, 0.5)  # by area


def test_grids_are_of_four_known_classes_of_which_none_shows_another(demo):
    dataset = open_dataset("demo:10:3000")
    grids = make_grids(dataset.samples, demo, 0)
    assert grids == {} or len(grids) % 4 == 0
    assert len(grids) >= 4
    for name, grid in grids.items():
        assert name in grid.names and len(set(grid.classes)) == 4
        for sample, entry in zip(grid.samples, grid.classes, strict=True):
            photo = sample.read()
            saliency = demo.explain(photo.image, method="centre")
            assert saliency.score.predicted == entry and demo.explain(photo.image, target=entry).probability > 0.5
            shown = {CLASS_NAMES.index(region.label) for region in photo.regions}
            assert shown & set(grid.classes) == {entry}
        pixels, half = grid.pixels(demo), demo.spec.size[0] // 2
        shrunk = nn.functional.avg_pool2d(demo.pixels(grid.samples[2].read().image)[0], 2)
        np.testing.assert_allclose(pixels[:, half:, :half], shrunk, atol=1e-6)
    again = make_grids(dataset.samples[::-1], demo, 0)
    assert {name: grid.names for name, grid in again.items()} == {name: grid.names for name, grid in grids.items()}
    other = make_grids(dataset.samples, demo, 1)
    assert {name: grid.names for name, grid in other.items()} != {name: grid.names for name, grid in grids.items()}


def test_an_evaluation_distinguishes_classes_and_goes_on_where_it_was(demo, tmp_path, monkeypatch):
    options = {"model": demo, "methods": ["gae", "rollout"], "metrics": ["grid"], "output": tmp_path / "out"}
    actual = evaluate("demo:12:3000", **options)
    assert [metric.name for metric in actual.metrics] == [
        *("grid_energy", "grid_auc", "grid_wins", "separation", "separation_wins")
    ]
    means = {
        metric.name: {row.method: row.estimate.mean for row in actual.table(metric.name)} for metric in actual.metrics
    }
    for name in ("rollout", "random", "centre"):  # the same for every class
        assert means["grid_energy"][name] == pytest.approx(0.25)
        assert means["grid_wins"][name] == pytest.approx(0.25)
    assert means["grid_wins"]["gae"] > 0.5 and means["separation_wins"]["gae"] > 0.8
    assert means["separation"]["gae"] > means["separation"]["rollout"]
    grids = {tuple(image["grid"]) for image in actual.images if image["grid"]}
    assert f"in {len(grids)} grids of four images" in " ".join(actual.notes)

    page = (tmp_path / "out" / "report.html").read_text()
    photographs = 3 * 3  # with the maps of two methods
    assert page.count("data:image/jpeg;base64,") == photographs and len(page) < 3e6
    assert (answers := verdict(actual)) and all(answer.sentence in page for answer in answers)

    monkeypatch.setattr(results, "draw_charts", lambda *_: {})
    with closing(sqlite3.connect(tmp_path / "out" / "run.sqlite")) as db:
        db.execute("DELETE FROM rows WHERE position > 8")
        db.commit()
    again = evaluate("demo:12:3000", **options)
    for name in means:
        np.testing.assert_array_equal(again.values[name], actual.values[name])
    # Of fewer images other grids are made: what was measured in another one counts no more.
    fewer = evaluate("demo:12:3000", **{**options, "limit": 8})
    fresh = evaluate("demo:12:3000", **{**options, "limit": 8, "output": None})
    np.testing.assert_array_equal(fewer.values["grid_auc"], fresh.values["grid_auc"])


def test_without_labels_there_is_no_grid_and_that_is_said(demo):
    actual = evaluate([draw_image(number).image for number in range(3)], model=demo, methods=["gae"], metrics=["grid"])
    assert "has no grid of four images" in " ".join(actual.notes)
    assert all(row.estimate.mean is None for row in actual.table("grid_auc"))


def test_an_image_that_cannot_be_read_takes_no_grid_along(demo):
    def broken() -> Labelled:
        raise OSError("gone")

    dataset = open_dataset("demo:16:3000")
    samples = [*dataset.samples, Sample("broken", broken)]
    actual = evaluate(Dataset("mine", "images", samples, True), model=demo, methods=["gae"], metrics=["grid_wins"])
    assert len(actual.failures) == 1 and len(actual.images) == 16
    assert actual.table("grid_wins")[0].estimate.count % 4 == 0


def test_grids_are_measured_by_default_and_left_out_of_the_tables_without_any(demo, tmp_path):
    options = {"model": demo, "methods": ["gae"], "sanity_images": 0, "points": 3}
    actual = evaluate("demo:16:3000", **options)
    assert actual.table("grid_auc")[0].estimate.count % 4 == 0 and "class_sensitivity" not in actual.values
    write_image(tmp_path / "0.png", draw_image(0).image)
    assert evaluate(tmp_path, **options).groups == ["faithfulness"]
