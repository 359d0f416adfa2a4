"""The same folder run on a cluster: Ray Data hands out batches to actors, each with a model; the rows are kept here.

An actor runs the very pipeline of a local run over the inputs that it is handed, in the same batches, and sends back
the rows with their maps. One that is killed is started anew, and what it was at is done again: files appear whole or
not at all, so that nothing changes for it. A row is kept once its files are there, and a run whose driver was killed
goes on from there.
"""

import hashlib
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitflow import errors
from vitflow.errors import OptionError, VitflowError, check_known, load_extra
from vitflow.files import remove_leftovers, write_inside
from vitflow.folder.decoders import Decoded, DecoderPool
from vitflow.folder.pipeline import Pipeline
from vitflow.folder.plan import Input
from vitflow.folder.work import Job, Picture, explainer_for
from vitflow.pictures.options import ENGINES
from vitflow.runs.batches import Tally
from vitflow.runs.columns import Maps, Row, failed_row
from vitflow.runs.fingerprints import fingerprint_difference

# Batches that an actor gets at once, at most; a task that is lost is done again whole.
_MOST_BATCHES = 64
# How often a task is begun before its pictures are taken one by one, and where that is noted below the output folder.
_TOGETHER, _TRIES = 2, ".vitflow-tries"


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a run, and an actor needs to know.

    Attributes:
        model: whatever stands for one, to be sent.
        fingerprint: of the driver's explainer, that all actors must have.
        job: what is computed.
        output: where files go.
        batch_size, workers, max_pixels: as for `explain_folder`; where no workers are asked for, an actor has one.
    """

    model: Any
    fingerprint: Mapping[str, Any]
    job: Job
    output: Path
    batch_size: int
    workers: int | None
    max_pixels: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a run goes.

    Attributes:
        address: of the cluster; by default one is started on this machine, or the one in use is taken.
        actors: how many; by default one for each GPU, or for each core where there is none.
    """

    address: str | None = None
    actors: int | None = None


def choose_engine(engine: str, address: str | None, actors: int | None) -> Cluster | None:
    """Where a run goes; None for this process.

    Raises:
        OptionError: an unknown engine, what a local run does not have, or ray is not installed.
    """
    check_known("engine", engine, ENGINES)
    if engine == "local":
        if address is not None or actors is not None:
            raise OptionError("An address and a number of actors are of a cluster: take --engine ray (engine='ray').")
        return None
    if actors is not None and actors < 1:
        raise OptionError(f"Expected actors of at least 1, got {actors}.")
    load_ray()
    return Cluster(address, actors)


class Worker:
    """An actor: explains the inputs of a batch, writes their files, and gives their rows."""

    def __init__(self, asked: bytes) -> None:
        self._asked: Asked = pickle.loads(asked)
        self._rows: list[tuple[Row, Maps]] = []
        self._pipeline: Pipeline | None = None

    def __call__(self, batch: Mapping[str, Sequence[bytes]]) -> dict[str, Any]:
        """Do some tasks: their rows with their maps, pickled."""
        sent: list[bytes] = []
        try:
            for task in batch["task"]:
                self._do(*pickle.loads(task))
                sent += map(pickle.dumps, self._rows)
                self._rows.clear()
        except VitflowError as error:  # what stops all stops the run with its own words
            sent = [pickle.dumps(({"stopped": type(error).__name__, "message": str(error)}, {}))]
        column = np.empty(len(sent), object)
        column[:] = sent
        return {"row": column}

    def _do(self, inputs: Sequence[Input], done: set[str]) -> None:
        """Do a task; one at which actors were killed twice goes picture by picture, to find out at which."""
        output = self._asked.output
        name = hashlib.sha256("\0".join(one.key for one in inputs).encode("utf-8", "surrogateescape")).hexdigest()
        note = f"{_TRIES}/{name[:16]}.json"
        begun, killing, alone = _noted(output / note)
        if alone is not None:
            killing.append(alone)

        def tell(alone: str | None) -> None:
            write_inside(output, note, json.dumps([begun + 1, killing, alone]).encode())

        tell(None)
        if begun < _TOGETHER:
            self._loaded().run(inputs, done)
        else:
            for one in inputs:
                if one.key in killing:
                    self._rows.append((_killed(one), {}))
                elif one.key not in done:
                    tell(one.key)
                    self._loaded().run([one], set())
        (output / note).unlink(missing_ok=True)

    def _loaded(self) -> Pipeline:
        if self._pipeline is None:
            asked = self._asked
            explainer = explainer_for(asked.model)
            # The driver need not have the devices of the actors.
            device = {"device": asked.fingerprint["device"]}
            if different := fingerprint_difference(asked.fingerprint, explainer.fingerprint() | device):
                raise OptionError(f"A machine of the cluster has another model: {'; '.join(different)}.")
            workers = 1 if asked.workers is None else min(asked.workers, os.cpu_count() or 1)
            decoders = DecoderPool(workers, max_pixels=asked.max_pixels)  # they end with the actor
            options: dict[str, Any] = {"batch_size": asked.batch_size, "decoders": decoders, "tally": Tally(None, 0)}
            self._pipeline = Pipeline(explainer, asked.job, asked.output, self._rows.extend, **options)
        return self._pipeline


def _noted(note: Path) -> tuple[int, list[str], str | None]:
    """How often a task was begun, the pictures that killed an actor, and the one that was taken alone at the end."""
    try:
        begun, killing, alone = json.loads(note.read_bytes())
    except (OSError, ValueError):
        return 0, [], None
    return begun, killing, alone


def _killed(one: Input) -> dict[str, Any]:
    """The row of a picture at which actors were killed."""
    message = (
        f"The process that explained this picture was killed {_TOGETHER + 1} times: memory ran out, or the model "
        "crashes on it. Try it alone with vitflow explain."
    )
    return failed_row(Picture(one.key, one.stem, Decoded()).known, "ActorDied", message)


def run_on_ray(
    inputs: Sequence[Input],
    done: set[str],
    asked: Asked,
    cluster: Cluster,
    keep: Callable[[Sequence[tuple[Row, Maps]]], None],
    tally: Tally,
) -> None:
    """Explain what is not done on a cluster.

    Args:
        inputs: all of the run, in their order.
        done: the keys of those that are done.
        asked: what to do with each.
        cluster: where.
        keep, tally: take the rows as they come.

    Raises:
        OptionError: ray is not installed.
        VitflowError: no picture can be explained this way.
    """
    ray = load_ray()
    shutil.rmtree(asked.output / _TRIES, ignore_errors=True)  # the notes of tasks that were not ended
    started = not ray.is_initialized()
    if started:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    talk = logging.getLogger("ray.data")
    level = talk.level
    talk.setLevel(logging.ERROR)  # it tells of its plans on stderr
    try:
        import ray.data as data

        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        resources = ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        actors = cluster.actors or gpus or max(cpus, 1)
        tasks = [pickle.dumps(task) for task in _tasks(inputs, done, asked.batch_size, actors)]
        found = data.from_items([{"task": task} for task in tasks], override_num_blocks=len(tasks)).map_batches(
            Worker,
            fn_constructor_args=(_dumps(asked),),
            batch_size=1,
            compute=data.ActorPoolStrategy(size=actors),
            num_gpus=1 if gpus else 0,
            num_cpus=max(1, cpus // actors) if gpus else 1,
        )
        for batch in found.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0):
            rows = [row_of(line) for line in batch["row"]]
            keep(rows)
            for row, _ in rows:
                tally.row(row)
    finally:
        shutil.rmtree(asked.output / _TRIES, ignore_errors=True)
        remove_leftovers(asked.output)  # of actors that were killed
        talk.setLevel(level)
        if started:
            ray.shutdown()


def load_ray() -> Any:
    """The module ray; OptionError that says how to get it if it is not installed."""
    load_extra("ray.data", "The engine ray", "ray", otherwise="take --engine local")
    return load_extra("ray", "The engine ray", "ray")


def _dumps(asked: Asked) -> bytes:
    cloudpickle: Any = load_ray().cloudpickle
    try:
        found: bytes = cloudpickle.dumps(asked)
    except Exception as error:
        raise OptionError(
            f"Expected a model that can be sent to other processes, got one that cannot ({error}): give its id, a "
            "path, or a function that makes it."
        ) from error
    return found


def _tasks(
    inputs: Sequence[Input], done: set[str], size: int, actors: int
) -> Iterator[tuple[Sequence[Input], set[str]]]:
    """Inputs for one actor at a time: the batches of a local run, several together, each with something to do."""
    batches = [inputs[start : start + size] for start in range(0, len(inputs), size)]
    missing = [batch for batch in batches if any(one.key not in done for one in batch)]
    together = min(max(len(missing) // (8 * actors), 1), _MOST_BATCHES)
    for start in range(0, len(missing), together):
        # The pipeline cuts them at the same places again, for all but the last are full.
        own = [one for batch in missing[start : start + together] for one in batch]
        yield own, {one.key for one in own if one.key in done}


def row_of(line: bytes) -> tuple[Row, Maps]:
    """The row that an actor sent, with its maps.

    Raises:
        VitflowError: what it sent says that no picture can be explained this way.
    """
    row, maps = pickle.loads(line)
    if "stopped" in row:
        kind = getattr(errors, row["stopped"], VitflowError)
        raise kind(row["message"])
    return row, maps
