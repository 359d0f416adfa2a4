"""Pipeline of a run in bounded memory: decode ahead, run the model in batches, draw and write in the background."""

import copy
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from vitflow.errors import VitflowWarning, printable
from vitflow.explaining.explainer import Explainer
from vitflow.folder.columns import Maps, Row, failed_row
from vitflow.folder.decoders import Decoded, DecoderPool
from vitflow.folder.draw import draw_files
from vitflow.folder.plan import Input
from vitflow.folder.store import Run
from vitflow.folder.work import WAITING_BYTES, Batches, Job, SaliencyMaps, Tally, compute_maps, in_order, parts
from vitflow.models.parts import foreign_hooks, modules_of
from vitflow.progress import watched
from vitflow.registry.choices import is_slow

R = TypeVar("R")
_Explained = list[tuple[Row, SaliencyMaps]]


class Pipeline:
    """One run over the inputs without a finished row; a row is stored once its image's files are written.

    The composition of a batch may change the last bits of the results, so that those of a resumed run agree with those
    of an uninterrupted one to rounding.
    """

    def __init__(
        self, explainer: Explainer, job: Job, decoders: DecoderPool, run: Run, tally: Tally, *, batch_size: int
    ) -> None:
        self._explainer, self._job, self._decoders = explainer, job, decoders
        self._run, self._tally, self._batch_size = run, tally, batch_size
        self._notes: dict[str, tuple[str, int]] = {}  # first image and number of images by note
        self._slow = sum(is_slow(method.name) for method in job.methods)
        self._explaining: deque[tuple[list[Decoded], Future[_Explained]]] = deque()
        self._writing: deque[tuple[int, Future[tuple[Row, Maps]]]] = deque()  # (bytes of pixels, row and grids)

    def run(self, inputs: Sequence[Input]) -> None:
        """Explain the inputs, in batches that are read ahead and divided among the lanes."""
        writers = ThreadPoolExecutor(min(os.cpu_count() or 1, 8), thread_name_prefix="vitflow-write")
        # Slow methods use all threads anyway, and react to Ctrl-C only in this thread.
        lanes = Lanes(self._explainer, self._batch_size, several=not self._slow)
        futures = (self._decoders.submit(item.path) for item in inputs)
        ahead = in_order(futures, self._batch_size, lambda result: result.nbytes)
        try:
            for start in range(0, len(inputs), self._batch_size):
                batch = inputs[start : start + self._batch_size]
                read = (self._noted(item, next(ahead)) for item in batch)
                for images in parts(lanes.batches[0], read, -(-len(batch) // lanes.count)):
                    self._explaining.append((images, lanes.submit(partial(self._explain, images))))
                    while len(self._explaining) > (lanes.count if lanes.count > 1 else 0):
                        self._hand_over(writers)
            while self._explaining:
                self._hand_over(writers)
            while self._writing:
                self._commit()
            for note, (name, count) in self._notes.items():
                noted = name if count == 1 else f"{count} images, such as {name}"
                warnings.warn(f"{noted}: {note}", VitflowWarning, stacklevel=2)
        finally:
            # On Ctrl-C: keep finished rows, and start nothing new.
            lanes.close()
            self._explaining.clear()
            writers.shutdown(wait=True, cancel_futures=True)
            self._run.put([future.result() for _, future in self._writing if not future.cancelled()])

    def _noted(self, item: Input, result: Decoded) -> Decoded:
        """Collect the notes on an image, and return it with the columns known of its input."""
        for note in result.notes:
            name, count = self._notes.get(note, (printable(item.key), 0))
            self._notes[note] = name, count + 1
        return result.named(item.known)

    def _explain(self, images: list[Decoded], batches: Batches) -> _Explained:
        """Return the results of a part, computed by a lane; slow methods report progress."""

        def report(share: float) -> None:
            self._tally.share(len(self._writing) + share * len(images))

        with watched(report, self._slow) if self._slow else nullcontext():
            return compute_maps(batches, images, self._job)

    def _hand_over(self, writers: ThreadPoolExecutor) -> None:
        """Submit the oldest part to the writers, and wait if too much is pending: the disk is the bottleneck."""
        images, explained = self._explaining.popleft()
        for image, (row, maps) in zip(images, explained.result(), strict=True):
            self._writing.append((image.nbytes, writers.submit(self._write, row, maps)))
        while self._writing and (
            self._writing[0][1].done()
            or len(self._writing) > 2 * self._batch_size
            or sum(nbytes for nbytes, _ in self._writing) > WAITING_BYTES
        ):
            self._commit()

    def _write(self, row: Row, maps: SaliencyMaps) -> tuple[Row, Maps]:
        """Draw, encode and write the files of one image, and return its row and grids."""
        try:
            if maps:
                row = draw_files(self._run.folder, row, maps, self._job)
            return row, {label: saliency.grid for label, saliency in maps.items()}
        except Exception as error:  # a full disk, above all
            reason = getattr(error, "strerror", None) or str(error)
            return failed_row(row, error, f"The files of this image could not be written: {reason}."), {}

    def _commit(self) -> None:
        """Store the row of the oldest image once its files are written."""
        row, maps = self._writing[0][1].result()
        self._writing.popleft()
        self._run.put([(row, maps)])
        self._tally.row(row, len(self._writing))


# -- lanes

# Models of these libraries do not store anything about an image outside of the module.
_LIBRARIES = {"torch", "torchvision", "timm", "transformers", "open_clip"}
# With more lanes, Python's work between operations would block the other lanes.
_MOST_LANES = 4


class Lanes:
    """Parallel copies of a model that share its weights, each with its share of the CPU threads.

    Threads that share one operation wait for each other at its end and between operations. Threads that work on
    different images do not: without lanes, the default rollout of ViT-Ti on two threads took 1.22 to 1.31 times as
    long. A model with code from outside of the known libraries has one lane, since its copies may share state; so does
    a GPU, and `several=False`. `size` is the number of images in all lanes.
    """

    def __init__(self, explainer: Explainer, size: int, *, several: bool = True) -> None:
        self._before = torch.get_num_threads()
        explainers = [explainer]
        if several and explainer.device.type == "cpu":
            explainers += _copies(explainer, min(self._before, size, _MOST_LANES) - 1)
        self.count = len(explainers)
        self.batches = [Batches(lane, -(-size // self.count)) for lane in explainers]
        self._lane, free = threading.local(), list(self.batches)

        def start() -> None:
            torch.set_num_threads(max(1, self._before // self.count))
            self._lane.batches = free.pop()

        self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="vitflow-lane", initializer=start)

    def submit(self, work: Callable[[Batches], R]) -> Future[R]:
        """Submit work to the next free lane; a single lane computes it synchronously."""
        if self.count > 1:
            return self._threads.submit(lambda: work(self._lane.batches))
        done: Future[R] = Future()
        done.set_result(work(self.batches[0]))
        return done

    def close(self) -> None:
        """Wait for running work, cancel pending work, and restore the number of threads of the process."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self.count > 1:
            torch.set_num_threads(self._before)


def _copies(explainer: Explainer, count: int) -> list[Explainer]:
    """Return explainers of copies of the model that share its weights; empty if it cannot be copied safely.

    Classes of the user, and hooks and methods added to the model, may reference the original model or shared state.
    """
    weights = list(explainer.model.parameters())
    if (
        any(type(weight) is not nn.Parameter for weight in weights)
        or foreign_hooks(modules_of(explainer.model))
        or any(type(module).__module__.partition(".")[0] not in _LIBRARIES for module in explainer.model.modules())
        or any(
            callable(getattr(type(module), name, None)) for module in explainer.model.modules() for name in vars(module)
        )
    ):
        return []
    try:
        return [
            copy.deepcopy(
                explainer, {id(weight): nn.Parameter(weight.detach(), weight.requires_grad) for weight in weights}
            )
            for _ in range(count)
        ]
    except Exception:  # arbitrary attributes of a model may not support deepcopy
        return []
