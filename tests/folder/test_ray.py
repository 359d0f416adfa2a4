"""A folder run on Ray: the rows and maps of the local run, whatever is killed during the run."""

import pickle
import time
from functools import partial

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from examples.ray_data import explain as explain_with_ray
from tests.conftest import ROOT
from tests.folder.small_models import broken, deadly, drive, plain, tiny_model
from tests.folder.test_batch_explainer import BAD as DAMAGED
from tests.folder.test_batch_explainer import is_the_map_of
from tests.folder.test_run import count_rows, fill, image_bytes, run
from tests.typed import forked
from vitflow import Explainer
from vitflow.cli import cli
from vitflow.cli.explainer import make_explainer
from vitflow.errors import OptionError, VitflowError
from vitflow.folder.batch_explainer import map_of
from vitflow.folder.draw import draw_run, read_grids
from vitflow.folder.plan import list_inputs
from vitflow.folder.ray_engine import Request, Worker, explain_inputs
from vitflow.folder.report import report_run
from vitflow.folder.saved import SavedRun
from vitflow.folder.work import make_job


@pytest.fixture(scope="module")
def ray_cluster():
    """Ray on two cores of this machine, started once: it takes some seconds."""
    ray = pytest.importorskip("ray")
    # The processes that Ray starts inherit it. Ray warns of what it will do with GPUs some day without the last one.
    its = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (its | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}).items():
            environment.setenv(name, value)
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        ray.init(num_cpus=2, object_store_memory=2**27, **quiet)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield ray
        ray.shutdown()


def requested_for(source, out, model=plain, change=(), method="rollout", **options):
    """The inputs of a run, and what its actors are told."""
    job = make_job([method], options, overlays=False)
    fingerprint = (plain if model is broken else model)().fingerprint()
    requested = Request(model, fingerprint | dict(change), job, 4)
    return list_inputs([source], out, urls=True).plan(job.endings), cloudpickle().dumps(requested)


def explained(source, out, **options):
    """The rows and maps of a batch, explained in this process."""
    inputs, requested = requested_for(source, out, **options)
    out.mkdir(exist_ok=True)
    (out / "asked").write_bytes(requested)
    return explain_inputs(out / "asked", inputs)


def cloudpickle():
    return pytest.importorskip("ray").cloudpickle


def test_an_image_that_kills_its_process_is_a_row_and_the_others_go_on(tmp_path):
    source = fill(tmp_path / "in", 3)
    Image.new("RGB", (40, 40), "white").save(source / "white.png")
    inputs, requested = requested_for(source, tmp_path / "out", model=deadly, method="occlusion")
    worker = Worker(requested)
    try:
        actual = worker({"input": [pickle.dumps(one) for one in inputs]})
    finally:
        worker._child.close()
    rows, maps = zip(*map(pickle.loads, actual["result"]), strict=True)
    assert [row["status"] for row in rows] == ["explained"] * 3 + ["failed"]
    assert (rows[3]["input"], rows[3]["error"]) == ("white.png", "WorkerDied")
    assert "exit status -9" in rows[3]["message"]
    assert [list(grids) for grids in maps] == [["occlusion"]] * 3 + [[]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"change": {"weights_sha256": "0"}}, "another model: the model has other weights"),
        ({"change": {"device": "cuda"}}, None),  # the driver need not have the devices of the actors
        ({"patch": (0, 9)}, "outside the grid"),
        ({"model": broken}, "ValueError: this model cannot be made"),
    ],
)
def test_a_worker_reports_what_concerns_all_images(tmp_path, options, message):
    results = explained(fill(tmp_path / "in", 2), tmp_path / "out", **options)
    if message is None:
        assert [row["status"] for row, _ in results] == ["explained"] * 2
    else:
        assert [message in str(error) for error in results] == [True]


ON_RAY = {"engine": "ray", "workers": None, "actors": 1, "model": plain}


def same_maps(actual, local) -> bool:
    """Return True if two runs have the same inputs in the same order, with the same maps."""
    ours, its = ({row["input"]: maps["rollout"] for row, maps in read_grids(run.output)} for run in (actual, local))
    assert list(ours) == list(its) and [row["input"] for row in actual] == [row["input"] for row in local]
    return all(np.abs(grid - its[name]).max() <= 2**-10 * its[name].max() for name, grid in ours.items())


@pytest.mark.slow  # one run on a cluster at each push: that of a folder at a URL
def test_a_run_on_ray_has_the_rows_and_maps_of_a_local_run(ray_cluster, tmp_path):
    source, seen = fill(tmp_path / "in", 6), []
    (source / "bad.jpg").write_bytes(DAMAGED)
    actual = run(source, tmp_path / "ray", **ON_RAY, progress=seen.append)
    assert (actual.total, actual.explained) == (7, 6) and [state.done for state in seen] == list(range(8))
    assert [row["error"] for row in actual.failures()] == ["OSError"]
    assert same_maps(actual, run(source, tmp_path / "local", overlays=False))
    with pytest.raises(OptionError, match="outside the grid"):  # reported by a worker, for all images
        run(source, tmp_path / "stopped", **ON_RAY, patch=(0, 9))


ODD_NAMES = ["a b.jpg", "50%25.jpg", "what?.jpg", "a#b.jpg", "below/é.jpg"]


def odd_folder(place) -> None:
    """Images with names that a URL quotes, a damaged one, and files that are no inputs."""
    (place / "below").mkdir(parents=True)
    for number, name in enumerate(ODD_NAMES):
        (place / name).write_bytes(image_bytes(number))
    (place / "bad.jpg").write_bytes(DAMAGED)
    for name in (".hidden.jpg", "notes.txt"):
        (place / name).write_bytes(b"no image")


@pytest.mark.filterwarnings("ignore:Hidden image files")
def test_a_folder_at_a_url_has_the_rows_and_maps_of_a_local_one(ray_cluster, tmp_path):
    odd_folder(tmp_path / "in")
    url, options = f"file://{tmp_path / 'in'}", {"recursive": True}
    actual = run(url, tmp_path / "ray", **ON_RAY, **options)
    local = run(tmp_path / "in", tmp_path / "local", overlays=False, **options)
    assert actual.explained == 5 and same_maps(actual, local) and stored_facts(actual) == stored_facts(local)
    (tmp_path / "in/a b.jpg").write_bytes(image_bytes(50))
    (tmp_path / "in/new.jpg").write_bytes(image_bytes(51))
    again = run(url + "/", tmp_path / "ray", **ON_RAY, **options)
    assert (again.total, again.explained, again.kept) == (7, 6, 4)
    assert "a local copy" in draw_run(again.output, tmp_path / "drawn", limit=1)[0].error
    drawn = draw_run(again.output, tmp_path / "drawn", images=tmp_path / "in")
    assert [each.error for each in drawn] == [None] * 6
    assert report_run(again.output).is_file()


def stored_facts(summary) -> list[dict]:
    """The rows of a run without values that depend on the batch, and without messages, which name the source."""
    left_out = {"seconds", "value", "probability", "message"}
    with SavedRun(summary.output) as saved:
        return [{name: value for name, value in row.items() if name not in left_out} for row in saved.rows()]


def test_files_at_a_url_that_vanish_are_rows(tmp_path):
    source = fill(tmp_path / "in", 3)
    inputs, requested = requested_for(f"file://{source}", tmp_path / "out")
    (source / "2.jpg").unlink()
    (tmp_path / "asked").write_bytes(requested)
    rows = [row for row, _ in explain_inputs(tmp_path / "asked", inputs)]
    assert (rows[2]["error"], rows[2]["stem"]) == ("FileNotFoundError", "2")
    assert rows[0]["status"] == rows[1]["status"] == "explained"


@pytest.mark.parametrize(
    ("source", "engine", "words"),
    [
        ("s3://bucket/in", "local", ["aws s3 sync s3://bucket/in", "mount", "--engine ray"]),
        ("nosuch://x", "ray", ["Cannot open 'nosuch://x'"]),
        ("file:///nowhere/in", "ray", ["Could not list 'file:///nowhere/in'"]),
        (["file:///a", "file:///b"], "ray", ["only source"]),
    ],
)
def test_urls_that_cannot_be_read_are_refused(tmp_path, source, engine, words):
    pytest.importorskip("ray")
    with pytest.raises(VitflowError) as error:
        run(source, tmp_path / "out", engine=engine, workers=None)
    assert all(word in str(error.value) for word in words)
    with pytest.raises(OptionError, match="local output"):
        run(tmp_path, "s3://bucket/out")


@pytest.mark.slow  # nearly a minute
def test_a_run_whose_driver_was_killed_goes_on_and_has_each_input_once(ray_cluster, tmp_path):
    source = fill(tmp_path / "in", 80)
    (source / "bad.jpg").write_bytes(DAMAGED)
    driver = forked(drive, ray_cluster.get_runtime_context().gcs_address, source, tmp_path / "ray")
    while count_rows(tmp_path / "ray") < 1:
        assert driver.is_alive()
        time.sleep(0.01)
    driver.kill()
    driver.join()
    actual = run(source, tmp_path / "ray", **ON_RAY)
    assert (actual.total, actual.explained) == (81, 80) and 0 < actual.kept < 80
    assert same_maps(actual, run(source, tmp_path / "local", overlays=False))
    assert [row["error"] for row in actual.failures()] == ["OSError"]
    assert [one.error for one in draw_run(actual.output, tmp_path / "drawn", limit=2)] == [None, None]
    with pytest.raises(OptionError, match="other options"):
        run(source, tmp_path / "ray", **ON_RAY, residual=0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "spark"}, "Unknown engine 'spark'"),
        ({"address": "auto"}, "require --engine ray"),
        ({"engine": "ray", "workers": None, "actors": 0}, "actors of at least 1"),
        ({"engine": "ray", "workers": None, "report": True}, "report require engine='local'"),
    ],
)
def test_what_does_not_fit_an_engine_is_refused(tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        run(fill(tmp_path / "in", 1), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_command_sends_no_model(tmp_path):
    actual = CliRunner().invoke(cli, ["folder", str(tmp_path), "-o", str(tmp_path / "out"), "--actors", "2"])
    assert actual.exit_code == 2
    given = dict.fromkeys(["checkpoint", "num_classes", "global_pool", "class_names", "name", "dtype", "data_config"])
    given |= {"model": "demo", "fit": "crop", "device": "cpu"}
    model = partial(make_explainer, given)
    sent = pickle.dumps(model)
    assert len(sent) < 1000 and pickle.loads(sent)().model_id == model().model_id


@pytest.mark.slow
def test_ray_data_maps_batches_in_an_actor_pool(ray_cluster, tmp_path):
    source = fill(tmp_path / "in", 6)
    (source / "bad.jpg").write_bytes(DAMAGED)
    explain_with_ray(str(source), str(tmp_path / "maps"), tiny_model)
    rows = {row["id"].rpartition("/")[2]: row for row in ray_cluster.data.read_parquet(tmp_path / "maps").iter_rows()}
    assert sorted(rows) == [*(f"{n}.jpg" for n in range(6)), "bad.jpg"]
    assert rows.pop("bad.jpg")["error"] == "OSError"
    explainer = Explainer(tiny_model())
    assert all(is_the_map_of(map_of(row, "rollout")[0], source / name, explainer) for name, row in rows.items())
