"""Token positions of each attention layer on the image: the windows and stages of a recorded forward pass.

Windows are traced, independent of the model family: the model runs once on random pixels, and each tensor of image
tokens is paired with an index tensor of the same shape, which has the number of the patch at each of its entries.
Functions that move entries move the index as well.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import OTHER_METHODS
from vitflow.methods.staged_rollout import LayerTokens
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import grid_of_count, layout_of_count, read_layout
from vitflow.models.blocks import block_paths_of
from vitflow.models.calls import tensors_in
from vitflow.recording.attending import Attention
from vitflow.recording.attention_kinds import Arrange, arrangement, is_class_attention, is_head_by_head, may_attend
from vitflow.recording.experiment import Call, Finished
from vitflow.recording.interception import Interception
from vitflow.recording.isolation import Hook
from vitflow.recording.layers import AttentionLayer, stack_of, stream_of

Size = tuple[int, int]

# Functions of torch that only move, copy or drop entries, or pad them with 0.
_MOVING = {
    *("__getitem__", "cat", "chunk", "concat", "expand", "expand_as", "flatten", "flip", "movedim", "mT", "narrow"),
    *("pad", "permute", "repeat", "repeat_interleave", "reshape", "roll", "select", "split", "squeeze", "stack"),
    *("swapaxes", "T", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view"),
}
# Functions that may pool tokens, and the possible sides of the cells of patches that are pooled or merged.
_REDUCING = {"amax", "max", "max_pool2d", "mean"}
_SIDES = (1, 2, 4)


def decoder_stacks(layers: Sequence[AttentionLayer], batch: int) -> set[str]:
    """Return the names of the stacks of a decoder on top: the last layers, in stacks with cross-attention.

    Their queries are not image tokens, even if their number equals the number of patches: the decoder is a part of the
    head.
    """
    stacks, shapes = [stack_of(layer.name) for layer in layers], [layer.example.shape for layer in layers]
    square = {keys for *_, queries, keys in shapes if queries == keys}
    crossing = {
        stack
        for layer, stack, shape in zip(layers, stacks, shapes, strict=True)
        if stream_of(layer.name) != stack or "decoder" in stack.lower() or _reads_others(shape, batch, square)
    }
    first = next((index for index, stack in enumerate(stacks) if stack in crossing), 0)
    return crossing if first and crossing.issuperset(stacks[first:]) else set()


def _reads_others(shape: Sequence[int], batch: int, square: set[int]) -> bool:
    """Return True if the queries of a layer's attention have no grid and attend to the tokens of other layers."""
    count, *_, queries, keys = shape
    return count == batch and 1 < queries != keys and keys in square and math.isqrt(queries) ** 2 != queries


def pooling_layers(call: Call, layers: Sequence[AttentionLayer]) -> set[str]:
    """Return the names of the last layers whose queries are no patches, as they are learned or class tokens.

    They are a part of the head: they have no residual over patches. Layers with as many queries as keys are among them
    if they are known to have no patch, as those over the class tokens of several layers. There are none if the block of
    another layer contains one.
    """
    names, counts = set[str](), {layer.example.shape[-2:] for layer in layers}
    for layer in reversed(layers if len(counts) > 1 else ()):
        (count, *_, queries, keys), module = layer.example.shape, call.model.get_submodule(layer.name)
        if queries > keys or count != len(call.pixels) or is_class_attention(module):
            break
        tokens = _trace(call).get(layer.name)
        if queries == keys if tokens is None or tokens.query_index is None else bool((tokens.query_index != -1).any()):
            break
        names.add(layer.name)
    others = [layer.name for layer in layers if layer.name not in names]
    blocks = block_paths_of(call.model, others) if names else []
    enclosed = any(name.startswith(f"{block}.") for name in names for block in blocks)
    return names if others and not enclosed else set()


def find_tokens(
    call: Call, layers: Sequence[AttentionLayer], layout: TokenLayout | None
) -> tuple[list[AttentionLayer], str | None]:
    """Return the layers that mix image tokens, with the positions of these, and why rollout does not apply, or None.

    Raises UnsupportedModelError for global attention if the model's token layout is unknown.
    """
    model, batch = call.model, len(call.pixels)
    counts = {(shape[0], *shape[-2:]) for shape in (layer.example.shape for layer in layers)}
    count, queries, keys = next(iter(counts))
    if len(counts) == 1 and count == batch and queries == keys:
        layout = layout or declared_layout(call, keys, layers[0].name)
        everywhere = LayerTokens(layout, layout)
        for layer in layers:
            layer.located = everywhere
        return list(layers), None
    traced = _trace(call)
    located = [replace(layer, located=_locate(call, layer, layout, traced)) for layer in layers]
    following = [*located[1:], None]
    within = [_is_within_patches(layer, then, batch) for layer, then in zip(located, following, strict=True)]
    # Layers of a stage are kept together: a window may have as many tokens as the next stage merges to a patch.
    grids = {layer.located.keys for layer, inside in zip(located, within, strict=True) if layer.located and not inside}
    mixing = [
        layer
        for layer, inside in zip(located, within, strict=True)
        if not inside or (layer.located is not None and layer.located.keys in grids)
    ]
    unknown = next((layer for layer in mixing if layer.located is None), None)
    if unknown is None:
        return mixing, None
    kind = type(model.get_submodule(unknown.name)).__name__
    return list(layers), (
        f"The image positions of the tokens of {unknown.name} ({kind}) in {type(model).__name__}, with attention "
        f"{tuple(unknown.example.shape)}, are unknown: rollout does not apply. {OTHER_METHODS}"
    )


def declared_layout(call: Call, tokens: int | None, path: str = "") -> TokenLayout:
    """Return the layout that the model declares for its tokens; see `read_layout`, which is cached here.

    If it declares none, the layout is measured at the input of the module with this path, if given.
    """
    key: tuple[Any, ...] = (read_layout, call.size, tokens)
    if not path:
        key = (*key, "guessed") if call.known(key) is None else key
        return call.cached(key, lambda: read_layout(call.model, call.size, tokens))
    return call.cached(key, lambda: read_layout(call.model, call.size, tokens, partial(_measured_layout, call, path)))


def _measured_layout(call: Call, path: str, tokens: int) -> TokenLayout | None:
    """Return the layout of the tokens that a module gets; None if its patches are not in a row, or no grid.

    Class and register tokens are those that are equal for two images.
    """
    found: list[Tensor] = []

    def see(args: Any, kwargs: Any) -> None:
        found.extend(each for each in tensors_in([args, kwargs]) if each.shape[:2] == (2, tokens) and each.ndim == 3)
        if found:
            raise Finished

    hooks = (Hook(module, see, before=True) for module in [call.model.get_submodule(path)])
    with suppress(Exception), call.experiment(hooks):  # the model may reject noise
        call(call.noise(2))
    if not found:
        return None
    patches = (found[0][0] != found[0][1]).any(dim=-1).nonzero().flatten().tolist()
    grid = grid_of_count(call.size, len(patches)) if patches else None
    if grid is None or patches[-1] - patches[0] + 1 != len(patches):
        return None
    return TokenLayout(patches[0], *grid, num_suffix_tokens=tokens - patches[-1] - 1)


def _is_within_patches(layer: AttentionLayer, following: AttentionLayer | None, batch: int) -> bool:
    """Return True if a layer's windows are the patches of the following layer, so that it does not mix patches."""
    windows, keys = len(layer.example) // batch, layer.example.shape[-1]
    patches = None if following is None or following.located is None else following.located
    if patches is None or patches.windows > 1 or patches.keys.num_patches != windows:
        return False
    return layer.located is None or windows * keys == layer.located.keys.num_patches


def _locate(
    call: Call, layer: AttentionLayer, given: TokenLayout | None, traced: Mapping[str, LayerTokens]
) -> LayerTokens | None:
    """Return the positions of the tokens of a layer, or None if they are unknown."""
    batch = len(call.pixels)
    windows, (queries, keys) = len(layer.example) // batch, layer.example.shape[-2:]
    if len(layer.example) % batch:
        return None  # computed image by image
    tokens = traced.get(layer.name)
    index = () if tokens is None else (tokens.query_index, tokens.key_index)
    if [tuple(each.shape) for each in index if each is not None] != [(windows, queries), (windows, keys)]:
        tokens = None
    if windows > 1:
        keys_of = None if tokens is None else tokens.key_index
        return None if keys_of is None or torch.equal(keys_of, keys_of[:1].expand_as(keys_of)) else tokens  # of heads
    of_queries, of_keys = [
        given if given is not None and given.num_tokens == count else layout_of_count(call.model, call.size, count)
        for count in (queries, keys)
    ]
    if of_keys is None:
        return None
    if is_class_attention(call.model.get_submodule(layer.name)):
        first = torch.zeros(1, queries, dtype=torch.long)
        return LayerTokens(of_keys, of_keys, first, torch.arange(keys).unsqueeze(0))
    in_order = LayerTokens(of_queries, of_keys) if of_queries is not None else None
    if tokens is None or tokens.key_index is None or of_keys.num_prefix_tokens:
        return in_order
    # All patches, in another order or with padding.
    order, raster = tokens.key_index[0], torch.arange(tokens.keys.num_patches, device="cpu")
    reordered = torch.equal(order[order >= 0].sort().values, raster) and not torch.equal(order, raster)
    return tokens if reordered else in_order


def _trace(call: Call) -> dict[str, LayerTokens]:
    """Return the tokens of each attention layer by its path, from one run of the model per input size."""

    def traced() -> dict[str, LayerTokens]:
        tracer, noise = _Tracer(call.model, call.size), call.noise(1)
        noise._of_image = True  # type: ignore[attr-defined]
        with call.experiment(tracer.hooks(may_attend(call.model))), tracer:
            call(noise)
        return tracer.traced

    return call.cached((_trace, call.size), traced)


@dataclass(frozen=True, slots=True, eq=False)
class PatchIndex:
    """The patch of each entry of a tensor, on a grid in raster order and counted from 1.

    It is 0 for padding and what is not of the image, and -1 if the patch is unknown.
    """

    index: Tensor
    grid: TokenLayout

    def coarser(self, side: int) -> "PatchIndex":
        """Return the places on the grid whose cells have side × side patches."""
        rows, cols, patch = -(-self.grid.rows // side), -(-self.grid.cols // side), self.index - 1
        cells = patch // self.grid.cols // side * cols + patch % self.grid.cols // side + 1
        return PatchIndex(torch.where(patch < 0, self.index, cells), TokenLayout(0, rows, cols))


class _Tracer(Interception):
    """Follows the tokens of an image through all functions, and keeps those that each module attends to."""

    def __init__(self, model: nn.Module, size: Size) -> None:
        super().__init__()
        self.model, self.size = model, size
        self.traced: dict[str, LayerTokens] = {}
        self._operands: Sequence[Tensor] = ()  # of the current call

    def on_attention(self, attention: Attention) -> None:
        """Keep the tokens of the queries and keys of a module."""
        name, module = self.path[-1]
        if name in self.traced or is_head_by_head(module):
            return
        # The arguments of fused attention, or of the product of attention and values or of their transposes.
        first, *_, last = self._operands[:3]
        probabilities = attention.probabilities
        arrange, transposed = arrangement(self.path, probabilities, 1), attention.value is not last
        queries, keys = _tokens_of(first, arrange, transposed), _tokens_of(last, arrange, transposed)
        if transposed:
            queries, keys = keys, queries
        if probabilities.shape[-2] == probabilities.shape[-1]:
            queries = keys
        if queries is not None and keys is not None:
            indices = queries.index.long() - 1, keys.index.long() - 1
            self.traced[name] = LayerTokens(queries.grid, keys.grid, *indices)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._operands = list(tensors_in([args, kwargs]))
        sources = [places for tensor in self._operands if (places := _places_of(tensor)) is not None]
        output = super().__torch_function__(func, types, args, kwargs)
        results, of_image = list(tensors_in(output)), any(getattr(each, "_of_image", False) for each in self._operands)
        for result in results if of_image else ():
            result._of_image = True  # type: ignore[attr-defined]
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name  # of a property, such as mT
        if name in _MOVING and sources:
            move = Tensor.reshape if name == "view" else func  # an index has other strides
            moved = move(*_indices(args), **_indices(kwargs))
            for tensor, index in zip(results, tensors_in(moved), strict=True):
                tensor._places = PatchIndex(index, sources[0].grid)  # type: ignore[attr-defined]
        elif name not in _MOVING and results and results[0].is_floating_point():
            shape = results[0].shape
            places = next(filter(None, (index_of_result(each, shape, name) for each in sources)), None)
            if places is None and sources and name in _REDUCING:
                maximum, grid = torch.amax if name == "mean" else func, sources[0].grid
                sides = [side for side in _SIDES if grid.rows % side == grid.cols % side == 0]
                places = index_of_pooled(sources[0], lambda index: maximum(index, *args[1:], **kwargs), sides)
            if (
                places is None
                and of_image
                and (not sources or (len(shape) == 4 and name not in _REDUCING - {"max_pool2d"}))
            ):
                places = self._image(results[0])
            results[0]._places = places  # type: ignore[attr-defined]
        return output

    def _image(self, tensor: Tensor) -> PatchIndex | None:
        """Return the places of a tensor with the tokens of one image in raster order, or None."""
        shape, size = tensor.shape, self.size
        if len(shape) not in (3, 4) or len(tensor) != 1:
            return None
        axis = 1 if len(shape) == 3 else grid_axis(shape, size)
        if axis is None:
            return None
        axes = shape[axis : axis + len(shape) - 2]  # of the tokens
        grid = TokenLayout(0, *axes) if len(axes) == 2 else layout_of_count(self.model, size, *axes)
        if grid is None or grid.num_prefix_tokens or grid.num_patches == 1:
            return None  # one token may be a class token
        index = torch.arange(1, grid.num_patches + 1, device="cpu").float().reshape(axes)
        return PatchIndex((index if axis > 1 else index.unsqueeze(-1)).expand(shape), grid)


def _places_of(tensor: Tensor) -> PatchIndex | None:
    return getattr(tensor, "_places", None)


def _indices(given: Any) -> Any:
    """Replace the tensors among the arguments of a function by their indices, -1 if unknown; others by 0."""
    if isinstance(given, Tensor):
        places = _places_of(given)
        if places is not None:
            return places.index
        if given.is_floating_point():
            return torch.full(given.shape, -1.0 if getattr(given, "_of_image", False) else 0.0, device="cpu")
        return torch.zeros(given.shape, dtype=given.dtype, device="cpu") if given.is_meta else given.cpu()
    if isinstance(given, Mapping):
        return {name: _indices(value) for name, value in given.items()}
    return type(given)(map(_indices, given)) if type(given) in (list, tuple) else given


def index_of_result(places: PatchIndex, shape: torch.Size, function: str) -> PatchIndex | None:
    """Return the places of a function's result: those of an operand, if at most the channel axis differs.

    The channels of an operand may be those of several tokens, which are merged.
    """
    index = places.index
    channels = [axis for axis in range(index.ndim) if len(shape) != index.ndim or shape[axis] != index.shape[axis]]
    if function == "linear":
        channels = channels or [index.ndim - 1]
    if not channels:
        return places
    if len(channels) > 1:
        return None
    if index.stride(channels[0]) == 0:
        return PatchIndex(index.narrow(channels[0], 0, 1).expand(shape), places.grid)
    sides = _SIDES if function == "linear" else (1,)
    merged = index_of_pooled(places, partial(torch.amax, dim=channels[0], keepdim=True), sides)
    return merged and replace(merged, index=merged.index.expand(shape))


def index_of_pooled(places: PatchIndex, maximum: Callable[[Tensor], Any], sides: Sequence[int]) -> PatchIndex | None:
    """Return the places of a maximum over channels, or over the patches of cells of side × side patches."""
    for side in sides:
        coarse = places.coarser(side)
        negative = torch.where(coarse.index > 0, -coarse.index, -torch.inf)
        high, low = (next(tensors_in(maximum(index))) for index in (coarse.index, negative))
        if torch.equal(high, torch.where(high > 0, -low, high)):
            return PatchIndex(high, coarse.grid)
    return None


def _tokens_of(tensor: Tensor, arrange: Arrange | None, transposed: bool) -> PatchIndex | None:
    """Return the places of the tokens [windows, tokens] of a tensor [batch, heads, tokens, channels]."""
    places = _places_of(tensor)
    if places is None:
        return None
    index = places.index.mT if transposed else places.index
    index = index if arrange is None else arrange(index)
    first = index[:, :1, :, :1]
    return replace(places, index=first[:, 0, :, 0]) if (index == first).all() else None


def grid_axis(shape: Sequence[int], size: Size) -> int | None:
    """Return the axis of the rows of [images, rows, cols, channels] or [images, channels, rows, cols], or None.

    Patches of the grid on an image of (height, width) are about square, and not single pixels.
    """

    def ratio(axis: int) -> float:
        tall, wide = size[0] / shape[axis], size[1] / shape[axis + 1]  # of a patch, in pixels
        patches = shape[axis] * shape[axis + 1] > 1 and min(tall, wide) >= 1.5
        return max(tall, wide) / min(tall, wide) if patches else math.inf

    axis = min((2, 1), key=ratio)
    return axis if ratio(axis) < 1.2 else None
