"""Observation of how a model computes an output from tokens: once per model and `read`, on two noise images.

Blocks run without gradients, later modules with gradients. The output of each block, and the tokens that later modules
compute from the last one, are replaced by leaves; the gradients at these leaves show which tokens the head reads.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import ClosedReadout
from vitflow.models.parts import kept_with, module_paths, runs_compiled
from vitflow.recording.attention_kinds import is_pooling
from vitflow.recording.isolation import Hook, given_few, no_fast_path, returning_all, trial, uncompiled
from vitflow.recording.readout import HALF_SCALE, Head, Read, channel_axis, is_norm, token_norms, tokens_of, with_tokens

# Tolerance for the difference between a closed form and the gradient, by bytes per element.
_ROUNDING = {8: 1e-9, 4: 1e-5, 2: 2e-2}
_FROM_INPUT = "also from the image directly, without its blocks"
_AROUND = "from several blocks, with connections around some of them"
# Up to this many outputs are tested one by one; of more, random combinations of all, and the largest one.
_FEW_OUTPUTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A model call that can be repeated on other pixels."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pixels: Tensor

    def __call__(self, other: Tensor) -> Any:
        """Return the model's output for other pixels."""
        args = tuple(other if value is self.pixels else value for value in self.args)
        kwargs = {name: other if value is self.pixels else value for name, value in self.kwargs.items()}
        weights = chain(self.model.named_parameters(), self.model.named_buffers())
        # Inference tensors do not support gradients, but their copies do.
        copies = {name: weight.clone() for name, weight in weights if weight.is_inference()}
        return functional_call(self.model, copies, args, kwargs) if copies else self.model(*args, **kwargs)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of two noise images; of the recorded batch if the call has other tensors, too."""
        tensors = [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]
        return tuple(self.pixels.shape) if len(tensors) > 1 else (2, *self.pixels.shape[1:])


@dataclass(slots=True)
class Cut:
    """A module's output and its replacement leaf, at which the gradient of later modules ends.

    Attributes:
        path: path of the module.
        original, leaf: its output, and a detached copy that requires gradients.
        tokens: True for tokens; False for the output of a pooling head.
        norm: True if the module is a norm after the last block.
        other: True if the module is a container whose tokens have another size than those of the last block.
        direct: gradient at the leaf that does not pass a later leaf.
        total: total gradient at the leaf.
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
    """Return the block path of each attention layer: the outermost running module without another layer.

    >>> block_paths_of(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())), ["0.0", "1.0"])
    ['0', '1']
    """
    blocks = []
    for name in layers:
        parts, others = name.split("."), [other for other in layers if other != name]
        prefixes = [".".join(parts[: n + 1]) for n in range(len(parts))]
        if others:
            unique = [path for path in prefixes if not any(f"{other}.".startswith(f"{path}.") for other in others)]
        else:
            unique = [path for path, part in zip(prefixes, parts, strict=True) if part.isdigit()]
        running = (path for path in unique if not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict))
        blocks.append(next(running, name))
    return blocks


def observed_head(
    call: Call, layers: Sequence[str], top: TokenLayout, closed: Sequence[ClosedReadout], read: Read
) -> Head:
    """Observe how an output is computed from tokens; cached per model and `read` while its modules are the same.

    The model runs on two noise images, in eval mode, with gradients only in the head.

    Args:
        call: call of the unwrapped model.
        layers: paths of the attention layers, first layer first.
        top: layout of the top layer's tokens.
        closed: closed-form readouts of known poolings, the declared one first.
        read: maps the return value of the model to its outputs.
    """
    owner = getattr(read, "__self__", read)  # each access creates a new bound method
    known = kept_with(call.model)
    key = ("head", id(owner), closed[0].name, top.num_prefix_tokens, layers[-1])
    held, head = known.get(key, (None, None))
    if held is None or held() is not owner:
        for stale in [entry for entry, kept in known.items() if entry[0] == "head" and kept[0]() is None]:
            del known[stale]  # its owner no longer exists
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
    """Observe the head on noise, with a few tokens per block or all tokens."""
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
            noise = torch.randn(shape, generator=random).to(device, pixels.dtype).requires_grad_()
            outputs = read(call(noise))
            heads.append(_head(outputs, noise, cuts, blocks, top, closed))
    names, refusals = {head.closed for head in heads}, {head.refusal for head in heads} - {""}
    return Head(
        names.pop() if len(names) == 1 else None,
        tuple(blocks),
        _taps({tap for head in heads for tap in head.taps}, cuts, blocks),
        min(refusals, default=""),
    )


class _Cuts:
    """Hooks that replace the output of each block, and tokens computed from the last one, by leaves.

    Blocks run without gradients, later modules with gradients.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._model, self._blocks = model, blocks
        self.earlier: list[Cut] = []  # blocks except the last
        self.inputs: dict[str, Tensor | None] = {}  # the input tokens of each block
        self.cuts: list[Cut] = []  # the last block and later modules, in order

    def __enter__(self) -> "_Cuts":
        self._stack = ExitStack()
        last = self._blocks[-1]
        containers = {last[:i] for i, sign in enumerate(last) if sign == "."}
        for path, module in module_paths(self._model):
            if path in self._blocks:
                self._hook(path, self._entering(path), before=True)
                self._hook(path, self._block(path, path == last), before=False)
            elif path in containers or (path and is_norm(module)):
                self._hook(path, self._after(path, path not in containers), before=False)
            elif is_pooling(path, module):
                self._hook(path, self._pooled(path), before=False)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _hook(self, path: str, act: Callable[..., Any], *, before: bool) -> None:
        hook = Hook(self._model.get_submodule(path), act, before=before, in_aside=True, first=True)
        self._stack.callback(hook.remove)

    def _entering(self, path: str) -> Callable[..., None]:
        def act(args: Any, kwargs: Any) -> None:
            self.inputs[path] = tokens_of(args or kwargs.get("hidden_states"))
            torch.set_grad_enabled(False)

        return act

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
    outputs: Tensor | None,
    noise: Tensor,
    cuts: _Cuts,
    blocks: Sequence[str],
    top: TokenLayout,
    closed: Sequence[ClosedReadout],
) -> Head:
    """Derive the head from one forward pass on noise."""
    if outputs is None or outputs.ndim != 2 or not cuts.cuts:
        return Head(None, tuple(blocks))
    holding, paths, scores = list(closed), set[str](), _scores(outputs)
    for score in scores:
        _differentiate(score, cuts)
        tap, earlier = _tap(cuts, top)
        paths |= earlier if tap is None else {tap.path, *earlier}
        holding = [readout for readout in holding if _holds(tap, cuts.cuts, top, readout)]
    taps = _taps(paths, cuts, blocks)
    if paths.isdisjoint(blocks[:-1]):
        return Head(holding[0].name if holding and scores else None, tuple(blocks), taps)
    to_input = [torch.autograd.grad(score, noise, retain_graph=True, allow_unused=True)[0] for score in scores]
    refusal = _FROM_INPUT if any(map(_is_nonzero, to_input)) else "" if _is_chain(cuts, blocks) else _AROUND
    return Head(None, tuple(blocks), taps, refusal)


def _taps(paths: set[str], cuts: _Cuts, blocks: Sequence[str]) -> tuple[str, ...]:
    """Return the taps among the paths that gradients reach, lowest first.

    The highest one is the first module after the last block that gradients reach, such as the final norm. If there are
    lower ones, it is the last block, as norms have gradients of another scale.
    """
    lower = [path for path in dict.fromkeys(blocks[:-1]) if path in paths]
    after = next((cut.path for cut in cuts.cuts if cut.path in paths), None)
    return (*lower, *(() if after is None else (blocks[-1],) if lower else (after,)))


def _is_chain(cuts: _Cuts, blocks: Sequence[str]) -> bool:
    """Return True if the input of each block is computed from the output of the previous block alone."""
    leaves = {cut.path: cut.leaf for cut in [*cuts.earlier, cuts.cuts[0]]}
    for before, path in pairwise(blocks):
        tokens = cuts.inputs.get(path)
        if tokens is None or before not in leaves:
            return False
        if tokens is leaves[before]:
            continue
        reached = (
            torch.autograd.grad(tokens.sum(), list(leaves.values()), retain_graph=True, allow_unused=True)
            if tokens.requires_grad
            else []
        )
        if {name for name, gradient in zip(leaves, reached, strict=False) if gradient is not None} != {before}:
            return False
    return True


def _scores(outputs: Tensor) -> list[Tensor]:
    """Return sums over the batch of each output, or of random combinations and of the largest output."""
    if not outputs.requires_grad:
        return []
    scale = HALF_SCALE if outputs.dtype == torch.float16 else 1.0
    outputs = outputs.float() if outputs.dtype.itemsize < 4 else outputs
    if outputs.shape[1] <= _FEW_OUTPUTS:
        return [scale * output.sum() for output in outputs.unbind(dim=1)]
    random = torch.Generator().manual_seed(1)
    weights = torch.randn(2, outputs.shape[1], generator=random).to(outputs)
    return [*(scale * (outputs @ weights.T)).sum(dim=0).unbind(), scale * outputs.amax(dim=1).sum()]


def _differentiate(score: Tensor, cuts: _Cuts) -> None:
    """Set the direct and total gradient of a score at each cut.

    The gradient at a leaf is direct, because later leaves stop it; the total also propagates through later cuts.
    """
    every = [*cuts.earlier, *cuts.cuts]
    direct = torch.autograd.grad(score, [cut.leaf for cut in every], retain_graph=True, allow_unused=True)
    for cut, gradient in zip(every, direct, strict=True):
        cut.direct = cut.total = gradient
    for index in range(len(every) - 1, len(cuts.earlier), -1):
        for cut, passed in zip(every, _passed(every[index], every[:index]), strict=False):
            if passed is not None:
                cut.total = passed if cut.total is None else cut.total + passed


def _passed(cut: Cut, before: Sequence[Cut]) -> Sequence[Tensor | None]:
    """Return the gradient from a cut to earlier ones that does not pass cuts between."""
    if cut.total is None or not before:
        return [None] * len(before)
    leaves = [earlier.leaf for earlier in before]
    return torch.autograd.grad(cut.original, leaves, cut.total, retain_graph=True, allow_unused=True)


def _tap(cuts: _Cuts, top: TokenLayout) -> tuple[Cut | None, set[str]]:
    """Return the latest cut after the last block that all gradients pass, if it has the top layer's tokens.

    Container outputs of another width may be internal to a head, and are only used if there are no others.

    Returns:
        The cut, and the paths of earlier blocks that gradients reach without passing it; without a cut, of all blocks
        that the head reads if it does not read the last one.
    """
    every, first = [*cuts.earlier, *cuts.cuts], len(cuts.earlier)
    for index in sorted(range(first, len(every)), key=lambda index: (every[index].other, -index)):
        cut = every[index]
        if not cut.tokens or not _is_nonzero(cut.total) or token_norms(cut.leaf, top) is None:
            continue
        reached = _reached(every, index)
        token_wise = not cut.norm or _is_token_wise(cuts.cuts, index - first, top)
        if token_wise and not any(place >= first for place in reached):
            return cut, {every[place].path for place in reached}
    if any(_is_nonzero(cut.total) for cut in cuts.cuts):
        return None, set()
    return None, {cut.path for cut in cuts.earlier if _is_nonzero(cut.direct)}


def _reached(every: Sequence[Cut], index: int) -> set[int]:
    """Return the indices of earlier cuts that gradients reach without passing a cut."""
    reached = {place for place in range(index) if _is_nonzero(every[place].direct)}
    for later in every[index + 1 :]:
        passed = _passed(later, every[:index])
        reached |= {place for place, gradient in enumerate(passed) if _is_nonzero(gradient)}
    return reached


def _is_token_wise(cuts: Sequence[Cut], index: int, top: TokenLayout) -> bool:
    """Return True if a token of a cut depends on only one token of earlier cuts, and so do norms between them."""
    original, before = cuts[index].original, [cut.leaf for cut in cuts[:index]]
    channels = channel_axis(original.shape, top)
    places = [side // 2 if axis else 0 for axis, side in enumerate(original.shape)]
    token = tuple(slice(None) if axis == channels else place for axis, place in enumerate(places))
    chosen = torch.zeros_like(original)
    chosen[token] = torch.randn(chosen[token].shape, generator=torch.Generator().manual_seed(2)).to(chosen)
    reached = torch.autograd.grad(original, before, chosen, retain_graph=True, allow_unused=True)
    for place, gradient in enumerate(reached):
        if gradient is None or not _is_nonzero(gradient):
            continue
        norms = token_norms(gradient, top)
        if norms is None or int((norms > 0).sum()) > 1:
            return False
        if cuts[place].norm and not _is_token_wise(cuts, place, top):
            return False
    return True


def _holds(tap: Cut | None, cuts: Sequence[Cut], top: TokenLayout, closed: ClosedReadout) -> bool:
    """Return True if the closed form agrees with the gradient."""
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
