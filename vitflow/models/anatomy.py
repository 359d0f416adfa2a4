"""Structure of a model: prefix tokens, patch grid, pooling, output projections.

Read from the attributes of timm's Vision Transformers, not guessed from sizes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import ModelError, UnsupportedModelError
from vitflow.methods.tokens import TokenLayout
from vitflow.models.libraries import BOTH_TOKENS, HALVES, PATCH_MEAN, library_layout, library_pooling
from vitflow.models.parts import modules_of

# Attribute names of the output projection of attention modules.
_OUTPUT_PROJECTIONS = ("proj", "attn_out_proj", "out_proj", "o_proj", "c_proj", "out_lin", "Wo", "dense", "o")
# Attribute names of the class token, [1, tokens, width].
_CLASS_TOKENS = ("cls_token", "class_token", "cls_token_0", "cls_token1")
#: Name of a readout that is taken from the attention of a pooling head.
ATTENTION_POOLING = "attention pooling"
_CLASS_TOKEN = "class token"
#: Name of a readout that includes the prefix tokens.
ALL_TOKENS = "average over all tokens"
# Names of the logits in outputs with fields, in order of preference.
_OUTPUTS = ("logits", "pooler_output", "image_embeds", "last_hidden_state")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DataParallel or DistributedDataParallel wrappers.

    Raises:
        UnsupportedModelError: `model` is not a module, or is scripted, traced or exported.
    """
    if not isinstance(model, nn.Module):
        remedy = " Pass its .model." if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise UnsupportedModelError(f"Expected a model as a torch.nn.Module, got {model!r:.80}.{remedy}")
    while True:
        if isinstance(model, torch.jit.ScriptModule | torch.fx.GraphModule):
            raise UnsupportedModelError(
                f"{type(model).__name__}: attention of a scripted, traced or exported model cannot be recorded. "
                "Pass the original module."
            )
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def transformer_of(model: nn.Module) -> nn.Module:
    """Return the outermost module that has a patch embedding, by default the model itself."""
    return next((module for module in modules_of(model) if hasattr(module, "patch_embed")), model)


def class_tokens(transformer: Any) -> int:
    """Return the number of learned class and distillation tokens."""
    tokens = (getattr(transformer, name, None) for name in _CLASS_TOKENS)
    return next((int(token.shape[1]) for token in tokens if isinstance(token, Tensor) and token.ndim == 3), 0)


def has_class_token(model: nn.Module, layout: TokenLayout) -> bool:
    """Return True if the first prefix token is a class token, not a register token."""
    transformer: Any = transformer_of(model)
    default = class_tokens(transformer) > 0 or not hasattr(transformer, "num_prefix_tokens")
    return layout.num_prefix_tokens > 0 and bool(getattr(transformer, "has_class_token", default))


def feature_layout(
    model: nn.Module, input_size: tuple[int, int], features: Tensor, layout: TokenLayout | None
) -> tuple[TokenLayout, bool] | None:
    """Return the layout of recorded features and whether channels come last; None if they have no layout.

    Args:
        features: [batch, tokens, channels], [batch, channels, rows, cols] or [batch, rows, cols, channels].
        layout: the layout of the model's tokens, if known.
    """
    if features.ndim == 3:
        count = features.shape[1]
        if layout is None or layout.num_tokens != count:
            layout = layout_of_count(model, input_size, count)
        return None if layout is None else (layout, True)
    if features.ndim != 4:
        return None
    for channels_last, (rows, cols) in ((False, features.shape[2:]), (True, features.shape[1:3])):
        height, width = input_size[0] / rows, input_size[1] / cols  # of a cell, in pixels
        if min(rows, cols) == 1 or max(height, width) < 1.5 * min(height, width):
            return TokenLayout(0, rows, cols), channels_last
    return None


def logits_of(output: Any) -> Tensor | None:
    """Return the logits of a model's output: the tensor itself, its `logits`, or its pooled features.

    In a tuple or list, they are the only tensor with two axes; None if there is none, or several.

    >>> logits_of({"logits": torch.zeros(1, 5), "hidden": torch.zeros(1, 17, 8)}).shape
    torch.Size([1, 5])
    """
    if isinstance(output, Tensor):
        return output
    fields = (output.get(name) if isinstance(output, Mapping) else getattr(output, name, None) for name in _OUTPUTS)
    logits = next((field for field in fields if field is not None), None)
    if logits is None and isinstance(output, tuple | list):
        tensors = [value for value in output if isinstance(value, Tensor)]
        outputs = [tensor for tensor in tensors if tensor.ndim == 2] or tensors[:1]
        logits = outputs[0] if len(outputs) == 1 else None
    return logits if isinstance(logits, Tensor) else None


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield all tensors of a model's output, including nested mappings and sequences."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_in(value)


def layout_of_count(model: nn.Module, input_size: tuple[int, int], num_tokens: int) -> TokenLayout | None:
    """Return the layout of num_tokens tokens for an input of (height, width); None if none fits.

    Patches form a grid with the aspect ratio of the input, in raster order, after the model's prefix tokens or none.
    """
    height, width = input_size
    transformer: Any = transformer_of(model)
    declared = (getattr(transformer, "num_prefix_tokens", None), class_tokens(transformer))
    prefixes = dict.fromkeys([count for count in declared if isinstance(count, int)] + [0])
    for prefix in prefixes:
        patches = num_tokens - prefix
        if patches < 1:
            continue
        side = (height * width / patches) ** 0.5  # of a square patch, in pixels
        for rows in {max(1, int(height / side)), int(height / side) + 1}:
            cols = patches // rows
            # Rounding at the edges may add or remove part of a patch in each direction.
            if rows * cols == patches and abs(rows - height / side) < 1 and abs(cols - width / side) < 1:
                return TokenLayout(prefix, rows, cols)
    return None


def read_layout(model: nn.Module, input_size: tuple[int, int], num_tokens: int | None) -> TokenLayout:
    """Return the token layout of a forward pass with num_tokens tokens for an input of (height, width).

    If num_tokens is None, the number of prefix tokens is the one that the model declares.

    Raises:
        UnsupportedModelError: the model does not declare its token layout, or num_tokens contradicts it.
    """
    transformer: Any = transformer_of(model)
    name = type(transformer).__name__
    embed: Any = getattr(transformer, "patch_embed", None)
    prefix = getattr(transformer, "num_prefix_tokens", None)
    layout = library_layout(model, input_size)
    if layout is not None and layout.num_tokens == num_tokens:
        return layout
    if layout is not None:
        prefix, rows, cols = layout.num_prefix_tokens, layout.rows, layout.cols
    elif getattr(embed, "strict_img_size", True) is False and hasattr(embed, "dynamic_feat_size"):
        rows, cols = embed.dynamic_feat_size(input_size)  # grid_size is stale under dynamic sizes
    elif getattr(embed, "grid_size", None) is not None and (prefix is not None or num_tokens is not None):
        rows, cols = embed.grid_size
    else:
        fitting = None if num_tokens is None else layout_of_count(model, input_size, num_tokens)
        if fitting is None:
            raise UnsupportedModelError(
                f"{name} does not declare the layout of its {num_tokens or ''} tokens (no patch_embed): "
                "pass layout=TokenLayout(num_prefix_tokens, rows, cols)."
            )
        return fitting
    if prefix is None:
        rest = -1 if num_tokens is None else num_tokens - rows * cols
        prefix = rest if rest >= 0 else class_tokens(transformer)
    if num_tokens is not None and prefix + rows * cols != num_tokens:
        fitting = layout_of_count(model, input_size, num_tokens)
        if fitting is not None:
            return fitting
        raise UnsupportedModelError(
            f"{name} declares {prefix} prefix tokens and {rows} × {cols} patches, but its attention has "
            f"{num_tokens} tokens: pass layout=TokenLayout(num_prefix_tokens, rows, cols)."
        )
    return TokenLayout(int(prefix), int(rows), int(cols))


@dataclass(frozen=True, slots=True, eq=False)
class ClosedReadout:
    """Readout implied by a known pooling, to be verified before use.

    Attributes:
        weights: weights of the top layer's tokens, [1 or batch, tokens]; rows sum to 1.
        name: the pooling: "class token", "average over patches", …
        convention: "exact" if the gradient of an output must equal the weights, "support" if it must be 0 exactly where
            they are 0, "pooling" if the output must depend on the output of an attention-pooling head only.
    """

    weights: Tensor
    name: str
    convention: str = "exact"


def closed_readouts(model: nn.Module, layout: TokenLayout, pooling_attention: Tensor | None) -> list[ClosedReadout]:
    """Return the readouts of known poolings, the one that the model declares first.

    Args:
        model: any model.
        layout: layout of the top layer's tokens.
        pooling_attention: recorded attention of an attention-pooling head, [batch, heads, queries, tokens], or None.
    """
    pooling = library_pooling(model)
    if pooling is None and pooling_attention is not None:
        weights = pool_queries(model, layout, pooling_attention.detach().mean(dim=1))
        declared = ClosedReadout(weights, ATTENTION_POOLING, "pooling")
    else:
        declared = _closed_readout(pooling or _timm_pooling(model, layout), layout)
    common = [PATCH_MEAN, *([_CLASS_TOKEN, ALL_TOKENS] if layout.num_prefix_tokens else [])]
    return [declared, *(_closed_readout(name, layout) for name in common if name != declared.name)]


def _closed_readout(pooling: str, layout: TokenLayout) -> ClosedReadout:
    weights = torch.zeros(1, layout.num_tokens)
    if pooling == _CLASS_TOKEN:
        weights[0, 0] = 1.0
    elif pooling == BOTH_TOKENS:
        weights[0, :2] = 0.5
    elif "all tokens" in pooling:
        weights[:] = 1.0 / layout.num_tokens
    else:
        weights[0, layout.patches] = (0.5 if pooling == HALVES else 1.0) / layout.num_patches
        weights[0, 0] += 0.5 if pooling == HALVES else 0.0
    return ClosedReadout(weights, pooling, "support" if pooling == BOTH_TOKENS else "exact")


def _timm_pooling(model: nn.Module, layout: TokenLayout) -> str:
    """Return the name of the pooling that the attributes of a timm model declare."""
    transformer: Any = transformer_of(model)
    pool = getattr(transformer, "global_pool", None)
    if getattr(transformer, "head_dist", None) is not None and layout.num_prefix_tokens == 2:
        return BOTH_TOKENS
    if has_class_token(model, layout) and pool not in ("avg", "avgmax", "max"):
        return _CLASS_TOKEN
    include_prefix = layout.num_prefix_tokens and getattr(transformer, "pool_include_prefix", False)
    words = {"max": "maximum", "avgmax": "average and maximum"}.get(str(pool), "average")
    over = "all tokens" if include_prefix else "patches"
    return f"{words} over {over}" + ("" if pool else " (the model does not pool)")


def pool_queries(model: nn.Module, layout: TokenLayout, queries: Tensor) -> Tensor:
    """Return the token weights [batch, tokens] of an attention-pooling head, its queries pooled as in the model.

    Args:
        model: the model that contains the head.
        layout: layout of the top layer's tokens.
        queries: attention of the head's queries, heads fused, [batch, queries, patches or tokens].

    Raises:
        UnsupportedModelError: the head pools a different number of tokens.
    """
    transformer: Any = transformer_of(model)
    pool = getattr(getattr(transformer, "attn_pool", None), "pool", "token")
    weights = queries.mean(dim=1) if pool == "avg" else queries[:, 0]
    missing = layout.num_tokens - layout.num_suffix_tokens - weights.shape[-1]
    if missing not in (0, layout.num_prefix_tokens) or layout.num_suffix_tokens:
        raise UnsupportedModelError(
            f"The attention pooling of {type(transformer).__name__} has {weights.shape[-1]} tokens, expected "
            f"{layout.num_tokens} or the {layout.num_patches} patches. Pass readout=, or use gradcam, input_gradient "
            "or occlusion."
        )
    return torch.nn.functional.pad(weights, (missing, 0))


def output_projection(attention_module: nn.Module, parent: nn.Module | None = None) -> Tensor | None:
    """Return W_O of an attention module, [width out, heads · head width]; None if it is not a single linear map.

    Args:
        attention_module: the module that computes the attention.
        parent: the module that contains it and may hold the projection as `output.dense`.
    """
    norm = getattr(attention_module, "norm", None)
    if norm is not None and not isinstance(norm, nn.Identity):
        return None  # with a norm before the projection, the output is not linear in the values of each token
    for name in _OUTPUT_PROJECTIONS:
        projection: Any = getattr(attention_module, name, None)
        if isinstance(projection, nn.Linear):
            return projection.weight
        if type(projection).__name__ == "Conv1D":  # of transformers: a linear map with transposed weights
            weight: Tensor = projection.weight
            return weight.T
        if isinstance(projection, nn.Conv2d) and projection.kernel_size == (1, 1) and projection.groups == 1:
            return projection.weight.flatten(1)
    dense = getattr(getattr(parent, "output", None), "dense", None)
    return dense.weight if isinstance(dense, nn.Linear) else None


# Numbers of axes, most similar to logits [batch, classes] first.
_AXES = (2, 1, 4, 3, 5)
_TENSORS_LISTED = 8


def no_logits(output: Any, model: str) -> ModelError:
    """Return the error for an output without logits, with a fitting example of `outputs`."""
    tensors = [(path, value) for path, value in _tensors_by_path(output) if value.is_floating_point() and value.ndim]
    remedy = "Make the model return its logits as a tensor [batch, classes]"
    if tensors:
        path, value = min(tensors, key=lambda entry: _AXES.index(min(entry[1].ndim, 5)))
        remedy = f"Pass the scores to explain, such as outputs=lambda output: output{path}"
        remedy += {1: "[:, None]", 2: "", 3: ".mean(1)"}.get(value.ndim, f".mean({tuple(range(2, value.ndim))})")
    return ModelError(
        f"Expected {model} to return one tensor of logits, or an output with logits, got {in_words(output)}. {remedy}."
    )


def in_words(output: Any) -> str:
    """Return a description of an output: its type and the shapes of its tensors."""
    if isinstance(output, Tensor):
        return f"a tensor {tuple(output.shape)}"
    shapes = [f"{path.lstrip('.')} {tuple(value.shape)}" for path, value in _tensors_by_path(output)]
    more = [f"… ({len(shapes)} tensors)"] if len(shapes) > _TENSORS_LISTED else []
    return f"{type(output).__name__} with {', '.join(shapes[:_TENSORS_LISTED] + more) or 'no tensors'}"


def _tensors_by_path(output: Any, depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an output after their access path: `["logits"]`, `[0]` or `.logits`."""
    if isinstance(output, Tensor):
        yield "", output
        return
    if depth == 0:
        return
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(output, Mapping):
        parts = ((f'["{name}"]' if isinstance(name, str) else f"[{name!r}]", value) for name, value in output.items())
    elif isinstance(output, list | tuple) and not hasattr(output, "_fields"):
        parts = ((f"[{index}]", value) for index, value in enumerate(output))
    elif not isinstance(output, type | nn.Module):  # a namedtuple, a dataclass with or without slots, or any object
        sources = (getattr(output, name, ()) for name in ("_fields", "__dataclass_fields__", "__dict__"))
        fields: Iterable[str] = next(filter(None, sources), ())
        parts = ((f".{name}", getattr(output, name, None)) for name in fields if not name.startswith("_"))
    for path, value in parts:
        for subpath, tensor in _tensors_by_path(value, depth - 1):
            yield path + subpath, tensor
