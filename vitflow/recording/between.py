"""Tokens between blocks: which tokens each block receives from the block before it, by gradients on the image.

If the recorded pass shows that the input of each block is the output of the block before it, nothing is to do. The
gradients are those of the recorded pass if the outputs of its blocks are leaves of the graph, else of another pass.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from vitflow.errors import OTHER_METHODS, UnsupportedModelError
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import possible_layouts
from vitflow.models.blocks import block_paths_of
from vitflow.recording.block_watch import BlockWatch, Boundary
from vitflow.recording.experiment import Call
from vitflow.recording.head import as_tokens, is_nonzero, remember_blocks
from vitflow.recording.layer_tokens import declared_layout
from vitflow.recording.layers import AttentionLayer, stack_of, stream_of

# Relative difference of gradients that is rounding, and in half precision.
_ROUNDING, _HALF_ROUNDING = 1e-3, 5e-2
# Tokens are shifted by this fraction of their size, and deviate less from the gradients; and in half precision.
_SHIFT, _DEVIATION, _HALF_SHIFT, _HALF_DEVIATION = 1e-4, 0.1, 0.25, 0.5
# Relative norm of tokens that are 0.
_ZERO = 1e-6
# The number of mixed tokens of an image whose origins are compared with their places.
_SAMPLES = 12
# The number of passes whose gradients are compared with shifts, if the constants of the tokens differ from the first.
_VERIFIED = 2
# Least ratio of a token's own squared gradient to others', or least share of a rectangle around it that is not 0.
_MOST, _FILLED = 2.0, 0.75


class _Lost(Exception):
    """Tokens cannot be followed to the block `above`; the message says why.

    `above` is empty if autograd does not see the change, so that gradients below it are not those of the output either.
    """

    def __init__(self, message: str, above: str = "") -> None:
        super().__init__(message)
        self.above = above

    def refusal(self, call: Call, effect: str) -> str:
        remedy = OTHER_METHODS if self.above else "Use sampling or occlusion."
        return f"{type(call.model).__name__} {self}, so {effect}. {remedy}"


@dataclass(frozen=True, slots=True, eq=False)
class _Passage:
    """Passage of tokens between two blocks, by gradients.

    Attributes:
        direction: the output of each token is its product with this vector.
        gradients: of these outputs at the tokens of the block below, [batch, tokens, channels].
        lost: which tokens receive nothing, bool [batch, tokens].
        mixed: which tokens also receive from others, bool [batch, tokens].
        constants: the outputs minus their products with the gradients, [batch, tokens]; None if the tokens of the block
            below are unknown.
        rounding: limit of the rounding errors of constants, [batch, tokens].
    """

    layout: TokenLayout
    direction: Tensor
    gradients: Tensor
    lost: Tensor
    mixed: Tensor
    constants: Tensor | None
    rounding: Tensor


# Constants and mixed tokens of the passages of a verified pass, by the index of the call of the block above.
_Verified = Mapping[int, tuple[Tensor | None, Tensor]]


def find_passed(call: Call, layers: Sequence[AttentionLayer], names: Sequence[str], watch: BlockWatch) -> str | None:
    """Set the masks of the tokens that each layer receives from the layer below, where some are replaced or zeroed.

    `names` are the attention modules that ran. Return why a product of layers would not follow the tokens, or None.
    """
    blocks = blocks_of(call, names)
    remember_blocks(call.model, blocks)
    if set(watch.blocks) != set(blocks):
        watch = _repeated(call, blocks)
    waiting, by_index = list(layers), dict[int, AttentionLayer]()  # some modules mix no patches and have no layer
    for index, name in enumerate(names):
        if waiting and waiting[0].name == name:
            by_index[index] = waiting.pop(0)
    by_block = {blocks[index]: layer for index, layer in reversed(by_index.items())}  # the lowest of each block

    def layouts_of(boundary: Boundary) -> Sequence[TokenLayout]:
        layer = by_block.get(boundary.above)
        return () if layer is None else (layer.tokens.keys, layer.tokens.queries)

    # What is between the attention modules of one block is verified once.
    inner = {block for block, name in zip(blocks, names, strict=True) if block == name}
    try:
        calls, passages = _passages(call, watch, layouts_of, inner)
    except _Lost as error:
        return error.refusal(call, "a product of layers would not follow its tokens")
    for index, passage in passages.items():
        layer = by_index.get(_first_name(blocks, calls, index))
        if layer is not None and passage.lost.any():
            layer.passed = ~passage.lost
    return None


def find_moved(call: Call, watch: BlockWatch, layout: TokenLayout | None) -> tuple[str, int | None] | None:
    """Return why the tokens of upper blocks are not at their places, and the number of calls of blocks below; or None.

    The number is None if gradients are not those of the output.
    """

    def layouts_of(boundary: Boundary) -> Sequence[TokenLayout]:
        if any(stream_of(path) != stack_of(path) for path in (boundary.below, boundary.above)):
            return ()  # queries of a decoder, which lie nowhere on the image
        return [each for each, _ in possible_layouts(call.model, call.size, boundary.given, layout)]

    try:
        _passages(call, watch, layouts_of)
    except _Lost as error:
        below = watch.calls.index(error.above) if error.above else None
        return error.refusal(call, "its tokens are not at their places above"), below
    return None


def _passages(
    call: Call, watch: BlockWatch, layouts_of: Callable[[Boundary], Sequence[TokenLayout]], inner: Collection[str] = ()
) -> tuple[Sequence[str], dict[int, _Passage]]:
    """Return the blocks that ran, and how tokens are passed on to each call whose input differs; or raise _Lost.

    Tokens that only change next to `inner` modules are not followed again if none were lost in an earlier pass.
    """
    if (places := watch.written()) is not None:
        raise _Lost(f"changes its tokens between {' and '.join(places)} without autograd")
    _check_sizes(call, watch)
    ends = {index: (each.below, each.above) for index, each in watch.changed.items()}
    key, once = (_passages, tuple(ends.items())), all(set(inner).intersection(each) for each in ends.values())
    if not ends or (once and call.cache.get(key) is False):  # no token was replaced
        return watch.calls, {}
    if not all(each.leaves for each in watch.changed.values()):
        watch = _repeated(call, watch.blocks)
    passages, verified = dict[int, _Passage](), call.cached((_verify, key), list[_Verified])
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(call.pixels.device.type, enabled=False):
        for index, boundary in watch.changed.items():
            ran_before = boundary.above in watch.calls[:index]
            if (passage := _passage(boundary, layouts_of(boundary), len(call.pixels), ran_before)) is not None:
                passages[index] = passage
        if len(verified) < _VERIFIED and not any(_same_constants(passages, each) for each in verified):
            _verify(call, watch, passages)
            verified.append({index: (each.constants, each.mixed) for index, each in passages.items()})
    call.cache[key] = any(bool(passage.lost.any()) for passage in passages.values())
    return watch.calls, passages


def _check_sizes(call: Call, watch: BlockWatch) -> None:
    """Raise _Lost if a block has another number of tokens than for noise, on which places are measured.

    Blocks that all have the tokens that the model declares are not tried.
    """
    if len({size for _, size in watch.sizes}) == 1:
        with suppress(UnsupportedModelError):
            if declared_layout(call, None).num_tokens == watch.num_tokens(watch.blocks):
                return

    def on_noise() -> list[tuple[str, int]]:
        trial = BlockWatch(call.model, watch.blocks)
        with suppress(Exception), call.experiment(trial.hooks()):  # the model may reject noise
            call(trial.begin(call.noise(images)))
        return trial.sizes

    changed = ""
    for images in dict.fromkeys((1, len(call.pixels))):  # what is not of images is the same for one and for several
        sizes = call.cached((_check_sizes, watch.blocks, images, tuple(call.pixels.shape[1:])), on_noise)
        usual = {(path, size * len(call.pixels) // images) for path, size in sizes}
        tried = {path for path, _ in usual}
        changed = next((path for path, size in watch.sizes if path in tried and (path, size) not in usual), "")
        if not changed:
            return
    raise _Lost(f"changes its number of tokens at {changed} with the image", changed)


def blocks_of(call: Call, names: Sequence[str]) -> list[str]:
    """Return `block_paths_of` the model of a call, which is cached here."""
    return call.cached((block_paths_of, *names), lambda: block_paths_of(call.model, names))


def _same_constants(passages: Mapping[int, _Passage], others: _Verified) -> bool:
    """Return True if tokens have the same constants as the first image of another pass.

    Then they are the same sum of a linear function of the tokens below and a constant, so that gradients that were
    right there are right here.
    """
    for index, passage in passages.items():
        constants, mixed = others.get(index, (None, passage.mixed))
        if constants is None or passage.constants is None or constants.shape[1:] != passage.constants.shape[1:]:
            return False
        differs = (passage.constants - constants[:1]).abs() > passage.rounding
        if (differs & ~(passage.mixed | mixed[:1])).any():
            return False
    return True


def _verify(call: Call, watch: BlockWatch, passages: Mapping[int, _Passage]) -> None:
    """Compare the gradients with what happens if tokens are shifted, as a model may detach tokens; or raise _Lost.

    A token at which both differ is tried again with another shift, as gates may open or close. Mixed tokens are not
    compared.
    """
    passages = {index: passage for index, passage in passages.items() if not passage.mixed.all()}
    if any(watch.changed[index].returned is None for index in passages):
        watch = _repeated(call, watch.blocks)
    apart = _apart(call, watch, passages, seed=1) if passages else {}
    if any(each.any() for each in apart.values()):
        again = _apart(call, watch, passages, seed=2)
        for index, each in apart.items():
            if (each & again[index]).any():
                boundary = watch.changed[index]
                raise _Lost(
                    f"changes its tokens between {boundary.below} and {boundary.above} in another way than its "
                    "gradients say"
                )


def _apart(call: Call, watch: BlockWatch, passages: Mapping[int, _Passage], *, seed: int) -> dict[int, Tensor]:
    """Shift the tokens between blocks; return which are passed on in another way than by their gradients."""
    shifts, batch, random = dict[int, Tensor](), len(call.pixels), torch.Generator().manual_seed(seed)
    for index, passage in passages.items():
        returned = watch.changed[index].returned
        assert returned is not None
        tokens = as_tokens(returned.double(), passage.layout, batch)
        shifts[index - 1] = torch.zeros(returned.shape, dtype=returned.dtype, device=returned.device)
        shift = as_tokens(shifts[index - 1], passage.layout, batch)
        assert tokens is not None and shift is not None
        half = torch.finfo(returned.dtype).bits < 32
        size = (torch.rand(tokens.shape[:2], generator=random, device="cpu").to(tokens) + 0.5)[..., None]
        size *= (_HALF_SHIFT if half else _SHIFT) * tokens.norm(dim=-1, keepdim=True)
        along = torch.where(passage.lost[..., None], 1.0, passage.gradients)
        shift.copy_(size * nn.functional.normalize(along, dim=-1))
    changed, apart = _repeated(call, watch.blocks, shifts).changed, {}
    for index, passage in passages.items():
        apart[index] = torch.ones_like(passage.lost)
        before, after = watch.changed[index], changed.get(index)
        if after is None or before.returned is None or after.returned is None:
            continue
        given = as_tokens((after.given - before.given).detach().double(), passage.layout, batch)
        returned = as_tokens((after.returned - before.returned).double(), passage.layout, batch)
        assert given is not None and returned is not None
        half, direction = torch.finfo(before.given.dtype).bits < 32, passage.direction.double()
        expected = torch.where(passage.lost, 0.0, (passage.gradients * returned).sum(dim=-1))
        size = torch.where(passage.lost, direction.norm(), passage.gradients.norm(dim=-1)) * returned.norm(dim=-1)
        limit = _HALF_DEVIATION if half else _DEVIATION
        apart[index] = ~passage.mixed & ((given @ direction - expected).abs() > limit * size)
    return apart


def _first_name(blocks: Sequence[str], calls: Sequence[str], index: int) -> int:
    """Return the index of the first layer of one call of a block, which may run several times.

    >>> _first_name(["a", "a", "b", "a", "a"], ["a", "b", "a"], 2)
    3
    """
    path = calls[index]
    names = [name for name, block in enumerate(blocks) if block == path]
    return names[calls[:index].count(path) * len(names) // calls.count(path)]


def _repeated(call: Call, blocks: Sequence[str], shifts: Mapping[int, Tensor] = MappingProxyType({})) -> BlockWatch:
    """Run the recorded call again on its images, cut at these blocks, whose outputs are shifted and kept."""
    watch = BlockWatch(call.model, blocks, cut=True, shifts=shifts)
    with call.experiment(watch.hooks(), gradients=True):
        call(watch.begin(call.pixels), same_images=True)
    return watch


def _passage(boundary: Boundary, layouts: Sequence[TokenLayout], batch: int, ran_before: bool) -> _Passage | None:
    """Return how tokens are passed on; None if nothing is, as the block above begins another run or stack.

    `ran_before` is True if the block above ran earlier in the pass, so that it may start anew.
    """
    given, leaf, between = boundary.given, boundary.leaves[-1], f"between {boundary.below} and {boundary.above}"
    layout = next((each for each in layouts if _fits(given, each, batch) and _fits(leaf, each, batch)), None)
    if layout is None:
        if not layouts:
            return None
        raise _Lost(f"rearranges its tokens {between} from {tuple(leaf.shape)} to {tuple(given.shape)}", boundary.above)
    tokens = as_tokens(given, layout, batch)
    assert tokens is not None
    random = torch.Generator().manual_seed(0)
    direction = torch.randn(tokens.shape[-1], generator=random, device="cpu").to(tokens)
    weights = (torch.rand(tokens.shape[:2], generator=random, device="cpu") + 0.5).to(tokens)
    scores = tokens @ direction  # [batch, tokens]
    plain, weighted = (_gradient(each, leaf, layout, batch) for each in (scores, scores * weights))
    size = plain.norm(dim=-1)
    lost = (size == 0) & (weighted.norm(dim=-1) == 0)
    if lost.all():  # another run of the model, or another stack of blocks
        if stack_of(boundary.below) == stack_of(boundary.above) and not ran_before:
            raise _Lost(f"does not pass on the output of {boundary.below} to {boundary.above}", boundary.above)
        return None
    if lost.any() and scores.requires_grad:
        others = torch.autograd.grad(scores[lost].square().sum(), boundary.leaves, retain_graph=True, allow_unused=True)
        if any(map(is_nonzero, others)):
            raise _Lost(f"replaces tokens by others {between}", boundary.above)
    rounding = _ROUNDING if torch.finfo(tokens.dtype).bits >= 32 else _HALF_ROUNDING
    mixed = (weighted - plain * weights.double()[..., None]).norm(dim=-1) > rounding * size
    if any(not _is_at(*origin, layout) for origin in _origins(scores, leaf, mixed, layout)):
        raise _Lost(f"reorders or merges its tokens {between}", boundary.above)
    norms = tokens.detach().double().norm(dim=-1)
    below = None if boundary.returned is None else as_tokens(boundary.returned.double(), layout, batch)
    constants, size = None, direction.double().norm() * norms
    if below is not None:
        constants = scores.detach().double() - (plain * below).sum(dim=-1)
        size += plain.norm(dim=-1) * below.norm(dim=-1)
    lost |= norms <= _ZERO * norms.amax(dim=1, keepdim=True)  # a gate may be 0 and have a gradient
    return _Passage(layout, direction, plain, lost, mixed, constants, rounding * size)


def _origins(scores: Tensor, leaf: Tensor, mixed: Tensor, layout: TokenLayout) -> Iterator[tuple[Tensor, int]]:
    """Yield the squared gradient [tokens] of some mixed tokens of each image, with the token."""
    samples = [
        places[torch.linspace(0, len(places) - 1, min(_SAMPLES, len(places))).round().long()].tolist()
        for places in (each.nonzero().flatten().cpu() for each in mixed)
    ]
    for tokens in zip_longest(*samples):  # of different images, which are independent
        chosen = [(image, token) for image, token in enumerate(tokens) if token is not None]
        gradient = _gradient(scores[tuple(zip(*chosen, strict=True))], leaf, layout, len(mixed))
        yield from ((gradient[image].square().sum(dim=-1), token) for image, token in chosen)


def _fits(value: Tensor, layout: TokenLayout, batch: int) -> bool:
    return as_tokens(value, layout, batch) is not None


def _gradient(scores: Tensor, leaf: Tensor, layout: TokenLayout, batch: int) -> Tensor:
    """Return the gradient of the sum of scores with respect to the leaf's tokens, [batch, tokens, channels]."""
    gradient = None
    if scores.requires_grad:
        [gradient] = torch.autograd.grad(scores.sum(), leaf, retain_graph=True, allow_unused=True)
    tokens = as_tokens(torch.zeros_like(leaf) if gradient is None else gradient, layout, batch)
    assert tokens is not None
    return tokens.double()


def _is_at(origins: Tensor, token: int, layout: TokenLayout) -> bool:
    """Return True if most of a token is its own, or its origins [tokens] fill a rectangle around it (a convolution)."""
    others = origins.clone()
    others[token] = 0
    if origins[token] >= _MOST * others.max():
        return True
    patch = token - layout.num_prefix_tokens
    if not 0 <= patch < layout.num_patches:
        return False
    grid = layout.to_grid(origins).cpu().numpy() > 0
    lines = [np.flatnonzero(grid.any(axis=1 - axis)) for axis in (0, 1)]
    if not grid.any() or grid[np.ix_(*(range(line[0], line[-1] + 1) for line in lines))].mean() < _FILLED:
        return False
    for place, line, count in zip(divmod(patch, layout.cols), lines, grid.shape, strict=True):
        cut = line[0] == 0 or line[-1] == count - 1
        inside = line[0] <= place <= line[-1]
        if not inside or (not cut and abs((line[0] + line[-1]) / 2 - place) > 0.5):
            return False
    return True
