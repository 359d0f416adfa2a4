"""Detection of unrecorded token mixing: change some tokens, and check if other tokens change.

A layer with unrecorded attention would be missing in the product of layers, and the map would be silently wrong.
Therefore the model runs once on noise, with all recorded attention replaced by the identity, and with half the input
tokens of each block changed, in another image the other half. If other output tokens change, the block has further
token mixing. Only a convolution, pooling or linear attention inside the block explains that.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import OTHER_METHODS
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import layout_of_count
from vitflow.models.blocks import block_paths_of
from vitflow.models.calls import tensors_in
from vitflow.models.parts import module_paths
from vitflow.recording.attending import Attention
from vitflow.recording.attention_kinds import may_attend, mixes_tokens, other_attention
from vitflow.recording.experiment import FEW_TOKENS, Call, few_token_hooks
from vitflow.recording.interception import Interception
from vitflow.recording.isolation import Hook, hooked
from vitflow.recording.layer_tokens import grid_axis
from vitflow.recording.layers import AttentionLayer

# The number of images: a noise image, and the same with one half, and with the other half of its tokens changed.
_IMAGES = 3
# Limits for the change of unchanged tokens relative to changed ones: at most by rounding, at least by mixing.
_ROUNDING, _MIXING = 1e-4, 1e-3
_HALF_ROUNDING, _HALF_MIXING = 1e-2, 3e-2


def unseen_mixing(call: Call, layers: Sequence[AttentionLayer], names: Sequence[str]) -> str | None:
    """Return why a product of layers would be incomplete, or None; the model runs at most three times, cached.

    `names` are the recorded attention modules, of which `layers` are those with image tokens.
    """
    if call.pixels.is_meta:
        return None
    fault, call.cache[blocks_in_place] = call.cached((unseen_mixing, *names), partial(_find, call, layers, names))
    if fault is None:
        return None
    (path, reason), model = fault, call.model
    kind = type(model.get_submodule(path)).__name__
    fact = f"{kind} ({path}) in {type(model).__name__} {reason}"
    return f"{fact}, so a product of layers would be incomplete. {OTHER_METHODS}"


def blocks_in_place(call: Call) -> frozenset[str]:
    """Return the paths of the blocks that `unseen_mixing` found to compute each token from itself and attention."""
    blocks: frozenset[str] = call.cache.get(blocks_in_place, frozenset())
    return blocks


def _find(
    call: Call, layers: Sequence[AttentionLayer], names: Sequence[str]
) -> tuple[tuple[str, str] | None, frozenset[str]]:
    """Return path and fault of the first innermost module with unrecorded token mixing, or of a block; or None.

    Also return the paths of the blocks whose tokens are computed from themselves and attention.
    """
    model, noise = call.model, call.noise(1).expand(_IMAGES, -1, -1, -1)
    layouts = [layout for layer in layers for layout in (layer.tokens.keys, layer.tokens.queries)]
    # The order of these tokens is known, and may be another than that of the block.
    traced = {layer.name for layer in layers if layer.tokens.key_index is not None}
    blocks = block_paths_of(model, names)
    whole = set(blocks).difference(names)  # not single attention modules
    # First with a few tokens per block, which is cheap; then with all tokens.
    for shortened in (blocks, ()):
        probe = _Probe(model, call.size, layouts, whole, set(names) - traced)
        try:
            with call.experiment(chain(few_token_hooks(model, shortened), probe.hooks())), probe:
                call(noise)
        except Exception:  # the model rejects the noise or the few tokens, so the check is impossible
            continue
        complete = probe.fault is None and not probe.missed and probe.checked.issuperset(shortened)
        if complete or not shortened:
            return probe.fault, frozenset(probe.in_place - probe.moved)
    return None, frozenset()


@contextmanager
def without_attention(call: Call) -> Iterator[None]:
    """Replace recorded attention by the identity, so that tokens are computed only from their own place."""
    probe = _Probe(call.model, call.size, ())
    with hooked(probe.hooks()), probe:
        yield


@dataclass(slots=True)
class _Call:
    """A running module.

    Attributes:
        path: its module path.
        tokens: the number of its input tokens, if only the changed ones differ; otherwise 0.
        begins: True if the tokens were changed at its input, as none were before, or those had been merged or mixed.
        explained: True if it contains known token mixing.
        changed: masks of the changed tokens at the input of a block, [2, tokens]; None for other modules, which may
            reorder tokens.
    """

    path: str
    tokens: int = 0
    begins: bool = False
    explained: bool = False
    changed: Tensor | None = None


class _Probe(Interception):
    """Runs images through a model; the second and the third become the first with one half of the tokens changed."""

    def __init__(
        self,
        model: nn.Module,
        size: tuple[int, int],
        layouts: Sequence[TokenLayout],
        blocks: Collection[str] = (),
        in_order: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._model, self._size = model, size
        self._blocks, self._in_order = blocks, in_order
        self._counts = {layout.num_tokens for layout in layouts} | {FEW_TOKENS}
        self._attending = may_attend(model)
        self._calls: list[_Call] = []
        self._changed = False  # True while a module with changed tokens runs
        self._restarted = False  # True after tokens were changed again, behind merged or mixed ones
        self.fault: tuple[str, str] | None = None  # path and fault of the module with unrecorded mixing
        self.missed = False  # True if a module could not be checked
        self.checked: set[str] = set()  # paths of the checked modules
        self.in_place: set[str] = set()  # paths of blocks whose changed tokens are those of their input
        self.moved: set[str] = set()  # paths of other blocks

    def hooks(self) -> Iterator[Hook]:
        """Yield the hooks of a forward pass."""
        for path, module in module_paths(self._model):
            if module._modules or not type(module).__module__.startswith("torch.nn.modules."):
                yield Hook(module, partial(self._enter, path, module), before=True)
                yield Hook(module, partial(self._leave, path), before=False, always=True, first=True)

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if path in self._attending or not path:
            self.path.append((path, module))
        call = _Call(path)
        self._calls.append(call)
        if other_attention(module) is not None:
            self.explain()
        given = next((value for value in (*args, *kwargs.values()) if self._tokens(value) is not None), None)
        if given is None:
            return None
        tokens = self._tokens(given)
        assert tokens is not None
        if self._changed and _share(tokens) <= _limits(tokens)[0]:
            call.tokens = tokens.shape[1]
            if path in self._blocks:
                call.changed = _moved(_differences(tokens), tokens)
            return None
        around = self._calls[:-1]
        if self._changed and any(each.tokens == tokens.shape[1] and not each.explained for each in around):
            return None  # mixed in one of these, perhaps
        self._restarted |= self._changed
        for each in around:  # these cannot be checked: their tokens were merged, or mixed in a known way
            each.tokens = 0
        call.tokens, call.begins, self._changed = tokens.shape[1], True, True
        call.changed = self._which(tokens) if path in self._blocks else None
        with torch._C.DisableTorchFunction():  # not part of the model
            other = self._change(given, tokens)

        def replaced(value: Any) -> Any:  # other inputs are those of the first image
            if value is given or not isinstance(value, Tensor) or value.ndim < 2 or len(value) != _IMAGES:
                return other if value is given else value
            return value[:1].expand(value.shape).clone()

        return tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}

    def _leave(self, path: str, args: Any, output: Any) -> None:
        self.leave(path)
        if not self._calls or self._calls[-1].path != path:  # an earlier hook raised an error before it began
            return
        call = self._calls.pop()
        tokens = next((t for tensor in tensors_in(output) if (t := self._tokens(tensor)) is not None), None)
        checked = tokens is not None and tokens.shape[1] == call.tokens and not call.explained
        if checked:
            self.checked.add(path)
        if checked and tokens is not None and self.fault is None:
            fault = _fault(tokens, call.changed)
            self.fault = None if fault is None else (path, fault)
        if path in self._blocks:
            kept = tokens is not None and tokens.shape[1] == call.tokens and call.changed is not None
            stays = kept and tokens is not None and _fault(tokens, call.changed) is None
            (self.in_place if stays else self.moved).add(path)
        if call.begins:
            self._changed = False
            if not checked:
                self.missed = True

    def explain(self) -> None:
        """Mark all running modules as containing known token mixing."""
        for call in self._calls:
            call.explained = True

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _tokens(self, given: Any) -> Tensor | None:
        """Return the tokens of all images as [images, tokens, channels]; None for other or ambiguous values."""
        if not isinstance(given, Tensor) or not given.is_floating_point() or given.ndim < 3 or len(given) != _IMAGES:
            return None
        if given.ndim == 3:
            count, width = given.shape[1:]
            # A width such as 1024 also fits a grid.
            known = count in self._counts and width not in self._counts
            return given if known or (self._fits(count) and not self._fits(width)) else None
        if given.ndim != 4:
            return None
        axis = grid_axis(given.shape, self._size)
        if axis is None:
            return None
        return given.flatten(1, 2) if axis == 1 else given.flatten(2).mT

    def _fits(self, count: int) -> bool:
        return count in self._counts or layout_of_count(self._model, self._size, count) is not None

    def _which(self, tokens: Tensor) -> Tensor:
        """Return the masks of changed tokens, [2, tokens]: a random half, also of the first few, and the other half."""
        count, random = tokens.shape[1], torch.Generator().manual_seed(0)
        few = min(FEW_TOKENS, count)
        chosen = [
            torch.randperm(n, generator=random, device="cpu") < changed
            for n, changed in ((few, few // 2), (count - few, count // 2 - few // 2))
        ]
        half = torch.cat(chosen).to(tokens.device)
        return torch.stack([half, ~half])

    def _change(self, given: Tensor, tokens: Tensor) -> Tensor:
        """Return a tensor whose further images are the first with the changed tokens shifted by the same vector."""
        first = tokens[:1]
        step = torch.randn(tokens.shape[2], generator=torch.Generator().manual_seed(0), device="cpu").to(first)
        size = first.float().square().mean().sqrt().to(first)
        others = torch.where(self._which(tokens)[..., None], first + 2 * size * step, first)
        every = torch.cat([first, others])
        channels_first = given.ndim == 4 and grid_axis(given.shape, self._size) == 2
        return (every.mT if channels_first else every).reshape(given.shape)

    # -- functions ----------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if mixes_tokens(getattr(func, "__name__", ""), args, kwargs or {}):
            self.explain()
        return super().__torch_function__(func, types, args, kwargs)

    def running(self) -> str | None:
        """Return the path of the running module; None if it computes no attention between tokens."""
        name = super().running()
        return name if name in self._attending else None

    def on_attention(self, attention: Attention) -> Tensor:
        """Replace attention by the identity, or by zero if queries are not keys."""
        probabilities, value = attention.probabilities, attention.value
        if 1 < value.shape[-3] < probabilities.shape[-3]:  # heads of one group share their values
            value = value.repeat_interleave(probabilities.shape[-3] // value.shape[-3], dim=-3)
        (*_, queries, keys), (*_, width) = probabilities.shape, value.shape
        shape = (*torch.broadcast_shapes(probabilities.shape[:-2], value.shape[:-2]), queries, width)
        if queries != keys:
            return value.new_zeros(shape)
        block = next((call for call in reversed(self._calls) if call.changed is not None), None)
        known = block is not None and block.tokens and not block.explained and not self._restarted
        if block is not None and known and self.fault is None:
            self._check_order(value, block)
        return value.expand(shape).clone(memory_format=torch.contiguous_format)

    def _check_order(self, value: Tensor, block: _Call) -> None:
        """Set the fault if an attention module has other tokens than its block, or in another order."""
        name, changed = self.path[-1][0], block.changed
        if name not in self._in_order or changed is None or value.shape[-2] != changed.shape[1] or value.ndim < 3:
            return
        with torch._C.DisableTorchFunction():
            folded = value.flatten(0, -3).movedim(-2, 0)  # [tokens, images · heads, channels]
            if folded.shape[1] % _IMAGES:
                return
            images = folded.unflatten(1, (_IMAGES, -1)).movedim(1, 0).flatten(2)
            apart = _differences(images)
            moved = _moved(apart, images)
            by_image = value.ndim == 4 and len(value) == _IMAGES  # otherwise heads may come before images
            if not torch.isfinite(apart).all() or moved.equal(changed):
                return
            if by_image or moved.sum(dim=1).equal(changed.sum(dim=1)):
                replaced = not (moved & ~changed).any()
                self.fault = name, "replaces some of its tokens" if replaced else "reorders its tokens"


def _differences(tokens: Tensor) -> Tensor:
    """Return the mean squared difference of each token of the further images from the first, [2, tokens]."""
    with torch._C.DisableTorchFunction():  # not part of the model
        return (tokens[1:] - tokens[:1]).float().square().mean(dim=-1)


def _moved(apart: Tensor, tokens: Tensor) -> Tensor:
    """Return which differences [2, tokens] are those of changed tokens."""
    with torch._C.DisableTorchFunction():
        return apart > apart.amax(dim=1, keepdim=True) * _limits(tokens)[1] ** 2


def _share(tokens: Tensor, changed: Tensor | None = None) -> float:
    """Return the difference between the images of unchanged tokens relative to that of changed tokens.

    The smallest differences count as those of unchanged tokens if it is unknown which these are.
    """
    with torch._C.DisableTorchFunction():
        shares = []
        for index, apart in enumerate(_differences(tokens)):
            if changed is None:
                others, moved = apart.sort().values.tensor_split([len(apart) // 2])
            else:
                others, moved = apart[~changed[index]], apart[changed[index]]
            shares.append(float((others.mean() / moved.mean()).sqrt()))
    return max((share for share in shares if math.isfinite(share)), default=0.0)


def _fault(tokens: Tensor, changed: Tensor | None) -> str | None:
    """Return what a module does besides recorded attention, given its output and the tokens that were changed."""
    limit = _limits(tokens)[1]
    if _share(tokens) > limit:
        return "mixes its tokens in a way that was not seen"
    if changed is None or not changed.any():
        return None
    if _share(tokens, changed) > limit:
        return "reorders its tokens"
    with torch._C.DisableTorchFunction():
        kept = [each[mask] for each, mask in zip(_differences(tokens), changed, strict=True)]
        lost = any((each <= limit**4 * each.mean()).any() for each in kept if len(each))
    return "zeroes or replaces some of its tokens" if lost else None


def _limits(tokens: Tensor) -> tuple[float, float]:
    """Return the largest change of tokens by rounding, and the smallest by mixing."""
    half = torch.finfo(tokens.dtype).bits < 32
    return (_HALF_ROUNDING, _HALF_MIXING) if half else (_ROUNDING, _MIXING)
