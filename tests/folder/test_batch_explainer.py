"""Batches out of a loop, datasets and Ray Data: a row for every row, with the maps of the explainer."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from examples.datasets_map import explain as explain_dataset
from tests.folder.test_run import image_bytes, tiny_model
from vitflow import Explainer
from vitflow.errors import OptionError, ShapeError
from vitflow.folder import BatchExplainer
from vitflow.folder.batch_explainer import map_of
from vitflow.folder.columns import pack_half

BAD = image_bytes(3)[:400]


def is_the_map_of(grid, image, explainer, method="rollout", **options) -> bool:
    expected = explainer.explain(image, method=method, **options).grid
    return np.abs(grid - expected).max() <= 1e-3 * np.abs(expected).max()


def test_a_row_for_every_input_with_its_id_its_fault_and_its_maps():
    explainer = Explainer(tiny_model())
    array = np.asarray(Image.open(io.BytesIO(image_bytes(5, "PNG"))))
    images = [image_bytes(1), BAD, array, {"bytes": image_bytes(2), "path": None}, None]
    batch = {"name": np.array([7, 8, 9, 10, 11]), "image": images, "other": [0] * 5}
    made = BatchExplainer(tiny_model, ["rollout", "gae"], image="image", id="name", target=2)
    actual = made(batch)
    assert actual["id"].tolist() == [7, 8, 9, 10, 11]
    assert actual["status"].tolist() == ["explained", "failed", "explained", "explained", "failed"]
    assert actual["error"][1] == "OSError" and "corrupt" in actual["message"][1] and actual["error"][4] == "ImageError"
    for row, image in ((0, images[0]), (2, array), (3, images[3]["bytes"])):
        for method in ("rollout", "gae"):
            grid, placement = made.map_of(actual, row, method)
            assert is_the_map_of(grid, image, explainer, method, target=2)
            assert placement == explainer.explain(image).placement
        assert actual["class_index"][row] == 2 and len(actual["grid_gae"][row]) == 2 * 16
    with pytest.raises(ShapeError, match="has no map 'rollout'"):
        made.map_of(actual, 1, "rollout")
    assert {len(column) for column in actual.values()} == {5}


def test_it_is_small_to_send_and_loads_the_model_where_it_runs():
    made = BatchExplainer(tiny_model)
    first = made({"id": ["a"], "image": [image_bytes(1)]})
    sent = pickle.dumps(made)
    assert len(sent) < 1000
    second = pickle.loads(sent)({"id": ["a"], "image": [image_bytes(1)]})
    assert {name: column.tolist() for name, column in first.items()} == {
        name: column.tolist() for name, column in second.items()
    }


@pytest.mark.parametrize(
    ("make", "batch", "message"),
    [
        (lambda: BatchExplainer(tiny_model()), None, "a function that creates the model"),
        (lambda: BatchExplainer(tiny_model, ["rolout"]), None, "Did you mean 'rollout'"),
        (lambda: BatchExplainer(tiny_model, batch_size=0), None, "batch_size of at least 1"),
        (lambda: BatchExplainer(tiny_model), {"id": [1], "bytes": [b""]}, "a column 'image', got 'id', 'bytes'"),
        (lambda: BatchExplainer(tiny_model), {"id": [1, 2], "image": [b""]}, "differ in length: 2 in 'id' and 1"),
        (lambda: BatchExplainer(tiny_model, target=9), {"id": [1], "image": [b""]}, "from 0 to 4, got 9"),
    ],
)
def test_what_is_wrong_with_all_is_reported(make, batch, message):
    with pytest.raises(OptionError, match=message):
        make()(batch)


PLACEMENT = '{"image_size": [4, 4], "resized_size": [4, 4], "offset": [0, 0], "input_size": [4, 4]}'


@pytest.mark.parametrize("scale", [1e-44, 1.0, 6e37])
def test_half_precision_keeps_maps_of_any_scale(scale):
    grid = (np.random.default_rng(0).normal(size=(14, 14)) * scale).astype(np.float32)
    values, rows, cols, entry = pack_half(grid)
    record = {"grid_m": values, "rows_m": rows, "cols_m": cols, "scale_m": entry}
    actual, _ = map_of(record | {"placement": PLACEMENT}, "m")
    assert len(values) == 392
    assert np.abs(actual - grid).max() <= max(np.abs(grid).max() / 2**11, np.finfo(np.float32).smallest_subnormal)
    assert (pack_half(np.zeros((2, 2)))[0], pack_half(np.zeros((2, 2)))[3]) == (bytes(8), 1.0)


GOOD = {"id": "a", "grid_m": bytes(8), "rows_m": 2, "cols_m": 2, "scale_m": 1.0, "placement": PLACEMENT}


def test_half_precision_keeps_the_largest_values_of_float32():
    most = np.finfo(np.float32).max
    grid = np.array([[most, -most, 0.0, 1.7e38]], np.float32)
    record = dict(zip(("grid_m", "rows_m", "cols_m", "scale_m"), pack_half(grid), strict=True))
    actual, _ = map_of(record | {"placement": PLACEMENT}, "m")
    np.testing.assert_allclose(actual, grid, rtol=2**-11)


@pytest.mark.parametrize(
    "change",
    [
        *({"rows_m": rows, "cols_m": cols} for rows, cols in ((-2, -2), ("2", 2), (4, 0))),
        *({"scale_m": scale} for scale in ("1", 0.0, float("nan"))),
        *({"grid_m": grid} for grid in ("a" * 8, b"\0" * 7, b"\0\x7c" * 4)),
    ],
)
def test_a_damaged_record_is_reported(change):
    assert map_of(GOOD, "m")[0].shape == (2, 2)
    with pytest.raises(ShapeError, match="[Ee]xpected"):
        map_of(GOOD | change, "m")


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_map_streaming_included(streaming):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    images = [image_bytes(n) for n in range(5)]
    # The first batch holds faults alone, so that no column has a type from its values.
    rows = [{"bytes": content, "path": None} for content in (BAD, b"", *images)]
    table = datasets.Dataset.from_dict({"id": list("abcdefg"), "label": list(range(7)), "image": rows})
    table = table.to_iterable_dataset() if streaming else table
    actual = list(explain_dataset(table, tiny_model, batch_size=2))
    assert [(row["id"], row["label"]) for row in actual] == list(zip("abcdefg", range(7), strict=True))
    assert [row["status"] for row in actual] == ["failed"] * 2 + ["explained"] * 5
    explainer = Explainer(tiny_model())
    for row, entry in zip(actual[2:], images, strict=True):
        assert is_the_map_of(map_of(row, "rollout")[0], entry, explainer)
