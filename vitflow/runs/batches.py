"""Work on many pictures at once, as many as the memory holds, where one that fails takes no other along; progress."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import nn

from vitflow.errors import stops_all
from vitflow.explaining.choices import MethodChoice
from vitflow.explaining.explainer import Explainer
from vitflow.recording.isolation import has_foreign_hooks

T = TypeVar("T")
R = TypeVar("R")

#: Pixels that wait for the model, or to be written, take no more memory than this each (and one picture).
WAITING_BYTES = 192 * 2**20


class Batches:
    """Computes pictures together, and remembers how many at once the memory holds.

    Args:
        explainer: what computes them.
        size: how many at once are tried first.
    """

    def __init__(self, explainer: Explainer, size: int) -> None:
        self.explainer = explainer
        self.fits = size
        self._refuses: bool | None = None

    def parts(self, pictures: Iterable[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
        """Cut pictures into parts that the memory holds; where depends on nothing but the pictures themselves.

        Args:
            pictures: read one by one as they are needed.
            nbytes: memory of a picture's pixels.
        """
        part: list[T] = []
        for picture in pictures:
            part.append(picture)
            if len(part) >= self.fits or sum(map(nbytes, part)) > WAITING_BYTES:
                yield part
                part = []
        if part:
            yield part

    def stops_all(self, error: Exception, methods: Sequence[MethodChoice]) -> bool:
        """Whether an error is that of every picture that these methods are asked for.

        Where each picture has a size of its own, a grey one of the model's size tells.
        """
        if not stops_all(error, self.explainer.fit) or self.explainer.fit != "native":
            return stops_all(error, self.explainer.fit)
        if self._refuses is None:
            try:
                self.explainer.explain_batch([self.explainer.grey()], methods=methods)
                self._refuses = False
            except Exception as own:
                self._refuses = stops_all(own, self.explainer.fit)
        return self._refuses

    def each(
        self, pictures: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]], methods: Sequence[MethodChoice]
    ) -> Iterator[R | Exception]:
        """What `work` gives for each picture, in order, or the error that is the picture's own.

        Where memory runs out, half as many are computed together from there on, in later calls as well. Any other
        error lies with one of the pictures: the rest of this call goes one by one, to find out which.

        Args:
            pictures: what is worked on.
            work: gives one result for each.
            methods: what it computes.

        Raises:
            OptionError, UnsupportedModelError: no picture can be computed this way.
        """
        alone, start = False, 0
        while start < len(pictures):
            members = pictures[start : start + (1 if alone else self.fits)]
            try:
                found: Sequence[R | Exception] = work(members)
            except Exception as error:
                if self.stops_all(error, methods):
                    raise
                # Its traceback holds the tensors that did not fit.
                found = [error.with_traceback(None)]
            memory_ran_out = isinstance(found[0], torch.OutOfMemoryError)
            if memory_ran_out and self.explainer.device.type == "cuda":
                torch.cuda.empty_cache()
            if isinstance(found[0], Exception) and len(members) > 1:
                alone = not memory_ran_out
                self.fits = (len(members) + 1) // 2 if memory_ran_out else self.fits
                continue
            yield from found
            start += len(members)


# Their models keep nothing of an image outside of themselves.
_LIBRARIES = {"torch", "torchvision", "timm", "transformers", "open_clip"}
# With more, what Python does between the operations of one would hold up the others.
_MOST_LANES = 4


class Lanes:
    """Copies of a model that share its weights, side by side, each on its share of the processor's threads.

    Threads that work on one operation together wait for each other at its end, and for all that is done between two
    operations. Those that work on images of their own do not: without lanes, the default rollout of ViT-Ti on two
    threads took 1.22 to 1.31 times as long. A model with code that is not a library's, whose copies may share what they
    keep of an image, has one lane.

    Args:
        explainer: what computes; the first lane is this very one.
        size: pictures in all lanes at once.
        several: False takes one lane with all threads, in the thread that calls. So does a GPU.
    """

    def __init__(self, explainer: Explainer, size: int, *, several: bool = True) -> None:
        self._before = torch.get_num_threads()
        count = min(self._before, size, _MOST_LANES) if several and explainer.device.type == "cpu" else 1
        explainers = [explainer, *_copies(explainer, count - 1)]
        share = partial(torch.set_num_threads, max(1, self._before // len(explainers)))
        self._threads = ThreadPoolExecutor(len(explainers), thread_name_prefix="vitflow-lane", initializer=share)
        self.count = len(explainers)
        self.batches = [Batches(one, -(-size // self.count)) for one in explainers]
        self._free: SimpleQueue[Batches] = SimpleQueue()
        for batches in self.batches:
            self._free.put(batches)

    def submit(self, work: Callable[[Batches], R]) -> Future[R]:
        """Have work done by the next lane that is free; a single lane does it here and now."""
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
        """End what has begun, start nothing more, and give the process its number of threads back."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self.count > 1:
            torch.set_num_threads(self._before)


def _copies(explainer: Explainer, count: int) -> list[Explainer]:
    """Explainers of copies of the model, with weights in the same memory; none of a model that cannot be copied so.

    Classes of the user, and hooks and methods that were put on the model, may hold on to the model itself, or to a
    place that all copies share.
    """
    weights = list(explainer.model.parameters())
    if (
        any(type(weight) is not nn.Parameter for weight in weights)
        or has_foreign_hooks(explainer.model)
        or any(type(one).__module__.partition(".")[0] not in _LIBRARIES for one in explainer.model.modules())
        or any(callable(getattr(type(one), name, None)) for one in explainer.model.modules() for name in vars(one))
    ):
        return []
    try:
        return [
            copy.deepcopy(explainer, {id(one): nn.Parameter(one.detach(), one.requires_grad) for one in weights})
            for _ in range(count)
        ]
    except Exception:  # a model may hold whatever its author likes
        return []


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Where a run stands, for a progress callback: called at the start (without a row), then once per picture.

    Attributes:
        done: pictures with a row, those of earlier runs included.
        total: pictures of the run.
        row: the newest row.
        under_way: how many more pictures' worth of work is done, as far as it is known. Methods that take long are told
            of in between, without a row.
    """

    done: int
    total: int
    row: Mapping[str, Any] | None
    under_way: float = 0.0


class Tally:
    """Counts the pictures of a run that have a row, and tells a callback where the run stands."""

    def __init__(self, tell: Callable[[RunProgress], None] | None, total: int, done: int = 0) -> None:
        self._tell, self._total, self.done = tell, total, done
        self.share(0.0)

    def row(self, row: Mapping[str, Any], under_way: float = 0.0) -> None:
        """One more picture has a row."""
        self.done += 1
        self._say(row, under_way)

    def share(self, under_way: float) -> None:
        """So many more pictures' worth of work is done."""
        self._say(None, under_way)

    def _say(self, row: Mapping[str, Any] | None, under_way: float) -> None:
        if self._tell is not None:
            self._tell(RunProgress(self.done, self._total, row, under_way))
