"""The steps of rollout on a processor, compiled: each layer's matrix is read once, and nothing of its size is written.

The formulas are those of `values` and `fusion`, which stay the reference and serve every other device and precision.
What is compiled is for float32 in a processor's memory, where the time goes into reading and writing, not into sums.
One small picture is done by NumPy before numba would be loaded. Both take their sums in float64, and round everything
else alike, so that they differ in the last bit of a number now and then, and mostly not at all.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.compiled import compiled_loosely, worth_compiling

Floats = NDArray[np.float32]

_FUSIONS = {"mean": 0, "max": 1, "min": 2}
# Factors up to here times attention stay finite in float32.
_LARGE = 1e30


def in_memory(*tensors: Tensor) -> bool:
    """Whether all tensors are float32 in a processor's memory, and no gradient shall pass."""
    return all(
        tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and not (tensor.requires_grad and torch.is_grad_enabled())
        for tensor in tensors
    )


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


def fuse_products(lengths: Tensor, attention: Tensor, head_fusion: str, out: Tensor | None = None) -> Tensor:
    """Fuse (lengths)⁺ ⊙ attention over the heads, and divide each row by its own sum.

    A row with nothing above zero becomes the row of the identity, or zero where queries are not keys.

    Args:
        lengths: what each entry of attention counts, up to a factor per query, [batch, heads, queries, keys]; finite.
        attention: [batch, heads, queries, keys].
        head_fusion: "mean", "max" or "min".
        out: where to write the result; by default a tensor of its own.

    Returns:
        [batch, queries, keys], the same as `normalize_rows(fuse_heads(lengths.clamp_min(0) * attention, head_fusion))`.

    >>> fuse_products(torch.tensor([[[[1.0, 2.0]], [[-1.0, 9.0]]]]), torch.full((1, 2, 1, 2), 0.5), "max")
    tensor([[[0.1000, 0.9000]]])
    """
    batch, _, queries, keys = attention.shape
    fused = torch.empty(batch, queries, keys) if out is None else out
    fuse = _fuse if worth_compiling(batch * queries * keys) else _fuse_plainly
    fuse(as_array(lengths), as_array(attention), _FUSIONS[head_fusion], fused.numpy())
    return fused


def carry_rows(
    rows: Tensor, layers: Sequence[Tensor], *, discard_ratio: float, residual: float, num_prefix_tokens: int
) -> Tensor:
    """Carry each picture's row down through the layers: qᵀ Â_L ⋯ Â_s, where Â = rownorm(α I + (1 − α) discard(W)).

    Args:
        rows: q of each picture, [batch, tokens].
        layers: fused attention W of each layer, [batch, tokens, tokens], first layer first; finite and not negative.
        discard_ratio, residual, num_prefix_tokens: as for `attention_rollout`.

    Returns:
        [batch, tokens].

    >>> layer = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> carry_rows(torch.tensor([[1.0, 0.0]]), [layer], discard_ratio=0.0, residual=0.5, num_prefix_tokens=1)
    tensor([[0.7500, 0.2500]])
    """
    matrices, starts = [as_array(layer) for layer in layers], as_array(rows)
    carried = np.empty_like(starts)
    multiply = _multiply if worth_compiling(matrices[0].size) else _multiply_plainly

    def carry(picture: int) -> None:
        row = starts[picture]
        for matrix in reversed(matrices):
            row = _carry(row, matrix[picture], discard_ratio, residual, num_prefix_tokens, multiply)
        carried[picture] = row

    each_picture(len(starts), carry)
    return torch.from_numpy(carried)


def _carry(row: Floats, matrix: Floats, discard_ratio: float, residual: float, prefix: int, multiply: Any) -> Floats:
    """One picture's row through one layer."""
    limit = np.float32(-1.0)
    patches = matrix[:, prefix:]
    count = int(discard_ratio * patches.size)
    if count:
        bits, equals_stay = _select(matrix.view(np.int32), prefix, count)
        limit = bits.view(np.float32)  # what is larger stays
        if equals_stay and limit > 0:
            matrix = matrix.copy()
            equals = np.flatnonzero(patches == limit)
            rows, columns = np.divmod(equals[: len(equals) - equals_stay], patches.shape[1])
            matrix[rows, columns + prefix] = 0.0
            limit = np.nextafter(limit, np.float32(0.0))
    arrived = np.zeros_like(row)
    multiply(row, matrix, prefix, limit, residual, arrived)
    return arrived


@compiled_loosely
def _fuse(lengths: Any, attention: Any, fusion: int, fused: Any) -> None:
    """`fuse_products` into `fused`."""
    batch, heads, queries, keys = attention.shape
    zero = np.float32(0.0)
    # From one row to the other and back: compilers do not vectorise a maximum that is written where it is read.
    other = np.empty(keys, np.float32)
    for picture in range(batch):
        for query in range(queries):
            row = fused[picture, query]
            old, new = other, row
            if heads % 2 == 0:
                old, new = row, other  # the last head writes into `row`
            for head in range(heads):
                length, share = lengths[picture, head, query], attention[picture, head, query]
                if head == 0:
                    for key in range(keys):
                        towards = length[key]
                        new[key] = (towards if towards > zero else zero) * share[key]
                elif fusion == 0:
                    for key in range(keys):
                        towards = length[key]
                        new[key] = old[key] + (towards if towards > zero else zero) * share[key]
                elif fusion == 1:
                    for key in range(keys):
                        towards, before = length[key], old[key]
                        product = (towards if towards > zero else zero) * share[key]
                        new[key] = product if product > before else before
                else:
                    for key in range(keys):
                        towards, before = length[key], old[key]
                        product = (towards if towards > zero else zero) * share[key]
                        new[key] = product if product < before else before
                old, new = new, old
            total = 0.0
            for key in range(keys):
                total += row[key]
            largest = row[0]
            for key in range(keys):
                largest = max(largest, row[key])
            if not total > 0.0 and largest <= zero:
                for key in range(keys):
                    row[key] = zero
                if queries == keys:
                    row[query] = np.float32(1.0)
                continue
            # Attention that was mixed after its softmax may be negative, and so may the sum.
            factor = 1.0 / total if total != 0.0 else np.nan
            for key in range(keys):
                row[key] = np.float32(row[key] * factor)


def _fuse_plainly(lengths: Floats, attention: Floats, fusion: int, fused: Floats) -> None:
    """`_fuse` by NumPy."""
    products = np.maximum(lengths, np.float32(0.0))
    products *= attention
    joined = (np.add, np.maximum, np.minimum)[fusion].reduce(products, axis=1)  # in their order, as compiled
    totals = joined.sum(axis=-1, dtype=np.float64, keepdims=True)
    empty = (~(totals > 0.0) & (joined.max(axis=-1, keepdims=True) <= 0.0))[..., 0]
    totals[totals == 0.0] = np.nan
    np.multiply(joined, 1.0 / totals, out=fused, casting="same_kind")
    fused[empty] = 0.0
    if fused.shape[1] == fused.shape[2]:
        pictures, queries = np.nonzero(empty)
        fused[pictures, queries, queries] = 1.0


def _select(bits: NDArray[np.int32], prefix: int, count: int) -> tuple[np.int32, int]:
    """The count-th smallest of the entries from column `prefix` on, and how many entries like it are larger in rank.

    Entries are the bits of float32 numbers that are not negative, which have the order of the numbers. Only those that
    share their upper half with the one that is looked for are sorted.
    """
    entries = bits[:, prefix:].ravel() & 0x7FFFFFFF
    uppers = entries >> 16
    below = np.bincount(uppers).cumsum()
    upper = int(np.searchsorted(below, count))
    alike = np.sort(entries[uppers == upper])
    rank = count - (int(below[upper - 1]) if upper else 0) - 1
    return alike[rank], int(np.searchsorted(alike, alike[rank], side="right")) - (rank + 1)


@compiled_loosely
def _multiply(row: Any, matrix: Any, prefix: int, limit: Any, residual: float, arrived: Any) -> None:
    """Add row · Â to `arrived`, for the matrix without what is at most `limit` in the columns of patches."""
    zero, share = np.float32(0.0), 1.0 - residual
    stays = np.zeros(row.size, np.float32)  # what the residual connection keeps of each token
    prefix_arrived, patches_arrived = arrived[:prefix], arrived[prefix:]
    for token in range(row.size):
        weight = row[token]
        if weight == zero:
            continue
        to_prefix, to_patches = matrix[token, :prefix], matrix[token, prefix:]
        total: Any = 0.0
        for key in range(to_prefix.size):
            total += to_prefix[key]
        for key in range(to_patches.size):
            value = to_patches[key]
            total += value if value > limit else zero
        if not total > 0.0:
            stays[token] = weight  # nothing is left of this row: the identity's
            continue
        whole = residual + share * total
        exact = weight * share / whole
        if exact < _LARGE:
            factor = np.float32(exact)
            for key in range(to_prefix.size):
                prefix_arrived[key] += factor * to_prefix[key]
            for key in range(to_patches.size):
                value = to_patches[key]
                patches_arrived[key] += factor * (value if value > limit else zero)
        else:  # a row of the smallest numbers
            for key in range(matrix.shape[1]):
                if key < prefix or matrix[token, key] > limit:
                    arrived[key] += np.float32(exact * matrix[token, key])
        stays[token] = np.float32(weight * residual / whole)
    for token in range(row.size):
        arrived[token] += stays[token]


def _multiply_plainly(row: Floats, matrix: Floats, prefix: int, limit: Any, residual: float, arrived: Floats) -> None:
    """`_multiply` by NumPy."""
    kept = np.where(matrix > limit, matrix, np.float32(0.0))
    kept[:, :prefix] = matrix[:, :prefix]
    totals = kept.sum(axis=1, dtype=np.float64)
    empty = ~(totals > 0.0)
    whole = np.where(empty, 1.0, residual + (1.0 - residual) * totals)
    weights = row.astype(np.float64)
    exact = np.where(empty, 0.0, weights * (1.0 - residual) / whole)
    large = exact >= _LARGE
    np.sum(np.where(large, 0.0, exact).astype(np.float32)[:, None] * kept, axis=0, out=arrived)
    for token in np.flatnonzero(large):  # rows of the smallest numbers
        arrived += (exact[token] * kept[token]).astype(np.float32)
    arrived += np.where(empty, weights, weights * residual / whole).astype(np.float32)
