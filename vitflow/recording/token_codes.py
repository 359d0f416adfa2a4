"""Codes of tokens: which tokens are changed in which image of an experiment, and which tokens of a tensor then differ.

Image 0 is noise. In each further image the tokens whose code has this bit are changed. A token that is computed from
itself alone then differs from that of image 0 in the images of its own code; one that is computed from others has
their bits as well. Each bit has its complement, so that all codes have the same weight and none contains another.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vitflow.methods.staged_rollout import LayerTokens
from vitflow.methods.tokens import TokenLayout

# A token differs if it does by more than this share of its largest difference, and of its size: by more than rounding.
_CHANGED, _ROUNDING = 1e-3, 2e-5
_HALF_CHANGED, _HALF_ROUNDING = 3e-2, 2e-2
# The least size of what is added to changed tokens, as tokens of models with random weights may be nearly 0.
_LEAST = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One way to read a tensor as the tokens of several images.

    Attributes:
        arrange: rearranges the tensor to [images, places, channels].
        restore: the inverse of `arrange`.
        index: token of the layout at each place, −1 for padding, [places]; None if the places are the tokens in order.
        sequence: True for a sequence of all tokens, in the order of the model.
    """

    layout: TokenLayout
    arrange: Callable[[Tensor], Tensor]
    restore: Callable[[Tensor], Tensor]
    index: Tensor | None = None
    sequence: bool = False


def readings(value: Tensor, layout: TokenLayout, images: int) -> Iterator[Reading]:
    """Yield the readings of a tensor as tokens of a layout: sequence, sequence first, channels last and first."""
    count, shape, square = layout.num_tokens, value.shape, layout.num_tokens == layout.num_patches
    if value.ndim == 3:
        if shape[:2] == (images, count):
            yield Reading(layout, lambda tensor: tensor, lambda tensor: tensor, sequence=True)
        if shape[:2] == (count, images):
            yield Reading(layout, lambda each: each.transpose(0, 1), lambda each: each.transpose(0, 1), sequence=True)
        if shape[::2] == (images, count):
            yield Reading(layout, lambda tensor: tensor.mT, lambda tensor: tensor.mT, sequence=True)
    grid = (layout.rows, layout.cols)
    if value.ndim == 4 and square and len(value) == images:
        if shape[1:3] == grid:
            yield Reading(layout, lambda tensor: tensor.flatten(1, 2), lambda tensor: tensor.unflatten(1, grid))
        if shape[2:] == grid:
            yield Reading(layout, lambda tensor: tensor.flatten(2).mT, lambda tensor: tensor.mT.unflatten(2, grid))


def window_reading(value: Tensor, tokens: LayerTokens, images: int, *, heads: bool = False) -> Reading | None:
    """Return the reading of a tensor by the windows of a layer; None if it has another shape.

    It is [images · windows, keys, channels] or [images, windows, keys, channels]; with `heads`, values
    [images · windows, heads, keys, width], whose heads are read as channels.
    """
    index, layout = tokens.key_index, tokens.keys
    windows, keys = (1, layout.num_tokens) if index is None else index.shape
    places = None if index is None else index.flatten()
    split = (windows, keys)
    if not heads and value.ndim == 4 and value.shape[:3] == (images, windows, keys):
        return Reading(layout, lambda each: each.flatten(1, 2), lambda each: each.unflatten(1, split), places)
    if value.ndim != 3 + heads or len(value) != images * windows or value.shape[-2] != keys:
        return None

    def arrange(tensor: Tensor) -> Tensor:
        joined = tensor.transpose(1, 2).flatten(2) if heads else tensor
        split_images: Tensor = joined.unflatten(0, (images, windows))
        return split_images.flatten(1, 2)

    def restore(tensor: Tensor) -> Tensor:
        split_windows: Tensor = tensor.unflatten(1, split)
        return split_windows.flatten(0, 1)

    return Reading(layout, arrange, restore, places)


def striped_codes(layout: TokenLayout, random: torch.Generator, bits: int) -> Tensor:
    """Return codes [bits, tokens] that differ for all tokens: Gray codes of row and column, and one bit for patches.

    Tokens that are no patches have the Gray code of their number, and further bits are random. Each bit is inverted or
    not at random, and has its complement in the second half. With fewer bits than `code_bits(layout)` they are not all
    different.
    """
    patch, across = torch.arange(layout.num_patches, device="cpu"), (layout.cols - 1).bit_length()
    number = torch.zeros(layout.num_tokens, dtype=torch.long, device="cpu")
    number[layout.patches] = _gray(patch // layout.cols) << across | _gray(patch % layout.cols)
    outside = torch.ones(layout.num_tokens, dtype=torch.bool, device="cpu")
    outside[layout.patches] = False
    number[outside] = _gray(torch.arange(int(outside.sum()), device="cpu"))
    codes = torch.rand(bits // 2, layout.num_tokens, generator=random, device="cpu") < 0.5
    used = min(code_bits(layout), bits) // 2
    codes[:used] = torch.stack([outside, *((number >> bit & 1).bool() for bit in range(used - 1))])
    codes ^= torch.rand(len(codes), 1, generator=random, device="cpu") < 0.5
    return torch.cat([codes, ~codes])


def code_bits(layout: TokenLayout) -> int:
    """Return the number of bits of a striped code for a layout, with complements."""
    patches = sum((count - 1).bit_length() for count in (layout.rows, layout.cols))
    others = layout.num_tokens - layout.num_patches
    return 2 * max(patches, (others - 1).bit_length() if others else 0) + 2


def _gray(number: Tensor) -> Tensor:
    return number ^ (number >> 1)


def coded(first: Tensor, codes: Tensor, random: torch.Generator) -> Tensor:
    """Return tokens [bits, places, channels] that are `first`, [1, places, channels], but for the coded places."""
    size = (2 * first.double().square().mean().sqrt()).clamp_min(_LEAST)
    noise = torch.randn(first.shape, generator=random, device="cpu").to(first.device) * size.float()
    return torch.where(codes.to(first.device)[..., None], first + noise.to(first.dtype), first)


def seen_codes(tokens: Tensor, *, rough: bool) -> Tensor:
    """Return in which images each place of [images, places, channels] differs from image 0, bool [bits, places].

    `rough` is True for weights of 8 bits, whose rounding depends on all tokens.
    """
    rough = rough or torch.finfo(tokens.dtype).bits < 32
    changed, rounding = (_HALF_CHANGED, _HALF_ROUNDING) if rough else (_CHANGED, _ROUNDING)
    tokens = tokens.float() if tokens.dtype != torch.float64 else tokens
    apart = (tokens[1:] - tokens[:1]).abs().amax(dim=-1)
    limit = torch.maximum(changed * apart.amax(dim=0), rounding * tokens.abs().amax(dim=-1).amax(dim=0))
    return (apart > limit).cpu()


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """Codes that the tokens of a layout should have.

    Attributes:
        own: codes [bits, tokens]; of a merged token, those of the first token of its cell.
        allowed: all bits that each token may have, [bits, tokens].
        known: which tokens are judged, [tokens]; prefix tokens that the layout before did not have are not.
        merged: True if several tokens were merged.
    """

    own: Tensor
    allowed: Tensor
    known: Tensor
    merged: bool

    def at(self, index: Tensor | None) -> "Expected":
        """Return the codes at the places of a reading; padding is not judged."""
        if index is None:
            return self
        place = index.clamp_min(0)
        return Expected(self.own[:, place], self.allowed[:, place], self.known[place] & (index >= 0), self.merged)


def expected_codes(codes: Tensor, layout: TokenLayout, other: TokenLayout, reach: tuple[float, float]) -> Expected:
    """Return the codes that tokens of another layout should have, if those of `layout` have `codes`.

    Args:
        codes: [bits, tokens].
        other: the same layout, with coarser or finer patches, or with other prefix tokens.
        reach: number of patches of `layout` down and across from which convolutions and pooling may have mixed.
    """
    grid = codes[:, layout.patches].float().unflatten(1, (layout.rows, layout.cols))
    sides = [_side(*pair) for pair in ((layout.rows, other.rows), (layout.cols, other.cols))]
    near = [min(int(-(-each // 1)), count - 1) for each, count in zip(reach, grid.shape[1:], strict=True)]
    index = [
        (torch.arange(count, device="cpu") * side).clamp_max(before - 1).long()
        for count, side, before in zip((other.rows, other.cols), sides, grid.shape[1:], strict=True)
    ]
    behind = [near[axis] + max(1, int(sides[axis])) - 1 for axis in (0, 1)]
    own = grid[:, index[0]][:, :, index[1]]
    allowed = _largest_around(grid, near, behind)[:, index[0]][:, :, index[1]]
    patches = [each.flatten(1).bool() for each in (own, allowed)]
    known = torch.ones(other.num_tokens, dtype=torch.bool, device="cpu")
    every = []
    for each in patches:
        full = torch.zeros(len(codes), other.num_tokens, dtype=torch.bool, device="cpu")
        full[:, other.patches] = each
        every.append(full)
    ends = (
        (slice(0, layout.num_prefix_tokens), slice(0, other.num_prefix_tokens)),
        (slice(layout.patches.stop, layout.num_tokens), slice(other.patches.stop, other.num_tokens)),
    )
    for before, after in ends:
        if codes[:, before].shape[1] == len(known[after]):
            for full in every:
                full[:, after] = codes[:, before]
        else:
            known[after] = False
    return Expected(every[0], every[1], known, max(sides) > 1)


def first_of_cells(fine: TokenLayout, coarse: TokenLayout) -> Tensor | None:
    """Return the first token of `fine` in each token of `coarse`, [tokens]; None if it has other prefix tokens."""
    if fine.num_prefix_tokens != coarse.num_prefix_tokens or coarse.num_tokens > fine.num_tokens:
        return None
    rows, cols = (
        (torch.arange(count, device="cpu") * _side(before, count)).clamp_max(before - 1).long()
        for before, count in ((fine.rows, coarse.rows), (fine.cols, coarse.cols))
    )
    patches = (rows[:, None] * fine.cols + cols).flatten() + fine.num_prefix_tokens
    return torch.cat([torch.arange(fine.num_prefix_tokens, device="cpu"), patches])


def _largest_around(grid: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Return the largest entry of [bits, rows, cols] from so many rows and columns before each one to those after."""
    down = functional.pad(grid, (0, 0, before[0], after[0]))
    down = functional.max_pool2d(down, (before[0] + after[0] + 1, 1), stride=1)
    return functional.max_pool2d(
        functional.pad(down, (before[1], after[1], 0, 0)), (1, before[1] + after[1] + 1), stride=1
    )


def _side(before: int, after: int) -> float:
    """Return how many patches in a row are merged to one; below 1 if patches are finer."""
    return max(1, -(-before // after)) if before >= after else before / after


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """Judgement of the tokens of one tensor; masks are [places].

    `displaced` is True if some token is not computed from itself, and `exact` if each token that is judged has its own
    code alone.
    """

    lost: Tensor
    reordered: Tensor
    mixed: Tensor
    displaced: bool
    exact: bool

    @property
    def wrong(self) -> int:
        """Number of tokens that are reordered or mixed."""
        return int((self.reordered | self.mixed).sum())


def judge(seen: Tensor, expected: Expected) -> Verdict:
    """Compare the codes of the places of a tensor [bits, places] with the expected ones."""
    own, allowed = expected.own, expected.allowed
    lost = ~seen.any(dim=0) & expected.known
    exact = (seen == own).all(dim=0)
    contains = ((own <= seen) | expected.merged).all(dim=0)
    fine = exact | ((seen <= allowed).all(dim=0) & contains)
    wrong = expected.known & ~lost & ~fine
    reordered = wrong.clone()
    reordered[wrong] = torch.isin(code_numbers(seen[:, wrong]), code_numbers(own))
    displaced, every = bool((wrong & ~contains).any()), bool((exact | ~expected.known).all())
    return Verdict(lost, reordered, wrong & ~reordered, displaced, every)


def code_numbers(codes: Tensor) -> Tensor:
    """Return codes [bits, places] as numbers, [places]."""
    return (codes.long() << torch.arange(len(codes), device=codes.device)[:, None]).sum(dim=0)


def random_order(tokens: int, random: torch.Generator) -> Tensor:
    """Return a cycle over all tokens, [tokens], in which a quarter of the places are copies of another quarter."""
    order, cycle = torch.randperm(tokens, generator=random, device="cpu"), torch.empty(tokens, dtype=torch.long)
    cycle[order] = order.roll(-1)
    places: Sequence[int] = torch.randperm(tokens, generator=random, device="cpu").tolist()
    quarter = tokens // 4
    cycle[places[:quarter]] = cycle[places[quarter : 2 * quarter]]
    return cycle


def order_of_cells(order: Tensor, coarse: TokenLayout, fine: TokenLayout) -> Tensor | None:
    """Return the order [tokens] of a layout if its cells are moved like the patches of a coarser one; None if unequal.

    >>> order_of_cells(torch.tensor([1, 0]), TokenLayout(0, 1, 2), TokenLayout(0, 1, 4))
    tensor([2, 3, 0, 1])
    """
    if fine == coarse:
        return order
    down, across = fine.rows // coarse.rows, fine.cols // coarse.cols
    cells = (down * coarse.rows, across * coarse.cols)
    if coarse.num_patches != len(order) or fine.num_tokens != fine.num_patches or cells != (fine.rows, fine.cols):
        return None
    rows, cols = (torch.arange(count, device="cpu") for count in (fine.rows, fine.cols))
    cell = order.view(coarse.rows, coarse.cols)[rows // down][:, cols // across]
    row = cell // coarse.cols * down + (rows % down)[:, None]
    return (row * fine.cols + cell % coarse.cols * across + cols % across).flatten()


def follows_order(tokens: Tensor, origin: Tensor, *, rough: bool) -> bool:
    """Return True if each token of image 1 of [2, tokens, channels] is that of image 0 at its origin."""
    rough = rough or torch.finfo(tokens.dtype).bits < 32
    first = tokens[0].float()[origin.to(tokens.device)]
    apart = (tokens[1].float() - first).abs().amax(dim=-1)
    limit = (_HALF_CHANGED if rough else 1e-4) * first.abs().amax(dim=-1)
    return bool((apart <= limit).all())
