"""Whole evaluations: numbers against the parts they are made of, faults caused one by one, interruptions, resume."""

import csv
import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from tests.folder.test_run import tiny_model
from tests.recording.test_readout import CONFIG, Around, photo, region
from tests.small import Custom
from vitflow import Explainer, register_method
from vitflow.demo import draw_image
from vitflow.errors import OptionError, UnsupportedModelError, VitflowError
from vitflow.evaluation import (
    METRICS,
    Evaluation,
    class_sensitivity,
    evaluate,
    faithfulness_curves,
    localise,
    measuring,
    results,
    run,
)
from vitflow.folder.saved import SavedRun
from vitflow.registry import method_table
from vitflow.registry.method_table import METHODS

QUICK = ["rollout", "gae"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Four drawn images with masks of all their objects."""
    place = tmp_path / "in"
    place.mkdir()
    for seed in range(4):
        image = draw_image(seed)
        Image.fromarray(image.image).save(place / f"{seed}.png")
        Image.fromarray(image.masks.any(axis=0).astype(np.uint8) * 255).save(place / f"{seed}_mask.png")
    return place


def test_the_values_are_those_of_the_parts(demo):
    groups = ["localisation", "faithfulness", "sanity"]
    actual = evaluate("demo:2", model=demo, methods=QUICK, metrics=groups, sanity_images=2, points=3)
    assert actual.methods == ("rollout", "gae", "random", "centre")
    assert [metric.name for metric in actual.metrics] == [name for name, one in METRICS.items() if one.group in groups]
    for number in range(2):
        image = draw_image(number)
        largest = image.labels[int(image.masks.sum(axis=(1, 2)).argmax())]
        maps = demo.explain_batch([image.image], methods=list(actual.methods), targets=largest)
        curves = faithfulness_curves(demo, maps, points=3)
        changes = class_sensitivity(demo, maps)
        for place, (one, curve, change) in enumerate(zip(maps, curves, changes, strict=True)):
            truth = localise(one.heatmap, image.mask_of(largest))
            for name in ("pointing_game", "energy", "roc_auc", "mean_iou"):
                assert actual.values[name][number, place] == pytest.approx(getattr(truth, name), abs=1e-5)
            for name in ("deletion_auc", "insertion_auc", "gap"):
                assert actual.values[name][number, place] == pytest.approx(getattr(curve, name), abs=1e-4)
            assert actual.table("roc_auc")[place].estimate.mean == pytest.approx(
                actual.values["roc_auc"][:, place].mean()
            )
            assert actual.series["deletion"][number, place] == pytest.approx(curve.deletion, abs=1e-4)
            assert actual.values["class_sensitivity"][number, place] == pytest.approx(change, abs=1e-3)
    assert (actual.values["randomisation"][:, 2:] == 1.0).all() and (actual.values["randomisation"][:, :2] < 0.9).all()


def test_each_method_has_a_blurred_control_next_to_it_if_requested(demo):
    metrics = ["roc_auc", "deletion_auc", "class_sensitivity"]
    actual = evaluate("demo:2", model=demo, methods=QUICK, metrics=metrics, blurred_control=True, points=3)
    assert actual.methods == ("rollout", "rollout (blurred)", "gae", "gae (blurred)", "random", "centre")
    largest = draw_image(1).labels[int(draw_image(1).masks.sum(axis=(1, 2)).argmax())]
    [one] = demo.explain_batch([draw_image(1).image], methods=["gae"], targets=largest)
    grid = np.pad(one.grid.astype(np.float64), 4, mode="symmetric")
    bell = np.exp(-0.5 * np.arange(-4, 5) ** 2)
    for axis in (0, 1):
        grid = np.apply_along_axis(lambda line: np.convolve(line, bell / bell.sum(), "valid"), axis, grid)
    twin = replace(one, grid=grid.astype(np.float32))
    truth = localise(twin.heatmap, draw_image(1).mask_of(largest))
    assert actual.values["roc_auc"][1, 3] == pytest.approx(truth.roc_auc, abs=1e-4)
    [curve] = faithfulness_curves(demo, [twin], points=3)
    assert actual.values["deletion_auc"][1, 3] == pytest.approx(curve.deletion_auc, abs=1e-3)
    checked = actual.values["class_sensitivity"][~np.isnan(actual.values["class_sensitivity"]).all(axis=1)]
    assert np.isnan(checked).all(axis=0).tolist() == [False, True, False, True, False, False]  # no sanity of controls
    pairs = {(one.first, one.second) for one in actual.differences("roc_auc")}
    assert {("gae", "gae (blurred)"), ("rollout", "gae")} <= pairs
    assert {name for name, _ in actual.ranking("roc_auc")} == {"gae", "rollout"}
    assert any("Blurred control" in note for note in actual.notes)
    assert actual.settings["blurred_control"] is True
    assert "\ngae (blurred)" in str(actual)


def test_options_reach_the_methods_and_name_them(demo):
    choices = ["rollout", ("rollout", {"preset": "paper"}), ("random", {"random_seed": 3})]
    entry = {"methods": choices, "metrics": ["roc_auc"]}
    actual = evaluate("demo:2", model=demo, start_layer=2, **entry)
    assert actual.methods == ("rollout", "rollout:preset=paper", "random:random_seed=3", "centre")
    assert [actual.is_baseline(method) for method in actual.methods] == [False, False, True, True]
    assert actual.settings["options"]["rollout"]["start_layer"] == 2
    assert actual.settings["options"]["rollout:preset=paper"]["head_fusion"] == "mean"
    values = actual.values["roc_auc"]
    assert (values[:, 0] != values[:, 1]).all()
    with pytest.raises(OptionError, match="rollout was given twice"):
        evaluate("demo:2", model=demo, methods=["rollout", "rollout"])


def test_sanity_is_measured_on_some_images_the_same_in_every_run(demo):
    actual = evaluate("demo:6", model=demo, methods=["input_gradient"], metrics=["sanity"], sanity_images=2)
    checked = ["sanity" in image["groups"] for image in actual.images]
    assert sum(checked) == 2
    assert (~np.isnan(actual.values["class_sensitivity"][:, 0]) == checked).all()
    row = actual.table("class_sensitivity")[0]
    assert (row.estimate.count, row.estimate.undefined) == (2, 0)
    assert any("2 images" in note for note in actual.notes)
    again = evaluate("demo:6", model=demo, methods=["centre"], metrics=["class_sensitivity"], sanity_images=2)
    assert ["sanity" in image["groups"] for image in again.images] == checked


def test_all_methods_are_all_and_slow_ones_are_not_checked_for_sanity():
    tiny = Explainer(tiny_model())
    actual = evaluate("demo:1", model=tiny, methods="all", metrics=["roc_auc", "sanity"], sanity_images=1)
    assert actual.methods[-2:] == ("random", "centre")
    assert {"rollout", "occlusion", "gradcam"} < set(actual.methods)
    place = actual.methods.index("occlusion")
    assert np.isnan(actual.values["class_sensitivity"][0, place])
    assert not np.isnan(actual.values["roc_auc"][0, place])
    [note] = [note for note in actual.notes if "without sanity checks" in note]
    assert "run the model again: legrad, occlusion, sampling, consensus; select a method" in note
    assert "occlusion" not in evaluate("demo:1", model=tiny, metrics=["roc_auc"]).methods


def test_images_without_regions_leave_localisation_out_and_say_so(folder, demo):
    for mask in folder.glob("*_mask.png"):
        mask.unlink()
    actual = evaluate(folder, model=demo, methods=["gae"], metrics=["localisation", "faithfulness"], points=3)
    assert actual.groups == ["faithfulness"]
    assert any("Skipped localisation" in note for note in actual.notes)
    assert any("predicted class" in note for note in actual.notes)
    with pytest.raises(OptionError, match=r"None of the metrics can be measured. Skipped localisation"):
        evaluate(folder, model=demo, metrics=["roc_auc"])


def test_images_without_objects_are_left_out_and_counted(folder, demo):
    Image.fromarray(np.zeros((96, 96), np.uint8)).save(folder / "1_mask.png")
    Image.fromarray(np.ones((96, 96), np.uint8)).save(folder / "2_mask.png")
    (folder / "3_mask.png").unlink()
    actual = evaluate(folder, model=demo, methods=["gae"], metrics=["localisation"])
    assert (actual.table("roc_auc")[0].estimate.count, actual.table("energy")[0].estimate.undefined) == (1, 3)
    assert str(actual).count("undefined on 3") == 3 * 4


def test_a_model_without_classes_has_no_answer_to_follow(folder):
    model = tiny_model()
    model.reset_classifier(0)
    actual = evaluate(folder, model=model, methods=["rollout"], sanity_images=1)
    assert actual.groups == ["localisation", "sanity"]
    assert "class_sensitivity" not in actual.values
    assert any("Skipped faithfulness: the model has no classes" in note for note in actual.notes)


def test_constant_maps_are_counted_and_reported(demo, monkeypatch):
    monkeypatch.setattr(method_table, "METHODS", dict(METHODS))
    register_method("nothing", lambda trace: torch.zeros(len(trace.pixels), *trace.grid()))
    actual = evaluate(
        "demo:3",
        model=demo,
        methods=["nothing", "gae"],
        metrics=["localisation", "faithfulness", "sanity"],
        points=3,
        sanity_images=1,
    )
    for name in ("deletion_auc", "insertion_auc", "gap"):
        estimate = actual.table(name)[0].estimate
        assert (estimate.mean, estimate.undefined) == (None, 3)
    assert actual.table("roc_auc")[0].estimate.mean == 0.5
    assert "| nothing | – (undefined on 3) |" in actual.overview("faithfulness").to_markdown()
    assert "undefined on 1" in actual.overview("sanity").to_markdown()
    json.dumps(actual.to_dict(), allow_nan=False)


def test_an_image_that_cannot_be_read_is_a_row_and_the_others_go_on(folder, demo, tmp_path, no_drawing):
    (folder / "1.png").write_bytes(b"nothing")
    (folder / "2_mask.png").write_bytes(b"nothing")
    actual = evaluate(folder, model=demo, methods=["gae"], metrics=["roc_auc"], output=tmp_path / "out")
    assert [image["input"] for image in actual.images] == ["0.png", "3.png"]
    assert [row["input"] for row in actual.failures] == ["1.png", "2.png"]
    assert "image" in actual.failures[0]["message"]
    assert "the mask '2_mask.png'" in actual.failures[1]["message"]
    assert "2 failed" in (tmp_path / "out" / "report.html").read_text()


def test_an_image_that_the_model_fails_on_does_not_take_its_batch_along(demo, monkeypatch):
    whole = demo.explain_batch
    poison = draw_image(2).image

    def fragile(images, **options):
        if any(np.array_equal(image, poison) for image in images):
            raise RuntimeError("cannot add")
        return whole(images, **options)

    monkeypatch.setattr(demo, "explain_batch", fragile)
    actual = evaluate("demo:5", model=demo, methods=["rollout"], metrics=["roc_auc"])
    assert len(actual.images) == 4
    assert [(row["input"], row["error"], row["message"]) for row in actual.failures] == [
        ("demo-2", "RuntimeError", "cannot add")
    ]


def test_images_without_a_gradient_are_rows_with_errors_and_take_neither_methods_nor_others_along():
    """The first image, on which methods are tried, has none, and neither has an image in a batch with others."""
    gated = Custom(lambda self, x: self.inner(x) * (x.mean((1, 2, 3)) > -0.5)[:, None], inner=Around(region))
    explainer = Explainer(gated, data_config=CONFIG)
    images = [photo(seed) // 8 + np.uint8(light) for seed, light in enumerate((9, 200, 9, 160, 90, 9))]
    options = {"model": explainer, "metrics": ["faithfulness", "sanity"], "points": 3, "batch_size": 3}
    actual = evaluate(images, **options)
    assert [(row["input"], row["error"]) for row in actual.failures] == [
        (f"image {number}", "NoGradientError") for number in (1, 3, 6)
    ]
    expected = evaluate([image for image in images if image.mean() > 50], **options)
    assert actual.methods == expected.methods and {"gae", "gradcam", "input_gradient"} < set(actual.methods)
    for name in ("deletion_auc", "class_sensitivity"):
        np.testing.assert_allclose(actual.values[name], expected.values[name], rtol=1e-4, err_msg=name)


def test_a_metric_that_fails_on_one_image_fails_that_image(demo, monkeypatch):
    honest, calls = measuring.localise, count()
    monkeypatch.setattr(measuring, "localise", lambda *given: 1 / 0 if next(calls) == 4 else honest(*given))
    actual = evaluate("demo:3", model=demo, methods=["rollout"], metrics=["roc_auc"])
    assert [(row["input"], row["error"]) for row in actual.failures] == [("demo-1", "ZeroDivisionError")]


def test_nothing_to_measure_is_an_error(folder, demo):
    for path in folder.glob("?.png"):
        path.write_bytes(b"nothing")
    with pytest.raises(VitflowError, match=r"None of the 4 images .* '0.png': UnidentifiedImageError|None of the 4"):
        evaluate(folder, model=demo, methods=["gae"], metrics=["roc_auc"])


def test_methods_that_do_not_apply_are_left_out_of_all_and_refused_by_name(demo, monkeypatch):
    monkeypatch.setattr(method_table, "METHODS", dict(METHODS))
    for name in ("picky", "choosy"):
        register_method(name, Mock(side_effect=UnsupportedModelError("This method wants another model.")))
    actual = evaluate("demo:1", model=demo, metrics=["roc_auc"])
    assert "picky" not in actual.methods
    assert "Left out: picky, choosy. This method wants another model." in actual.notes
    with pytest.raises(VitflowError, match="wants another model"):
        evaluate("demo:1", model=demo, methods=["picky"], metrics=["roc_auc"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": 1}, "points of at least 2"),
        ({"batch_size": 0}, "batch_size of at least 1"),
        ({"sanity_images": -1}, "sanity_images of at least 0"),
        ({"replace_by": "grey"}, "Unknown replacement 'grey'"),
        ({"metrics": ["auc"]}, "Unknown metric 'auc'"),
        ({"metrics": []}, "at least one metric"),
        ({"methods": ["rolout"]}, "Did you mean 'rollout'"),
        ({"sigma_": 1}, "sigma_"),
    ],
)
def test_wrong_options_are_reported_before_a_model_is_loaded(options, message):
    def never():
        raise AssertionError("loaded")

    with pytest.raises(OptionError, match=message):
        evaluate("demo:2", model=never, **options)


def counting(monkeypatch) -> list[str]:
    """The names of the images that are measured from now on."""
    measured, honest = [], run.measure
    monkeypatch.setattr(run, "measure", lambda case: (measured.append(case.name), honest(case))[1])
    return measured


def tables(place: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(place.glob("*.csv"))}


def test_an_interrupted_run_goes_on_and_ends_with_the_same_tables(demo, tmp_path, monkeypatch, no_drawing):
    options = {"model": demo, "methods": ["gae"], "metrics": ["localisation", "class_sensitivity"], "sanity_images": 1}
    options |= {"batch_size": 2}
    evaluate("demo:5", output=tmp_path / "whole", **options)

    def stop(state):
        if state.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate("demo:5", output=tmp_path / "parts", progress=stop, **options)
    with SavedRun(tmp_path / "parts") as stored:
        kept = len(list(stored.rows()))
    assert 2 <= kept <= 3
    measured = counting(monkeypatch)
    states = []
    evaluate("demo:5", output=tmp_path / "parts", progress=states.append, **options)
    assert measured == [f"demo-{number}" for number in range(kept, 5)]
    assert (states[0].done, states[0].total, states[-1].done) == (kept, 5, 5)
    assert tables(tmp_path / "parts") == tables(tmp_path / "whole")
    measured.clear()
    evaluate("demo:5", output=tmp_path / "parts", **options)
    assert measured == []


def test_sameness_is_of_all_images_of_a_run_that_was_resumed(demo, tmp_path, no_drawing):
    options = {"model": demo, "methods": ["gae"], "metrics": ["sameness"], "blurred_control": True}
    few = evaluate("demo:7", output=tmp_path / "out", **options)
    assert np.isnan(few.values["sameness"]).all() and "Skipped sameness. " in few.skipped[-1]
    actual = evaluate("demo:9", output=tmp_path / "out", **options)
    again = evaluate("demo:9", **options)
    np.testing.assert_array_equal(actual.values["sameness"], again.values["sameness"])
    means = {row.method: row.estimate.mean for row in actual.table("sameness")}
    assert means["centre"] == pytest.approx(1.0) and abs(means["random"]) < 0.2 and means["gae"] < 0.9


def test_changed_and_failed_images_are_measured_again(folder, demo, tmp_path, monkeypatch, no_drawing):
    options = {"model": demo, "methods": ["gae"], "metrics": ["roc_auc"], "output": tmp_path / "out"}
    good = (folder / "2.png").read_bytes()
    (folder / "2.png").write_bytes(good[:100])
    assert len(evaluate(folder, **options).failures) == 1
    (folder / "2.png").write_bytes(good)
    Image.fromarray(draw_image(1).masks[0].astype(np.uint8)).save(folder / "1_mask.png")
    measured = counting(monkeypatch)
    actual = evaluate(folder, **options)
    assert (measured, actual.failures) == (["1.png", "2.png"], ())


def test_an_output_that_cannot_be_written_is_reported(demo, tmp_path, no_drawing, monkeypatch):
    options = {"model": demo, "methods": ["gae"], "metrics": ["roc_auc"]}
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written to"):
        evaluate("demo:1", output=tmp_path / "file" / "out", **options)

    monkeypatch.setattr(results, "_write", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(VitflowError, match=r"The results are saved, but .* No space left on device"):
        evaluate("demo:1", output=tmp_path / "out", **options)
    (tmp_path / "out" / ".vitflow-0123.part").write_text("left by a kill")
    monkeypatch.undo()
    measured = counting(monkeypatch)
    monkeypatch.setattr(results, "draw_charts", lambda *_: {})
    assert len(evaluate("demo:1", output=tmp_path / "out", **options).images) == 1
    assert measured == []
    assert not list((tmp_path / "out").glob("*.part"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, demo) -> tuple[Evaluation, Path]:
    place = tmp_path_factory.mktemp("saved") / "out"
    entry = {"methods": QUICK, "sanity_images": 1, "points": 3}
    entry["metrics"] = ["localisation", "faithfulness", "sanity"]
    return evaluate("demo:4", model=demo, output=place, **entry), place


def test_a_saved_evaluation_holds_every_number(saved):
    actual, place = saved
    assert {path.name for path in place.iterdir()} == {
        *("run.sqlite", "results.csv", "summary.json", "report.html", "figures")
    }
    localised, faithful, checked = 4, 3, 2
    assert len(actual.rows) == 4 * (4 * (localised + faithful) + checked)
    with (place / "results.csv").open(newline="") as file:
        stored = list(csv.DictReader(file))
    for row, written in zip(actual.rows, stored, strict=True):
        number, method = int(row["input"].removeprefix("demo-")), actual.methods.index(row["method"])
        value = actual.values[row["metric"]][number, method]
        assert row["value"] == value or (row["value"] is None and np.isnan(value))
        assert row["baseline"] == (row["method"] in ("random", "centre"))
        assert {name: "" if each is None else str(each) for name, each in row.items()} == written
    record = json.loads((place / "summary.json").read_text())
    assert record == json.loads(json.dumps(actual.to_dict()))
    summary = {(row["metric"], row["method"]): row for row in record["summary"]}
    for metric in actual.metrics:
        for row in actual.table(metric.name):
            assert summary[metric.name, row.method]["mean"] == row.estimate.mean
    assert record["metrics"]["roc_auc"]["limitations"]
    assert len(record["differences"]) == 6 * len(actual.metrics)
    assert {path.name for path in (place / "figures").iterdir()} == {
        "examples.png",
        *(f"{name}.{kind}" for name in ("localisation", "faithfulness", "curves", "sanity") for kind in ("png", "svg")),
    }


def test_curves_are_the_means_with_gaps_and_baselines_are_grey(saved):
    evaluation = saved[0]
    figure = results.draw_charts(evaluation)["curves"]
    for axes, name in zip(figure.axes, ("deletion", "insertion"), strict=True):
        assert axes.get_title(loc="left").startswith(name)
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert set(lines) == set(evaluation.methods)
        for method, values in evaluation.mean_lines(name).items():
            np.testing.assert_allclose(lines[method].get_ydata(), np.array(values, float))
            assert (lines[method].get_marker() == "None") == evaluation.is_baseline(method)
    [legend] = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == set(evaluation.methods)


def test_rows_for_other_programs(saved):
    actual = replace(saved[0], records=tuple({**one, "class_name": "=1+2"} for one in saved[0].records))
    text = actual.to_csv()
    assert ",'=1+2," in text and ",=1+2," not in text  # no formula
    pandas = pytest.importorskip("pandas")
    means = pandas.DataFrame(saved[0].rows).groupby(["metric", "method"])["value"].mean()
    for row in saved[0].table("roc_auc"):
        assert means["roc_auc", row.method] == pytest.approx(row.estimate.mean)
