"""Check that the tokens of a model are the patches of its layout."""

from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from vitflow.methods.tokens import TokenLayout
from vitflow.models.parts import model_cache, runs_compiled
from vitflow.recording.isolation import Hook, hooked, trial, uncompiled
from vitflow.recording.probing import Call

# Largest distance between a patch and the pixels that its token is computed from, in patches and in their standard
# deviations, which are large after a convolutional stem.
_MOST_PATCHES, _MOST_DEVIATIONS = 0.6, 2.0


class _Embedded(Exception):
    """Raised before the first block runs."""


def misplaced(call: Call, block: str, layout: TokenLayout) -> str | None:
    """Return why the tokens of the first block are not the patches of a layout, or None; cached per model and layout.

    Up to nine patches are tested: the gradient of their tokens with respect to the pixels of noise must be where the
    layout places them. A crop, a flip or another order of tokens inside the model would misplace every map.

    Args:
        call: call of the unwrapped model.
        block: path of the first block.
        layout: layout of the tokens at its input.
    """
    known, key = model_cache(call.model), (misplaced, layout, tuple(call.pixels.shape[1:]))
    if key not in known:
        known[key] = None if call.pixels.is_meta else _misplaced_patch(call, block, layout)
    if known[key] is None:
        return None
    row, col = known[key]
    return (
        f"{type(call.model).__name__} computes the token of the patch in row {row} and column {col} (of "
        f"{layout.rows} × {layout.cols}) from other pixels, so its maps would be misplaced: it may crop, flip or "
        "reorder its input. If its layout is another, pass layout=TokenLayout(num_prefix_tokens, rows, cols); "
        "otherwise use input_gradient or occlusion."
    )


def _misplaced_patch(call: Call, block: str, layout: TokenLayout) -> tuple[int, int] | None:
    """Return row and column of a patch whose token is computed from other pixels, or None."""
    given: list[Tensor] = []

    def end(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.extend(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim == 3)
        raise _Embedded

    hook = Hook(call.model.get_submodule(block), end, before=True, while_unrecorded=True)
    compiled = uncompiled() if runs_compiled(call.model) else nullcontext()
    with torch.inference_mode(False), trial(call.model, call.pixels.device), torch.enable_grad(), compiled:
        with hooked([hook]), suppress(Exception):  # the model may reject noise; the test ends with _Embedded
            call(noise := call.noise(1).requires_grad_())
        fitting = (each.flatten(0, 1) for each in given if each.shape[:2].numel() == layout.num_tokens)
        tokens = next(fitting, None)
        if tokens is None or not tokens.requires_grad:
            return None
        direction = torch.randn(tokens.shape[1], generator=torch.Generator().manual_seed(0)).to(tokens)
        for row in {0, layout.rows // 2, layout.rows - 1}:
            for col in {0, layout.cols // 2, layout.cols - 1}:
                token = tokens[layout.token_of_patch(row, col)]
                [gradient] = torch.autograd.grad(token @ direction, noise, retain_graph=True, allow_unused=True)
                if gradient is None or not _is_around(gradient[0].double().square().sum(dim=0), row, col, layout):
                    return row, col
    return None


def _is_around(weights: Tensor, row: int, col: int, layout: TokenLayout) -> bool:
    """Return True if the centre of weights [height, width] is near a patch of a layout."""
    total = weights.sum()
    for axis, (place, count) in enumerate(((row, layout.rows), (col, layout.cols))):
        shares = weights.sum(dim=1 - axis) / total
        places = (torch.arange(len(shares), device=shares.device) + 0.5) * count / len(shares)
        centre = (shares * places).sum()
        deviation = float((shares * (places - centre).square()).sum().sqrt())
        # False if there is no gradient.
        if not abs(float(centre) - place - 0.5) <= max(_MOST_PATCHES, _MOST_DEVIATIONS * deviation):
            return False
    return True
