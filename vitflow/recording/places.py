"""Places of tokens: the pixels of the model input that the tokens of each layer are computed from.

The model runs on noise, with recorded attention replaced by the identity. Gradients of the tokens with respect to the
pixels show where each token is: its grid gets an extent, or the model is refused if its tokens are not in raster order.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.images.extents import Extent, Span, even_extent
from vitflow.methods.tokens import TokenLayout
from vitflow.models.calls import tensors_in
from vitflow.models.parts import runs_compiled
from vitflow.recording.heads import block_paths_of
from vitflow.recording.isolation import Hook, hooked, trial, uncompiled
from vitflow.recording.layers import AttentionLayer
from vitflow.recording.probing import Call
from vitflow.recording.unseen import without_attention

# Largest distance between a token and its place on a regular grid, in cells.
_TOLERANCE = 0.1
# Shares of the largest squared gradient below which a pixel is not assigned to a token, and is not seen at all.
_WEAK, _UNSEEN = 1e-8, 1e-14
# Largest distance of a token from its even cell, in cells and in standard deviations of its gradients, if its receptive
# field is the whole image.
_MOST_CELLS, _MOST_DEVIATIONS = 0.6, 2.0

Edges = tuple[int, int]


class _Misplaced(Exception):
    """A token is not at its place; the message says where it was found."""


class _Unmeasured(_Misplaced):
    """No token depends on the pixels, as behind attention to coarser tokens, which is replaced by zero."""


class _Seen(Exception):
    """Ends a forward pass when the tokens of every layout are known."""


def place_layers(call: Call, layers: Sequence[AttentionLayer], names: Sequence[str]) -> str | None:
    """Measure the extents of the layouts of layers, and set them; return why tokens are not at their places, or None.

    Args:
        call: call of the unwrapped model.
        layers: its layers, some of which may be products of several.
        names: paths of all attention modules that ran, first layer first.
    """
    layouts = dict.fromkeys(layout for layer in layers for layout in (layer.tokens.queries, layer.tokens.keys))
    in_order = [layer for layer in layers if layer.tokens.key_index is None]
    sites = {
        block: tuple(
            dict.fromkeys(
                layout
                for layer in in_order
                if layer.name == name or layer.multiplied
                for layout in (layer.tokens.queries, layer.tokens.keys)
            )
        )
        for name, block in zip(names, block_paths_of(call.model, names), strict=True)
    }
    extents, refusal = find_extents(call, sites, tuple(layouts))
    if refusal is None:
        placed = {layout: replace(layout, extent=extents.get(layout)) for layout in layouts}
        for layer in layers:
            queries, keys = placed[layer.tokens.queries], placed[layer.tokens.keys]
            if keys.num_patches < queries.num_patches:  # pooled in this layer
                keys = replace(keys, extent=_pooled(queries, keys))
            layer.located = replace(layer.tokens, queries=queries, keys=keys)
    return refusal


def _pooled(queries: TokenLayout, keys: TokenLayout) -> Extent | None:
    """Return the extent of keys that are pooled from the queries' tokens, usually by 2 to a power.

    The last tokens may be left out, or padded.
    """
    if queries.extent is None:
        return None
    spans = []
    for span, fine, coarse in zip(queries.extent, (queries.rows, queries.cols), (keys.rows, keys.cols), strict=True):
        strides = [2**power for power in range(fine.bit_length())]
        fitting = (stride for stride in strides if coarse in (fine // stride, -(-fine // stride)))
        spans.append(span._replace(step=span.step * next(fitting, fine / coarse)))
    return spans[0], spans[1]


def find_extents(
    call: Call, sites: Mapping[str, Sequence[TokenLayout]], grids: Sequence[TokenLayout] = ()
) -> tuple[dict[TokenLayout, Extent], str | None]:
    """Measure the extents of layouts, each where it first fits; cached per model, layouts and input size.

    If each pixel belongs to one token, as with a patch embedding whose stride is its kernel, all tokens are tested.
    Otherwise the first and last pixels of the receptive fields of some tokens, partly random, determine the cells. If
    these fields are the whole image, cells divide it evenly.

    Args:
        call: call of the unwrapped model.
        sites: layouts in raster order that the input or output of modules may have, by path.
        grids: layouts that any of them may have as [batch, rows, cols, channels] or [batch, channels, rows, cols].

    Returns:
        The extents of the layouts that were found, and the reason why tokens are not in raster order, or None.
    """
    known, key = call.cache, (find_extents, tuple(sites.items()), grids, tuple(call.pixels.shape[1:]))
    if key not in known:
        extents, refusal = ({}, None) if call.pixels.is_meta else _measure(call, sites, grids)
        if refusal is not None:  # with one image, torch 2.14 returns wrong gradients of BatchNorm on a CPU (LeViT)
            extents, refusal = _measure(call, sites, grids, images=3)  # two would be compared by the probe
        known[key] = extents, refusal
    result: tuple[dict[TokenLayout, Extent], str | None] = known[key]
    return result


def _measure(
    call: Call, sites: Mapping[str, Sequence[TokenLayout]], grids: Sequence[TokenLayout], images: int = 1
) -> tuple[dict[TokenLayout, Extent], str | None]:
    tokens: dict[TokenLayout, tuple[str, Tensor]] = {}
    every = {*grids, *(layout for layouts in sites.values() for layout in layouts)}

    def see(path: str, *given: Any) -> None:
        for value in tensors_in(given):
            for layout in sites[path] if value.ndim == 3 else every:
                if layout not in tokens and (fitting := _tokens(value, layout, images)) is not None:
                    fitting = fitting.clone()  # the model may change it in place
                    if fitting.requires_grad:
                        tokens[layout] = path, fitting
        if len(tokens) == len(every):
            raise _Seen

    modules = [(path, call.model.get_submodule(path)) for path in sites]
    hooks = [
        Hook(module, partial(see, path), before=before, while_unrecorded=True)
        for path, module in modules
        for before in (True, False)
    ]
    compiled = uncompiled() if runs_compiled(call.model) else nullcontext()
    with torch.inference_mode(False), trial(call.model, call.pixels.device), torch.enable_grad(), compiled:
        noise = call.noise(1).requires_grad_()
        # The model may reject noise.
        with suppress(Exception), hooked(hooks), without_attention(call):
            call(noise.expand(images, -1, -1, -1))
        extents = {}
        for layout, (path, each) in tokens.items():
            try:
                extents[layout] = _extent(each[layout.patches], noise, (layout.rows, layout.cols))
                _check_prefix(each[: layout.patches.start], noise, extents[layout])
            except _Unmeasured as error:
                if not extents:
                    return {}, _refusal(call, path, layout, error)
            except _Misplaced as error:
                return {}, _refusal(call, path, layout, error)
    return extents, None


def _refusal(call: Call, path: str, layout: TokenLayout, error: _Misplaced) -> str:
    return (
        f"{type(call.model).__name__} computes the token {error} (of {layout.rows} × {layout.cols}, at {path}), so its "
        "maps would be misplaced. If its layout is another, pass layout=TokenLayout(num_prefix_tokens, rows, cols); "
        "otherwise use input_gradient or occlusion."
    )


def _tokens(value: Tensor, layout: TokenLayout, images: int) -> Tensor | None:
    """Return the tokens [tokens, channels] of the first image if a tensor has this layout, or None."""
    if not value.is_floating_point():
        return None
    if value.ndim == 3:
        if value.shape[:2] == (images, layout.num_tokens):
            return value[0]
        return value[:, 0] if value.shape[:2] == (layout.num_tokens, images) else None
    if value.ndim != 4 or len(value) != images or layout.num_tokens != layout.num_patches:
        return None
    last, first = (value.shape[axis : axis + 2] == (layout.rows, layout.cols) for axis in (1, 2))
    if last == first:
        return None
    return value[0].flatten(0, 1) if last else value[0].flatten(1).T


def _check_prefix(prefix: Tensor, noise: Tensor, extent: Extent) -> None:
    """Raise _Misplaced if patches that cover a part of the image come after tokens of other pixels."""
    sides = zip(extent, noise.shape[-2:], strict=True)
    if not len(prefix) or not prefix.requires_grad or all(span[2:] == (0, length) for span, length in sides):
        return
    [gradient] = torch.autograd.grad(prefix.square().sum(), noise, retain_graph=True, allow_unused=True)
    if gradient is not None and gradient.any():
        raise _Misplaced(
            f"of the patch in row 0 and column 0 after {len(prefix)} tokens, of which some are patches, too"
        )


class _Gradients:
    """Gradients of weighted sums of tokens [patches, channels] with respect to the pixels, each [channels, H, W]."""

    def __init__(self, patches: Tensor, noise: Tensor) -> None:
        random = torch.Generator().manual_seed(0)
        direction = torch.randn(patches.shape[1], generator=random, device="cpu").to(patches)
        self.noise, self.scores = noise, patches @ direction

    def of(self, weights: Tensor) -> NDArray[np.float64]:
        total = (self.scores * weights.to(self.scores)).sum()
        [gradient] = torch.autograd.grad(total, self.noise, retain_graph=True, allow_unused=True)
        gradient = torch.zeros_like(self.noise) if gradient is None else gradient
        array: NDArray[np.float64] = gradient[0].double().cpu().numpy()
        return array

    def of_token(self, index: int) -> NDArray[np.float64]:
        """Return the squared gradient of one token at each pixel, [H, W]."""
        one = torch.zeros(len(self.scores), device="cpu")
        one[index] = 1
        energy: NDArray[np.float64] = np.square(self.of(one)).sum(axis=0)
        return energy


def _extent(patches: Tensor, noise: Tensor, grid: tuple[int, int]) -> Extent:
    """Return the extent of a grid of tokens; raise _Misplaced if they are not in raster order."""
    gradients = _Gradients(patches, noise)
    owners = _owners(gradients, grid)
    if owners is not None:
        return _tiled(*owners, grid)
    return _overlapping(gradients, grid)


def _owners(gradients: _Gradients, grid: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]] | None:
    """Return (row, column) of the token that each pixel belongs to, [2, H, W], and the seen pixels.

    None if tokens share pixels. Tokens are weighted by 2 to the power of their row's or column's digits, by which a
    pixel's gradient is then multiplied, without rounding.

    Raises:
        _Misplaced: no token depends on the pixels.
    """
    base = 8 if gradients.scores.dtype == torch.float16 else 128
    plain = gradients.of(torch.ones(len(gradients.scores), device="cpu"))
    energy = np.square(plain).sum(axis=0)
    if not np.isfinite(energy).all() or not energy.any():
        raise _Unmeasured("of the patch in row 0 and column 0 from no pixel")
    strong = energy > _WEAK * energy.max()
    owners = np.full((2, *energy.shape), -1)
    for axis, index in enumerate(np.indices(grid).reshape(2, -1)):
        indices, digit = np.zeros(energy.shape), 1
        while digit <= index.max(initial=0):
            weights = 2.0 ** (index // digit % base - base // 2)
            weighted = gradients.of(torch.from_numpy(weights))
            with np.errstate(divide="ignore", invalid="ignore"):
                power = np.log2((weighted * plain).sum(axis=0) / energy) + base // 2
                apart = np.sqrt(np.square(weighted - plain * 2.0 ** (power - base // 2)).sum(axis=0) / energy)
            rounded = np.rint(power)
            exact = (np.abs(power - rounded) < _TOLERANCE) & (apart < _TOLERANCE * 2.0 ** (power - base // 2))
            if not exact[strong].all():
                return None
            indices, digit = indices + np.where(strong, rounded, 0) * digit, digit * base
        owners[axis][strong] = indices[strong]
    return owners, energy > _UNSEEN * energy.max()


def _tiled(owners: NDArray[np.int64], seen: NDArray[np.bool_], grid: tuple[int, int]) -> Extent:
    """Return the extent of a grid whose tokens share no pixels; raise _Misplaced for the first that is not in order."""
    known, spans = owners[0] >= 0, []
    for axis, count in enumerate(grid):
        line = np.where(known, owners[axis], count).min(axis=1 - axis)  # of each row or column of pixels
        other = np.where(known, owners[axis], -1).max(axis=1 - axis)
        places = np.flatnonzero(other >= 0)
        index, begins = np.unique(line[places], return_index=True)
        span = _regular(index, places[begins], places[np.append(begins[1:], 0) - 1] + 1)
        if span.step <= 0:
            raise _Misplaced(_where_misplaced(owners, grid))
        edges = span.edges(count)
        inside = (edges[:-1] < len(line)) & (edges[1:] > 0)
        expected = np.searchsorted(edges, places + 0.5, side="right") - 1
        near = np.minimum(*(np.abs(edges[(expected + k).clip(0, count)] - places - 0.5) for k in (0, 1)))
        wrong = (line[places] != other[places]) | ((line[places] != expected) & (near > _TOLERANCE * span.step + 0.5))
        if wrong.any() or not set(np.flatnonzero(inside)) <= set(index.tolist()):
            raise _Misplaced(_where_misplaced(owners, grid))
        lit = np.flatnonzero(seen.any(axis=1 - axis))
        spans.append(span._replace(first=int(lit[0]), last=int(lit[-1]) + 1))
    cells = np.unique(owners[0][known] * grid[1] + owners[1][known])
    rows, cols = (len(np.unique(each[known])) for each in owners)
    if len(cells) != rows * cols:
        raise _Misplaced(_where_misplaced(owners, grid))
    return spans[0], spans[1]


def _regular(index: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Span:
    """Return the span of the cells `index`, given their first pixels and ends; the first and the last may be cut."""
    widths = ends - begins
    if len(index) > 2:
        step = (begins[-1] - begins[1]) / (index[-1] - index[1])
    else:
        step = float(widths.max()) if len(set(widths.tolist())) > 1 else float(begins[-1] - begins[0] or widths[0])
    whole = int(widths.argmax())
    start = float((begins[whole] + ends[whole] - step) / 2 - index[whole] * step)
    return Span(start, float(step), int(begins[0]), int(ends[-1]))


def _where_misplaced(owners: NDArray[np.int64], grid: tuple[int, int]) -> str:
    """Describe the first token that is not where an even grid has it, and where it is."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    boxes: dict[tuple[int, int], str] = {}
    for row, col in np.ndindex(*grid):
        ys, xs = np.nonzero((owners[0] == row) & (owners[1] == col))
        if not len(ys):
            return f"of the patch in row {row} and column {col} from no pixel: it was dropped or replaced"
        middle = [(each.min() + each.max() + 1) / 2 for each in (ys, xs)]
        sides = zip(middle, grid, owners.shape[1:], strict=True)
        down, across = (min(int(centre * count / side), count - 1) for centre, count, side in sides)
        places[row, col] = down, across
        boxes[row, col] = f"the pixels ({xs.min()}, {ys.min()}) to ({xs.max()}, {ys.max()})"
    rows, cols = grid
    flips = (
        all(
            there == (rows - 1 - row if down else row, cols - 1 - col if across else col)
            for (row, col), there in places.items()
        )
        for down, across in ((True, False), (False, True), (True, True))
    )
    order = "tokens are flipped" if any(flips) else "tokens are in another order"
    place = next((place for place, there in places.items() if place != there), (0, 0))
    where = f"around row {places[place][0]} and column {places[place][1]}"
    return f"of the patch in row {place[0]} and column {place[1]} from {boxes[place]}, {where}: {order}"


# -- overlapping receptive fields -------------------------------------------------------------------------------------


def _overlapping(gradients: _Gradients, grid: tuple[int, int]) -> Extent:
    """Return the extent of a grid from the first and last pixels of the receptive fields of some tokens."""
    size = (gradients.noise.shape[-2], gradients.noise.shape[-1])
    fields = {place: gradients.of_token(place[0] * grid[1] + place[1]) for place in _samples(grid)}
    boxes: dict[tuple[int, int], list[Edges]] = {}
    for (row, col), energy in fields.items():
        lit = energy > 0
        if not lit.any():
            raise _Misplaced(f"of the patch in row {row} and column {col} from no pixel: it was dropped or replaced")
        boxes[row, col] = [(int(line[0]), int(line[-1]) + 1) for line in map(np.flatnonzero, (lit.any(1), lit.any(0)))]
    spans = []
    for axis, (count, length) in enumerate(zip(grid, size, strict=True)):
        span = _aligned({place: box[axis] for place, box in boxes.items()}, axis, count, length)
        spans.append(span or even_extent(grid, size)[axis])
    for place, energy in fields.items():
        for axis, span in enumerate(spans):
            _check_centre(energy.sum(axis=1 - axis), place, axis, span)
    return spans[0], spans[1]


def _samples(grid: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield (row, column) of some tokens: in three corners, next to two of them, and random ones."""
    random = np.random.RandomState(0)
    places = [[min(max(each, 0), count - 1) for each in (0, 1, count - 2, count - 1)] for count in grid]
    chosen = [*zip(*places, strict=True), (0, grid[1] - 1)]
    chosen += [(random.randint(grid[0]), random.randint(grid[1])) for _ in range(2)]
    yield from dict.fromkeys(chosen)


def _aligned(edges: Mapping[tuple[int, int], Edges], axis: int, count: int, length: int) -> Span | None:
    """Return the span of cells whose receptive fields have these edges; None if they do not determine one."""
    first, last = min(low for low, _ in edges.values()), max(high for _, high in edges.values())
    if count == 1:
        return Span(float(first), float(last - first), first, last)
    lows = {place: low for place, (low, _) in edges.items() if low > 0}
    highs = {place: high for place, (_, high) in edges.items() if high < length}
    steps = []
    for ends in (lows, highs):
        by_index = sorted((place[axis], end) for place, end in ends.items())
        if by_index and by_index[-1][0] > by_index[0][0]:
            steps.append((by_index[-1][1] - by_index[0][1]) / (by_index[-1][0] - by_index[0][0]))
    if not steps or not lows or not highs:
        return None
    step = float(np.mean(steps))
    begins = [  # a dead unit may shorten a receptive field
        float(furthest([end - place[axis] * step for place, end in ends.items()]))
        for furthest, ends in ((np.min, lows), (np.max, highs))
    ]
    for place, both in edges.items():
        for begin, edge in zip(begins, both, strict=True):
            expected = min(max(begin + place[axis] * step, 0.0), length)
            if step <= 0 or abs(edge - expected) > _TOLERANCE * step + 0.5:
                return None
    if math.isclose(step * count, length, rel_tol=1e-3) and begins[0] <= 0.5 and begins[1] >= step - 0.5:
        # Padded strided convolutions: each receptive field contains its cell of an even grid. Cells around the centres
        # of the fields would leave the last pixels without a cell, and give those at the other end too much weight.
        return Span(0.0, length / count, first, last)
    return Span((begins[0] + begins[1] - step) / 2, step, first, last)


def _check_centre(weights: NDArray[np.float64], place: tuple[int, int], axis: int, span: Span) -> None:
    """Raise _Misplaced unless the centre of gradients [pixels] is near the cell of a token."""
    shares = weights / weights.sum()
    places = (np.arange(len(shares)) + 0.5 - span.start) / span.step
    centre = float((shares * places).sum())
    deviation = math.sqrt(float((shares * np.square(places - centre)).sum()))
    if not abs(centre - place[axis] - 0.5) <= max(_MOST_CELLS, _MOST_DEVIATIONS * deviation):
        raise _Misplaced(
            f"of the patch in row {place[0]} and column {place[1]} from pixels around {('row', 'column')[axis]} "
            f"{centre:.1f} of the grid"
        )
