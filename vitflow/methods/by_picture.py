"""Compiled work on tensors in a processor's memory: as arrays, picture by picture, several pictures at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The numbers of a tensor in a processor's memory, row after row; a copy only where they do not lie so."""
    array: NDArray[Any] = tensor.detach().contiguous().numpy()
    return array


def each_picture(count: int, work: Callable[[int], Any]) -> list[Any]:
    """`work` for each picture by its number, several at once: compiled code lets other threads run."""
    workers = min(count, torch.get_num_threads())
    if workers <= 1:
        return [work(number) for number in range(count)]
    with ThreadPoolExecutor(workers, thread_name_prefix="vitflow-pictures") as threads:
        return list(threads.map(work, range(count)))
