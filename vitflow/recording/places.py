"""Places of tokens: the pixels of the model input that the tokens of each layer are computed from.

Once per model and input size, the model runs on noise, with recorded attention replaced by the identity. Gradients of
the tokens with respect to the pixels show where each token is: its grid gets an extent, or the model is refused if its
tokens are not in raster order.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from vitflow.errors import UnsupportedModelError
from vitflow.images.geometry import Extent
from vitflow.methods.tokens import LAYOUT, TokenLayout
from vitflow.models.anatomy import possible_layouts
from vitflow.models.blocks import block_norms, block_paths
from vitflow.models.calls import tensors_in
from vitflow.recording.attention_kinds import refusal_of
from vitflow.recording.certificate import Refusal, blocks_of, certify, set_passed
from vitflow.recording.experiment import Call, Finished
from vitflow.recording.head import as_tokens, remember_blocks
from vitflow.recording.isolation import Hook, checkpointing_error, hooked
from vitflow.recording.layer_tokens import declared_layout, decoder_stacks, find_tokens, pooling_layers
from vitflow.recording.layers import AttentionLayer, RecordedLayers, stack_of
from vitflow.recording.parallel import known_layers
from vitflow.recording.receptive_fields import Gradients, Misplaced, Unmeasured, measured_extent
from vitflow.recording.trace import Trace
from vitflow.recording.without_attention import without_attention


def locate(trace: Trace, given: TokenLayout | None, *, whole: bool) -> None:
    """Set where the tokens of a recorded pass are on the image, or why rollout does not apply.

    `given` is the layout that the user gave; `whole` is False if only a submodule was recorded.
    """
    call = trace.call
    assert call is not None
    if trace.layers:
        names = [layer.name for layer in trace.layers]
        refusal = call.cached((refusal_of, *names), lambda: refusal_of(call.model, names))
        trace.refusal = refusal or _refusal_of_pooling(trace) or _locate_layers(trace, call, given, whole)
    if trace.layers and trace.refusal is None:
        layouts = [layout for layer in trace.layers for layout in (layer.tokens.keys, layer.tokens.queries)]
        trace.known_layout = max(layouts, key=lambda layout: layout.num_patches)
        trace.known_top = trace.layers[-1].tokens.queries
    else:
        trace.known_layout = _layout_without_attention(trace, call, given)
    for path, features in trace.features.items():
        if path not in trace.feature_layouts:
            trace.feature_layouts[path] = place_features(call, path, features, trace.known_layout)


def _refusal_of_pooling(trace: Trace) -> str | None:
    """Return why rollout does not apply if the only attention is that of a few queries over the cells of a CNN."""
    queries, keys = trace.layers[0].example.shape[-2:]
    if len(trace.layers) > 1 or queries >= keys:
        return None
    return (
        f"{type(trace.model).__name__} only attends in {trace.layers[0].name}, from {queries} to {keys} tokens: this "
        "pools tokens, and is not attention between them. Use gradcam, sampling or occlusion."
    )


def _locate_layers(trace: Trace, call: Call, given: TokenLayout | None, whole: bool) -> str | None:
    """Locate the tokens of each layer without those of a decoder on top; return why rollout does not apply, or None."""
    names, above = trace.names, decoder_stacks(trace.layers, len(call.pixels))
    pools = pooling_layers(call, trace.layers)
    layers = [layer for layer in trace.layers if stack_of(layer.name) not in above and layer.name not in pools]
    trace.names = [name for name in names if stack_of(name) not in above and name not in pools]
    located, refusal = find_tokens(call, layers, given)
    trace.layers = RecordedLayers(located)
    within = {layer.name for layer in layers} - {layer.name for layer in trace.layers}
    mixing = [name for name in trace.names if name not in within]
    if refusal is not None:
        return Refusal(refusal, 3)
    known = known_layers(call)
    if known is not None and (refusal := known.refusal(call.model, mixing)) is not None:
        return Refusal(refusal, 2)
    if not whole or not trace.layers:
        return None
    remember_blocks(call.model, blocks_of(call, trace.names))
    trace.certificate = certify(call, trace.layers, names)
    if (refusal := trace.certificate.refusal(call.model)) is not None:
        return refusal
    merged = trace.certificate.scheme == "permuted"
    if (refusal := _place_layers(call, trace.layers, trace.names, merged)) is not None:
        return Refusal(refusal, 4)
    set_passed(call, trace.certificate, trace.layers)
    return None


def _layout_without_attention(trace: Trace, call: Call, given: TokenLayout | None) -> TokenLayout | None:
    """Return the layout that the model declares or its blocks have, or None, as methods without attention need none."""
    blocks = block_paths(call.model)
    of_features = next((features.shape[1] for features in trace.features.values() if features.ndim == 3), None)
    of_blocks = None if trace.watch is None or not blocks else trace.watch.num_tokens
    for tokens in dict.fromkeys((of_features, of_blocks)):
        with suppress(UnsupportedModelError):
            layout = given or declared_layout(call, tokens, blocks[0] if blocks else "")
            if layout.num_patches == 1 and given is None:
                continue  # the result of a pooling
            extents, _ = find_extents(call, dict.fromkeys(blocks[:1], (layout,)))
            return replace(layout, extent=extents.get(layout))
    return None


def _place_layers(call: Call, layers: Sequence[AttentionLayer], names: Sequence[str], merged: bool) -> str | None:
    """Set the extents of the layouts of layers; return why tokens are not at their places, or None.

    With `merged`, the grids of later stages are cells of the first one, which alone is measured.
    """
    layouts = dict.fromkeys(layout for layer in layers for layout in (layer.tokens.queries, layer.tokens.keys))
    sites: dict[str, tuple[TokenLayout, ...]] = {}
    for name, block in zip(names, blocks_of(call, names), strict=True):
        here = [layer.tokens for layer in layers if layer.name == name and layer.tokens.key_index is None]
        sites[block] = tuple(dict.fromkeys(layout for each in here for layout in (each.queries, each.keys)))
    first = layers[0].tokens.queries
    measured = (dict([*sites.items()][:1]), (first,)) if merged else (sites, tuple(layouts))
    extents, refusal = find_extents(call, *measured)
    if refusal is None:
        before = replace(first, extent=extents.get(first))
        placed = {layout: replace(layout, extent=extents.get(layout)) for layout in layouts}
        for layout in sorted(layouts, key=lambda layout: -layout.num_patches) if merged else ():
            if layout != first:
                placed[layout] = replace(layout, extent=_pooled(before, layout))
            before = placed[layout]
        for layer in layers:
            queries, keys = placed[layer.tokens.queries], placed[layer.tokens.keys]
            if keys.num_patches < queries.num_patches:  # pooled in this layer
                keys = replace(keys, extent=_pooled(queries, keys))
            layer.located = replace(layer.tokens, queries=queries, keys=keys)
    return refusal


def place_features(
    call: Call, path: str, features: Tensor, layout: TokenLayout | None
) -> tuple[TokenLayout, bool] | None:
    """Return the layout of a module's output with its extent, and True if channels come last; None if it has no grid.

    A single possible layout is not measured at the stages of a model without a list of blocks, if its strides are 2 to
    a power. `layout` is that of the tokens of the model, if known.
    """
    possible, stages = possible_layouts(call.model, call.size, features, layout), not block_paths(call.model)
    for each, channels_last in possible:
        strides = [side / count for side, count in zip(call.size, (each.rows, each.cols), strict=True)]
        even = all(math.frexp(stride)[0] == 0.5 for stride in strides)
        if even and stages and features.ndim == 4 and len(possible) == 1 and path in block_norms(call.model):
            return each, channels_last
        extents, refusal = find_extents(call, {path: (each,)}, unseen=stages)
        if refusal is None:
            return replace(each, extent=extents.get(each)), channels_last
    return None


def _pooled(fine: TokenLayout, coarse: TokenLayout) -> Extent | None:
    """Return the extent of tokens that are pooled from others by 2 to a power, perhaps with padding or cut."""
    if fine.extent is None:
        return None
    spans = []
    for span, before, after in zip(fine.extent, (fine.rows, fine.cols), (coarse.rows, coarse.cols), strict=True):
        strides = [2**power for power in range(before.bit_length())]
        fitting = (stride for stride in strides if after in (before // stride, -(-before // stride)))
        spans.append(span._replace(step=span.step * next(fitting, before / after)))
    return spans[0], spans[1]


def find_extents(
    call: Call, sites: Mapping[str, Sequence[TokenLayout]], grids: Sequence[TokenLayout] = (), *, unseen: bool = False
) -> tuple[dict[TokenLayout, Extent], str | None]:
    """Measure the extents of layouts, each where it first fits; cached per model, layouts and input size.

    The first and last pixels of the receptive fields of some tokens, partly random, determine the cells. If these
    fields are the whole image, cells divide it evenly. If each pixel belongs to one token, as with a patch embedding
    whose stride is its kernel, all tokens are tested.

    Args:
        sites: layouts in raster order that the input or output of modules may have, by path.
        grids: layouts that any of them may have as [batch, rows, cols, channels] or [batch, channels, rows, cols].
        unseen: accept tokens that are computed from the pixels by attention alone.

    Returns:
        The extents of the layouts that were found, and the reason why tokens are not in raster order, or None.
    """
    if call.pixels.is_meta:
        return {}, None
    key = find_extents, tuple(sites.items()), grids, unseen, tuple(call.pixels.shape[1:])
    return call.cached(key, lambda: _measure(call, sites, grids, unseen))


def _measure(
    call: Call, sites: Mapping[str, Sequence[TokenLayout]], grids: Sequence[TokenLayout], unseen: bool
) -> tuple[dict[TokenLayout, Extent], str | None]:
    tokens: dict[TokenLayout, tuple[str, Tensor]] = {}
    every = {*grids, *(layout for layouts in sites.values() for layout in layouts)}

    def see(path: str, enters: bool, *given: Any) -> None:
        for value in filter(torch.is_floating_point, tensors_in(given if enters else given[-1])):
            fitting = {each: found for each in every if (found := as_tokens(value, each, 1)) is not None}
            for layout in fitting.keys() - tokens.keys():
                if value.ndim != 3 or layout in sites[path]:
                    copied = fitting[layout][0].clone()  # the model may change it in place
                    if copied.requires_grad:
                        tokens[layout] = path, copied
            if fitting:  # further tensors may be attention
                break
        if len(tokens) == len(every):
            raise Finished

    modules = ((path, call.model.get_submodule(path)) for path in sites)
    hooks = (
        Hook(module, partial(see, path, first), before=first) for path, module in modules for first in (True, False)
    )
    with call.experiment(gradients=True):
        noise = call.noise(1).requires_grad_()
        # The model may reject noise.
        with suppress(Exception), hooked(hooks), without_attention(call.model):
            call(noise)
        extents = {}
        for layout, (path, each) in tokens.items():
            try:
                extents[layout] = measured_extent(Gradients(each[layout.patches], noise), (layout.rows, layout.cols))
                _check_prefix(each[: layout.patches.start], noise, extents[layout])
            except Unmeasured as error:
                if not (extents or unseen):
                    return {}, _refusal(call, path, layout, error)
            except CheckpointError as error:
                raise checkpointing_error(call.model) from error
            except Misplaced as error:
                return {}, _refusal(call, path, layout, error)
    return extents, None


def _refusal(call: Call, path: str, layout: TokenLayout, error: Misplaced) -> str:
    return (
        f"{type(call.model).__name__} computes the token {error} (of {layout.rows} × {layout.cols}, at {path}), so its "
        f"maps would be misplaced. If its layout is another, pass {LAYOUT}; otherwise use input_gradient or occlusion."
    )


def _check_prefix(prefix: Tensor, noise: Tensor, extent: Extent) -> None:
    """Raise Misplaced if patches that cover a part of the image come after tokens of other pixels."""
    sides = zip(extent, noise.shape[-2:], strict=True)
    if not len(prefix) or not prefix.requires_grad or all(span[2:] == (0, length) for span, length in sides):
        return
    [gradient] = torch.autograd.grad(prefix.square().sum(), noise, retain_graph=True, allow_unused=True)
    if gradient is not None and gradient.any():
        raise Misplaced(
            f"of the patch in row 0 and column 0 after {len(prefix)} tokens, of which some are patches, too"
        )
