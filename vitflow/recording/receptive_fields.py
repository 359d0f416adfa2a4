"""Receptive fields: the cells of a grid of tokens, from gradients of the tokens with respect to the pixels."""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.images.geometry import Extent, Span, even_extent

# Largest distance between a token and its place on a regular grid, in cells.
_TOLERANCE = 0.1
# Shares of the largest squared gradient below which a pixel is not assigned to a token, and is not seen at all.
_WEAK, _UNSEEN = 1e-8, 1e-14
# Largest distance of a token from its even cell, in cells and in standard deviations of its gradients, if its receptive
# field is the whole image.
_MOST_CELLS, _MOST_DEVIATIONS = 0.6, 2.0
_LOST = "of the patch in row {} and column {} from no pixel: it was dropped or replaced"

Edges = tuple[int, int]


class Misplaced(Exception):
    """A token is not at its place; the message says where it was found."""


class Unmeasured(Misplaced):
    """No token depends on the pixels, as behind attention to coarser tokens, which is replaced by zero."""


class Gradients:
    """Gradients of weighted sums of tokens [patches, channels] with respect to the pixels, each [channels, H, W]."""

    def __init__(self, patches: Tensor, noise: Tensor) -> None:
        random = torch.Generator().manual_seed(0)
        direction = torch.randn(patches.shape[1], generator=random, device="cpu").to(patches)
        self.noise, self.scores = noise, patches @ direction

    def of(self, weights: Tensor) -> NDArray[np.float64]:
        """Return the gradient of the sum of the tokens with these weights [patches]."""
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


def owners_of(gradients: Gradients, grid: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]] | None:
    """Return (row, column) of the token that each pixel belongs to, [2, H, W], and the seen pixels; None if shared.

    Tokens are weighted by 2 to the power of their row's or column's digits, by which a pixel's gradient is then
    multiplied, without rounding.
    """
    base = 8 if gradients.scores.dtype == torch.float16 else 128
    plain = gradients.of(torch.ones(len(gradients.scores), device="cpu"))
    energy = np.square(plain).sum(axis=0)
    if not np.isfinite(energy).all() or not energy.any():
        raise Unmeasured(_LOST.format(0, 0))
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


def tiled_extent(owners: NDArray[np.int64], seen: NDArray[np.bool_], grid: tuple[int, int]) -> Extent:
    """Return the extent of a grid whose tokens share no pixels; raise Misplaced if one has pixels of other cells."""
    known, wrong, owned = owners[0] >= 0, np.zeros(seen.shape, bool), np.zeros(grid, bool)
    spans, inside = list[Span](), list[NDArray[np.bool_]]()
    for axis, count in enumerate(grid):
        line = np.where(known, owners[axis], -1).max(axis=1 - axis)  # of each row or column of pixels
        places = np.flatnonzero(line >= 0)
        index, begins = np.unique(line[places], return_index=True)
        span = _regular(index, places[begins], places[np.append(begins[1:], 0) - 1] + 1)
        step = max(span.step, _TOLERANCE)  # it may be negative
        cells, margin = (np.arange(len(line)) + 0.5 - span.start) / step, _TOLERANCE + 0.5 / step
        low, high = (np.expand_dims(np.floor(cells + shift), 1 - axis) for shift in (-margin, margin))
        wrong |= known & ((owners[axis] < low) | (owners[axis] > high) | (span.step <= 0))
        edges, lit = span.edges(count), np.flatnonzero(seen.any(axis=1 - axis))
        inside.append((edges[:-1] < len(line)) & (edges[1:] > 0))
        spans.append(span._replace(first=int(lit[0]), last=int(lit[-1]) + 1))
    if wrong.any():
        y, x = np.argwhere(wrong)[0]
        row, col = owners[:, y, x]
        raise Misplaced(
            f"of the patch in row {row} and column {col} from the pixel ({x}, {y}): tokens are in another order"
        )
    owned[tuple(owners[:, known])] = True
    if (lost := np.logical_and.outer(*inside) & ~owned).any():
        raise Misplaced(_LOST.format(*np.argwhere(lost)[0]))
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


def overlapping_extent(gradients: Gradients, grid: tuple[int, int]) -> Extent:
    """Return the extent of a grid from the first and last pixels of the receptive fields of some tokens."""
    size = (gradients.noise.shape[-2], gradients.noise.shape[-1])
    fields = {place: gradients.of_token(place[0] * grid[1] + place[1]) for place in _samples(grid)}
    if not any(np.isfinite(energy).all() and energy.any() for energy in fields.values()):
        raise Unmeasured(_LOST.format(0, 0))
    boxes: dict[tuple[int, int], list[Edges]] = {}
    for (row, col), energy in fields.items():
        lit = energy > 0
        if not lit.any():
            raise Misplaced(_LOST.format(row, col))
        boxes[row, col] = [(int(line[0]), int(line[-1]) + 1) for line in map(np.flatnonzero, (lit.any(1), lit.any(0)))]
    spans = []
    for axis, (count, length) in enumerate(zip(grid, size, strict=True)):
        edges = {place: box[axis] for place, box in boxes.items()}
        sums = {place: energy.sum(axis=1 - axis) for place, energy in fields.items()}
        span = _aligned(edges, axis, count, length) or _whole(sums, axis, count, length)
        for place, weights in sums.items():
            _check_centre(weights, place, axis, span)
        spans.append(span)
    return spans[0], spans[1]


def _samples(grid: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield (row, column) of some tokens: in two corners, next to these, and random ones."""
    random = np.random.RandomState(0)
    places = [[min(max(each, 0), count - 1) for each in (0, 1, count - 2, count - 1)] for count in grid]
    others = [(random.randint(grid[0]), random.randint(grid[1])) for _ in range(2)]
    yield from dict.fromkeys([*zip(*places, strict=True), *others])


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


def _whole(sums: Mapping[tuple[int, int], NDArray[np.float64]], axis: int, count: int, length: int) -> Span:
    """Return the span of cells whose receptive fields are the whole image, given the gradients [pixels] of some tokens.

    Cells divide the image evenly; or, as strided convolutions drop its last pixels, their side is a power of 2:
    whichever is nearer to the centres of the gradients.
    """
    spans, side = [even_extent((count, count), (length, length))[0]], 2.0 ** int(math.log2(length / count))
    if length // side == count:
        spans.append(Span(0.0, side, 0, length))

    def error(span: Span) -> float:
        return sum((_centre(weights, span)[0] - place[axis] - 0.5) ** 2 for place, weights in sums.items())

    return min(spans, key=error)


def _centre(weights: NDArray[np.float64], span: Span) -> tuple[float, float]:
    """Return mean and standard deviation of gradients [pixels] in cells."""
    shares = weights / weights.sum()
    places = (np.arange(len(shares)) + 0.5 - span.start) / span.step
    centre = float((shares * places).sum())
    return centre, math.sqrt(float((shares * np.square(places - centre)).sum()))


def _check_centre(weights: NDArray[np.float64], place: tuple[int, int], axis: int, span: Span) -> None:
    """Raise Misplaced unless the centre of gradients [pixels] is near the cell of a token."""
    centre, deviation = _centre(weights, span)
    if not abs(centre - place[axis] - 0.5) <= max(_MOST_CELLS, _MOST_DEVIATIONS * deviation):
        raise Misplaced(
            f"of the patch in row {place[0]} and column {place[1]} from pixels around {('row', 'column')[axis]} "
            f"{centre:.1f} of the grid"
        )
