"""Observation of how a model computes an output from tokens: once per model and `read`, on two noise images.

Blocks run without gradients, later modules with gradients. The output of each block is replaced by a leaf of the
autograd graph; the gradients at these leaves, and at tokens computed from the last one, show which tokens the head
reads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.methods.tokens import TokenLayout
from vitflow.models.parts import module_paths, output_cache, runs_compiled
from vitflow.models.pooling import ClosedReadout
from vitflow.recording.attention_kinds import is_pooling
from vitflow.recording.isolation import Hook, hooked, trial, uncompiled
from vitflow.recording.probing import Call, on_few_tokens
from vitflow.recording.readout import HALF_SCALE, Head, Read, channel_axis, is_norm, token_norms, tokens_of, with_tokens

# Tolerance for the difference between a closed form and the gradient, by bytes per element.
_ROUNDING = {8: 1e-9, 4: 1e-5, 2: 2e-2}
_FROM_INPUT = "also directly from the image, bypassing its blocks"
_SKIPPED = "from several blocks, with skip connections around some of them"
# Path of the image among those of blocks.
_IMAGE = ""
_REPEATED = "by several runs of its blocks"
# Maximum number of outputs that are tested individually; with more, two random combinations and the largest output are
# tested.
_FEW_OUTPUTS = 8


@dataclass(slots=True)
class Cut:
    """A module's output in the autograd graph of the head; that of a block is a leaf, where the graph begins.

    Attributes:
        path: path of the module.
        tensor: its output.
        tokens: True for tokens; False for the output of a pooling head.
        norm: True if the module is a norm after the last block.
        other: True if the module is a container whose tokens have another size than those of the last block.
        gradient: gradient of the current score at the tensor.
    """

    path: str
    tensor: Tensor
    tokens: bool
    norm: bool = False
    other: bool = False
    gradient: Tensor | None = None


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
    known = output_cache(call.model, read)
    key = (observed_head, closed[0].name, top.num_prefix_tokens, layers[-1])
    if key not in known:
        known[key] = _observe(call, block_paths_of(call.model, layers), top, closed, read)
    head: Head = known[key]
    return head


def _observe(call: Call, blocks: Sequence[str], top: TokenLayout, closed: Sequence[ClosedReadout], read: Read) -> Head:
    """Observe the head with a few tokens per block; if that finds no known pooling, with all tokens."""
    try:
        head = _observe_on(call, blocks, top, closed, read, few=blocks)
    except Exception:  # a block may fail in any way on a few of its tokens
        head = Head(None)
    return head if head.closed is not None else _observe_on(call, blocks, top, closed, read, few=())


def _observe_on(
    call: Call,
    blocks: Sequence[str],
    top: TokenLayout,
    closed: Sequence[ClosedReadout],
    read: Read,
    *,
    few: Sequence[str],
) -> Head:
    with torch.inference_mode(False):
        noise = call.noise(2).requires_grad_()
    cuts = _Cuts(call.model, blocks, noise)
    with (
        torch.inference_mode(False),
        trial(call.model, call.pixels.device),
        torch.enable_grad(),
        uncompiled() if runs_compiled(call.model) else nullcontext(),
        on_few_tokens(call.model, few),
        hooked(cuts.hooks()),
    ):
        return _head(read(call(noise)), cuts, blocks, top, closed)


class _Cuts:
    """Replaces the output of each block by a leaf, and keeps tokens that are computed from the last one.

    Blocks run without gradients, later modules with gradients.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], pixels: Tensor) -> None:
        self._model, self._blocks = model, blocks
        self.earlier = [Cut(_IMAGE, pixels, False)]  # the image, and blocks except the last
        self.inputs: dict[str, Tensor | None] = {}  # the input tokens of each block
        self.cuts: list[Cut] = []  # the last block and later modules, in order
        self.latest = pixels  # the latest output of a block
        self.restarted = False  # True if a block ran again on tokens that are not computed from that output

    def hooks(self) -> Iterator[Hook]:
        """Yield the hooks of a forward pass."""
        last = self._blocks[-1]
        containers = {last[:i] for i, sign in enumerate(last) if sign == "."}
        for path, module in module_paths(self._model):
            if path in self._blocks:
                yield Hook(module, partial(self._enter, path), before=True, while_unrecorded=True)
                act: Callable[..., Any] = partial(self._cut, path)
            elif path in containers or (path and is_norm(module)):
                act = partial(self._keep, path, path not in containers)
            elif is_pooling(path, module):
                act = partial(self._keep_pooled, path)
            else:
                continue
            yield Hook(module, act, before=False, while_unrecorded=True, first=True)

    def _enter(self, path: str, args: Any, kwargs: Any) -> None:
        tokens = tokens_of(args or kwargs.get("hidden_states"))
        if path in self.inputs and tokens is not None and not _is_computed_from(tokens, self.latest):
            self.restarted = True
        self.inputs[path] = tokens
        torch.set_grad_enabled(False)

    def _cut(self, path: str, args: Any, output: Any) -> Any:
        torch.set_grad_enabled(True)
        last = path == self._blocks[-1]
        if last:
            self.earlier += self.cuts[:1]  # of the block's previous run
            self.cuts.clear()
        tokens = tokens_of(output)
        if tokens is None:
            return None
        self.latest = leaf = tokens.detach().requires_grad_()
        (self.cuts if last else self.earlier).append(Cut(path, leaf, True))
        return with_tokens(output, leaf)

    def _keep(self, path: str, norm: bool, args: Any, output: Any) -> None:
        tokens, known = tokens_of(output), [cut.tensor for cut in self.cuts]
        if known and tokens is not None and tokens.requires_grad and all(tokens is not each for each in known):
            self.cuts.append(Cut(path, tokens, True, norm, not norm and tokens.numel() != known[0].numel()))

    def _keep_pooled(self, path: str, args: Any, output: Any) -> None:
        if self.cuts and isinstance(output, Tensor) and output.requires_grad:
            self.cuts.append(Cut(path, output, False))


def _is_computed_from(tokens: Tensor, source: Tensor) -> bool:
    if tokens is source or not tokens.requires_grad:
        return tokens is source
    [gradient] = torch.autograd.grad(tokens.sum(), [source], retain_graph=True, allow_unused=True)
    return gradient is not None


def _head(
    outputs: Tensor | None,
    cuts: _Cuts,
    blocks: Sequence[str],
    top: TokenLayout,
    closed: Sequence[ClosedReadout],
) -> Head:
    """Derive the head from one forward pass on noise."""
    if outputs is None or outputs.ndim != 2 or not cuts.cuts:
        return Head(None, tuple(blocks))
    candidates, paths, scores, repeated = list(closed), set[str](), _scores(outputs), cuts.restarted
    for score in scores:
        every = [*cuts.earlier, *cuts.cuts]
        gradients = torch.autograd.grad(score, [cut.tensor for cut in every], retain_graph=True, allow_unused=True)
        for cut, gradient in zip(every, gradients, strict=True):
            cut.gradient = gradient
        repeated = repeated or any(cut.path == blocks[-1] and _is_nonzero(cut.gradient) for cut in cuts.earlier)
        tap, earlier = _tap(cuts, top)
        paths |= earlier if tap is None else {tap.path, *earlier}
        candidates = [readout for readout in candidates if _matches_gradient(tap, cuts, top, readout)]
    taps = _taps(paths, cuts, blocks)
    refusal = _REPEATED if repeated else _FROM_INPUT if _IMAGE in paths else ""
    if paths.isdisjoint(blocks[:-1]) and not refusal:
        return Head(candidates[0].name if candidates and scores else None, tuple(blocks), taps)
    return Head(None, tuple(blocks), taps, refusal or ("" if _is_chain(cuts, blocks) else _SKIPPED))


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
    leaves = {cut.path: cut.tensor for cut in [*cuts.earlier, cuts.cuts[0]] if cut.path != _IMAGE}
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


def _tap(cuts: _Cuts, top: TokenLayout) -> tuple[Cut | None, set[str]]:
    """Return the latest cut after the last block that all gradients pass, if it has the top layer's tokens.

    Container outputs of another width may be internal to a head, and are only used if there are no others.

    Returns:
        The cut, and the paths of earlier blocks, or of the image, that gradients reach without passing it; without a
        cut, of all blocks that the head reads if it does not read the last one.
    """
    last = cuts.cuts[0]
    if not _is_nonzero(last.gradient):
        return None, {cut.path for cut in cuts.earlier if _is_nonzero(cut.gradient)}
    for cut in sorted(reversed(cuts.cuts), key=lambda cut: cut.other):  # noqa: C414 - the latest of equals first
        if not cut.tokens or not _is_nonzero(cut.gradient) or token_norms(cut.tensor, top) is None:
            continue
        bypassing = _bypassing_blocks(cut, cuts)
        token_wise = not cut.norm or _is_token_wise(cut, cuts.cuts, top)
        if token_wise and (cut is last or last.path not in bypassing):
            return cut, bypassing - {last.path}
    return None, set()


def _bypassing_blocks(cut: Cut, cuts: _Cuts) -> set[str]:
    """Return the paths of the blocks, or of the image, with gradients that bypass the cut."""
    blocks = [block for block in (*cuts.earlier, cuts.cuts[0]) if _is_nonzero(block.gradient)]
    leaves = [block.tensor for block in blocks]
    passed = torch.autograd.grad(cut.tensor, leaves, cut.gradient, retain_graph=True, allow_unused=True)
    bypassing = set()
    for block, through in zip(blocks, passed, strict=True):
        assert block.gradient is not None
        rest = block.gradient if through is None else block.gradient - through
        if rest.abs().max() > _ROUNDING[rest.dtype.itemsize] * block.gradient.abs().max():
            bypassing.add(block.path)
    return bypassing


def _is_token_wise(norm: Cut, cuts: Sequence[Cut], top: TokenLayout) -> bool:
    """Return True if a token of a norm depends on only one token of the last block or container before it."""
    channels = channel_axis(norm.tensor.shape, top)
    places = [side // 2 if axis else 0 for axis, side in enumerate(norm.tensor.shape)]
    token = tuple(slice(None) if axis == channels else place for axis, place in enumerate(places))
    chosen = torch.zeros_like(norm.tensor)
    chosen[token] = torch.randn(chosen[token].shape, generator=torch.Generator().manual_seed(2)).to(chosen)
    earlier = reversed(cuts[: cuts.index(norm)])
    before = [cut.tensor for cut in earlier if cut.tokens and not cut.norm and not cut.other]
    reached = torch.autograd.grad(norm.tensor, before, chosen, retain_graph=True, allow_unused=True)
    nearest = next((gradient for gradient in reached if gradient is not None and _is_nonzero(gradient)), None)
    if nearest is None:
        return True
    norms = token_norms(nearest, top)
    return norms is not None and int((norms > 0).sum()) <= 1


def _matches_gradient(tap: Cut | None, cuts: _Cuts, top: TokenLayout, closed: ClosedReadout) -> bool:
    """Return True if the closed form agrees with the gradient."""
    if closed.convention == "pooling":
        pools = [cut for cut in cuts.cuts if not cut.tokens and _is_nonzero(cut.gradient)]
        return any(not _bypassing_blocks(pool, cuts) for pool in pools)
    if tap is None or tap.gradient is None:
        return False
    norms = token_norms(tap.gradient, top)
    if norms is None or not torch.isfinite(norms).all() or not (norms.sum(dim=1) > 0).all():
        return False
    readout, rounding = norms / norms.sum(dim=1, keepdim=True), _ROUNDING[tap.tensor.dtype.itemsize]
    weights = closed.weights[:1].to(readout)
    if closed.convention == "support":
        inside = weights[0] > 0
        return bool(readout[:, ~inside].sum(dim=1).max() <= rounding and readout[:, inside].min() > rounding)
    return bool((readout - weights).abs().max() <= rounding)


def _is_nonzero(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(torch.count_nonzero(gradient))
