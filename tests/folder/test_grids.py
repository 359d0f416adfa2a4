"""Maps first, overlays later: a run without overlays keeps its maps, which are drawn on demand and exported."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from tests.folder.test_run import fill, image_bytes, run, tiny_model
from vitflow import Explainer
from vitflow.cli import cli
from vitflow.errors import OptionError, printable
from vitflow.folder.batch_explainer import map_of
from vitflow.folder.draw import draw_run, read_grids
from vitflow.folder.report import report_run


def actual(out: Path) -> dict[str, dict[str, np.ndarray]]:
    return {row["input"]: dict(maps) for row, maps in read_grids(out)}


@pytest.fixture(scope="module")
def explainer():
    return Explainer(tiny_model())


@pytest.fixture(scope="module")
def both(tmp_path_factory, explainer):
    """The same images with overlays and with grids alone."""
    place = tmp_path_factory.mktemp("both")
    source = fill(place / "in", 7)
    (source / "bad.png").write_bytes(b"nothing")
    (source / "caf\udce9.jpg").write_bytes(image_bytes(9))
    options = {"model": explainer, "methods": ["rollout", "gae"], "format": "png"}
    run(source, place / "overlays", **options)
    run(source, place / "grids", overlays=False, **options)
    return place


def test_the_maps_are_those_of_a_run_with_overlays_and_no_overlay_is_there(both):
    drawn, kept = (list(read_grids(both / name)) for name in ("overlays", "grids"))
    assert len(kept) == 8 and not [*both.glob("grids/*.png"), *both.glob("grids/*.jpg")]
    for (row, maps), (other, its) in zip(kept, drawn, strict=True):
        same = ("input", "status", "class_index", "probability", "sha256")
        assert [row[name] for name in same] == [other[name] for name in same] and list(maps) == ["rollout", "gae"]
        assert all(grid.dtype == np.float32 and (grid == its[label]).all() for label, grid in maps.items())


def test_overlays_drawn_on_demand_are_those_of_the_run(both, tmp_path):
    for name in ("grids", "overlays"):
        drawn = draw_run(both / name, tmp_path / name)
        assert [one.error for one in drawn] == [None] * 8
        assert {path.name for one in drawn for path in one.paths} == {path.name for path in both.glob("overlays/*.png")}
        for path in both.glob("overlays/*.png"):
            expected, entry = (
                np.asarray(Image.open(place)).astype(int) for place in (path, tmp_path / name / path.name)
            )
            assert np.abs(expected - entry).max() <= 2  # maps are kept in half precision


def test_the_command_draws_what_is_requested_and_reports_what_it_could_not(both, tmp_path):
    command = ["draw", str(both / "grids"), "-o", str(tmp_path / "drawn"), "--method", "gae"]
    some = CliRunner().invoke(cli, [*command, "--where", "input in ('0.jpg', '3.jpg')", "--cmap", "viridis"])
    assert some.exit_code == 0 and some.stdout.splitlines() == [str(tmp_path / f"drawn/{n}-gae.png") for n in (0, 3)]
    copied = fill(tmp_path / "copy", 1)
    most = CliRunner().invoke(cli, [*command, "--images", str(copied), "--limit", "9" * 20, "--format", "webp"])
    assert most.exit_code == 1 and "1 drawn, 7 failed" in most.stderr and "2.jpg: Could not read" in most.stderr
    for wrong in (["--where", "oops"], ["--where", "{[1]: 2} == 1"], ["--method", "rolout"]):
        assert CliRunner().invoke(cli, [*command, *wrong]).exit_code == 2
    with pytest.raises(OptionError, match="limit"):
        draw_run(both / "grids", tmp_path / "drawn", limit=-1)


def test_drawing_replaces_no_photograph(tmp_path, explainer):
    source = fill(tmp_path / "in", 1)
    (source / "0-rollout.jpg").write_bytes(image_bytes(4))
    run(source, tmp_path / "out", model=explainer, overlays=False)
    first, second = sorted(draw_run(tmp_path / "out", source), key=lambda one: one.input)
    assert "would overwrite an input" in str(first.error) + str(second.error)
    assert (source / "0-rollout.jpg").read_bytes() == image_bytes(4)


def test_what_is_read_back_is_what_the_manifest_of_the_latest_run_has(tmp_path, explainer):
    source, out = fill(tmp_path / "in", 5), tmp_path / "out"

    def names():
        page = report_run(out).read_text()
        listed = [json.loads(line)["input"] for line in (out / "manifest.jsonl").read_text().splitlines()]
        drawn = [one.input for one in draw_run(out, tmp_path / "drawn")]
        assert list(actual(out)) == drawn == listed == [f"{n}.jpg" for n in range(5) if f'"{n}.jpg"' in page]
        return len(listed)

    for limit, kept in ((None, 0), (2, 2), (None, 5), (1, 1), (3, 3)):
        summary = run(source, out, model=explainer, overlays=False, limit=limit)
        assert summary.kept == kept and names() == summary.explained == (limit or 5)


def test_the_maps_of_a_run_are_exported_as_parquet(both, tmp_path, explainer):
    parquet = pytest.importorskip("pyarrow.parquet")
    out, options = tmp_path / "out", {"model": explainer, "methods": ["rollout", "gae"], "overlays": False}
    assert run(both / "in", out, manifest="parquet+grids", **options).manifest == out / "manifest.parquet"
    table = parquet.read_table(out / "manifest.parquet")
    rows = {row["input"]: row for row in table.to_pylist()}
    assert len(rows) == 9 and rows["bad.png"]["grid_gae"] is None and len(rows["0.jpg"]["grid_gae"]) == 2 * 16
    for name, maps in actual(out).items():
        record = rows[printable(name)]
        for label, grid in maps.items():
            entry, placement = map_of(record, label)
            assert (entry == grid).all() and placement.image_size == (40, 48)
    run(both / "in", out, manifest="parquet", **options)
    assert not [name for name in parquet.read_table(out / "manifest.parquet").column_names if "grid" in name]
    run(both / "in", out, **options)
    assert not (out / "manifest.parquet").exists()


def test_backgrounds_reach_the_overlays_and_the_report(tmp_path, explainer):
    drawing = {"background": "dim", "interpolation": "nearest"}
    source, out = fill(tmp_path / "in", 1), tmp_path / "out"
    run(source, out, model=explainer, format="png", report=True, drawing=drawing)
    saliency = explainer.explain(source / "0.jpg")
    drawn = np.asarray(Image.open(out / "0-rollout.png")).astype(int)
    assert np.abs(drawn - saliency.overlay(**drawing)).max() <= 1
    assert np.abs(drawn - saliency.overlay()).mean() > 2
    before = (out / "report.html").read_text()
    assert report_run(out).read_text() == before  # the record says how it was drawn
