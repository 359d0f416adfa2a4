"""W_Oᵀ W_O of output projections, kept: it is the same for all pictures, and costs as much as a part of one."""

import threading
from collections import OrderedDict
from functools import lru_cache

import torch
from torch import Tensor

#: Matrices of more channels than this would take too much memory, and are not made.
MAX_CHANNELS = 1280
#: All matrices that are kept take no more memory than this; the least recently used ones go first.
KEPT_BYTES = 2**29

_Key = tuple[tuple[int, ...], torch.dtype, bytes]
_kept: OrderedDict[_Key, Tensor] = OrderedDict()
_lock = threading.Lock()


def gram_matrix(projection: Tensor) -> Tensor | None:
    """W_Oᵀ W_O of a projection [out, channels] in a processor's memory: [channels, channels], or None if too large.

    It is found again by what the projection does to one fixed vector: that tells weights apart that were changed in
    place, and finds those that are converted anew for each call.

    >>> gram_matrix(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 2.],
            [2., 4.]])
    """
    if projection.shape[1] > MAX_CHANNELS:
        return None
    projection = projection.detach()
    probe = _probe(projection.shape[1], projection.dtype)
    key = (tuple(projection.shape), projection.dtype, (projection @ probe).numpy().tobytes())
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    # An ordinary tensor, whatever mode it is first asked for in: later calls may be under another one.
    with torch.inference_mode(False), torch.no_grad():
        gram = projection.clone().T @ projection.clone() if projection.is_inference() else projection.T @ projection
    with _lock:
        _kept[key] = gram
        while sum(kept.nbytes for kept in _kept.values()) > KEPT_BYTES:
            _kept.popitem(last=False)
    return gram


@lru_cache(maxsize=16)
def _probe(channels: int, dtype: torch.dtype) -> Tensor:
    """Fixed numbers from −1 to 1 that no weights will be orthogonal to."""
    with torch.inference_mode(False):
        return torch.sin(torch.arange(1, channels + 1, dtype=torch.float64) ** 2).to(dtype)
