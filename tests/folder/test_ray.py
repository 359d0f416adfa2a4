"""A folder run on Ray: the rows and maps of the local run, whatever is killed on the way."""

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from examples.ray_data import explain as explain_with_ray
from tests.conftest import ROOT
from tests.folder.test_batch_explainer import BAD as DAMAGED
from tests.folder.test_batch_explainer import is_the_map_of
from tests.folder.test_run import count_rows, fill, picture_bytes, run, stored, tiny_model
from vitflow import Explainer, explain_folder
from vitflow.cli import cli
from vitflow.cli.commands.folder import _Model
from vitflow.errors import OptionError
from vitflow.folder.found.draw import read_grids
from vitflow.folder.plan import list_inputs
from vitflow.folder.ray_engine import Asked, Worker, row_of
from vitflow.folder.work import make_job
from vitflow.runs.columns import map_of

PICTURES, BAD = 300, 10


@pytest.fixture(scope="module")
def ray_cluster():
    """Ray on two cores of this machine, started once: it takes some seconds."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # or it warns of what it will do with GPUs some day
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=2**27,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


class NotedModel:
    """Makes the model, and notes in which process."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __call__(self):
        (self.place / str(os.getpid())).touch()
        return Explainer(tiny_model())

    def processes(self) -> set[int]:
        return {int(path.name) for path in self.place.iterdir()} - {os.getpid()}


def slow_driver(source: str, output: str, place: str, address: str) -> None:
    """A run that takes its rows one by one, to be killed at it."""
    model = NotedModel(Path(place))
    options = {"batch_size": 4, "workers": 0, "engine": "ray", "address": address, "actors": 1}
    explain_folder(source, output, model=model, progress=lambda _: time.sleep(0.05), **options)


@pytest.fixture(scope="module")
def results(ray_cluster, tmp_path_factory):
    """The same files by the local engine and by Ray, whose driver is killed, and then an actor of the run after it."""
    place = tmp_path_factory.mktemp("ray")
    (place / "pids").mkdir()
    source, model = fill(place / "in", PICTURES - BAD), NotedModel(place / "pids")
    for number in range(BAD):
        (source / f"bad{number}.jpg").write_bytes(picture_bytes(number)[: 40 * number])
    local = run(source, place / "local")
    address = ray_cluster.get_runtime_context().gcs_address
    code = "import sys; from tests.folder.test_ray import slow_driver; slow_driver(*sys.argv[1:])"
    words = [str(source), str(place / "ray"), str(place / "pids"), address]
    driver = subprocess.Popen([sys.executable, "-c", code, *words], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while count_rows(place / "ray") < 30:
        assert time.monotonic() < deadline and driver.poll() is None, driver.stderr.read()
        time.sleep(0.05)
    driver.kill()
    driver.communicate()
    told = {row["input"] for row, _ in stored(place / "ray") if row["status"] == "explained"}
    before = model.processes() | {driver.pid}
    killed: list[int] = []

    def kill_one(state) -> None:
        if state.row is not None and not killed and (actors := model.processes() - before):
            killed.append(min(actors))
            os.kill(killed[0], signal.SIGKILL)

    options = {"batch_size": 4, "workers": 0, "engine": "ray"}
    resumed = explain_folder(source, place / "ray", model=model, progress=kill_one, **options)
    return local, resumed, told, killed, model


def test_ray_gives_the_rows_and_the_maps_of_a_local_run(results):
    local, resumed, _, _, _ = results
    assert (resumed.total, resumed.explained, resumed.failed) == (PICTURES, PICTURES - BAD, BAD)
    timeless = [[{**row, "seconds": 0, "written": 0} for row in summary] for summary in (local, resumed)]
    assert timeless[0] == timeless[1]
    pairs = zip(read_grids(local.output), read_grids(resumed.output), strict=True)
    for (row, own), (_, its) in pairs:
        assert np.abs(own["rollout"] - its["rollout"]).max() <= 2**-11 * own["rollout"].max()
        name = row["outputs"]["rollout"]
        drawn = [np.asarray(Image.open(place.output / name)).astype(int) for place in (local, resumed)]
        assert np.abs(drawn[0] - drawn[1]).max() <= 2
    files = [{path.name for path in place.output.rglob("*") if path.is_file()} for place in (local, resumed)]
    assert files[0] == files[1]
    assert json.loads((resumed.output / "run.json").read_text())["totals"]["failed"] == BAD


def test_after_a_killed_driver_it_does_only_what_is_missing(results):
    _, resumed, told, _, _ = results
    assert 20 < len(told) < PICTURES - BAD
    assert resumed.kept == len(told)


def test_an_actor_that_is_killed_changes_nothing(results):
    _, _, _, killed, model = results
    assert len(killed) == 1
    # One of the first run and its driver, two of the second, and the one that took the place of the killed one.
    assert len(model.processes()) == 5


@pytest.mark.parametrize(
    ("options", "change", "error", "message"),
    [
        ({}, {"weights_sha256": "0"}, OptionError, "another model: the model has other weights"),
        ({}, {"device": "cuda"}, None, ""),  # the driver need not have the devices of the actors
        ({"patch": (0, 9)}, {}, OptionError, "outside the grid"),
    ],
)
def test_what_concerns_all_stops_the_run_in_its_own_words(tmp_path, options, change, error, message):
    """An actor, without a cluster around it."""
    source, explainer = fill(tmp_path / "in", 3), Explainer(tiny_model())
    inputs = list_inputs([source], tmp_path / "out").plan(["-rollout.jpg"])
    job = make_job(["rollout"], options)
    asked = Asked(explainer, explainer.fingerprint() | change, job, tmp_path / "out", 2, 0, 10**6)
    found = Worker(pickle.dumps(asked))({"task": [pickle.dumps((inputs, {"1.jpg"}))]})["row"]
    if error is None:
        assert [row_of(line)[0]["input"] for line in found] == ["0.jpg", "2.jpg"]
    else:
        with pytest.raises(error, match=message):
            row_of(found[0])


class Deadly(VisionTransformer):
    """A model that kills its process when it sees a white picture."""

    def forward(self, pixels):
        if (pixels.flatten(1).amin(dim=1) > 0.99).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(pixels)


def test_a_picture_that_kills_its_actor_three_times_is_a_row(tmp_path):
    source, explainer = fill(tmp_path / "in", 3), Explainer(tiny_model(Deadly))
    Image.new("RGB", (40, 40), "white").save(source / "1b.png")
    out = tmp_path / "out"
    inputs = list_inputs([source], out).plan(["-rollout.jpg"])
    asked = Asked(explainer, explainer.fingerprint(), make_job(["rollout"], {}), out, 4, 0, 10**6)
    sent = pickle.dumps(asked)

    def work(place) -> None:
        found = Worker(sent)({"task": [pickle.dumps((inputs, {"0.jpg"}))]})["row"]
        place.write_bytes(pickle.dumps(list(found)))

    for number in range(4):
        place = tmp_path / f"rows{number}"
        child = multiprocessing.get_context("fork").Process(target=work, args=(place,))
        child.start()
        child.join(120)
        assert (child.exitcode, place.exists()) == ((0, True) if number == 3 else (-signal.SIGKILL, False))
    rows = {row["input"]: row for row, _ in map(row_of, pickle.loads(place.read_bytes()))}
    assert {name: row["status"] for name, row in rows.items()} == {
        "1.jpg": "explained",
        "1b.png": "failed",
        "2.jpg": "explained",
    }
    assert rows["1b.png"]["error"] == "ActorDied" and "3 times" in rows["1b.png"]["message"]
    assert not list((out / ".vitflow-tries").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "spark"}, "Unknown engine 'spark'"),
        ({"actors": 2}, "take --engine ray"),
        ({"address": "auto"}, "take --engine ray"),
        ({"engine": "ray", "actors": 0}, "actors of at least 1"),
    ],
)
def test_what_does_not_fit_an_engine_is_refused(tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        run(fill(tmp_path / "in", 1), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_command_sends_no_model(tmp_path):
    found = CliRunner().invoke(cli, ["folder", str(tmp_path), "-o", str(tmp_path / "out"), "--actors", "2"])
    assert found.exit_code == 2
    given = {
        "model": "demo",
        "checkpoint": None,
        "num_classes": None,
        "class_names": None,
        "name": None,
        "fit": "crop",
        "device": "cpu",
        "dtype": None,
    }
    model = _Model(given)
    assert model() is model()
    sent = pickle.dumps(model)
    assert len(sent) < 1000 and pickle.loads(sent)().model_id == model().model_id


def test_ray_data_maps_batches_in_an_actor_pool(ray_cluster, tmp_path):
    source = fill(tmp_path / "in", 6)
    (source / "bad.jpg").write_bytes(DAMAGED)
    explain_with_ray(str(source), str(tmp_path / "maps"), tiny_model)
    rows = {row["id"].rpartition("/")[2]: row for row in ray_cluster.data.read_parquet(tmp_path / "maps").iter_rows()}
    assert sorted(rows) == [*(f"{n}.jpg" for n in range(6)), "bad.jpg"]
    assert rows.pop("bad.jpg")["error"] == "OSError"
    explainer = Explainer(tiny_model())
    assert all(is_the_map_of(map_of(row, "rollout")[0], source / name, explainer) for name, row in rows.items())
