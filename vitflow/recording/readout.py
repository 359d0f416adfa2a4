"""The readout: weights of the tokens that an output is computed from, by gradient norm.

`readout_i ∝ ‖∂f/∂y_i‖₂` for an output f and the tokens y that the head reads: those after the final norm if the head
reads nothing else, otherwise those after the last block. Known poolings have a closed form, which is used after
`heads.py` has verified it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError
from vitflow.methods.tokens import TokenLayout
from vitflow.models.parts import module_paths

# Maps the return value of a model to the explained outputs, [batch, outputs].
Read = Callable[[Any], Tensor | None]

_ZERO = (
    "The gradient of the output with respect to its tokens is zero: the output is detached, constant, or behind an "
    "inactive ReLU. Pass readout=, or use sampling or occlusion, which need no gradient."
)
# Tokens with less than this fraction of the largest weight are not counted.
_COUNTED = 1e-3
# Lower limit of a divisor.
_TINY = torch.finfo(torch.float64).tiny
#: Loss scale for half precision, in which the smallest gradients underflow.
HALF_SCALE = 1024.0


@dataclass(frozen=True, slots=True)
class Head:
    """Observed computation of an output from tokens.

    Attributes:
        closed: name of the verified known pooling; None if the gradient is needed.
        blocks: path of the block of each attention layer, first layer first.
        taps: paths of the modules whose output tokens the head reads, lowest first: blocks, or a norm after the last
            block; empty if no module returns these tokens.
        refusal: reason why the taps cannot be explained, or an empty string.
    """

    closed: str | None
    blocks: tuple[str, ...] = ()
    taps: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def reads_several(self) -> bool:
        """True if the head reads the tokens of several blocks, or of one below the last."""
        return len(self.taps) > 1 or (bool(self.taps) and self.layers_below(self.taps[0]) < len(self.blocks))

    def layers_below(self, tap: str) -> int:
        """Return the number of attention layers up to a tap."""
        return len(self.blocks) - self.blocks[::-1].index(tap) if tap in self.blocks else len(self.blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Tap:
    """Tokens of one block that the head reads, with the readout there.

    Attributes:
        layers: the number of attention layers up to this block.
        readout: weights of the tokens of the last of these layers, [batch, tokens]; rows sum to 1.
        share: share of this tap in the readouts of all taps, [batch].
    """

    layers: int
    readout: Tensor
    share: Tensor


def tap_candidates(model: nn.Module, attending: Iterable[str]) -> list[str]:
    """Return paths of modules that may return the head's input tokens: norms and containers of attention modules."""
    containers = {".".join(name.split(".")[:n]) for name in attending for n in range(1, name.count(".") + 1)}
    return [path for path, module in module_paths(model) if path and (path in containers or is_norm(module))]


def tokens_of(output: Any) -> Tensor | None:
    """Return the token tensor of a module's output: itself, the first of a sequence, or `last_hidden_state`."""
    if isinstance(output, Mapping):
        output = output.get("last_hidden_state")
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.is_floating_point() and output.ndim in (3, 4) else None


def with_tokens(output: Any, tokens: Tensor) -> Any:
    """Return a module's output with its tokens replaced."""
    if isinstance(output, Mapping):
        output["last_hidden_state"] = tokens  # type: ignore[index]
        return output
    if isinstance(output, tuple | list):
        return [tokens, *output[1:]] if isinstance(output, list) else (tokens, *output[1:])
    return tokens


def token_norms(gradient: Tensor, layout: TokenLayout, order: Tensor | None = None) -> Tensor | None:
    """Return L2 norms of a gradient over channels, [batch, tokens]; None if its tokens do not fit the layout.

    Args:
        gradient: [batch, tokens, channels], [tokens, batch, channels], [batch, rows, cols, channels] or
            [batch, channels, rows, cols]; a finer grid is reduced to the norm over the cells of each patch.
        layout: layout of the top layer's tokens.
        order: raster index of each token, if the model does not use raster order.
    """
    channels = channel_axis(gradient.shape, layout)
    if channels is None:
        return None
    sums = gradient.double().square().sum(dim=channels)  # [batch, …]
    if sums.ndim == 2 and sums.shape[1] not in (layout.num_patches, layout.num_tokens):
        sums = sums.T  # [tokens, batch, channels]
    if sums.ndim == 3:
        cells = sums.shape[1] // layout.rows, sums.shape[2] // layout.cols
        sums = sums.reshape(-1, layout.rows, cells[0], layout.cols, cells[1]).sum(dim=(2, 4)).flatten(1)
    if sums.shape[1] != layout.num_tokens:
        sums = torch.nn.functional.pad(sums, (layout.num_prefix_tokens, layout.num_suffix_tokens))
    if order is not None:
        sums = torch.zeros_like(sums).index_copy_(1, order.to(sums.device), sums)
    return sums.sqrt()


def channel_axis(shape: Sequence[int], layout: TokenLayout) -> int | None:
    """Return the channel axis of a tensor with the tokens of a layout, or None."""
    counts = (layout.num_patches, layout.num_tokens)
    if len(shape) == 3:
        return 2 if shape[1] in counts or shape[0] in counts else None
    for axis, (rows, cols) in ((3, shape[1:3]), (1, shape[2:])):
        if rows and cols and rows % layout.rows == 0 and cols % layout.cols == 0:
            return axis
    return None


def gradient_taps(
    outputs: Tensor,
    targets: Tensor,
    tokens: Sequence[Tensor],
    layers: Sequence[int],
    layouts: Sequence[TokenLayout],
    orders: Sequence[Tensor | None],
) -> list[Tap]:
    """Return the taps of one output of each image, with the norm of the direct gradient at each as its readout.

    The direct gradient is the total one minus the part that passes the next tap: `G_l − (∂y_m/∂y_l)ᵀ G_m`.

    Args:
        outputs: the outputs of each image, [batch, outputs].
        targets: index of the output f of each image, [batch].
        tokens: the tokens y of each tap, lowest first, in the autograd graph or leaves of it.
        layers: the number of attention layers up to each tap.
        layouts, orders: of each tap, as for `token_norms`.

    Raises:
        UnsupportedModelError: the gradient of an image is zero everywhere, or not finite; or tokens have no layout.
    """
    scale = HALF_SCALE if outputs.dtype == torch.float16 else 1.0
    total: list[Tensor | None] = [None] * len(tokens)
    with torch.inference_mode(False), torch.enable_grad():
        scores = outputs.gather(1, targets.view(-1, 1))
        scores = scores.float() if scores.dtype.itemsize < 4 else scores
        if scores.requires_grad:
            total = list(torch.autograd.grad(scores.sum() * scale, tokens, retain_graph=True, allow_unused=True))
    direct = list(total)
    for lower, (gradient, above) in enumerate(pairwise(total)):
        if gradient is not None and above is not None and tokens[lower + 1].grad_fn is not None:
            [passed] = torch.autograd.grad(
                tokens[lower + 1], [tokens[lower]], above, retain_graph=True, allow_unused=True
            )
            direct[lower] = gradient if passed is None else gradient - passed
    norms = [
        torch.zeros(len(outputs), layout.num_tokens, dtype=torch.float64, device=outputs.device)
        if gradient is None
        else token_norms(gradient, layout, order)
        for gradient, layout, order in zip(direct, layouts, orders, strict=True)
    ]
    fitting = [each for each in norms if each is not None]
    if len(fitting) < len(norms):
        raise UnsupportedModelError(
            "The output is computed from tokens that do not fit the patch grid of their block. Pass readout=, or use "
            "sampling or occlusion."
        )
    sums = [each.sum(dim=1) for each in fitting]
    every = torch.stack(sums).sum(dim=0)
    if not (torch.isfinite(every) & (every > 0)).all():
        raise UnsupportedModelError(_ZERO)
    return [
        Tap(count, each / total.clamp(min=_TINY).unsqueeze(1), total / every)
        for count, each, total in zip(layers, fitting, sums, strict=True)
    ]


def taps_words(taps: Sequence[Tap], layouts: Sequence[TokenLayout], layers: int) -> list[str]:
    """Describe the readout of each image in words: that of its strongest tap, and the shares of all taps.

    Args:
        taps: the taps of each image.
        layouts: layout of the tokens of each tap.
        layers: the number of attention layers of the model.
    """
    words = []
    for index in range(len(taps[0].readout)):
        strongest, layout = max(zip(taps, layouts, strict=True), key=lambda pair: float(pair[0].share[index]))
        text = f"{readout_words(strongest.readout[index], layout)}, from the gradient of the output"
        if len(taps) > 1 or strongest.layers < layers:
            shares = ", ".join(f"{tap.layers} ({float(tap.share[index]):.0%})" for tap in taps)
            text += f", after layers {shares}"
        words.append(text)
    return words


def readout_words(readout: Tensor, layout: TokenLayout) -> str:
    """Describe the tokens of a readout [tokens] in words.

    >>> readout_words(torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]), TokenLayout(1, 2, 2))
    '1 prefix token and 1 patch'
    """
    counted = readout > _COUNTED * readout.max()
    first, last = layout.num_prefix_tokens, layout.num_prefix_tokens + layout.num_patches
    patches, prefix, suffix = counted[first:last].sum(), counted[:first].sum(), counted[last:].sum()
    words = [f"{int(prefix)} prefix token{'s' * bool(prefix > 1)}"] if prefix else []
    words += [f"{int(patches)} patch{'es' * bool(patches > 1)}"] if patches else []
    words += [f"{int(suffix)} trailing token{'s' * bool(suffix > 1)}"] if suffix else []
    return " and ".join(words)


def is_norm(module: nn.Module) -> bool:
    """Return True if a module is a norm, by the name of its class."""
    return "norm" in type(module).__name__.lower() and not module._modules
