"""What a model says of itself: prefix tokens, patch grid, pooling, output projections.

Read from the attributes that timm's Vision Transformers carry, never from guesses about sizes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError
from vitflow.methods.attention import check_layer
from vitflow.tokens import TokenLayout

# What timm's attention modules call the projection that takes the joined heads back to the token width.
_OUTPUT_PROJECTIONS = ("proj", "attn_out_proj", "out_proj")
# Where models that answer with fields keep their logits.
_OUTPUTS = ("logits", "pooler_output", "image_embeds", "last_hidden_state")
# What they call the norm that a block begins with.
_FIRST_NORMS = ("norm1", "in_norm")


def unwrap(model: nn.Module) -> nn.Module:
    """The module that does the work inside torch.compile, DataParallel or DistributedDataParallel wrappers.

    Raises:
        UnsupportedModelError: the model is scripted, traced or exported, so that its attention cannot be seen.
    """
    while True:
        if isinstance(model, torch.jit.ScriptModule | torch.fx.GraphModule):
            raise UnsupportedModelError(
                f"{type(model).__name__}: a scripted, traced or exported model does not show its attention. "
                "Pass the original module that it was made from."
            )
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def transformer_of(model: nn.Module) -> nn.Module:
    """The Vision Transformer inside the model: the outermost module that has a patch embedding, or else the model."""
    return next((module for module in model.modules() if hasattr(module, "patch_embed")), model)


def block_norms(model: nn.Module) -> list[str]:
    """Module path of each block's first norm, first block first; empty where the model has no blocks with norms."""
    transformer = transformer_of(model)
    root = next(path for path, module in model.named_modules() if module is transformer)
    blocks = getattr(transformer, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList):
        return []
    paths = []
    for number, block in enumerate(blocks):
        norms = [path for path, module in block.named_modules() if "norm" in type(module).__name__.lower()]
        first = next((name for name in _FIRST_NORMS if hasattr(block, name)), norms[0] if norms else None)
        if first is None:
            return []
        paths.append(".".join(filter(None, (root, "blocks", str(number), first))))
    return paths


def block_norm(model: nn.Module, layer: int) -> str:
    """Module path of the first norm of one block, 1 for the first, −1 for the last.

    Raises:
        UnsupportedModelError: the model has no blocks with norms.
        OptionError: it has no such block.
    """
    paths = block_norms(model)
    if not paths:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no transformer blocks with norms, whose tokens Grad-CAM needs. "
            "Use input_gradient or occlusion, which need none."
        )
    return paths[check_layer("layer", layer, len(paths))]


def logits_of(output: Any) -> Tensor | None:
    """What a model answers: its output, or the `logits` (or else the pooled features) of an output with fields."""
    if isinstance(output, Tensor):
        return output
    found = next((getattr(output, name, None) for name in _OUTPUTS if getattr(output, name, None) is not None), None)
    return found if isinstance(found, Tensor) else None


def layout_of_count(model: nn.Module, input_size: tuple[int, int], num_tokens: int) -> TokenLayout | None:
    """The layout of num_tokens tokens over a picture of input_size = (height, width), or None if none fits.

    The patches make a grid of the picture's own shape; before them stand as many tokens as the model says, or none, or
    as many as remain.
    """
    height, width = input_size
    transformer: Any = transformer_of(model)
    class_token = getattr(transformer, "cls_token", None)
    said = (
        getattr(transformer, "num_prefix_tokens", None),
        class_token.shape[1] if isinstance(class_token, Tensor) and class_token.ndim == 3 else None,
    )
    prefixes = dict.fromkeys([count for count in said if isinstance(count, int)] + [0, 1, 2])
    for prefix in prefixes:
        patches = num_tokens - prefix
        if patches < 1:
            continue
        side = (height * width / patches) ** 0.5  # of a square patch, in pixels
        for rows in {max(1, int(height / side)), int(height / side) + 1}:
            cols = patches // rows
            # Rounding at the edges may add or take away a part of a patch in each direction.
            if rows * cols == patches and abs(rows - height / side) < 1 and abs(cols - width / side) < 1:
                return TokenLayout(prefix, rows, cols)
    return None


def read_layout(model: nn.Module, input_size: tuple[int, int], num_tokens: int | None) -> TokenLayout:
    """Token layout of a forward pass over a picture of input_size = (height, width) that had num_tokens tokens.

    Where no tokens were counted (None), the model's own word is taken for the prefix tokens.

    Raises:
        UnsupportedModelError: the model does not say how its tokens are arranged, or says something else than what ran.
    """
    transformer: Any = transformer_of(model)
    name = type(transformer).__name__
    embed: Any = getattr(transformer, "patch_embed", None)
    prefix = getattr(transformer, "num_prefix_tokens", None)
    if getattr(embed, "strict_img_size", True) is False and hasattr(embed, "dynamic_feat_size"):
        rows, cols = embed.dynamic_feat_size(input_size)  # grid_size is stale under dynamic sizes
    elif getattr(embed, "grid_size", None) is not None and (prefix is not None or num_tokens is not None):
        rows, cols = embed.grid_size
    else:
        fitting = None if num_tokens is None else layout_of_count(model, input_size, num_tokens)
        if fitting is None:
            raise UnsupportedModelError(
                f"{name} does not say how its {num_tokens or ''} tokens are arranged (no patch_embed): "
                "pass layout=TokenLayout(num_prefix_tokens, rows, cols)."
            )
        return fitting
    if prefix is None:
        prefix = num_tokens - rows * cols
    if num_tokens is not None and prefix + rows * cols != num_tokens:
        fitting = layout_of_count(model, input_size, num_tokens)
        if fitting is not None:
            return fitting
        raise UnsupportedModelError(
            f"{name} has {prefix} prefix tokens and a grid of {rows} × {cols} patches, but its attention ran over "
            f"{num_tokens} tokens: pass layout=TokenLayout(num_prefix_tokens, rows, cols)."
        )
    return TokenLayout(int(prefix), int(rows), int(cols))


def read_readout(model: nn.Module, layout: TokenLayout, pooling_attention: Tensor | None) -> tuple[Tensor, str]:
    """Which tokens of the top layer speak for the picture: weights that sum to 1, and where they come from in words.

    Args:
        pooling_attention: attention of an attention-pooling head, [batch, heads, queries, tokens], if one was seen.

    Returns:
        Weights [1 or batch, tokens] and the kind of pooling.
    """
    transformer: Any = transformer_of(model)
    if pooling_attention is not None:
        return _attention_pooling(transformer, layout, pooling_attention), "attention pooling"
    weights = torch.zeros(1, layout.num_tokens)
    pool = getattr(transformer, "global_pool", None)
    if getattr(transformer, "head_dist", None) is not None and layout.num_prefix_tokens == 2:
        weights[0, :2] = 0.5
        return weights, "class and distillation token"
    has_class_token = layout.num_prefix_tokens > 0 and getattr(transformer, "has_class_token", True)
    if has_class_token and pool not in ("avg", "avgmax", "max"):
        weights[0, 0] = 1.0
        return weights, "class token"
    first = 0 if getattr(transformer, "pool_include_prefix", False) else layout.num_prefix_tokens
    weights[0, first:] = 1.0 / (layout.num_tokens - first)
    words = {"avg": "average", "max": "maximum", "avgmax": "average and maximum"}.get(str(pool), "average")
    over = "all tokens" if first == 0 and layout.num_prefix_tokens else "patches"
    return weights, f"{words} over {over}" + ("" if pool else " (the model itself pools nothing)")


def _attention_pooling(transformer: Any, layout: TokenLayout, attention: Tensor) -> Tensor:
    """Weights [batch, tokens] of an attention-pooling head: heads averaged, queries pooled as the module does."""
    queries = attention.detach().mean(dim=1)  # [batch, queries, keys]
    pool = getattr(getattr(transformer, "attn_pool", None), "pool", "token")
    weights = queries.mean(dim=1) if pool == "avg" else queries[:, 0]
    missing = layout.num_tokens - weights.shape[-1]
    if missing not in (0, layout.num_prefix_tokens):
        raise UnsupportedModelError(
            f"{type(transformer).__name__} pools {weights.shape[-1]} tokens by attention, expected {layout.num_tokens} "
            f"or the {layout.num_patches} patches."
        )
    return torch.nn.functional.pad(weights, (missing, 0))


def output_projection(attention_module: nn.Module) -> Tensor | None:
    """W_O of an attention module, [width out, heads · head width]; None where heads are not joined by one Linear."""
    norm = getattr(attention_module, "norm", None)
    if norm is not None and not isinstance(norm, nn.Identity):
        return None  # a norm between the heads and the projection makes it depend on all tokens' values
    for name in _OUTPUT_PROJECTIONS:
        projection = getattr(attention_module, name, None)
        if isinstance(projection, nn.Linear):
            return projection.weight
        if isinstance(projection, nn.Conv2d) and projection.kernel_size == (1, 1) and projection.groups == 1:
            return projection.weight.flatten(1)
    return None
