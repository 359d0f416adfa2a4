"""Compute many images together, as many as the memory holds, where one that fails takes no other along; progress."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from vitflow.errors import stops_all
from vitflow.explaining.choices import MethodChoice
from vitflow.explaining.explainer import Explainer

T = TypeVar("T")
R = TypeVar("R")

#: Pixels that wait for the model, or to be written, take no more memory than this each (and one image).
WAITING_BYTES = 192 * 2**20


class Batches:
    """Computes images together, and remembers how many at once the memory holds.

    Args:
        explainer: what computes them.
        size: how many at once are tried first.
    """

    def __init__(self, explainer: Explainer, size: int) -> None:
        self.explainer = explainer
        self.fits = size
        self._refuses: bool | None = None

    def parts(self, images: Iterable[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
        """Cut images into parts that the memory holds; where depends on nothing but the images themselves.

        Args:
            images: read one by one as they are needed.
            nbytes: memory of an image's pixels.
        """
        part: list[T] = []
        for image in images:
            part.append(image)
            if len(part) >= self.fits or sum(map(nbytes, part)) > WAITING_BYTES:
                yield part
                part = []
        if part:
            yield part

    def stops_all(self, error: Exception, methods: Sequence[MethodChoice]) -> bool:
        """Whether an error is that of every image that these methods are asked for.

        Where each image has a size of its own, a grey one of the model's size tells.
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
        self, images: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]], methods: Sequence[MethodChoice]
    ) -> Iterator[R | Exception]:
        """What `work` gives for each image, in order, or the error that is the image's own.

        Where memory runs out, half as many are computed together from there on, in later calls as well. Any other
        error lies with one of the images: the rest of this call goes one by one, to find out which.

        Args:
            images: what is worked on.
            work: gives one result for each.
            methods: what it computes.

        Raises:
            OptionError, UnsupportedModelError: no image can be computed this way.
        """
        alone, start = False, 0
        while start < len(images):
            members = images[start : start + (1 if alone else self.fits)]
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


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Where a run stands, for a progress callback: called at the start (without a row), then once per image.

    Attributes:
        done: images with a row, those of earlier runs included.
        total: images of the run.
        row: the newest row.
        under_way: how many more images' worth of work is done, as far as it is known. Methods that take long are told
            of in between, without a row.
    """

    done: int
    total: int
    row: Mapping[str, Any] | None
    under_way: float = 0.0


class Tally:
    """Counts the images of a run that have a row, and tells a callback where the run stands."""

    def __init__(self, tell: Callable[[RunProgress], None] | None, total: int, done: int = 0) -> None:
        self._tell, self._total, self.done = tell, total, done
        self.share(0.0)

    def row(self, row: Mapping[str, Any], under_way: float = 0.0) -> None:
        """One more image has a row."""
        self.done += 1
        self._say(row, under_way)

    def share(self, under_way: float) -> None:
        """So many more images' worth of work is done."""
        self._say(None, under_way)

    def _say(self, row: Mapping[str, Any] | None, under_way: float) -> None:
        if self._tell is not None:
            self._tell(RunProgress(self.done, self._total, row, under_way))
