"""Token positions of each attention layer on the image: the windows and stages of a recorded forward pass."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError
from vitflow.methods.staged_rollout import LayerTokens
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import layout_of_count, read_layout
from vitflow.models.parts import model_cache, runs_compiled
from vitflow.recording.attention_kinds import is_class_attention, is_traced
from vitflow.recording.heads import block_paths_of
from vitflow.recording.isolation import Hook, hooked, trial, uncompiled
from vitflow.recording.layers import AttentionLayer, stack_of, stream_of
from vitflow.recording.probing import Call
from vitflow.recording.unseen import without_attention
from vitflow.recording.windows import Size, Windows, find_windows, token_orders

# Largest distance between a patch and the pixels that its token is computed from, in patches and in their standard
# deviations, which are large after a convolutional stem.
_MOST_PATCHES, _MOST_DEVIATIONS = 0.6, 2.0


def decoder_stacks(layers: Sequence[AttentionLayer], batch: int) -> set[str]:
    """Return the names of the stacks of a decoder on top: the last layers, in stacks with cross-attention.

    Their queries are not image tokens, even if their number equals the number of patches. The decoder is a part of the
    head: its outputs have gradients at the tokens of the layers below.
    """
    stacks = [stack_of(layer.name) for layer in layers]
    square = {layer.example.shape[-1] for layer in layers if len(set(layer.example.shape[-2:])) == 1}
    crossing = {
        stack
        for layer, stack in zip(layers, stacks, strict=True)
        if stream_of(layer.name) != stack or "decoder" in stack.lower() or _reads_others(layer, batch, square)
    }
    first = next((index for index, stack in enumerate(stacks) if stack in crossing), 0)
    return crossing if first and crossing.issuperset(stacks[first:]) else set()


def _reads_others(layer: AttentionLayer, batch: int, square: set[int]) -> bool:
    """Return True if a layer's queries have no grid and attend to the tokens of other layers."""
    queries, keys = layer.example.shape[-2:]
    return (
        len(layer.example) == batch and 1 < queries != keys and keys in square and math.isqrt(queries) ** 2 != queries
    )


def find_tokens(
    model: nn.Module, layers: Sequence[AttentionLayer], pixels: Tensor, layout: TokenLayout | None
) -> tuple[list[AttentionLayer], str | None]:
    """Find the token positions of each layer.

    Args:
        model: the model.
        layers: its recorded attention, in order.
        pixels: the model input, [batch, channels, height, width].
        layout: the layout of the tokens, if given.

    Returns:
        The layers that mix image tokens, with token positions; and the reason why rollout does not apply, or None.

    Raises:
        UnsupportedModelError: global attention, and the model's token layout is unknown.
    """
    batch, size = len(pixels), (pixels.shape[-2], pixels.shape[-1])
    counts = {(len(layer.example), *layer.example.shape[-2:]) for layer in layers}
    count, queries, keys = next(iter(counts))
    if len(counts) == 1 and count == batch and queries == keys and not hasattr(model, "unroll"):
        layout = layout or read_layout(model, size, keys)
        everywhere = LayerTokens(layout, layout)
        for layer in layers:
            layer.located = everywhere
        return list(layers), None
    windowed: Windows = {}
    if any(count > batch for count, _, _ in counts):
        windowed = _assumed_windows(model, layers, batch, size) if pixels.is_meta else find_windows(model, pixels)
    located = [replace(layer, located=_locate(model, layer, batch, size, layout, windowed)) for layer in layers]
    grids = {layer.tokens.keys.num_patches for layer in located if layer.located is not None}
    # If there is one window per patch, the layer attends within patches and does not mix them.
    mixing = [layer for layer in located if layer.located is not None or len(layer.example) // batch not in grids]
    unknown = next((layer for layer in mixing if layer.located is None), None)
    if unknown is None:
        return mixing, None
    kind = type(model.get_submodule(unknown.name)).__name__
    return list(layers), (
        f"The image positions of the tokens of {unknown.name} ({kind}) in {type(model).__name__} are unknown: its "
        f"attention {tuple(unknown.example.shape)} is in trace.attentions, but rollout does not apply. Use gradcam, "
        "input_gradient or occlusion."
    )


def _assumed_windows(model: nn.Module, layers: Sequence[AttentionLayer], batch: int, size: Size) -> Windows:
    """Return placeholder windows for a model on the meta device, where they cannot be traced by values."""
    placeholders: Windows = {}
    finest = None
    with suppress(UnsupportedModelError):
        finest = read_layout(model, size, None)
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        windows, keys = len(layer.example) // batch, layer.example.shape[-1]
        module: Any = model.get_submodule(layer.name)
        if windows == 1 or not is_traced(module):
            continue
        if following is not None and len(following.example) == batch:
            grid = layout_of_count(model, size, following.example.shape[-1])
            if grid is not None and grid.num_patches == windows:
                continue  # attention within each patch, before attention between patches
        stride = getattr(module, "stride", None)  # of overlapping windows
        tokens = windows * keys if stride is None else windows * stride**2
        side = (size[0] * size[1] / tokens) ** 0.5
        filled = TokenLayout(0, round(size[0] / side), round(size[1] / side))  # padded to full windows
        grid = layout_of_count(model, size, tokens) or filled
        if finest is not None and grid.num_patches > finest.num_patches:
            grid = TokenLayout(0, finest.rows, finest.cols)
        placeholders[layer.name] = torch.zeros(windows, keys, dtype=torch.long), grid
    return placeholders


def _locate(
    model: nn.Module,
    layer: AttentionLayer,
    batch: int,
    size: Size,
    given: TokenLayout | None,
    windowed: Windows,
) -> LayerTokens | None:
    windows, (queries, keys) = len(layer.example) // batch, layer.example.shape[-2:]
    if len(layer.example) % batch:
        return None  # computed image by image
    if windows > 1:
        if layer.name not in windowed or windowed[layer.name][0].shape != (windows, keys):
            return None
        return _windowed(*windowed[layer.name], queries)
    layouts = [
        given if given is not None and given.num_tokens == count else layout_of_count(model, size, count)
        for count in (queries, keys)
    ]
    of_queries, of_keys = layouts
    if of_keys is None:
        return None
    if is_class_attention(model.get_submodule(layer.name)):
        first = torch.zeros(1, queries, dtype=torch.long)
        return LayerTokens(of_keys, of_keys, first, torch.arange(keys).unsqueeze(0))
    order = token_orders(model, size).get(keys)
    if order is not None:
        return _windowed(order.unsqueeze(0), of_keys, queries)
    return None if of_queries is None else LayerTokens(of_queries, of_keys)


def _windowed(key_index: Tensor, keys: TokenLayout, queries: int) -> LayerTokens | None:
    """Return the tokens of windows whose queries are the keys, or are pooled from them."""
    if queries == key_index.shape[1]:
        return LayerTokens(keys, keys, key_index, key_index)
    count = key_index.shape[1]
    side, width = round((count / queries) ** 0.5), round(count**0.5)
    if side * side * queries != count or keys.rows % side or keys.cols % side:
        return None
    coarse = TokenLayout(0, keys.rows // side, keys.cols // side)
    parents = key_index // keys.cols // side * coarse.cols + key_index % keys.cols // side
    parents = torch.where(key_index < 0, -1, parents)  # [windows, keys]
    groupings = [parents.unflatten(1, (side * side, queries)).transpose(1, 2)]  # in Hiera's order, or in raster order
    if width * width == count and width % side == 0:
        blocks = parents.unflatten(1, (width // side, side, width // side, side))
        groupings.append(blocks.transpose(2, 3).flatten(3).flatten(1, 2))
    for groups in groupings:  # [windows, queries, keys of a query]
        common = groups.amax(dim=-1)
        if ((groups == common.unsqueeze(-1)) | (groups < 0)).all():
            return LayerTokens(coarse, keys, common, key_index)
    return None


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


def misplaced(call: Call, places: Mapping[str, TokenLayout], unapplied: set[str] | None = None) -> str | None:
    """Return why tokens are not the patches of their layout, or None; cached per model and layouts.

    Up to nine patches of each layout are tested: the gradient of their tokens with respect to the pixels of noise must
    be where the layout places them, if attention is replaced by the identity. A crop, a flip, another order or dropped
    tokens would misplace every map.

    Args:
        call: call of the unwrapped model.
        places: layout of the tokens at the input of blocks, by path.
        unapplied: as for `unseen_mixing`.
    """
    known, key = model_cache(call.model), (misplaced, tuple(places.items()), tuple(call.pixels.shape[1:]))
    if key not in known:
        known[key] = None if call.pixels.is_meta else _misplaced_patch(call, places, unapplied or set())
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


def _misplaced_patch(call: Call, places: Mapping[str, TokenLayout], unapplied: set[str]) -> tuple[str, int, int] | None:
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
        with suppress(Exception), hooked(hooks), without_attention(call, unapplied):
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
