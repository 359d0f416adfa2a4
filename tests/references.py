"""The definitions written out slowly, in float64, index by index: what the fast code is held against."""

import numpy as np
import torch
from numpy.typing import NDArray

from vitflow import Explainer
from vitflow.images.geometry import Placement

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


def balanced(matrix: Array) -> Array:
    """Rows to sum 1, then columns, until every row sums to 1 within 1e-13, however many rounds that takes."""
    result = matrix.copy()
    size = len(result)
    for _ in range(10_000):
        if all(abs(sum(result[i]) - 1) <= 1e-13 for i in range(size)) and not np.array_equal(result, matrix):
            break
        for i in range(size):
            result[i] = result[i] / sum(result[i])
        for j in range(size):
            result[:, j] = result[:, j] / sum(result[:, j])
    return result


def co_attention(layers: list[Array]) -> Array:
    """Head means among patches, [n, n] each → mean of S², S the symmetric part of the balanced matrix."""
    size = len(layers[0])
    result = np.zeros((size, size))
    for layer in layers:
        half = (balanced(layer) + balanced(layer).T) / 2
        for i in range(size):
            for j in range(size):
                result[i, j] += sum(half[i, k] * half[k, j] for k in range(size)) / len(layers)
    return result


def key_affinity(layers: list[Array]) -> Array:
    """Keys [n, width] of each layer → the balanced, symmetric fourth power of their mean cosines above 0."""
    size = len(layers[0])
    powers = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            cosines = [
                float(keys[i] @ keys[j]) / float(np.sqrt(keys[i] @ keys[i]) * np.sqrt(keys[j] @ keys[j]))
                for keys in layers
            ]
            powers[i, j] = max(sum(cosines) / len(cosines), 0.0) ** 4
    result = balanced(powers)
    rest = [(1 - sum(row)) / 2 for row in result]  # what the last round left
    return (result + result.T) / 2 + np.diag(rest)


def seen_mask(placement: Placement) -> NDArray[np.bool_]:
    """Which pixels of the original the model saw: [height, width]."""
    left, top, right, bottom = placement.seen_box
    mask = np.zeros(placement.image_size, dtype=np.bool_)
    mask[top:bottom, left:right] = True
    return mask


def patch_box(placement: Placement, row: int, col: int, rows: int, cols: int) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of one patch of a rows × cols grid, in pixels of the original image."""
    height, width = placement.input_size
    top, left = placement.to_image(row * height / rows, col * width / cols)
    bottom, right = placement.to_image((row + 1) * height / rows, (col + 1) * width / cols)
    return left, top, right, bottom


def among_visible(layers: list[Array], visible: NDArray[np.bool_], ratio: float, alpha: float = 0.5) -> Array:
    """Rollout of layers of [heads, N, N] in which each row discards its ⌊ratio · visible⌋ smallest visible entries."""
    size = layers[0].shape[-1]
    product = np.eye(size)
    for layer in layers:
        fused = fuse(layer, "mean")
        for i in range(size):
            entries = sorted((fused[i, j], j) for j in range(size) if visible[i, j])
            for _, j in entries[: int(np.floor(ratio * len(entries)))]:
                fused[i, j] = 0.0
            for j in range(size):
                fused[i, j] = fused[i, j] if visible[i, j] else 0.0
        product = residual(fused, alpha) @ product
    return product


def relative(actual: Array, reference: Array, entry: list[int] | None = None) -> Array:
    """Quotients row by row, 0/0 = 0, the row's own token left out, divided by their sum."""
    result = np.zeros_like(actual)
    for i, row in enumerate(actual):
        mine = i if entry is None else entry[i]
        for j in range(len(row)):
            result[i, j] = row[j] / reference[i, j] if reference[i, j] > 0 and j != mine else 0.0
        total = sum(result[i])
        result[i] = result[i] / total if total > 0 else result[i]
    return result


def logit_rounding(explainer: Explainer, image: NDArray[np.uint8]) -> float:
    """Return the tolerance of differences of an image's float32 logits for another order of summation."""
    with torch.no_grad():
        logits = explainer.logits(explainer.pixels(image))
    return 100 * torch.finfo(torch.float32).eps * float(logits.abs().max())


def mean_differences(kept: list[list[bool]], scores: list[float]) -> list[float]:
    """The mean score where each patch was kept, less the mean score where it was dropped; 0 where one is missing."""
    result = []
    for patch in range(len(kept[0])):
        having = [score for mask, score in zip(kept, scores, strict=True) if mask[patch]]
        lacking = [score for mask, score in zip(kept, scores, strict=True) if not mask[patch]]
        both = having and lacking
        result.append(sum(having) / len(having) - sum(lacking) / len(lacking) if both else 0.0)
    return result
