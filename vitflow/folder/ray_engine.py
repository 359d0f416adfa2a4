"""Folder runs on a cluster: Ray Data sends batches to actors, and their rows and maps to the run's store.

Overlays are drawn afterwards. Each actor runs its model in a child process: an image that crashes it fails one row
only. Actors do not import torch; their child processes do.
"""

import logging
import pickle
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitflow.errors import OptionError, VitflowError, check_known, load_extra, whole_number
from vitflow.folder.columns import Maps, Row, failed_row
from vitflow.folder.decoders import Child, Decoded, WorkerCrashed, decode_bytes, decode_file, failed
from vitflow.folder.plan import Input, open_url
from vitflow.images import ENGINES

if TYPE_CHECKING:
    from vitflow.folder.store import Run
    from vitflow.folder.work import Batches, Job, Tally

# Rows arrive block by block; Ray schedules this many blocks without noticeable cost.
_MOST_BLOCKS = 10_000


@dataclass(frozen=True, slots=True)
class Request:
    """The input of all actors of a run: a model or its factory, its fingerprint on the driver, and the job."""

    model: Any
    fingerprint: Mapping[str, Any]
    job: "Job"
    batch_size: int


def check_engine(engine: str, address: str | None, actors: int | None, **local: Any) -> None:
    """Check the arguments of a cluster before anything is loaded; `local` are arguments of local runs only."""
    check_known("engine", engine, ENGINES)
    if engine == "local":
        if address is not None or actors is not None:
            raise OptionError("--address and --actors require --engine ray (engine='ray').")
        return
    if given := [name for name, value in local.items() if value]:
        raise OptionError(f"{' and '.join(given)} require engine='local': a cluster writes only rows and maps.")
    if actors is not None:
        whole_number("actors", actors, 1)
    _load_ray()


def _load_ray() -> Any:
    load_extra("ray.data", "The engine ray", "ray", otherwise="use --engine local")
    return load_extra("ray", "The engine ray", "ray")


class Worker:
    """An actor: explains batches of inputs in a child process, which is restarted if an image crashes it."""

    def __init__(self, request: bytes) -> None:
        self._request_file = tempfile.NamedTemporaryFile(prefix="vitflow-")  # noqa: SIM115 - removed with the actor
        self._request_file.write(request)
        self._request_file.flush()
        self._child = Child(partial(explain_inputs, Path(self._request_file.name)), sys.path)

    def __call__(self, batch: Mapping[str, Sequence[bytes]]) -> dict[str, Any]:
        """Return the pickled results of a batch: (row, maps), or an error that concerns all images."""
        results = self._explain([pickle.loads(pickled) for pickled in batch["input"]])
        return {"result": np.array([pickle.dumps(result) for result in results], object)}

    def _explain(self, inputs: Sequence[Input]) -> list[Any]:
        try:
            results: list[Any] = self._child.ask(inputs)
        except WorkerCrashed as crashed:
            if len(inputs) > 1:  # one of them is the cause
                return [result for item in inputs for result in self._explain([item])]
            message = f"The process ended on this image (exit status {crashed}): memory ran out, or the model crashed. "
            message += "Try this image with vitflow explain."
            return [(failed_row(inputs[0].known, "WorkerDied", message), {})]
        return results


def explain_inputs(request_file: Path, inputs: Sequence[Input]) -> list[tuple[Row, Maps] | VitflowError]:
    """Return the rows and maps of a batch; a single error if no image can be explained with the pickled `Request`."""
    from vitflow.folder.work import compute_maps

    try:
        request, batches = _loaded(request_file)
        images = [_read(item) for item in inputs]
        return [
            (row, {label: saliency.grid for label, saliency in maps.items()})
            for row, maps in compute_maps(batches, images, request.job)
        ]
    except Exception as error:  # concerns all images; errors of single images are in their rows
        return [error if isinstance(error, VitflowError) else VitflowError(traceback.format_exc())]


def _read(item: "Input") -> "Decoded":
    """Read a local file or a URL; a failure becomes a failed row."""
    if item.listed is None:
        return decode_file(item.path).named(item.known)
    try:
        filesystem, path = open_url(item.path)
        with filesystem.open_input_stream(path) as file:
            content = file.read()
    except Exception as error:  # stores raise errors of many types
        return failed(error, item.path, item.known)
    return decode_bytes(content, item.path).named(item.known)


@cache
def _loaded(request_file: Path) -> "tuple[Request, Batches]":
    from vitflow.folder.saved import fingerprint_difference
    from vitflow.folder.work import Batches, explainer_for

    request: Request = pickle.loads(request_file.read_bytes())
    explainer = explainer_for(request.model)
    # Devices may differ, and the source files of the driver may not be on this machine.
    kept = ("device", "state_sha256", "outputs")
    own = {name: value for name, value in request.fingerprint.items() if name in kept}
    actual = explainer.fingerprint() | own
    if different := fingerprint_difference(request.fingerprint, actual):
        raise OptionError(f"A machine of the cluster has another model: {'; '.join(different)}.")
    return request, Batches(explainer, request.batch_size)


def run_on_ray(
    missing: Sequence[Input], request: Request, run: "Run", tally: "Tally", address: str | None, actors: int | None
) -> None:
    """Explain inputs on a cluster whose machines can all access them, and store rows and maps as they arrive."""
    ray = _load_ray()
    try:
        sent = ray.cloudpickle.dumps(request)
    except Exception as error:
        words = f"The model cannot be sent to other processes ({error}): pass its id, a path, or a function."
        raise OptionError(words) from error
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
        blocks = min(-(-len(missing) // request.batch_size), _MOST_BLOCKS)
        rows = [{"input": pickle.dumps(item)} for item in missing]
        results = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
            Worker,
            fn_constructor_args=(sent,),
            batch_size=request.batch_size,
            compute=ray.data.ActorPoolStrategy(size=actors),
            num_gpus=1 if gpus else 0,
            num_cpus=max(1, cpus // actors) if gpus else 1,
        )
        for record in results.iter_rows():
            result = pickle.loads(record["result"])
            if isinstance(result, VitflowError):
                raise result
            run.put([result])
            tally.row(result[0])
    finally:
        logger.setLevel(level)
        if started:
            ray.shutdown()
