"""Structure of a model: patch embedding, token layout, output projections and declared pooling.

Read from attributes, not guessed from sizes: those of timm's Vision Transformers, and for models of transformers,
torchvision and open_clip those of their embedding, also inside custom modules. No library is imported.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError
from vitflow.methods.tokens import LAYOUT, TokenLayout
from vitflow.models.parts import modules_of, pretrained_of

# Attribute names of the output projection of attention modules.
_OUTPUT_PROJECTIONS = (
    *("proj", "attn_out_proj", "out_proj", "o_proj", "c_proj", "out_lin", "Wo", "dense", "o"),
    *("out", "to_out", "fc_out", "out_projection", "projection", "output", "wo", "w_o", "proj_out"),  # by hand
)
# Attribute names of the class token in timm, and in models by hand, [1, tokens, width].
_CLASS_TOKENS = (
    *("cls_token", "class_token", "cls_token_0", "cls_token1"),
    *("cls_tokens", "class_tokens", "class_embedding", "cls_embedding", "cls_embed", "cls"),
)
# Attribute names of register tokens outside of transformers, [… tokens, width].
_REGISTERS = ("register_tokens", "storage_tokens", "reg_token")
# Attribute names of prefix tokens in transformers.
_PREFIX_TOKENS = ("cls_token", "class_embedding", "distillation_token", "register_tokens")


def transformer_of(model: nn.Module) -> nn.Module:
    """Return the outermost module that has a patch embedding, by default the model itself."""
    return next((module for module in modules_of(model) if patch_embed_of(module) is not None), model)


def patch_embed_of(module: nn.Module) -> Any:
    """Return the patch embedding of a model of timm, which NaFlex calls `embeds`, or None."""
    inside = module._modules  # not its attributes, which wrappers such as those of peft pass on from the model inside
    embed = inside.get("embeds")
    return inside.get("patch_embed", embed if hasattr(embed, "dynamic_feat_size") else None)


def class_tokens(transformer: Any) -> int:
    """Return the number of learned class and distillation tokens."""
    tokens = (getattr(transformer, name, None) for name in _CLASS_TOKENS)
    return next((int(token.shape[1]) for token in tokens if isinstance(token, Tensor) and token.ndim == 3), 0)


def _prefix_tokens(transformer: Any) -> int:
    """Return the number of learned class, distillation and register tokens."""
    registers = (getattr(transformer, name, None) for name in _REGISTERS)
    shapes = (token.shape for token in registers if isinstance(token, Tensor) and token.ndim > 1)
    return class_tokens(transformer) + int(next(shapes, (0, 0))[-2])


def class_token(model: nn.Module, layout: TokenLayout) -> int | None:
    """Return the index of the class token; None if there is none, as if the prefix tokens are registers."""
    transformer: Any = transformer_of(model)
    learned = class_tokens(transformer)
    if layout.num_prefix_tokens:
        default = learned > 0 or not hasattr(transformer, "num_prefix_tokens")
        return 0 if getattr(transformer, "has_class_token", default) else None
    return layout.patches.stop if 0 < learned <= layout.num_suffix_tokens else None


@dataclass(frozen=True, slots=True)
class Embedding:
    """Patch embedding of a non-timm model; sizes are (height, width) in pixels.

    `dynamic` is True if other image sizes are supported, `patchified` if the input is a sequence of patches, of a
    length that depends on the image. Suffix tokens are the detection tokens after the patches.
    """

    module: nn.Module
    num_prefix_tokens: int
    patch_size: tuple[int, int]
    image_size: tuple[int, int]
    channels: int
    dynamic: bool
    patchified: bool = False
    num_suffix_tokens: int = 0


def embedding_of(model: nn.Module) -> Embedding | None:
    """Return the patch embedding of a model of transformers, torchvision or open_clip; None for other models."""
    for owner in modules_of(model):
        inside = owner._modules
        patches = inside.get("patch_embeddings", inside.get("patch_embedding"))
        if patches is not None:  # of transformers
            return _of_transformers(owner, patches)
        known = {"conv_proj": "class_token", "conv1": "class_embedding"}  # of torchvision and open_clip
        if any(inside.get(name) is not None and hasattr(owner, token) for name, token in known.items()):
            sizes: Any = owner
            return Embedding(owner, 1, height_width(sizes.patch_size), height_width(sizes.image_size), 3, dynamic=False)
    return None


def _of_transformers(module: Any, patches: nn.Module) -> Embedding | None:
    if isinstance(patches, nn.Linear) and hasattr(module, "position_embedding_size"):
        patch, image = (height_width(module.patch_size * n) for n in (1, module.position_embedding_size))
        channels = patches.in_features // patch[0] ** 2
        return Embedding(module, 0, patch, image, channels, dynamic=True, patchified=True)
    convolution = next((part for part in patches.modules() if isinstance(part, nn.Conv2d)), None)
    sources = (module, patches, getattr(module, "config", None))
    size = next((size for source in sources if (size := getattr(source, "image_size", None))), None)
    if convolution is None or size is None:
        return None  # video, or an input of patches
    tokens = [token for name in _PREFIX_TOKENS if isinstance(token := getattr(module, name, None), Tensor)]
    prefix = sum(1 if token.ndim == 1 else token.shape[-2] for token in tokens)
    patch = (int(convolution.stride[0]), int(convolution.stride[1]))
    dynamic = hasattr(module, "interpolate_pos_encoding")
    detection = getattr(module, "detection_tokens", None)  # of YOLOS
    suffix, channels = detection.shape[-2] if isinstance(detection, Tensor) else 0, convolution.in_channels
    return Embedding(module, prefix, patch, height_width(size), channels, dynamic, num_suffix_tokens=suffix)


def height_width(size: Any) -> tuple[int, int]:
    """Return (height, width) of a size given as a number, or as a sequence of one or two."""
    return (int(size[0]), int(size[-1])) if isinstance(size, Sequence) else (int(size), int(size))


def forward_options(model: nn.Module, input_size: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments with which a transformers model accepts an input of (height, width)."""
    embedding = embedding_of(model) if pretrained_of(model) is model else None
    if embedding is None or not embedding.dynamic or input_size == embedding.image_size:
        return {}
    option = "interpolate_pos_encoding"
    parameters = inspect.signature(model.forward).parameters
    accepted = option in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    used = option in inspect.signature(embedding.module.forward).parameters
    return {option: True} if used and accepted else {}


def possible_layouts(
    model: nn.Module, input_size: tuple[int, int], features: Tensor, layout: TokenLayout | None
) -> list[tuple[TokenLayout, bool]]:
    """Return the layouts that recorded features may have, and True if channels come last.

    Features are [batch, tokens, channels], [batch, channels, tokens] with the tokens of `layout`, [batch, channels,
    rows, cols] or [batch, rows, cols, channels].
    """
    if features.ndim == 3:
        count = features.shape[1]
        if layout is not None and layout.num_tokens == features.shape[2] != count:
            return [(layout, False)]
        if layout is None or layout.num_tokens != count:
            layout = layout_of_count(model, input_size, count)
        return [] if layout is None else [(layout, True)]
    layouts: list[tuple[TokenLayout, bool]] = []
    sides = [(False, features.shape[2:]), (True, features.shape[1:3])] if features.ndim == 4 else []
    for channels_last, (rows, cols) in sides:
        height, width = input_size[0] / rows, input_size[1] / cols  # of a cell, in pixels
        if min(rows, cols) == 1 or max(height, width) < 1.5 * min(height, width):
            layouts.append((TokenLayout(0, rows, cols), channels_last))
    return layouts


def grid_of_count(input_size: tuple[int, int], patches: int) -> tuple[int, int] | None:
    """Return the rows and columns of a number of about square patches on an input of (height, width), or None."""
    height, width = input_size
    side = (height * width / patches) ** 0.5  # of a square patch, in pixels
    for rows in {max(1, int(height / side)), int(height / side) + 1}:
        cols = patches // rows
        # Rounding at the edges may add or remove part of a patch in each direction.
        if rows * cols == patches and abs(rows - height / side) < 1 and abs(cols - width / side) < 1:
            return rows, cols
    return None


def layout_of_count(model: nn.Module, input_size: tuple[int, int], num_tokens: int) -> TokenLayout | None:
    """Return the layout of num_tokens tokens for an input of (height, width); None if none fits.

    Patches form a grid with the aspect ratio of the input, in raster order, after the model's prefix tokens or none.
    """
    transformer: Any = transformer_of(model)
    owner = next((module for module in modules_of(transformer) if class_tokens(module)), transformer)
    declared: Any = getattr(transformer, "num_prefix_tokens", None) or 0
    for prefix in (declared, _prefix_tokens(owner), class_tokens(owner), 0):
        if prefix < num_tokens and (grid := grid_of_count(input_size, num_tokens - prefix)) is not None:
            return TokenLayout(prefix, *grid)
    return None


def read_layout(
    model: nn.Module,
    input_size: tuple[int, int],
    num_tokens: int | None,
    measure: Callable[[int], TokenLayout | None] = lambda _: None,
) -> TokenLayout:
    """Return the token layout of a forward pass with num_tokens tokens for an input of (height, width).

    If num_tokens is None, the number of prefix tokens is the one that the model declares. `measure` returns the layout
    of a number of tokens if it can be measured, for models that are not those of a library.
    """
    embedding, transformer = embedding_of(model), transformer_of(model)
    declared = _declared_layout(model, input_size, num_tokens)
    fitting = declared if declared is not None and num_tokens in (None, declared.num_tokens) else None
    if num_tokens is not None and not (fitting and is_of_library(embedding.module if embedding else transformer)):
        fitting = measure(num_tokens) or fitting or layout_of_count(model, input_size, num_tokens)
    if fitting is not None:
        return fitting
    problem = f"does not declare the layout of its {num_tokens or ''} tokens"
    if declared is not None:
        problem = f"declares {declared.num_prefix_tokens} prefix tokens and {declared.rows} × {declared.cols} patches, "
        problem += f"but its attention has {num_tokens} tokens"
    raise UnsupportedModelError(f"{type(transformer).__name__} {problem}: pass {LAYOUT}.")


def _declared_layout(model: nn.Module, input_size: tuple[int, int], num_tokens: int | None) -> TokenLayout | None:
    """Return the layout that a model declares; prefix tokens that it does not declare are the rest of num_tokens."""
    embedding, transformer = embedding_of(model), transformer_of(model)
    if embedding is not None:
        if type(embedding.module).__name__ == "ViTMAEEmbeddings":
            raise UnsupportedModelError(
                f"{type(model).__name__} masks and shuffles its patches at random, so its tokens have no position in "
                "the image. Load the same weights as a ViTModel or ViTForImageClassification."
            )
        rows, cols = (max(side // patch, 1) for side, patch in zip(input_size, embedding.patch_size, strict=True))
        return TokenLayout(embedding.num_prefix_tokens, rows, cols, embedding.num_suffix_tokens)
    embed, prefix = patch_embed_of(transformer), getattr(transformer, "num_prefix_tokens", None)
    if hasattr(embed, "dynamic_feat_size") and not getattr(embed, "strict_img_size", False):
        rows, cols = embed.dynamic_feat_size(input_size)  # grid_size is stale under dynamic sizes
    elif getattr(embed, "grid_size", None) is not None and (prefix is not None or num_tokens is not None):
        rows, cols = embed.grid_size
    elif isinstance(size := getattr(embed, "patch_size", None), int | Sequence) and class_tokens(transformer):
        rows, cols = (side // patch for side, patch in zip(input_size, height_width(size), strict=True))
        prefix = _prefix_tokens(transformer)
    else:
        return None
    if prefix is None:
        rest = -1 if num_tokens is None else num_tokens - rows * cols
        prefix = rest if rest >= 0 else class_tokens(transformer)
    return TokenLayout(int(prefix), int(rows), int(cols))


def output_projection(attention_module: nn.Module, parent: nn.Module | None = None) -> nn.Module | None:
    """Return the output projection of an attention module, or `output.dense` of its parent; None if there is none."""
    named = (attention_module._modules.get(name) for name in _OUTPUT_PROJECTIONS)
    projection = next((module for module in named if module is not None), None)
    if projection is None:
        projection = getattr(getattr(parent, "output", None), "dense", None)
    return projection if isinstance(projection, nn.Module) else None


def is_of_library(module: nn.Module) -> bool:
    """Return True if the class of a module is one of a library of models, or a subclass."""
    return any(kind.__module__.startswith(_LIBRARIES) for kind in type(module).__mro__)


def has_other_forward(module: nn.Module) -> bool:
    """Return True if a module, or its subclass of a library's class, has another forward method than that class."""
    replaced = is_of_library(module) and not type(module).forward.__module__.startswith(_LIBRARIES)
    return replaced or "forward" in vars(module)


def projection_weight(projection: nn.Module) -> Tensor | None:
    """Return the weight [out, in] of a linear layer, also as a 1 × 1 convolution or Conv1D; None for other modules."""
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    if type(projection).__name__ == "Conv1D":  # of transformers: a linear map with transposed weights
        return weight.T
    if weight.ndim == 4 and weight.shape[2:] == (1, 1) and getattr(projection, "groups", 1) == 1:
        return weight.flatten(1)
    return weight if weight.ndim == 2 else None


#: Name of a readout that is taken from the attention of a pooling head.
ATTENTION_POOLING = "attention pooling"
_CLASS_TOKEN, _BOTH_TOKENS = "class token", "class and distillation token"
_PATCH_MEAN, _ALL_TOKENS = "average over patches", "average over all tokens"
# Packages whose models declare how they pool.
_LIBRARIES = ("timm.", "transformers.", "torchvision.", "open_clip.")
# Classifiers of transformers that average over patches (Dinov2 together with its class token).
_AVERAGING = {
    f"{name}ForImageClassification"
    for name in ("Dinov2", "Dinov2WithRegisters", "CLIP", "MetaClip2", "Siglip", "IJepa", "Swin", "Swinv2")
}


def declared_pooling(
    model: nn.Module, layout: TokenLayout, pooling_attention: Tensor | None
) -> tuple[str, Tensor] | None:
    """Return name and weights [1 or batch, tokens] of the pooling that a model of a library declares, or None.

    `pooling_attention` is that of an attention-pooling head, [batch, heads, queries, tokens], if there is one.
    """
    if not type(model).forward.__module__.startswith(_LIBRARIES) or "forward" in vars(model):
        return None
    if pooling_attention is not None:
        return ATTENTION_POOLING, pool_queries(model, layout, pooling_attention.detach().mean(dim=1))
    name = _declared(model, layout)
    return None if name is None else (name, _pooling(name, layout))


def pooling_name(readout: Tensor, layout: TokenLayout, rounding: float) -> str:
    """Return the name of the known pooling that a readout [tokens] equals, or an empty string.

    `rounding` is the limit of the sum of absolute differences.

    >>> pooling_name(torch.tensor([0.0, 0.25, 0.25, 0.25, 0.25]), TokenLayout(1, 2, 2), 1e-5)
    'average over patches'
    """
    names = (_CLASS_TOKEN, _PATCH_MEAN, _ALL_TOKENS) if layout.num_prefix_tokens else (_PATCH_MEAN,)
    for name in names:
        if float((readout - _pooling(name, layout)[0].to(readout)).abs().sum()) <= rounding:
            return name
    both = layout.num_prefix_tokens == 2 and bool((readout[:2] > 0).all()) and float(readout[2:].sum()) <= rounding
    return _BOTH_TOKENS if both else ""


def _pooling(name: str, layout: TokenLayout) -> Tensor:
    """Return the weights [1, tokens] of a pooling."""
    weights = torch.zeros(1, layout.num_tokens)
    tokens = {_CLASS_TOKEN: slice(1), _BOTH_TOKENS: slice(2), _ALL_TOKENS: slice(None)}.get(name, layout.patches)
    weights[0, tokens] = 1.0
    return weights / weights.sum()


def _declared(model: nn.Module, layout: TokenLayout) -> str | None:
    """Return the name of the pooling that the class, the configuration or the attributes of a model declare."""
    transformer: Any = transformer_of(model)
    pool, pretrained, embedding = getattr(transformer, "global_pool", None), pretrained_of(model), embedding_of(model)
    kinds = {kind.__name__ for kind in type(pretrained).__mro__}
    if (
        kinds & _AVERAGING
        or getattr(getattr(pretrained, "config", None), "use_mean_pooling", False)  # BEiT and Data2Vec
        or (embedding is not None and getattr(embedding.module, "pool_type", None) == "avg")  # open_clip
    ):
        return _PATCH_MEAN
    distilled = getattr(transformer, "head_dist", None) is not None or "DeiTForImageClassificationWithTeacher" in kinds
    if distilled and layout.num_prefix_tokens == 2:
        return _BOTH_TOKENS
    if pool in ("max", "avgmax"):
        return None
    if class_token(model, layout) is not None and pool != "avg":
        return _CLASS_TOKEN
    include_prefix = getattr(transformer, "pool_include_prefix", False)
    return _ALL_TOKENS if layout.num_prefix_tokens and include_prefix else _PATCH_MEAN


def pool_queries(model: nn.Module, layout: TokenLayout, queries: Tensor) -> Tensor:
    """Return the token weights [batch, tokens] of an attention-pooling head, its queries pooled as in the model.

    `queries` is the attention of the head's queries, heads fused, [batch, queries, patches or tokens].
    """
    transformer: Any = transformer_of(model)
    pool = getattr(getattr(transformer, "attn_pool", None), "pool", "token")
    weights = queries.mean(dim=1) if pool == "avg" else queries[:, 0]
    missing = layout.num_tokens - layout.num_suffix_tokens - weights.shape[-1]
    if missing not in (0, layout.num_prefix_tokens) or layout.num_suffix_tokens:
        raise UnsupportedModelError(
            f"The attention pooling of {type(transformer).__name__} has {weights.shape[-1]} tokens, expected "
            f"{layout.num_tokens} or the {layout.num_patches} patches. Pass readout=, or use sampling, input_gradient "
            "or occlusion."
        )
    return torch.nn.functional.pad(weights, (missing, 0))
