"""Batch computation that adapts to memory and isolates failing images; progress of runs."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from vitflow.errors import stops_all
from vitflow.explaining.explainer import Explainer
from vitflow.registry.choices import MethodChoice

T = TypeVar("T")
R = TypeVar("R")

#: Memory limit of the pixels waiting for the model, and of those waiting to be written (plus one image).
WAITING_BYTES = 192 * 2**20


def in_order(futures: Iterable[Future[R]], most: int, nbytes: Callable[[R], int] = lambda result: 0) -> Iterator[R]:
    """Yield results in order; futures are submitted ahead, at most `most` and about WAITING_BYTES of results.

    Args:
        futures: submitted when they are iterated.
        most: maximal number of futures that wait.
        nbytes: returns the memory that a result occupies.
    """
    waiting: deque[Future[R]] = deque()
    for future in futures:
        waiting.append(future)
        while len(waiting) > most or sum(nbytes(each.result()) for each in waiting if each.done()) > WAITING_BYTES:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class Batches:
    """Compute images in batches, and remember the batch size that fits into memory.

    Args:
        explainer: the explainer that computes them.
        size: initial batch size.
    """

    def __init__(self, explainer: Explainer, size: int) -> None:
        self.explainer = explainer
        self.fits = size
        self._refuses: bool | None = None

    def stops_all(self, error: Exception, methods: Sequence[MethodChoice]) -> bool:
        """Return True if every image would raise this error with these methods.

        With fit="native", where image sizes differ, this is tested on a grey image of the model's size.
        """
        if not stops_all(error, self.explainer.fit) or self.explainer.fit != "native":
            return stops_all(error, self.explainer.fit)
        if self._refuses is None:
            try:
                self.explainer.explain_batch([self.explainer.inputs.grey()], methods=methods)
                self._refuses = False
            except Exception as probe_error:
                self._refuses = stops_all(probe_error, self.explainer.fit)
        return self._refuses

    def each(
        self, images: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]], methods: Sequence[MethodChoice]
    ) -> Iterator[R | Exception]:
        """Yield the result of `work` for each image in order, or the image's error.

        If memory runs out, the batch size is halved, in later calls as well. After any other error, the rest of this
        call computes image by image, to attribute the error.

        Args:
            images: the images.
            work: returns one result per image.
            methods: the methods that it computes.

        Raises:
            OptionError, UnsupportedModelError: no image can be computed with these options.
        """
        one_by_one, start = False, 0
        while start < len(images):
            members = images[start : start + (1 if one_by_one else self.fits)]
            try:
                results: Sequence[R | Exception] = work(members)
            except Exception as error:
                if self.stops_all(error, methods):
                    raise
                # The traceback references the tensors that did not fit.
                results = [error.with_traceback(None)]
            memory_ran_out = isinstance(results[0], torch.OutOfMemoryError)
            if memory_ran_out and self.explainer.device.type == "cuda":
                torch.cuda.empty_cache()
            if isinstance(results[0], Exception) and len(members) > 1:
                one_by_one = not memory_ran_out
                self.fits = (len(members) + 1) // 2 if memory_ran_out else self.fits
                continue
            yield from results
            start += len(members)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Progress of a run, passed to the callback at the start (without a row), then once per image.

    Attributes:
        done: images with a row, including those of earlier runs.
        total: images of the run.
        row: the newest row.
        under_way: further work done, in images, as far as it is known. Slow methods report it between rows, without a
            row.
        seconds: expected duration of the whole run, once it is known.
    """

    done: int
    total: int
    row: Mapping[str, Any] | None
    under_way: float = 0.0
    seconds: float | None = None


class Tally:
    """Count the images of a run that have a row, and report progress to a callback."""

    def __init__(self, callback: Callable[[RunProgress], None] | None, total: int, done: int = 0) -> None:
        self._callback, self._total, self.done = callback, total, done
        self.seconds: float | None = None
        self.share(0.0)

    def row(self, row: Mapping[str, Any], under_way: float = 0.0) -> None:
        """Count an image that has a row now."""
        self.done += 1
        self._report(row, under_way)

    def share(self, under_way: float) -> None:
        """Report further work done, in images."""
        self._report(None, under_way)

    def _report(self, row: Mapping[str, Any] | None, under_way: float) -> None:
        if self._callback is not None:
            self._callback(RunProgress(self.done, self._total, row, under_way, self.seconds))
