"""Structure of a model: patch embedding, token layout and output projections.

Read from attributes, not guessed from sizes: those of timm's Vision Transformers, and for models of transformers,
torchvision and open_clip those of their embedding, also inside custom modules. No library is imported.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError
from vitflow.methods.tokens import TokenLayout
from vitflow.models.parts import modules_of, pretrained_of

# Attribute names of the output projection of attention modules.
_OUTPUT_PROJECTIONS = ("proj", "attn_out_proj", "out_proj", "o_proj", "c_proj", "out_lin", "Wo", "dense", "o")
# Attribute names of the class token in timm, [1, tokens, width].
_CLASS_TOKENS = ("cls_token", "class_token", "cls_token_0", "cls_token1")
# Names of the patch embedding and of prefix tokens in transformers.
_PATCH_EMBEDDINGS = ("patch_embeddings", "patch_embedding")
_PREFIX_TOKENS = ("cls_token", "class_embedding", "distillation_token", "register_tokens")


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


@dataclass(frozen=True, slots=True)
class Embedding:
    """Patch embedding of a non-timm model.

    Attributes:
        module: the embedding module.
        num_prefix_tokens: number of class, distillation and register tokens before the patches.
        patch_size: (height, width) in pixels.
        image_size: (height, width) that the model was built for.
        channels: number of image channels.
        dynamic: True if other sizes are supported.
        patchified: True if the input is a sequence of patches, of a length that depends on the image.
        num_suffix_tokens: number of detection tokens after the patches.
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
    owner: Any = next(filter(_embeds, modules_of(model)), None)
    if owner is None:
        return None
    patches = _patches_of(owner)
    if patches is not None:
        return _of_transformers(owner, patches)
    return Embedding(owner, 1, height_width(owner.patch_size), height_width(owner.image_size), 3, dynamic=False)


def _embeds(module: nn.Module) -> bool:
    inside = module._modules
    of_torchvision = inside.get("conv_proj") is not None and hasattr(module, "class_token")
    of_open_clip = inside.get("conv1") is not None and hasattr(module, "class_embedding")
    return _patches_of(module) is not None or of_torchvision or of_open_clip


def _patches_of(module: nn.Module) -> nn.Module | None:
    """Return the patch projection inside an embedding module of transformers, or None."""
    return next((patches for name in _PATCH_EMBEDDINGS if (patches := module._modules.get(name)) is not None), None)


def _of_transformers(module: nn.Module, patches: nn.Module) -> Embedding | None:
    if isinstance(patches, nn.Linear) and hasattr(module, "position_embedding_size"):
        owner: Any = module
        side, pixels = int(owner.position_embedding_size), int(owner.patch_size)
        channels = patches.in_features // pixels**2
        return Embedding(
            module, 0, height_width(pixels), height_width(side * pixels), channels, dynamic=True, patchified=True
        )
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
    suffix = detection.shape[-2] if isinstance(detection, Tensor) else 0
    return Embedding(
        module, prefix, patch, height_width(size), convolution.in_channels, dynamic, num_suffix_tokens=suffix
    )


def height_width(size: Any) -> tuple[int, int]:
    """Return (height, width) of a size given as a number, or as a sequence of one or two.

    >>> height_width(16), height_width([224]), height_width((14, 16))
    ((16, 16), (224, 224), (14, 16))
    """
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
        UnsupportedModelError: the model does not declare its token layout or shuffles its patches, or num_tokens
            contradicts it.
    """
    declared = _declared_layout(model, input_size, num_tokens)
    if declared is not None and num_tokens in (None, declared.num_tokens):
        return declared
    fitting = None if num_tokens is None else layout_of_count(model, input_size, num_tokens)
    if fitting is not None:
        return fitting
    if declared is None:
        problem = f"does not declare the layout of its {num_tokens or ''} tokens (no patch_embed)"
    else:
        prefix, rows, cols = declared.num_prefix_tokens, declared.rows, declared.cols
        problem = (
            f"declares {prefix} prefix tokens and {rows} × {cols} patches, but its attention has {num_tokens} tokens"
        )
    raise UnsupportedModelError(
        f"{type(transformer_of(model)).__name__} {problem}: pass layout=TokenLayout(num_prefix_tokens, rows, cols)."
    )


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
    embed: Any = getattr(transformer, "patch_embed", None)
    prefix: Any = getattr(transformer, "num_prefix_tokens", None)
    if getattr(embed, "strict_img_size", True) is False and hasattr(embed, "dynamic_feat_size"):
        rows, cols = embed.dynamic_feat_size(input_size)  # grid_size is stale under dynamic sizes
    elif getattr(embed, "grid_size", None) is not None and (prefix is not None or num_tokens is not None):
        rows, cols = embed.grid_size
    else:
        return None
    if prefix is None:
        rest = -1 if num_tokens is None else num_tokens - rows * cols
        prefix = rest if rest >= 0 else class_tokens(transformer)
    return TokenLayout(int(prefix), int(rows), int(cols))


def output_projection(attention_module: nn.Module, parent: nn.Module | None = None) -> nn.Module | None:
    """Return the output projection of an attention module; None if it has none, or a norm before it.

    Args:
        attention_module: the module that computes the attention.
        parent: the module that contains it and may hold the projection as `output.dense`.
    """
    norm = getattr(attention_module, "norm", None)
    if norm is not None and not isinstance(norm, nn.Identity):
        return None  # with a norm before the projection, the output is not linear in the values of each token
    named = (attention_module._modules.get(name) for name in _OUTPUT_PROJECTIONS)
    projection = next((module for module in named if module is not None), None)
    dense = getattr(getattr(parent, "output", None), "dense", None)
    return dense if projection is None and isinstance(dense, nn.Module) else projection


def projection_weight(projection: nn.Module) -> Tensor | None:
    """Return the weight [out, in] of a linear layer, also as a 1 × 1 convolution or Conv1D; None for other modules."""
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    if type(projection).__name__ == "Conv1D":  # of transformers: a linear map with transposed weights
        return weight.T
    if weight.ndim == 4:
        single = weight.shape[2:] == (1, 1) and getattr(projection, "groups", 1) == 1
        return weight.flatten(1) if single else None
    return weight if weight.ndim == 2 else None
