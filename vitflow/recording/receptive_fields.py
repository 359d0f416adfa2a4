"""Receptive fields: the cells of a grid of tokens, from gradients of the tokens with respect to the pixels."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.images.geometry import Extent, Span, even_extent

# Largest distance between a token and its place on a regular grid, in cells.
_TOLERANCE = 0.1
# Share of the largest squared gradient below which a pixel is not assigned to a token.
_WEAK = 1e-8
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


def measured_extent(gradients: Gradients, grid: tuple[int, int]) -> Extent:
    """Return the extent of a grid from the first and last pixels of the receptive fields of some tokens.

    If these are not larger than a cell, each pixel belongs to one token, and the pixels of all tokens are tested.
    """
    fields = {place: gradients.of_token(place[0] * grid[1] + place[1]) for place in _samples(grid)}
    if not any(np.isfinite(energy).all() and energy.any() for energy in fields.values()):
        raise Unmeasured(_LOST.format(0, 0))
    lit = {place: energy > 0 for place, energy in fields.items()}
    if (dark := next((place for place, seen in lit.items() if not seen.any()), None)) is not None:
        raise Misplaced(_LOST.format(*dark))
    spans = []
    for axis, (count, length) in enumerate(zip(grid, gradients.noise.shape[-2:], strict=True)):
        lines = {place: np.flatnonzero(seen.any(axis=1 - axis)) for place, seen in lit.items()}
        edges = {place: (int(line[0]), int(line[-1]) + 1) for place, line in lines.items()}
        sums = {place: energy.sum(axis=1 - axis) for place, energy in fields.items()}
        span = _aligned(edges, axis, count, length) or _whole(sums, axis, count, length)
        for place, weights in sums.items():
            _check_centre(weights, place, axis, span)
        spans.append(span)
    cell = spans[0].step * spans[1].step
    if max(seen.sum() for seen in lit.values()) <= (1 + _TOLERANCE) * cell:
        _check_pixels(gradients, grid, spans)
    return spans[0], spans[1]


def _check_pixels(gradients: Gradients, grid: tuple[int, int], spans: Sequence[Span]) -> None:
    """Raise Misplaced unless each pixel belongs to the token of its cell, and each cell has a pixel.

    Tokens are weighted by 2 to the power of the digits of their number, by which a pixel's gradient is then multiplied,
    without rounding.
    """
    plain = gradients.of(torch.ones(len(gradients.scores), device="cpu"))
    energy = np.square(plain).sum(axis=0)
    places = [
        (np.arange(length) + 0.5 - span.start) / span.step for length, span in zip(energy.shape, spans, strict=True)
    ]
    rows, cols = np.meshgrid(*places, indexing="ij")  # in cells
    inner = np.maximum(np.abs(rows % 1 - 0.5), np.abs(cols % 1 - 0.5)) < 0.5 - _TOLERANCE
    tokens = np.ravel_multi_index((rows.astype(int), cols.astype(int)), grid, mode="clip")
    known, wrong, numbers = energy > _WEAK * energy.max(), np.zeros(energy.shape, bool), np.arange(grid[0] * grid[1])
    digit, base = 1, 8 if gradients.scores.dtype == torch.float16 else 128
    while digit < len(numbers):
        weights = 2.0 ** (numbers // digit % base - base // 2)
        weighted = gradients.of(torch.from_numpy(weights)) / weights[tokens]
        wrong |= np.square(weighted - plain).sum(axis=0) > _TOLERANCE * energy
        digit *= base
    if (misplaced := tokens[wrong & known & inner]).size:
        row, col = divmod(int(misplaced[0]), grid[1])
        raise Misplaced(f"of the patch in row {row} and column {col} from other pixels: tokens are in another order")
    if (lost := np.setdiff1d(tokens[inner], tokens[known])).size:
        raise Misplaced(_LOST.format(*divmod(int(lost[0]), grid[1])))


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
    lows = {place: low for place, (low, _) in edges.items() if low > first}  # others may be cut
    highs = {place: high for place, (_, high) in edges.items() if high < last}
    steps = []
    for ends in (lows, highs):
        by_index = sorted((place[axis], end) for place, end in ends.items())
        if by_index and by_index[-1][0] > by_index[0][0]:
            steps.append((by_index[-1][1] - by_index[0][1]) / (by_index[-1][0] - by_index[0][0]))
    if not lows or not highs:
        return None
    if not steps and set(lows.values()) == set(highs.values()):  # of two cells that share an edge
        steps = [max(high - low for low, high in edges.values())]
    if not steps:
        return None
    step = float(np.mean(steps))
    begins = [  # a dead unit may shorten a receptive field
        float(furthest([end - place[axis] * step for place, end in ends.items()]))
        for furthest, ends in ((np.min, lows), (np.max, highs))
    ]
    for place, both in edges.items():
        for begin, edge in zip(begins, both, strict=True):
            expected = min(max(begin + place[axis] * step, first), last)
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
            f"{centre:.1f} of the grid: tokens are in another order"
        )
