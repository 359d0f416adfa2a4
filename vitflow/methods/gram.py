"""W_Oᵀ W_O of output projections, kept: it is the same for all pictures, and costs as much as a part of one."""

from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

#: Matrices of more channels than this would take too much memory, and are not made.
MAX_CHANNELS = 1280

# By the module that the projection belongs to: they live as long as it does, and take a small part of its memory.
_kept: WeakKeyDictionary[object, tuple[bytes, Tensor]] = WeakKeyDictionary()


def gram_matrix(projection: Tensor, owner: object | None) -> Tensor | None:
    """W_Oᵀ W_O of a projection [out, channels] in a processor's memory: [channels, channels].

    It is kept for its owner, and made again where the projection has another effect on one fixed vector: that tells
    weights apart that were changed in place, and knows those that are converted anew for each call.

    Args:
        projection: the weights W_O.
        owner: the module that they belong to, with which the matrix is forgotten.

    Returns:
        The matrix, or None if it is too large, or belongs to nobody and would be made for one call alone.

    >>> gram_matrix(torch.tensor([[1.0, 2.0]]), torch.nn.Identity())
    tensor([[1., 2.],
            [2., 4.]])
    """
    if owner is None or projection.shape[1] > MAX_CHANNELS:
        return None
    projection = projection.detach()
    probe = _probe(projection.shape[1], projection.dtype)
    effect = (projection @ probe).numpy().tobytes()
    known = _kept.get(owner)
    if known is not None and known[0] == effect:
        return known[1]
    # An ordinary tensor, whatever mode it is first asked for in: later calls may be under another one.
    with torch.inference_mode(False), torch.no_grad():
        gram = projection.clone().T @ projection.clone() if projection.is_inference() else projection.T @ projection
    _kept[owner] = effect, gram
    return gram


@lru_cache(maxsize=16)
def _probe(channels: int, dtype: torch.dtype) -> Tensor:
    """Fixed numbers from −1 to 1 that no weights will be orthogonal to."""
    with torch.inference_mode(False):
        return torch.sin(torch.arange(1, channels + 1, dtype=torch.float64) ** 2).to(dtype)
