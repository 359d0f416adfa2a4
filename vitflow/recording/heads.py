"""How a model computes an output from tokens: observed once per model and question, on two images of noise.

Blocks run without gradients, and what reads their tokens with them. Each block's output is replaced by a leaf, and so
are the tokens that later modules make of the last one's: the gradients at these leaves show which tokens are read.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import ClosedReadout, module_paths, runs_compiled
from vitflow.models.parts import kept_with
from vitflow.recording.attention_kinds import is_pooling
from vitflow.recording.isolation import Hook, given_few, no_fast_path, returning_all, trial, uncompiled
from vitflow.recording.readout import HALF_SCALE, Head, Read, channel_axis, is_norm, token_norms, tokens_of, with_tokens

# Largest difference between a closed form and the gradient that rounding explains, by bytes of a number.
_ROUNDING = {8: 1e-9, 4: 1e-5, 2: 2e-2}
# So many outputs are tested one by one; of more, random combinations of all and the largest ones.
_FEW_OUTPUTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a model, to be repeated on other pixels."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pixels: Tensor

    def __call__(self, other: Tensor) -> Any:
        """Return the model's output for other pixels."""
        args = tuple(other if one is self.pixels else one for one in self.args)
        kwargs = {name: other if one is self.pixels else one for name, one in self.kwargs.items()}
        weights = chain(self.model.named_parameters(), self.model.named_buffers())
        # No gradient passes weights that were made in inference mode, but their copies.
        copies = {name: weight.clone() for name, weight in weights if weight.is_inference()}
        return functional_call(self.model, copies, args, kwargs) if copies else self.model(*args, **kwargs)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """The shape of two images; of as many as there were if other tensors go with them."""
        others = [one for one in (*self.args, *self.kwargs.values()) if isinstance(one, Tensor)]
        return tuple(self.pixels.shape) if len(others) > 1 else (2, *self.pixels.shape[1:])


@dataclass(slots=True)
class Cut:
    """A module's output and the leaf that takes its place, so that the gradient of what follows ends there.

    Attributes:
        path: of the module.
        original, leaf: its output, and a detached copy that requires gradients.
        tokens: whether it holds tokens; otherwise it is the output of a pooling head.
        norm: whether the module is a norm after the last block.
        other: whether it is a container whose tokens are not as wide as those of the last block.
        direct: gradient that reaches the leaf without passing a later one.
        total: all of its gradient.
    """

    path: str
    original: Tensor
    leaf: Tensor
    tokens: bool
    norm: bool = False
    other: bool = False
    direct: Tensor | None = None
    total: Tensor | None = None


def block_paths_of(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """Path of the block of each attention layer: the outermost module that runs and contains no other layer.

    >>> block_paths_of(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())), ["0.0", "1.0"])
    ['0', '1']
    """
    blocks = []
    for name in layers:
        parts, others = name.split("."), [other for other in layers if other != name]
        prefixes = [".".join(parts[: n + 1]) for n in range(len(parts))]
        if others:
            unique = [one for one in prefixes if not any(f"{other}.".startswith(f"{one}.") for other in others)]
        else:
            unique = [one for one, part in zip(prefixes, parts, strict=True) if part.isdigit()]
        running = (one for one in unique if not isinstance(model.get_submodule(one), nn.ModuleList | nn.ModuleDict))
        blocks.append(next(running, name))
    return blocks


def observed_head(
    call: Call, layers: Sequence[str], top: TokenLayout, closed: Sequence[ClosedReadout], read: Read
) -> Head:
    """How an output is computed from tokens; observed once per model and question, while its modules are the same.

    The model runs on two images of noise, in eval mode, with gradients in the head alone.

    Args:
        call: of the model, without wrappers.
        layers: paths of the attention layers, first layer first.
        top: layout of the top layer's tokens.
        closed: the readouts of known poolings, first the one that the model declares.
        read: maps what the model returns to its outputs.
    """
    owner = getattr(read, "__self__", read)  # a method is made anew each time
    known = kept_with(call.model)
    key = ("head", id(owner), closed[0].name, top.num_prefix_tokens, layers[-1])
    held, head = known.get(key, (None, None))
    if held is None or held() is not owner:
        for other in [one for one, kept in known.items() if one[0] == "head" and kept[0]() is None]:
            del known[other]  # of a question that nobody asks any more
        head = _observe(call, layers, top, closed, read)
        known[key] = ref(owner), head
    assert isinstance(head, Head)
    return head


def _observe(call: Call, layers: Sequence[str], top: TokenLayout, closed: Sequence[ClosedReadout], read: Read) -> Head:
    blocks = block_paths_of(call.model, layers)
    try:
        head = _observe_on(call, blocks, top, closed, read, few=True)
    except Exception:  # a block may fail in any way on a few of its tokens
        head = Head(None)
    return head if head.closed is not None else _observe_on(call, blocks, top, closed, read, few=False)


def _observe_on(
    call: Call,
    blocks: Sequence[str],
    top: TokenLayout,
    closed: Sequence[ClosedReadout],
    read: Read,
    *,
    few: bool,
) -> Head:
    """What runs on noise show, in blocks that are given a few of their tokens, or all."""
    pixels, shape, shortened = call.pixels, call.noise_shape, blocks if few else ()
    device, random, whole = pixels.device, torch.Generator().manual_seed(0), dict[str, Tensor]()
    heads = []
    for _ in range(1 if shape[0] > 1 else 2):
        with (
            torch.inference_mode(False),
            trial(call.model, device),
            torch.enable_grad(),
            no_fast_path(),
            uncompiled() if runs_compiled(call.model) else nullcontext(),
            given_few(call.model, shortened, whole),
            returning_all(call.model, shortened, whole),
            _Cuts(call.model, blocks) as cuts,
        ):
            noise = torch.randn(shape, generator=random).to(device, pixels.dtype)
            numbers = read(call(noise))
            heads.append(_head(numbers, cuts, blocks, top, closed))
    taps = [head.tap for head in heads]
    tap = next((cut.path for cut in cuts.cuts if cut.path in taps), None)
    several = tuple(sorted({path for head in heads for path in head.blocks}))
    names = {head.closed for head in heads}
    return Head(names.pop() if len(names) == 1 else None, blocks[0], tap, several)


class _Cuts:
    """Leaves in the place of each block's output, and of the tokens that later modules make of the last one's.

    Blocks run without gradients, and what reads their tokens with them.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._model, self._blocks = model, blocks
        self.earlier: list[Cut] = []  # blocks but the last
        self.cuts: list[Cut] = []  # the last block and what follows it, in their order

    def __enter__(self) -> "_Cuts":
        self._stack = ExitStack()
        last = self._blocks[-1]
        containers = {last[:i] for i, sign in enumerate(last) if sign == "."}
        for path, module in module_paths(self._model):
            if path in self._blocks:
                self._hook(path, self._stop, before=True)
                self._hook(path, self._block(path, path == last), before=False)
            elif path in containers or (path and is_norm(module)):
                self._hook(path, self._after(path, path not in containers), before=False)
            elif is_pooling(path, module):
                self._hook(path, self._pooled(path), before=False)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _hook(self, path: str, act: Callable[..., Any], *, before: bool) -> None:
        hook = Hook(self._model.get_submodule(path), act, before=before, in_aside=True)
        self._stack.callback(hook.remove)

    def _stop(self, args: Any, kwargs: Any) -> None:
        torch.set_grad_enabled(False)

    def _block(self, path: str, last: bool) -> Callable[..., Any]:
        def act(args: Any, output: Any) -> Any:
            if output is None:
                return None
            torch.set_grad_enabled(True)
            if last:
                self.cuts.clear()
            tokens = tokens_of(output)
            if tokens is None:
                return None
            cut = Cut(path, tokens, tokens.detach().requires_grad_(), True)
            (self.cuts if last else self.earlier).append(cut)
            return with_tokens(output, cut.leaf)

        return act

    def _after(self, path: str, norm: bool) -> Callable[..., Any]:
        def act(args: Any, output: Any) -> Any:
            tokens = tokens_of(output)
            known = [cut.leaf for cut in self.cuts]
            if not known or tokens is None or not tokens.requires_grad or any(tokens is leaf for leaf in known):
                return None
            other = not norm and tokens.numel() != known[0].numel()
            self.cuts.append(Cut(path, tokens, tokens.detach().requires_grad_(), True, norm, other))
            return with_tokens(output, self.cuts[-1].leaf)

        return act

    def _pooled(self, path: str) -> Callable[..., Any]:
        def act(args: Any, output: Any) -> Any:
            if not self.cuts or not isinstance(output, Tensor) or not output.requires_grad:
                return None
            self.cuts.append(Cut(path, output, output.detach().requires_grad_(), False))
            return self.cuts[-1].leaf

        return act


def _head(
    numbers: Tensor | None, cuts: _Cuts, blocks: Sequence[str], top: TokenLayout, closed: Sequence[ClosedReadout]
) -> Head:
    """What one pass over noise shows."""
    if numbers is None or numbers.ndim != 2 or not cuts.cuts:
        return Head(None, blocks[0])
    holding, taps, several = list(closed), set[str | None](), set[str]()
    for score in _scores(numbers):
        _differentiate(score, cuts)
        tap, earlier = _tap(cuts, top)
        taps.add(None if tap is None else tap.path)
        several |= earlier
        holding = [one for one in holding if _holds(tap, cuts.cuts, top, one)]
    path = next((cut.path for cut in cuts.cuts if cut.path in taps), None)
    name = holding[0].name if holding and taps and not several else None
    return Head(name, blocks[0], path, tuple(sorted(several)))


def _scores(numbers: Tensor) -> list[Tensor]:
    """Sums over the batch of single outputs, or of random combinations of all and the largest ones."""
    if not numbers.requires_grad:
        return []
    scale = HALF_SCALE if numbers.dtype == torch.float16 else 1.0
    numbers = numbers.float() if numbers.dtype.itemsize < 4 else numbers
    if numbers.shape[1] <= _FEW_OUTPUTS:
        return [scale * one.sum() for one in numbers.unbind(dim=1)]
    random = torch.Generator().manual_seed(1)
    weights = torch.randn(2, numbers.shape[1], generator=random).to(numbers)
    return [*(scale * (numbers @ weights.T)).sum(dim=0).unbind(), scale * numbers.amax(dim=1).sum()]


def _differentiate(score: Tensor, cuts: _Cuts) -> None:
    """Write the gradient of a score into each cut, direct and in total.

    The gradient at a leaf is direct: what passes through a later cut ends there. In total, it goes on from there.
    """
    every = [*cuts.earlier, *cuts.cuts]
    direct = torch.autograd.grad(score, [cut.leaf for cut in every], retain_graph=True, allow_unused=True)
    for cut, gradient in zip(every, direct, strict=True):
        cut.direct = cut.total = gradient
    for number in range(len(every) - 1, len(cuts.earlier), -1):
        for one, passed in zip(every, _passed(every[number], every[:number]), strict=False):
            if passed is not None:
                one.total = passed if one.total is None else one.total + passed


def _passed(cut: Cut, before: Sequence[Cut]) -> Sequence[Tensor | None]:
    """The gradient that a cut passes on to earlier ones, not through those between."""
    if cut.total is None or not before:
        return [None] * len(before)
    leaves = [one.leaf for one in before]
    return torch.autograd.grad(cut.original, leaves, cut.total, retain_graph=True, allow_unused=True)


def _tap(cuts: _Cuts, top: TokenLayout) -> tuple[Cut | None, set[str]]:
    """The latest tokens through which all of the gradient passes from the last block on, if they are the top layer's.

    Those of a container with another width may be a head's own, and are taken if there are no others.

    Returns:
        Their cut, and the paths of earlier blocks that some gradient reaches without passing it.
    """
    every, first = [*cuts.earlier, *cuts.cuts], len(cuts.earlier)
    for number in sorted(range(first, len(every)), key=lambda number: (every[number].other, -number)):
        cut = every[number]
        if not cut.tokens or not _is_nonzero(cut.total) or token_norms(cut.leaf, top) is None:
            continue
        reached = _reached(every, number)
        token_wise = not cut.norm or _is_token_wise(cuts.cuts, number - first, top)
        if token_wise and not any(place >= first for place in reached):
            return cut, {every[place].path for place in reached}
    return None, set()


def _reached(every: Sequence[Cut], number: int) -> set[int]:
    """The places of earlier cuts that some gradient reaches without passing a cut."""
    reached = {place for place in range(number) if _is_nonzero(every[place].direct)}
    for later in every[number + 1 :]:
        passed = _passed(later, every[:number])
        reached |= {place for place, gradient in enumerate(passed) if _is_nonzero(gradient)}
    return reached


def _is_token_wise(cuts: Sequence[Cut], number: int, top: TokenLayout) -> bool:
    """Whether one token of a cut depends on one token of earlier cuts alone."""
    original, before = cuts[number].original, [cut.leaf for cut in cuts[:number]]
    channels = channel_axis(original.shape, top)
    places = [side // 2 if axis else 0 for axis, side in enumerate(original.shape)]
    one = tuple(slice(None) if axis == channels else place for axis, place in enumerate(places))
    chosen = torch.zeros_like(original)
    chosen[one] = torch.randn(chosen[one].shape, generator=torch.Generator().manual_seed(2)).to(chosen)
    reached = torch.autograd.grad(original, before, chosen, retain_graph=True, allow_unused=True)
    for gradient in (one for one in reached if _is_nonzero(one)):
        norms = token_norms(gradient, top)
        if norms is None or int((norms > 0).sum()) > 1:
            return False
    return True


def _holds(tap: Cut | None, cuts: Sequence[Cut], top: TokenLayout, closed: ClosedReadout) -> bool:
    """Whether the closed form agrees with the gradient."""
    if closed.convention == "pooling":
        pools = [cut for cut in cuts if not cut.tokens]
        direct = [cut for cut in cuts if _is_nonzero(cut.direct)]
        return bool(direct) and all(any(cut is pool for pool in pools) for cut in direct)
    if tap is None or tap.total is None:
        return False
    norms = token_norms(tap.total, top)
    if norms is None or not torch.isfinite(norms).all() or not (norms.sum(dim=1) > 0).all():
        return False
    readout, rounding = norms / norms.sum(dim=1, keepdim=True), _ROUNDING[tap.leaf.dtype.itemsize]
    weights = closed.weights[:1].to(readout)
    if closed.convention == "support":
        return bool(readout[:, weights[0] == 0].sum(dim=1).max() <= rounding)
    return bool((readout - weights).abs().max() <= rounding)


def _is_nonzero(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(torch.count_nonzero(gradient))
