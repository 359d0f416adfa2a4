"""Pipeline of a run in bounded memory: decode ahead, run the model in batches, draw and write in the background."""

import copy
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import nn

from vitflow.explaining.explainer import Explainer
from vitflow.files import write_inside
from vitflow.folder.decoders import Decoded, DecoderPool
from vitflow.folder.plan import Input
from vitflow.folder.work import InputImage
from vitflow.progress import watched
from vitflow.recording.isolation import has_foreign_hooks
from vitflow.runs.batches import WAITING_BYTES, Batches, Tally
from vitflow.runs.columns import Maps, Row, failed_row
from vitflow.runs.store import Run

R = TypeVar("R")
_Written = tuple[Row, Maps]


class Pipeline:
    """One run over the inputs without a finished row; a row is stored once its image's files are written.

    Args:
        compute: returns one result for each image of a part of a batch.
        draw: returns an image's row, grids and files from its result; called by several threads.
        run: stores the rows.
        tally: counts stored rows, and the progress of slow methods, in images.
        decoders: the processes that read images.
        batch_size: images per forward pass; halved if memory runs out.
        explainer: the model, which lanes copy; without it, there is one lane.
        slow: the number of slow methods.
        behind: maximal number of batches waiting to be written; beyond two, the disk is the bottleneck.
    """

    def __init__(
        self,
        compute: Callable[[Batches, list[InputImage]], Sequence[Any]],
        draw: Callable[[InputImage, Any], tuple[Row, Maps, dict[str, bytes]]],
        run: Run,
        tally: Tally,
        decoders: DecoderPool,
        *,
        batch_size: int,
        explainer: Explainer | None = None,
        slow: int = 0,
        behind: int = 2,
    ) -> None:
        self._compute, self._draw, self._run = compute, draw, run
        self._tally, self._decoders, self._batch_size = tally, decoders, batch_size
        self._explainer, self._slow, self._behind = explainer, slow, behind
        self._explaining: deque[tuple[list[InputImage], set[str], Future[Sequence[Any]]]] = deque()
        self._under_way = 0.0  # images with maps but no row yet
        self._writing: deque[tuple[int, list[Future[_Written]]]] = deque()  # (bytes of pixels, one future per image)

    def run(self, inputs: Sequence[Input], missing: set[str]) -> None:
        """Explain the inputs whose keys are in `missing`.

        Batches are the same in every run over the same inputs: a resumed run recomputes an interrupted batch as a
        whole, since the composition of a batch may change the last bits of the results.
        """
        writers = ThreadPoolExecutor(min(os.cpu_count() or 1, 8), thread_name_prefix="vitflow-write")
        # Slow methods use all threads anyway, and react to Ctrl-C only in this thread.
        lanes = Lanes(self._explainer, self._batch_size, several=not self._slow)
        try:
            for batch in self._batches(inputs, missing):
                for images in lanes.batches[0].parts(batch, lambda image: image.decoded.nbytes):
                    wanted = {image.item.key for image in images} & missing
                    if wanted:
                        future = lanes.submit(partial(self._explain, images, len(wanted)))
                        self._explaining.append((images, wanted, future))
                    while len(self._explaining) > (lanes.count if lanes.count > 1 else 0):
                        self._hand_over(writers)
            while self._explaining:
                self._hand_over(writers)
            while self._writing:
                self._commit()
        finally:
            # On Ctrl-C: keep finished rows, and start nothing new.
            lanes.close()
            self._explaining.clear()
            writers.shutdown(wait=True, cancel_futures=True)
            for _, futures in self._writing:
                self._keep([future.result() for future in futures if not future.cancelled()])

    def _batches(self, inputs: Sequence[Input], missing: set[str]) -> Iterator[Iterator[InputImage]]:
        """Yield the images of each batch with missing ones; those of the next batch are read ahead."""
        batches = [inputs[start : start + self._batch_size] for start in range(0, len(inputs), self._batch_size)]
        batches = [batch for batch in batches if any(item.key in missing for item in batch)]
        ahead = self._read(batches[0], missing)
        for position, batch in enumerate(batches):
            decoded = {key: future.result() for key, future in ahead.items()}
            ahead.clear()  # futures reference the pixels
            following = batches[position + 1] if position + 1 < len(batches) else []
            small = sum(result.nbytes for result in decoded.values()) < WAITING_BYTES
            ahead = self._read(following, missing) if small else {}
            yield self._complete(batch, decoded)
            ahead = ahead or self._read(following, missing)

    def _read(self, batch: Sequence[Input], missing: set[str]) -> dict[str, Future[Decoded]]:
        return {item.key: self._decoders.submit(item.path) for item in batch if item.key in missing}

    def _complete(self, batch: Sequence[Input], decoded: dict[str, Decoded]) -> Iterator[InputImage]:
        """Yield the images of a batch in order, and reread finished images if the batch is recomputed."""
        recomputed = any(result.image is not None for result in decoded.values())
        for item in batch:
            if item.key in decoded:
                yield InputImage(item, decoded.pop(item.key))
            elif recomputed:
                yield InputImage(item, self._decoders.submit(item.path).result())

    def _explain(self, images: list[InputImage], wanted: int, batches: Batches) -> Sequence[Any]:
        """Return the results of a part, computed by a lane; slow methods report progress."""
        with watched(partial(self._report_share, wanted), self._slow) if self._slow else nullcontext():
            return self._compute(batches, images)

    def _hand_over(self, writers: ThreadPoolExecutor) -> None:
        """Submit the oldest part to the writers, and wait if too much is pending."""
        images, wanted, explained = self._explaining.popleft()
        pairs = [pair for pair in zip(images, explained.result(), strict=True) if pair[0].item.key in wanted]
        self._under_way += len(pairs)
        size = sum(image.decoded.nbytes for image, _ in pairs)
        self._writing.append((size, [writers.submit(self._write, image, result) for image, result in pairs]))
        while self._writing and (
            len(self._writing) > self._behind
            or sum(nbytes for nbytes, _ in self._writing) > WAITING_BYTES
            or all(future.done() for future in self._writing[0][1])
        ):
            self._commit()

    def _write(self, image: InputImage, result: Any) -> _Written:
        """Draw, encode and write one image, and return its row and grids."""
        try:
            row, grids, files = self._draw(image, result)
            for path, content in files.items():
                write_inside(self._run.folder, path, content)
            return row, grids
        except Exception as error:  # a full disk, above all
            reason = getattr(error, "strerror", None) or str(error)
            return failed_row(image.known, error, f"The files of this image could not be written: {reason}."), {}

    def _commit(self) -> None:
        """Store the rows of the oldest part once its files are written."""
        rows = [future.result() for future in self._writing[0][1]]
        self._writing.popleft()
        self._keep(rows)

    def _keep(self, rows: Sequence[_Written]) -> None:
        self._run.put(rows)
        for row, _ in rows:
            self._under_way -= 1
            self._tally.row(row, self._under_way)

    def _report_share(self, images: int, share: float) -> None:
        self._tally.share(self._under_way + share * images)


# -- lanes

# Models of these libraries do not store anything about an image outside of the module.
_LIBRARIES = {"torch", "torchvision", "timm", "transformers", "open_clip"}
# With more lanes, Python's work between operations would block the other lanes.
_MOST_LANES = 4


class Lanes:
    """Parallel copies of a model that share its weights, each with its share of the CPU threads.

    Threads that share one operation wait for each other at its end and between operations. Threads that work on
    different images do not: without lanes, the default rollout of ViT-Ti on two threads took 1.22 to 1.31 times as
    long. A model with code from outside of the known libraries has one lane, since its copies may share state.

    Args:
        explainer: the explainer, which is the first lane. Without it, there is one lane.
        size: images in all lanes at once.
        several: False uses one lane with all threads, in the calling thread; so does a GPU.
    """

    def __init__(self, explainer: Explainer | None, size: int, *, several: bool = True) -> None:
        self._before = torch.get_num_threads()
        explainers: list[Any] = [explainer]
        if explainer is not None and several and explainer.device.type == "cpu":
            explainers += _copies(explainer, min(self._before, size, _MOST_LANES) - 1)
        share = partial(torch.set_num_threads, max(1, self._before // len(explainers)))
        self._threads = ThreadPoolExecutor(len(explainers), thread_name_prefix="vitflow-lane", initializer=share)
        self.count = len(explainers)
        self.batches = [Batches(lane, -(-size // self.count)) for lane in explainers]
        self._free: SimpleQueue[Batches] = SimpleQueue()
        for batches in self.batches:
            self._free.put(batches)

    def submit(self, work: Callable[[Batches], R]) -> Future[R]:
        """Submit work to the next free lane; a single lane computes it synchronously."""
        if self.count > 1:
            return self._threads.submit(self._run, work)
        done: Future[R] = Future()
        done.set_result(work(self.batches[0]))
        return done

    def _run(self, work: Callable[[Batches], R]) -> R:
        batches = self._free.get()
        try:
            return work(batches)
        finally:
            self._free.put(batches)

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
        or has_foreign_hooks(explainer.model)
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
