"""Forward passes with frozen nonlinearities, whose outputs are linear in the tokens of a block and the constants above.

No list of functions can show that nothing was missed. So each run checks that the outputs are those of the model, and
that output = Σ tokens × gradients + Σ constants × gradients.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import OTHER_METHODS, ModelError, NoAttentionError, UnsupportedModelError
from vitflow.methods.frozen_gradient import contributions
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import read_layout
from vitflow.models.blocks import block_paths, block_paths_of
from vitflow.models.calls import tokens_of, with_tokens
from vitflow.recording.experiment import Call
from vitflow.recording.freezing import Freezing
from vitflow.recording.isolation import Hook, evaluating, refuse_checkpointing
from vitflow.recording.places import place_features
from vitflow.recording.readout import HALF_SCALE
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace

# The largest share of a map that may be missing, and relative difference of outputs that should be equal, by bytes per
# element.
_TOLERANCE = {8: 1e-6, 4: 1e-3, 2: 5e-2}


@dataclass(frozen=True, slots=True, eq=False)
class FrozenPass:
    """A forward pass with frozen nonlinearities.

    Attributes:
        call: the repeated call.
        outputs: the explained outputs, [batch, outputs].
        blocks: paths of the chosen blocks, first block first.
        tokens: their outputs: [batch, tokens, channels], or with rows and columns instead of tokens.
        layouts: layout of these tokens, and True if their channels are last.
        ones: for each block, the factor of the constants that are added between it and the next one.
    """

    call: Call
    outputs: Tensor
    blocks: Sequence[str]
    tokens: Sequence[Tensor]
    layouts: Sequence[tuple[TokenLayout, bool]]
    ones: Sequence[Tensor]

    def contributions(self, weights: Tensor) -> list[Tensor]:
        """Return what each token of each block contributes to a sum of the outputs of its image, [batch, tokens].

        Args:
            weights: of the outputs in the sum, [batch, outputs].

        Raises:
            UnsupportedModelError: the contributions of tokens and constants do not add up to the sum.
        """
        # Another factor for each image, as errors of opposite targets would cancel.
        factors = torch.linspace(1.0, 2.0, len(weights)).to(weights)
        factors *= HALF_SCALE if self.outputs.dtype == torch.float16 else 1.0
        parts, errors = self._differentiate(weights * factors.unsqueeze(1))
        if not self._hold(errors):
            for image, factor in enumerate(factors):
                alone = torch.zeros_like(weights)
                alone[image] = weights[image] * factor
                _, errors = self._differentiate(alone, image)
                if not self._hold(errors):
                    raise self._error(errors)
        return [part / factors.to(part).unsqueeze(1) for part in parts]

    def _hold(self, errors: Sequence[float]) -> bool:
        return all(error <= _TOLERANCE[self.outputs.dtype.itemsize] for error in errors)

    def _differentiate(self, weights: Tensor, image: int | None = None) -> tuple[list[Tensor], list[float]]:
        """Return contributions, and what is missing at each block, relative to the smallest map or that of an image."""
        inputs = [*self.tokens, *self.ones]
        raw = torch.autograd.grad(self.outputs, inputs, weights.to(self.outputs), True, allow_unused=True)
        gradients = [torch.zeros_like(x) if each is None else each for x, each in zip(inputs, raw, strict=True)]
        total, parts, errors = (self.outputs.detach().double() * weights).sum(), list[Tensor](), list[float]()
        for n, (tokens, (_, last)) in enumerate(zip(self.tokens, self.layouts, strict=True)):
            parts.append(contributions(tokens, gradients[n], axis=-1 if last else 1))
            constants = torch.stack(gradients[len(self.tokens) + n :]).double().sum()
            masses = parts[n].abs().sum(dim=1)
            mass = masses.min() if image is None else masses[image]
            errors.append(float((total - parts[n].sum() - constants).abs() / mass))
        return parts, errors

    def _error(self, errors: Sequence[float]) -> UnsupportedModelError:
        model, (error, path) = type(self.call.model).__name__, max(zip(errors, self.blocks, strict=True))
        if not all(map(isfinite, errors)):
            return _refusal(f"The output of {model} does not depend on the tokens after {path}")
        return _refusal(
            f"The tokens after {path} and the constants above do not add up to the output of {model}: {error:.2g} of "
            "the map is missing. There is a nonlinearity that cannot be frozen, or a path around this block"
        )


def attending_blocks(trace: Trace) -> list[str]:
    """Return the paths of the blocks of the attention layers of a pass, first block first.

    If it was recorded without attention, one more pass finds them, once for a model. If the attention is not one
    between tokens, they are the blocks that the model declares.
    """
    call, model, names, refusal = trace.call, trace.model, trace.names, trace.refusal
    assert call is not None

    def record() -> tuple[list[str], str | None]:
        try:
            with torch.no_grad(), evaluating(model), record_attention(model, head_fusion="mean") as recorded:
                call(call.pixels, same_images=True)
        except NoAttentionError as error:
            if not block_paths(model):
                raise
            return [], str(error)
        return recorded.names, recorded.refusal

    if not names:
        names, refusal = call.cached(attending_blocks, record)
    blocks = block_paths(model) if refusal is not None else []
    return blocks or list(dict.fromkeys(block_paths_of(model, names)))


def frozen_pass(
    call: Call,
    blocks: Sequence[str],
    read: Callable[[Any], Tensor | None],
    layout: TokenLayout | None,
    expected: Tensor,
) -> FrozenPass:
    """Repeat a recorded call with nonlinearities frozen from the first of some blocks on.

    Args:
        call: the call of the unwrapped model.
        blocks: paths of blocks, first block first.
        read: maps the output of the model to its explained outputs.
        layout: layout of the tokens of the model, if known.
        expected: the explained outputs of the recorded call, [batch, outputs].

    Raises:
        UnsupportedModelError: the tokens of a block are not on a patch grid, or the outputs differ from those expected.
    """
    model, batch = type(call.model).__name__, len(call.pixels)
    tokens, ones = dict[str, Tensor](), list[Tensor]()
    freezing = Freezing()

    def freeze(path: str, args: Any, output: Any) -> Any:
        refuse_checkpointing(call.model)
        computed = tokens_of(output)
        if computed is None or path in tokens or len(computed) != batch or (tokens and not computed.requires_grad):
            raise _refusal(f"{path} of {model} runs several times, or not on tokens [batch, …] of the block before")
        torch.set_grad_enabled(True)  # until the experiment below ends
        tokens[path] = computed if tokens else freezing.linear(computed.detach().requires_grad_())
        kind = torch.promote_types(computed.dtype, torch.float32)
        freezing.one = torch.ones((), dtype=kind, device=computed.device, requires_grad=True)
        ones.append(freezing.one)
        return with_tokens(output, freezing.linear(tokens[path].clone()))  # the model may change it in place

    # Created inside the experiment, in which they act.
    hooks = (Hook(call.model.get_submodule(path), partial(freeze, path), before=False, first=True) for path in blocks)
    with call.experiment(hooks, autocast=True), freezing:
        output = call(freezing.begin(call.pixels), same_images=True)
        try:
            outputs = read(output)
        except ModelError as error:
            raise _refusal(f"The outputs of {model} cannot be computed with frozen nonlinearities ({error})") from error
    if list(tokens) != list(blocks) or outputs is None or not outputs.requires_grad:
        raise _refusal(f"The output of {model} is not computed from {' and then '.join(blocks)}, or by a softmax")
    difference = (outputs.detach().double() - expected.detach().double()).abs().max()
    if not difference <= _TOLERANCE[outputs.dtype.itemsize] * expected.detach().double().abs().max():
        raise _refusal(f"{model} has another output if it runs again: it may be random, or change tensors in place")
    for path, each in tokens.items():
        if each.shape[1] == batch > 1:  # the first axis may be that of tokens
            first = torch.zeros_like(outputs).index_fill_(0, torch.tensor(0, device=outputs.device), 1.0)
            [gradient] = torch.autograd.grad(outputs, [each], first, retain_graph=True)
            if gradient[1:].any():
                raise _refusal(f"The output of {model} for an image depends on all {batch} rows after {path}")
    layouts = [_located(call, path, each, layout) for path, each in tokens.items()]
    return FrozenPass(call, outputs, list(blocks), list(tokens.values()), layouts, ones)


def _located(call: Call, path: str, tokens: Tensor, layout: TokenLayout | None) -> tuple[TokenLayout, bool]:
    size = (call.pixels.shape[-2], call.pixels.shape[-1])
    if layout is None and tokens.ndim == 3:
        with suppress(UnsupportedModelError):
            layout = read_layout(call.model, size, tokens.shape[1])
    if (placed := place_features(call, path, tokens, layout)) is None:
        raise _refusal(
            f"The output of {path} in {type(call.model).__name__}, of shape {tuple(tokens.shape)}, has no patch grid"
        )
    return placed


def _refusal(fact: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fact}, so frozen_gradient does not apply. {OTHER_METHODS}")
