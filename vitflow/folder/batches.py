"""Work on many pictures at once, as many as the memory holds, where one that fails takes no other along."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from vitflow.errors import stops_all
from vitflow.explaining.explainer import Explainer

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

    def each(self, pictures: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]]) -> Iterator[R | Exception]:
        """What `work` gives for each picture, in order, or the error that is the picture's own.

        Where memory runs out, half as many are computed together from there on, in later calls as well. Any other
        error lies with one of the pictures: the rest of this call goes one by one, to find out which.

        Raises:
            OptionError, UnsupportedModelError: no picture can be computed this way.
        """
        alone, start = False, 0
        while start < len(pictures):
            members = pictures[start : start + (1 if alone else self.fits)]
            try:
                found: Sequence[R | Exception] = work(members)
            except Exception as error:
                if stops_all(error, self.explainer.fit):
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
