"""Rollout through windows and stages: one row of the product, without any matrix over all tokens.

A windowed layer is a block-sparse matrix over the tokens, and a stage that merges tokens is a pooling of them. The row
of the output is multiplied from the top layer down: it is gathered into windows and scattered back by token index, and
resampled from one patch grid to the next by area.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitflow.errors import OTHER_METHODS, UnsupportedModelError
from vitflow.images.geometry import overlaps
from vitflow.methods.fusion import (
    LargestValues,
    carry_rows,
    check_fraction,
    check_layer,
    check_readout,
    discard_low,
    larger_than,
    raw_attention,
    residual_shares,
)
from vitflow.methods.tokens import TokenLayout


@dataclass(frozen=True, slots=True, eq=False)
class LayerTokens:
    """Query and key tokens of one layer, with their layouts and windows.

    Attributes:
        queries: layout of the tokens that attend.
        keys: layout of the tokens that are attended to; coarser than `queries` if keys are pooled, finer if
            queries are.
        query_index: index in `queries` of each window's queries, [windows, queries], −1 for padding; None if one
            window contains all tokens in order. A token that is not a query of any window passes the layer unchanged.
        key_index: index in `keys` of each window's keys, [windows, keys], likewise.
    """

    queries: TokenLayout
    keys: TokenLayout
    query_index: Tensor | None = None
    key_index: Tensor | None = None

    @property
    def windows(self) -> int:
        """Number of windows of an image."""
        return 1 if self.key_index is None else len(self.key_index)

    @property
    def order(self) -> Tensor | None:
        """Index in `queries` of each token, if a single window has all of them, perhaps in another order."""
        index = None if self.query_index is None or self.windows > 1 else self.query_index[0]
        return index if index is not None and len(index) == self.queries.num_tokens else None

    @property
    def dense(self) -> bool:
        """True if all tokens attend to all tokens, in a single window and in order."""
        return self.queries == self.keys and self.query_index is None and self.key_index is None


def staged_rollout(
    matrices: Sequence[Tensor | LargestValues],
    tokens: Sequence[LayerTokens],
    *,
    readout: Tensor | Mapping[int, Tensor],
    discard_ratio: float | Sequence[float] = 0.0,
    residual: float = 0.5,
    start_layer: int = 1,
    additive: bool = False,
    passed: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, TokenLayout]:
    """Compute the row qᵀ Â_L ⋯ Â_s of attention rollout, for layers with windows and stages, and its layout.

    Each layer equals its dense matrix: Â = rownorm(α I + (1 − α) W), where W contains the probabilities of each window
    at its tokens, summed if windows overlap, and 0 at padding. If layers differ in their tokens, it is assumed that
    operations between attention layers (merging, convolution, pooling) preserve positions, and that each coarse token
    covers its area uniformly, regardless of the merge weights: the area in pixels if the extents of the layouts are
    measured, else an even share of the image. A class token that is added in a late layer keeps its share. The row has
    the finest layout of the layers down to s.

    Args:
        matrices: fused attention of each layer, [batch, windows, queries, keys], first layer first; or its largest
            values, if it has no windows.
        tokens: layouts of the tokens of each layer.
        readout: weight in the model's output of each token among the queries of the top layer, [batch, tokens]; or
            such weights of several layers by layer number, which are added to the row where it comes to that layer.
        discard_ratio: share of each layer's own entries between tokens, whose key is a patch, to set to 0; smallest
            first, ties by their position in the windows. Of all layers or of each.
        residual: α.
        start_layer: s, the first layer of the product.
        additive: multiply by I + W instead, without normalisation, as generic attention explainability does.
        passed: for each layer, mask of the tokens at its input that the layer below computed, bool [batch, tokens], or
            None for all. The columns of the others are 0: they were replaced or zeroed, and what they had is lost.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, §3.1, for the product; windows,
    shifts and merges as Liu et al., "Swin Transformer", ICCV 2021, §3 define them.

    >>> two = TokenLayout(0, 1, 2)
    >>> index = torch.tensor([[0], [1]])  # each token is a window of its own
    >>> windows = LayerTokens(two, two, index, index)
    >>> staged_rollout([torch.ones(1, 2, 1, 1)], [windows], readout=torch.tensor([[0.25, 0.75]]))[0]
    tensor([[0.2500, 0.7500]])
    """
    ratios = list(discard_ratio) if isinstance(discard_ratio, Sequence) else [discard_ratio] * len(matrices)
    check_fraction("residual", residual)
    for ratio in ratios:
        check_fraction("discard_ratio", ratio)
    layout, count = tokens[-1].queries, len(matrices)
    first = check_layer("start_layer", start_layer, count)
    readouts = dict(readout) if isinstance(readout, Mapping) else {count: readout}
    top = matrices[-1].values if isinstance(matrices[-1], LargestValues) else matrices[-1]
    row = top.new_zeros(len(top), layout.num_tokens)
    for number in range(count, 0, -1):
        layer = tokens[number - 1]
        if (weights := readouts.get(number)) is not None:
            row, layout = _at_least_as_fine(row, layout, layer.queries)
            weights = check_readout(weights, len(row), layer.queries.num_tokens).to(row)
            row = row + carry(weights, layer.queries, layout)
        if number <= first:
            continue
        step = ratios[number - 1], residual, additive
        matrix = matrices[number - 1]
        matrix = matrix.matrix.unsqueeze(1) if isinstance(matrix, LargestValues) else matrix
        row, layout = _through(row, layout, matrix, layer, *step)
        mask = None if passed is None else passed[number - 1]
        if mask is not None:
            row = row * _spread(mask.to(row), layer.keys, layout)
    return row, layout


def staged_attention(
    matrix: Tensor, tokens: Sequence[LayerTokens], *, layer: int, readout: Tensor, discard_ratio: float = 0.0
) -> tuple[Tensor, TokenLayout]:
    """Compute the readout's row qᵀ W_l of one layer without residual, and the layout of its keys.

    If layers differ in their tokens, the rows of W_l are normalised to 1. Arguments are as for `staged_rollout`.

    >>> one = TokenLayout(0, 1, 2)
    >>> dense = LayerTokens(one, one)
    >>> staged_attention(torch.eye(2)[None, None], [dense], layer=1, readout=torch.tensor([[1.0, 0.0]]))[0]
    tensor([[1., 0.]])
    """
    among = tokens[check_layer("layer", layer, len(tokens))]
    top = tokens[-1].queries
    if not top.num_suffix_tokens and all(each.dense and each.queries == top for each in tokens):
        prefix, whole = among.keys.num_prefix_tokens, matrix.squeeze(1)
        row = raw_attention(whole, readout=readout, discard_ratio=discard_ratio, num_prefix_tokens=prefix)
        return row, among.keys
    row = check_readout(readout, len(matrix), top.num_tokens).to(matrix)
    query_row = carry(row, top, among.queries)
    return _through(query_row, among.queries, matrix, among, discard_ratio, 0.0, additive=False)


def _through(
    row: Tensor,
    layout: TokenLayout,
    matrix: Tensor,
    layer: LayerTokens,
    discard_ratio: float,
    residual: float,
    additive: bool,
) -> tuple[Tensor, TokenLayout]:
    """Carry a row over the tokens of `layout` down through one layer."""
    if layer.dense and layout == layer.queries and not layout.num_suffix_tokens:  # the whole matrix, which is faster
        whole, rows = discard_low(matrix.squeeze(1), discard_ratio, layout.num_prefix_tokens), row.unsqueeze(1)
        rows = rows + torch.bmm(rows, whole) if additive else carry_rows(rows, whole, residual)
        return rows.squeeze(1), layout
    unlocated = layer.query_index is not None and bool((layer.query_index < 0).any())
    if layout.num_prefix_tokens and not layer.queries.num_prefix_tokens and unlocated:  # some may be the same tokens
        raise _prefix_error(0, layout.num_prefix_tokens)
    row, layout = _at_least_as_fine(row, layout, layer.queries)
    query_row = carry(row, layout, layer.queries)
    query_index, key_index = _indices(layer, matrix.device)
    valid = (query_index >= 0).unsqueeze(-1) & (key_index >= 0).unsqueeze(-2)  # [windows, queries, keys]
    weights = _discard(matrix.masked_fill(~valid, 0.0), valid, key_index, layer, discard_ratio)
    gathered = _pad(query_row)[:, query_index]  # [batch, windows, queries]
    if additive:
        passed, kept = gathered, torch.ones_like(query_row)
    else:
        sums = _scatter(weights.sum(dim=-1), query_index, layer.queries.num_tokens)  # of each row of W
        kept, factors = residual_shares(sums, residual)
        passed = gathered * _pad(factors)[:, query_index]
    arrived = _scatter((passed.unsqueeze(-2) @ weights).squeeze(-2), key_index, layer.keys.num_tokens)
    stayed = row * _spread(kept, layer.queries, layout)
    if layer.keys.num_patches > layout.num_patches:
        return carry(stayed, layout, layer.keys) + arrived, layer.keys
    return stayed + carry(arrived, layer.keys, layout), layout


def _at_least_as_fine(row: Tensor, layout: TokenLayout, queries: TokenLayout) -> tuple[Tensor, TokenLayout]:
    """Carry a row to the layout of the queries if it is finer, and to its prefix tokens."""
    if queries.num_patches <= layout.num_patches and queries.num_prefix_tokens == layout.num_prefix_tokens:
        return row, layout
    finer = max(layout, queries, key=lambda one: one.num_patches)
    finer = replace(finer, num_prefix_tokens=queries.num_prefix_tokens)
    return carry(row, layout, finer), finer


def _discard(weights: Tensor, valid: Tensor, key_index: Tensor, layer: LayerTokens, discard_ratio: float) -> Tensor:
    if discard_ratio == 0.0:
        return weights
    patches = layer.keys.patches
    among = valid & ((key_index >= patches.start) & (key_index < patches.stop)).unsqueeze(-2)
    entries = weights[:, among]  # [batch, entries]
    if count := int(discard_ratio * entries.shape[-1]):
        weights = weights.clone()
        weights[:, among] = entries * larger_than(entries, count)
    return weights


def _indices(layer: LayerTokens, device: torch.device) -> tuple[Tensor, Tensor]:
    """Query and key index, [windows, queries] and [windows, keys], also if they contain all tokens in order."""
    parts = []
    for index, layout in ((layer.query_index, layer.queries), (layer.key_index, layer.keys)):
        everything = torch.arange(layout.num_tokens, device=device).unsqueeze(0)
        parts.append(everything.expand(layer.windows, -1) if index is None else index.to(device))
    return parts[0], parts[1]


def _pad(row: Tensor) -> Tensor:
    """Append a 0 to a row, for index −1."""
    return torch.nn.functional.pad(row, (0, 1))


def _scatter(values: Tensor, index: Tensor, tokens: int) -> Tensor:
    """Add up values [batch, windows, n] at the tokens of `index` [windows, n]; padding is left out."""
    out = values.new_zeros(len(values), tokens + 1)
    slots = torch.where(index >= 0, index, tokens).flatten()
    return out.index_add_(1, slots, values.flatten(1))[:, :tokens]


def carry(row: Tensor, source: TokenLayout, target: TokenLayout) -> Tensor:
    """Carry a row over the tokens of one layout to another, by area: the sum over patches stays the same.

    Weights of prefix tokens are kept if the target has as many prefix tokens, and dropped if it has none.

    >>> carry(torch.tensor([[4.0, 8.0]]), TokenLayout(0, 1, 2), TokenLayout(0, 2, 4))
    tensor([[1., 1., 2., 2., 1., 1., 2., 2.]])
    """
    if source == target:
        return row
    counts = source.num_prefix_tokens, target.num_prefix_tokens
    if counts[0] != counts[1] and all(counts):
        raise _prefix_error(counts[1], counts[0])
    prefix = row.new_zeros(len(row), target.num_prefix_tokens)
    if counts[0] == counts[1]:
        prefix = row[:, : source.num_prefix_tokens]
    return torch.cat([prefix, _by_area(row, source, target, mean=False)], dim=1)


def _prefix_error(before: int, after: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The number of prefix tokens changes between layers, from {before} to {after}, and it is unknown which of "
        f"them stay. {OTHER_METHODS}"
    )


def _by_area(values: Tensor, source: TokenLayout, target: TokenLayout, *, mean: bool) -> Tensor:
    """Return each patch of the target as the sum (or mean) over patches of the source, weighted by overlapping area.

    Patches of a sum are shared among the cells of the target that they overlap; a mean is 1 where nothing overlaps.
    """
    grid = source.to_grid(values)
    measured = source.extent is not None and target.extent is not None
    down, across = (_shares(source, target, axis, mean).to(values) for axis in (0, 1))
    patches: Tensor = 1 + down @ (grid - 1) @ across.T if measured and mean else down @ grid @ across.T
    return patches.flatten(1)


def _shares(source: TokenLayout, target: TokenLayout, axis: int, mean: bool) -> Tensor:
    """Return the shares of overlap along an axis, [target, source]; columns sum to 1, or rows if `mean`."""
    counts = [(layout.rows, layout.cols)[axis] for layout in (source, target)]
    if source.extent is None or target.extent is None:
        edges = [torch.arange(count + 1, dtype=torch.float64).numpy() / count for count in counts]
        return torch.from_numpy(overlaps(*edges)) * counts[mean]
    edges = [span.edges(count) for span, count in zip((source.extent[axis], target.extent[axis]), counts, strict=True)]
    shared = torch.from_numpy(overlaps(*edges))
    totals = shared.sum(dim=int(mean), keepdim=True)
    return torch.where(totals > 0, shared / totals, 0.0)


def _spread(factors: Tensor, source: TokenLayout, target: TokenLayout) -> Tensor:
    """Return factors of tokens for another layout: means by area, [batch, tokens of target]."""
    if source == target:
        return factors
    return torch.cat([factors[:, : target.num_prefix_tokens], _by_area(factors, source, target, mean=True)], dim=1)
