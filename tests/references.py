"""The definitions written out slowly, in float64, index by index: what the fast code is held against."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def fuse(heads: Array, how: str) -> Array:
    """[heads, N, N] → [N, N]."""
    count, size, _ = heads.shape
    fused = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            values = [heads[h, i, j] for h in range(count)]
            fused[i, j] = {"mean": sum(values) / count, "max": max(values), "min": min(values)}[how]
    return fused


def discard(fused: Array, ratio: float, prefix: int) -> Array:
    """The ⌊ratio · N · n⌋ smallest entries of the patch columns become 0, ties by position."""
    size = len(fused)
    entries = sorted((fused[i, j], i, j) for i in range(size) for j in range(prefix, size))
    kept = fused.copy()
    for _, i, j in entries[: int(np.floor(ratio * len(entries)))]:
        kept[i, j] = 0.0
    return kept


def residual(fused: Array, alpha: float) -> Array:
    """rownorm(α I + (1 − α) W); a row without any attention becomes the identity's."""
    size = len(fused)
    result = np.zeros((size, size))
    for i in range(size):
        row = [(1 - alpha) * fused[i, j] + (alpha if i == j else 0.0) for j in range(size)]
        total = sum(row)
        for j in range(size):
            result[i, j] = row[j] / total if total > 0 else float(i == j)
    return result


def rollout(
    layers: list[Array], *, how: str = "mean", ratio: float = 0.0, alpha: float = 0.5, start: int = 1, prefix: int = 1
) -> Array:
    """Layers of [heads, N, N], first layer first → the full product [N, N]."""
    product = np.eye(layers[0].shape[-1])
    for layer in layers[start - 1 :]:
        product = residual(discard(fuse(layer, how), ratio, prefix), alpha) @ product
    return product
