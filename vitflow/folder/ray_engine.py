"""Folder runs on a cluster: Ray Data sends batches to actors, and writes their rows and maps as Parquet.

The driver copies these files to the run's store, where a later row of an input replaces an earlier one, so that tasks
that Ray repeats are harmless; a run whose driver was killed resumes with this step. Overlays are drawn afterwards. Each
actor runs its model in a child process: an image that crashes it fails one row only. Actors do not import torch; their
child processes do.
"""

import json
import logging
import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitflow import errors
from vitflow.errors import OptionError, VitflowError, check_known, load_extra
from vitflow.folder.decoders import Child, ChildDied, Decoded, answer_requests, decode_file
from vitflow.folder.plan import Input
from vitflow.images import ENGINES
from vitflow.runs.columns import Maps, Row, failed_row, grid_columns, load_pyarrow, pack_half, unpack_half

if TYPE_CHECKING:
    from vitflow.folder.work import Job
    from vitflow.runs.batches import Batches, Tally
    from vitflow.runs.store import Run

# Ray writes to this subfolder of the output; its files are removed once their rows are in the store.
_PARTS = ".vitflow-parts"


@dataclass(frozen=True, slots=True)
class Request:
    """The input of all actors of a run: a model or its factory, its fingerprint on the driver, and the job."""

    model: Any
    fingerprint: Mapping[str, Any]
    job: "Job"
    batch_size: int
    max_pixels: int


def check_engine(engine: str, address: str | None, actors: int | None, **local: Any) -> None:
    """Check the arguments of a cluster before anything is loaded; `local` are arguments of local runs only.

    Raises:
        OptionError: unknown engine, argument of another engine, or ray is not installed.
    """
    check_known("engine", engine, ENGINES)
    if engine == "local":
        if address is not None or actors is not None:
            raise OptionError("--address and --actors require --engine ray (engine='ray').")
        return
    if given := [name for name, value in local.items() if value]:
        raise OptionError(f"{' and '.join(given)} require engine='local': a cluster writes only rows and maps.")
    if actors is not None and actors < 1:
        raise OptionError(f"Expected actors of at least 1, got {actors}.")
    _load_ray()
    load_pyarrow()


def _load_ray() -> Any:
    load_extra("ray.data", "The engine ray", "ray", otherwise="take --engine local")
    return load_extra("ray", "The engine ray", "ray")


class Worker:
    """An actor: explains batches of inputs in a child process, which is restarted if an image crashes it."""

    def __init__(self, request: bytes, labels: Sequence[str]) -> None:
        self._request_file = tempfile.NamedTemporaryFile(prefix="vitflow-")  # noqa: SIM115 - removed with the actor
        self._request_file.write(request)
        self._request_file.flush()
        self._labels = labels
        self._child = Child(__name__, self._request_file.name, json.dumps(sys.path))

    def __call__(self, batch: Mapping[str, Sequence[bytes]]) -> dict[str, Any]:
        """Return the rows of a batch as JSON, and the columns of their maps."""
        return as_columns(self._explain([pickle.loads(pickled) for pickled in batch["input"]]), self._labels)

    def _explain(self, inputs: Sequence[Input]) -> list[tuple[Row, Maps]]:
        try:
            rows: list[tuple[Row, Maps]] = pickle.loads(self._child.ask(pickle.dumps(inputs)).data)
        except ChildDied as died:
            if len(inputs) > 1:  # one of them is the cause
                return [pair for item in inputs for pair in self._explain([item])]
            message = f"The process ended on this image (exit status {died}): memory ran out, or the model crashed. "
            message += "Try this image with vitflow explain."
            [item] = inputs
            return [(failed_row({"input": item.key, "stem": item.stem}, "WorkerDied", message), {})]
        return rows


def as_columns(rows: Sequence[tuple[Row, Maps]], labels: Sequence[str]) -> dict[str, Any]:
    """Return rows as JSON, and the columns of their maps."""
    columns: dict[str, list[Any]] = {"row": [json.dumps(row) for row, _ in rows]}
    for label in labels:
        values = [pack_half(maps[label]) if label in maps else (b"", 0, 0, 1.0) for _, maps in rows]
        columns |= dict(zip(grid_columns(label), map(list, zip(*values, strict=True)), strict=True))
    return {name: np.array(values, object if name[:4] in ("row", "grid") else None) for name, values in columns.items()}


def serve(request_path: str, paths: str) -> None:
    """Explain the requested inputs: the main function of an actor's child process."""
    sys.path[:] = json.loads(paths)
    answer_requests(lambda request: [pickle.dumps(explain_inputs(Path(request_path), pickle.loads(request)))])


def explain_inputs(place: Path, inputs: Sequence[Input]) -> list[tuple[Row, Maps]]:
    """Return the rows and maps of inputs; a single row with the status "stopped" if no image can be explained.

    Args:
        place: the file with the pickled `Request`.
        inputs: one batch.
    """
    from vitflow.folder.work import InputImage, compute_maps, describe

    try:
        request, batches = _loaded(place)
        read = [Decoded(error="OSError", message=item.problem) if item.problem else None for item in inputs]
        images = [
            InputImage(
                item.key, item.stem, known or decode_file(item.path, request.max_pixels), (item.listed or (0, None))[1]
            )
            for item, known in zip(inputs, read, strict=True)
        ]
        rows: list[tuple[Row, Maps]] = []
        for image, result in zip(images, compute_maps(batches, images, request.job), strict=True):
            row = describe(image, result, request.job)
            row |= {"outputs": {}, "maps": None, "written": {}} if result.maps else {}
            rows.append((row, result.grids))
        return rows
    except Exception as error:  # concerns all images; errors of single images are in their rows
        message = str(error) if isinstance(error, VitflowError) else traceback.format_exc()
        return [({"input": "", "status": "stopped", "error": type(error).__name__, "message": message}, {})]


@cache
def _loaded(place: Path) -> "tuple[Request, Batches]":
    from vitflow.folder.work import explainer_for
    from vitflow.runs.batches import Batches
    from vitflow.runs.fingerprints import fingerprint_difference

    request: Request = pickle.loads(place.read_bytes())
    explainer = explainer_for(request.model)
    # The devices of the driver and the actors may differ.
    actual = explainer.fingerprint() | {"device": request.fingerprint["device"]}
    if different := fingerprint_difference(request.fingerprint, actual):
        raise OptionError(f"A machine of the cluster has another model: {'; '.join(different)}.")
    return request, Batches(explainer, request.batch_size)


def run_on_ray(
    missing: Sequence[Input], request: Request, run: "Run", tally: "Tally", address: str | None, actors: int | None
) -> None:
    """Explain inputs on a cluster whose machines can all access them and the output folder.

    Args:
        missing: the inputs.
        request: the model, the job and the batch size.
        run: the run that stores the rows and maps.
        tally: counts the rows.
        address: address of the cluster; by default, a cluster is started on this machine.
        actors: number of actors; by default one for each GPU, or for each core.

    Raises:
        OptionError: the model cannot be pickled.
        VitflowError: no image can be explained with these options.
    """
    ray = _load_ray()
    try:
        sent = ray.cloudpickle.dumps(request)
    except Exception as error:
        raise OptionError(
            f"The model cannot be sent to other processes ({error}): pass its id, a path, or a function that creates "
            "it."
        ) from error
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it prints execution plans to stderr
    try:
        ray.data.DataContext.get_current().enable_progress_bars = sys.stderr.isatty()
        resources = ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        actors = actors or gpus or max(cpus, 1)
        blocks = max(1, min(-(-len(missing) // request.batch_size), 8 * actors))
        rows = [{"input": pickle.dumps(item)} for item in missing]
        ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
            Worker,
            fn_constructor_args=(sent, request.job.labels),
            batch_size=request.batch_size,
            compute=ray.data.ActorPoolStrategy(size=actors),
            num_gpus=1 if gpus else 0,
            num_cpus=max(1, cpus // actors) if gpus else 1,
        ).write_parquet(str((run.folder / _PARTS).absolute()))
    finally:
        logger.setLevel(level)
        if started:
            ray.shutdown()
        take_parts(run, tally)


def take_parts(run: "Run", tally: "Tally | None" = None) -> None:
    """Copy the rows and maps written by Ray to the store of a run, and remove their files.

    Raises:
        VitflowError: the cluster reported that no image can be explained.
    """
    pyarrow, parquet = load_pyarrow()
    stopped: Row = {}
    for path in sorted((run.folder / _PARTS).glob("*.parquet")):
        with suppress(pyarrow.ArrowInvalid, OSError):  # truncated by a killed worker: its rows are recomputed
            for record in parquet.read_table(path).to_pylist():
                row = json.loads(record["row"])
                if row["status"] == "stopped":
                    stopped = row
                    continue
                labels = [name.removeprefix("grid_") for name in record if name.startswith("grid_")]
                packed = {label: [record[name] for name in grid_columns(label)] for label in labels}
                grids = {label: unpack_half(*values) for label, values in packed.items() if values[0]}
                run.put([(row, {label: grid for label, grid in grids.items() if grid is not None})])
                if tally is not None:
                    tally.row(row)
            run.finish()
    shutil.rmtree(run.folder / _PARTS, ignore_errors=True)
    if stopped:
        raise getattr(errors, stopped["error"], VitflowError)(stopped["message"])
