"""Check that the tokens of a model are the patches of their layout."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.methods.tokens import TokenLayout
from vitflow.models.parts import model_cache, runs_compiled
from vitflow.recording.heads import block_paths_of
from vitflow.recording.isolation import Hook, hooked, trial, uncompiled
from vitflow.recording.layers import AttentionLayer
from vitflow.recording.probing import Call
from vitflow.recording.unseen import without_attention

# Largest distance between a patch and the pixels that its token is computed from, in patches and in their standard
# deviations, which are large after a convolutional stem.
_MOST_PATCHES, _MOST_DEVIATIONS = 0.6, 2.0


class _Seen(Exception):
    """Ends a forward pass after the last block of interest has its input."""


def block_layouts(model: nn.Module, layers: Sequence[AttentionLayer], names: Sequence[str]) -> dict[str, TokenLayout]:
    """Return the path of a block for each layout of dense layers: the first block, and others of later layouts.

    Args:
        model: the model.
        layers: its layers, some of which may be products of several.
        names: paths of all attention modules that ran, first layer first.
    """
    paths = dict(zip(names, block_paths_of(model, names), strict=True))
    blocks: dict[str, TokenLayout] = {}
    for layer in layers:
        if layer.tokens.dense and layer.tokens.keys not in blocks.values():
            blocks.setdefault(paths[layer.name if layer is not layers[0] else names[0]], layer.tokens.keys)
    return blocks


def misplaced(call: Call, places: Mapping[str, TokenLayout]) -> str | None:
    """Return why tokens are not the patches of their layout, or None; cached per model and layouts.

    Up to nine patches of each layout are tested: the gradient of their tokens with respect to the pixels of noise must
    be where the layout places them, if attention is replaced by the identity. A crop, a flip, another order or dropped
    tokens would misplace every map.

    Args:
        call: call of the unwrapped model.
        places: layout of the tokens at the input of blocks, by path.
    """
    known, key = model_cache(call.model), (misplaced, tuple(places.items()), tuple(call.pixels.shape[1:]))
    if key not in known:
        known[key] = None if call.pixels.is_meta else _misplaced_patch(call, places)
    if known[key] is None:
        return None
    block, row, col = known[key]
    layout = places[block]
    return (
        f"{type(call.model).__name__} computes the token of the patch in row {row} and column {col} (of "
        f"{layout.rows} × {layout.cols}) at {block} from other pixels, so its maps would be misplaced: it may crop, "
        "flip or reorder its input, or drop tokens. If its layout is another, pass "
        "layout=TokenLayout(num_prefix_tokens, rows, cols); otherwise use input_gradient or occlusion."
    )


def _misplaced_patch(call: Call, places: Mapping[str, TokenLayout]) -> tuple[str, int, int] | None:
    """Return block, row and column of a patch whose token is computed from other pixels, or None."""
    given: dict[str, Tensor | None] = {}

    def see(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim == 3)
        fitting = (value.flatten(0, 1) for value in values if value.shape[:2].numel() == places[path].num_tokens)
        given.setdefault(path, next(fitting, None))
        if len(given) == len(places):
            raise _Seen

    hooks = [
        Hook(call.model.get_submodule(path), partial(see, path), before=True, while_unrecorded=True) for path in places
    ]
    compiled = uncompiled() if runs_compiled(call.model) else nullcontext()
    with torch.inference_mode(False), trial(call.model, call.pixels.device), torch.enable_grad(), compiled:
        noise = call.noise(1).requires_grad_()
        # The model may reject noise.
        with suppress(Exception), hooked(hooks), without_attention(call):
            call(noise)
        for block, layout in places.items():
            tokens = given.get(block)
            if tokens is None or not tokens.requires_grad:
                continue
            direction = torch.randn(tokens.shape[1], generator=torch.Generator().manual_seed(0)).to(tokens)
            for row, col in product(*({0, side // 2, side - 1} for side in (layout.rows, layout.cols))):
                token = tokens[layout.token_of_patch(row, col)]
                [gradient] = torch.autograd.grad(token @ direction, noise, retain_graph=True, allow_unused=True)
                if gradient is None or not _is_around(gradient[0].double().square().sum(dim=0), row, col, layout):
                    return block, row, col
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
