"""A folder run on Ray: the rows and maps of the local run, whatever is killed on the way."""

import json
import os
import pickle
import signal

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from examples.ray_data import explain as explain_with_ray
from tests.conftest import ROOT
from tests.folder.test_batch_explainer import BAD as DAMAGED
from tests.folder.test_batch_explainer import is_the_map_of
from tests.folder.test_run import fill, picture_bytes, run, tiny_model
from vitflow import Explainer
from vitflow.cli import cli
from vitflow.cli.commands.folder import _Model
from vitflow.errors import OptionError
from vitflow.folder.draw import draw_run, read_grids
from vitflow.folder.plan import list_inputs
from vitflow.folder.ray_engine import Asked, Worker, take_parts
from vitflow.folder.work import make_job
from vitflow.runs.columns import load_pyarrow, map_of
from vitflow.runs.store import Run


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


class Deadly(VisionTransformer):
    """A model that kills its process when it sees a white picture."""

    def forward(self, pixels):
        if (pixels.flatten(1).amin(dim=1) > 0.99).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(pixels)


def plain():
    return Explainer(tiny_model())


def deadly():
    return Explainer(tiny_model(Deadly))


@pytest.fixture
def images(tmp_path):
    source = fill(tmp_path / "in", 9)
    (source / "bad.jpg").write_bytes(DAMAGED)
    Image.new("RGB", (40, 40), "white").save(source / "deadly.png")
    return source


def work(source, out, **options):
    """The rows and maps of a worker, without a cluster around it."""
    explainer = Explainer(tiny_model())
    inputs = list_inputs([source], out).plan(["-rollout.jpg"])
    known = explainer.fingerprint() | options.pop("change", {})
    asked = Asked(options.pop("model", plain), known, make_job(["rollout"], options, overlays=False), 4, 10**6)
    worker = Worker(cloudpickle().dumps(asked))
    try:
        return worker({"input": [pickle.dumps(one) for one in inputs]})
    finally:
        worker._child.close()


def cloudpickle():
    return pytest.importorskip("ray").cloudpickle


def test_an_image_that_kills_its_worker_is_a_row_and_the_others_go_on(images, tmp_path):
    found = work(images, tmp_path / "out", model=deadly)
    rows = {row["input"]: row for row in map(json.loads, found["row"])}
    assert {name: row["error"] for name, row in rows.items() if row["status"] == "failed"} == {
        "bad.jpg": "OSError",
        "deadly.png": "WorkerDied",
    }
    assert len(rows) == 11 and "exit status -9" in rows["deadly.png"]["message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"change": {"weights_sha256": "0"}}, "another model: the model has other weights"),
        ({"change": {"device": "cuda"}}, None),  # the driver need not have the devices of the actors
        ({"patch": (0, 9)}, "outside the grid"),
    ],
)
def test_a_worker_reports_what_concerns_all_images(tmp_path, options, message):
    rows = [json.loads(row) for row in work(fill(tmp_path / "in", 2), tmp_path / "out", **options)["row"]]
    assert [row["status"] for row in rows] == (["stopped"] if message else ["explained"] * 2)
    assert message is None or message in rows[0]["message"]


FINGERPRINT = {"kind": "folder", "methods": {"rollout": "rollout"}}


def test_parts_are_taken_once_and_a_damaged_one_is_left_out(images, tmp_path):
    pyarrow, parquet = load_pyarrow()
    found = work(images, tmp_path / "out")
    (tmp_path / "out/.vitflow-parts").mkdir(parents=True)
    table = pyarrow.table({name: list(values) for name, values in found.items()})
    for name in ("a", "b"):  # a task that was done twice
        parquet.write_table(table, tmp_path / f"out/.vitflow-parts/{name}.parquet")
    (tmp_path / "out/.vitflow-parts/c.parquet").write_bytes(b"PAR1 half")
    with Run(tmp_path / "out", FINGERPRINT) as run:
        take_parts(run)
        names = [json.loads(row)["input"] for row in found["row"]]
        assert len(run.missing(names, lambda row: row["status"] == "explained")) == 1
        assert [row["input"] for row, maps in run.with_maps() if maps] == [name for name in names if name != "bad.jpg"]
    assert not (tmp_path / "out/.vitflow-parts").exists()


def test_a_stopped_run_ends_in_the_words_of_its_worker(tmp_path):
    pyarrow, parquet = load_pyarrow()
    found = work(fill(tmp_path / "in", 1), tmp_path / "out", patch=(0, 9))
    (tmp_path / "out/.vitflow-parts").mkdir(parents=True)
    parquet.write_table(
        pyarrow.table({n: list(v) for n, v in found.items()}), tmp_path / "out/.vitflow-parts/a.parquet"
    )
    with Run(tmp_path / "out", FINGERPRINT) as run, pytest.raises(OptionError, match="outside the grid"):
        take_parts(run)


def test_ray_gives_the_rows_and_the_maps_of_a_local_run_and_resumes(ray_cluster, images, tmp_path):
    options = {"model": deadly, "engine": "ray", "workers": None, "actors": 1}
    found = run(images, tmp_path / "ray", **options)
    assert {row["input"]: row["error"] for row in found.failures()} == {
        "bad.jpg": "OSError",
        "deadly.png": "WorkerDied",
    }
    local = run(images, tmp_path / "local", overlays=False)
    its = {row["input"]: maps["rollout"] for row, maps in read_grids(local.output)}
    for row, maps in read_grids(found.output):
        assert np.abs(maps["rollout"] - its[row["input"]]).max() <= 2**-10 * its[row["input"]].max()
    assert [one.error for one in draw_run(found.output, tmp_path / "drawn", limit=2)] == [None, None]
    (images / "3.jpg").write_bytes(picture_bytes(50))
    (images / "deadly.png").unlink()
    again = run(images, tmp_path / "ray", **options)
    assert (again.explained, again.kept, again.failed) == (9, 8, 1)
    with pytest.raises(OptionError, match="other options"):
        run(images, tmp_path / "ray", **options, residual=0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "spark"}, "Unknown engine 'spark'"),
        ({"actors": 2}, "require --engine ray"),
        ({"address": "auto"}, "require --engine ray"),
        ({"engine": "ray", "workers": None, "actors": 0}, "actors of at least 1"),
        ({"engine": "ray", "workers": None, "save_map": True}, "save_map require engine='local'"),
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
