"""What a model says of itself: prefix tokens, patch grid, pooling, output projections.

Read from the attributes that timm's Vision Transformers carry, never from guesses about sizes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import ModelError, UnsupportedModelError
from vitflow.methods.tokens import TokenLayout
from vitflow.models.libraries import library_layout, library_readout
from vitflow.models.parts import those_that

# What attention modules call the projection that takes the joined heads back to the token width.
_OUTPUT_PROJECTIONS = ("proj", "attn_out_proj", "out_proj", "o_proj", "c_proj", "out_lin", "Wo", "dense", "o")
# What models call their class token, [1, tokens, width].
_CLASS_TOKENS = ("cls_token", "class_token", "cls_token_0", "cls_token1")
#: What a readout is called that is taken from the attention of a pooling head.
ATTENTION_POOLING = "attention pooling"
_BOTH_TOKENS = "class and distillation token"
# Where models that answer with fields keep their logits.
_OUTPUTS = ("logits", "pooler_output", "image_embeds", "last_hidden_state")


def unwrap(model: nn.Module) -> nn.Module:
    """The module that does the work inside torch.compile, DataParallel or DistributedDataParallel wrappers.

    Raises:
        UnsupportedModelError: it is no module at all.
        UnsupportedModelError: the model is scripted, traced or exported, so that its attention cannot be seen.
    """
    if not isinstance(model, nn.Module):
        held = " Pass its .model." if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise UnsupportedModelError(f"Expected a model as a torch.nn.Module, got {model!r:.80}.{held}")
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


def module_paths(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by path, as `named_modules` gives them, with compiled ones in the place of their wrappers."""
    for path, module in model.named_modules():
        if "_orig_mod" not in module._modules:
            yield ".".join(part for part in path.split(".") if part != "_orig_mod"), module


def runs_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has its hands in the model or a part of it, in any of the ways that it is applied."""
    return bool(_is_compiled(model))


@those_that
def _is_compiled(module: nn.Module) -> bool:
    return (
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def transformer_of(model: nn.Module) -> nn.Module:
    """The Vision Transformer inside the model: the outermost module that has a patch embedding, or else the model."""
    return next(iter(_embeds_patches(model)), model)


@those_that
def _embeds_patches(module: nn.Module) -> bool:
    return hasattr(module, "patch_embed")


def class_tokens(transformer: Any) -> int:
    """How many class (and distillation) tokens a model has of its own."""
    found = (getattr(transformer, name, None) for name in _CLASS_TOKENS)
    return next((int(token.shape[1]) for token in found if isinstance(token, Tensor) and token.ndim == 3), 0)


def has_class_token(model: nn.Module, layout: TokenLayout) -> bool:
    """Whether the first of a model's prefix tokens is a class token, and no register."""
    transformer: Any = transformer_of(model)
    other = class_tokens(transformer) > 0 or not hasattr(transformer, "num_prefix_tokens")
    return layout.num_prefix_tokens > 0 and bool(getattr(transformer, "has_class_token", other))


def feature_layout(
    model: nn.Module, input_size: tuple[int, int], features: Tensor, layout: TokenLayout | None
) -> tuple[TokenLayout, bool] | None:
    """How recorded features lie on the image, and whether their channels come last; None where they do not.

    Args:
        features: [batch, tokens, channels], [batch, channels, rows, cols] or [batch, rows, cols, channels].
        layout: the layout of the model's tokens, where known.
    """
    if features.ndim == 3:
        count = features.shape[1]
        own = layout if layout is not None and layout.num_tokens == count else None
        own = own or layout_of_count(model, input_size, count)
        return None if own is None else (own, True)
    if features.ndim != 4:
        return None
    for last, (rows, cols) in ((False, features.shape[2:]), (True, features.shape[1:3])):
        tall, wide = input_size[0] / rows, input_size[1] / cols  # of a cell, in pixels
        if min(rows, cols) == 1 or max(tall, wide) < 1.5 * min(tall, wide):
            return TokenLayout(0, rows, cols), last
    return None


def logits_of(output: Any) -> Tensor | None:
    """The logits of a model's output: the output itself, or its field or entry `logits`, or else its pooled features.

    Of several tensors without these names it is the only one with two axes; None if there is none, or several.

    >>> logits_of({"logits": torch.zeros(1, 5), "hidden": torch.zeros(1, 17, 8)}).shape
    torch.Size([1, 5])
    """
    if isinstance(output, Tensor):
        return output
    fields = (output.get(name) if isinstance(output, Mapping) else getattr(output, name, None) for name in _OUTPUTS)
    found = next((one for one in fields if one is not None), None)
    if found is None and isinstance(output, tuple | list):
        tensors = [one for one in output if isinstance(one, Tensor)]
        outputs = [one for one in tensors if one.ndim == 2] or tensors[:1]
        found = outputs[0] if len(outputs) == 1 else None
    return found if isinstance(found, Tensor) else None


def tensors_in(output: Any) -> Iterator[Tensor]:
    """All tensors of what a model returned: itself, or those of a mapping or a sequence, however deep."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for one in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_in(one)


def layout_of_count(model: nn.Module, input_size: tuple[int, int], num_tokens: int) -> TokenLayout | None:
    """The layout of num_tokens tokens over an image of input_size = (height, width), or None if none fits.

    The patches make a grid of the image's own shape, in raster order; before them stand as many prefix tokens as the
    model says, or none.
    """
    height, width = input_size
    transformer: Any = transformer_of(model)
    said = (getattr(transformer, "num_prefix_tokens", None), class_tokens(transformer))
    prefixes = dict.fromkeys([count for count in said if isinstance(count, int)] + [0])
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
    """Token layout of a forward pass over an image of input_size = (height, width) that had num_tokens tokens.

    Where no tokens were counted (None), the model's own word is taken for the prefix tokens.

    Raises:
        UnsupportedModelError: the model does not say how its tokens are arranged, or says something else than what ran.
    """
    transformer: Any = transformer_of(model)
    name = type(transformer).__name__
    embed: Any = getattr(transformer, "patch_embed", None)
    prefix = getattr(transformer, "num_prefix_tokens", None)
    own = library_layout(model, input_size)
    if own is not None and own.num_tokens == num_tokens:
        return own
    if own is not None:
        prefix, rows, cols = own.num_prefix_tokens, own.rows, own.cols
    elif getattr(embed, "strict_img_size", True) is False and hasattr(embed, "dynamic_feat_size"):
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
        rest = -1 if num_tokens is None else num_tokens - rows * cols
        prefix = rest if rest >= 0 else class_tokens(transformer)
    if num_tokens is not None and prefix + rows * cols != num_tokens:
        fitting = layout_of_count(model, input_size, num_tokens)
        if fitting is not None:
            return fitting
        raise UnsupportedModelError(
            f"{name} has {prefix} prefix tokens and a grid of {rows} × {cols} patches, but its attention ran over "
            f"{num_tokens} tokens: pass layout=TokenLayout(num_prefix_tokens, rows, cols)."
        )
    return TokenLayout(int(prefix), int(rows), int(cols))


@dataclass(frozen=True, slots=True, eq=False)
class ClosedReadout:
    """The readout that a model's pooling implies, as the model declares it: to be verified before it is used.

    Attributes:
        weights: of the top layer's tokens, [1 or batch, tokens]; rows sum to 1.
        name: of the pooling: "class token", "average over patches", …
        convention: "exact" if the gradient of an output must equal the weights, "support" if it must vanish where they
            are 0, "pooling" if the output must be computed from the output of an attention-pooling head alone.
    """

    weights: Tensor
    name: str
    convention: str = "exact"


def closed_readouts(model: nn.Module, layout: TokenLayout, pooling_attention: Tensor | None) -> list[ClosedReadout]:
    """The readouts of known poolings, first the one that the model declares.

    Args:
        model: any model.
        layout: of the top layer's tokens.
        pooling_attention: attention of an attention-pooling head, [batch, heads, queries, tokens], if one was seen.
    """
    declared = _declared_readout(model, layout, pooling_attention)
    class_token, patches = torch.zeros(2, 1, layout.num_tokens).unbind()
    class_token[0, 0], patches[0, layout.patches] = 1.0, 1.0 / layout.num_patches
    common = [ClosedReadout(patches, "average over patches")]
    if layout.num_prefix_tokens:
        every = torch.full((1, layout.num_tokens), 1.0 / layout.num_tokens)
        common += [ClosedReadout(class_token, "class token"), ClosedReadout(every, "average over all tokens")]
    return [declared, *(one for one in common if one.name != declared.name)]


def _declared_readout(model: nn.Module, layout: TokenLayout, pooling_attention: Tensor | None) -> ClosedReadout:
    transformer: Any = transformer_of(model)
    by_library = library_readout(model, layout)
    if by_library is not None:
        return ClosedReadout(*by_library, convention="support" if by_library[1] == _BOTH_TOKENS else "exact")
    if pooling_attention is not None:
        weights = pool_queries(model, layout, pooling_attention.detach().mean(dim=1))
        return ClosedReadout(weights, ATTENTION_POOLING, "pooling")
    weights = torch.zeros(1, layout.num_tokens)
    pool = getattr(transformer, "global_pool", None)
    if getattr(transformer, "head_dist", None) is not None and layout.num_prefix_tokens == 2:
        weights[0, :2] = 0.5
        return ClosedReadout(weights, _BOTH_TOKENS, "support")
    if has_class_token(model, layout) and pool not in ("avg", "avgmax", "max"):
        weights[0, 0] = 1.0
        return ClosedReadout(weights, "class token")
    include_prefix = bool(getattr(transformer, "pool_include_prefix", False))
    pooled = slice(0, None) if include_prefix else layout.patches
    weights[0, pooled] = 1.0 / weights[0, pooled].numel()
    words = {"avg": "average", "max": "maximum", "avgmax": "average and maximum"}.get(str(pool), "average")
    over = "all tokens" if include_prefix and layout.num_prefix_tokens else "patches"
    return ClosedReadout(weights, f"{words} over {over}" + ("" if pool else " (the model itself pools nothing)"))


def pool_queries(model: nn.Module, layout: TokenLayout, queries: Tensor) -> Tensor:
    """Weights [batch, tokens] of an attention-pooling head, its queries pooled as the module does.

    Args:
        model: that the head is a part of.
        layout: of the top layer's tokens.
        queries: what each of its queries attends to, heads fused, [batch, queries, patches or tokens].

    Raises:
        UnsupportedModelError: it pools other tokens than these.
    """
    transformer: Any = transformer_of(model)
    pool = getattr(getattr(transformer, "attn_pool", None), "pool", "token")
    weights = queries.mean(dim=1) if pool == "avg" else queries[:, 0]
    missing = layout.num_tokens - layout.num_suffix_tokens - weights.shape[-1]
    if missing not in (0, layout.num_prefix_tokens) or layout.num_suffix_tokens:
        raise UnsupportedModelError(
            f"{type(transformer).__name__} pools {weights.shape[-1]} tokens by attention, expected {layout.num_tokens} "
            f"or the {layout.num_patches} patches."
        )
    return torch.nn.functional.pad(weights, (missing, 0))


def output_projection(attention_module: nn.Module, around: nn.Module | None = None) -> Tensor | None:
    """W_O of an attention module, [width out, heads · head width]; None where heads are not joined by one Linear.

    Args:
        attention_module: the module that computes the attention.
        around: the module that it is a part of, which may hold the projection beside it, as `output.dense`.
    """
    norm = getattr(attention_module, "norm", None)
    if norm is not None and not isinstance(norm, nn.Identity):
        return None  # a norm between the heads and the projection makes it depend on all tokens' values
    for name in _OUTPUT_PROJECTIONS:
        projection: Any = getattr(attention_module, name, None)
        if isinstance(projection, nn.Linear):
            return projection.weight
        if type(projection).__name__ == "Conv1D":  # of transformers: a linear map whose weights are transposed
            weight: Tensor = projection.weight
            return weight.T
        if isinstance(projection, nn.Conv2d) and projection.kernel_size == (1, 1) and projection.groups == 1:
            return projection.weight.flatten(1)
    beside = getattr(getattr(around, "output", None), "dense", None)
    return beside.weight if isinstance(beside, nn.Linear) else None


# Numbers of axes, those first that are the most like logits [batch, classes].
_AXES = (2, 1, 4, 3, 5)
_TENSORS_LISTED = 8


def no_logits(output: Any, model: str) -> ModelError:
    """The error for a model whose output has no logits, with an example of `outputs` that fits this output."""
    tensors = [(path, one) for path, one in _tensors_by_path(output) if one.is_floating_point() and one.ndim > 0]
    remedy = "Make the model return its logits as a tensor [batch, classes]"
    if tensors:
        path, one = min(tensors, key=lambda found: _AXES.index(min(found[1].ndim, 5)))
        remedy = f"Pass outputs= to name the numbers to explain, such as outputs=lambda output: output{path}"
        remedy += {1: "[:, None]", 2: "", 3: ".mean(1)"}.get(one.ndim, f".mean({tuple(range(2, one.ndim))})")
    return ModelError(
        f"Expected {model} to return one tensor of logits, or an output with logits, got {in_words(output)}. {remedy}."
    )


def in_words(output: Any) -> str:
    """The type of a model's output and the shapes of its tensors, in words."""
    if isinstance(output, Tensor):
        return f"a tensor {tuple(output.shape)}"
    shapes = [f"{path.lstrip('.')} {tuple(one.shape)}" for path, one in _tensors_by_path(output)]
    more = [f"… ({len(shapes)} tensors)"] if len(shapes) > _TENSORS_LISTED else []
    return f"{type(output).__name__} with {', '.join(shapes[:_TENSORS_LISTED] + more) or 'no tensors'}"


def _tensors_by_path(output: Any, depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an output, each after the code that reads it from there: `["logits"]`, `[0]` or `.logits`."""
    if isinstance(output, Tensor):
        yield "", output
        return
    if depth == 0:
        return
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(output, Mapping):
        parts = ((f'["{name}"]' if isinstance(name, str) else f"[{name!r}]", one) for name, one in output.items())
    elif isinstance(output, list | tuple) and not hasattr(output, "_fields"):
        parts = ((f"[{number}]", one) for number, one in enumerate(output))
    elif not isinstance(output, type | nn.Module):  # a namedtuple, a dataclass with or without slots, or any object
        named = (getattr(output, one, ()) for one in ("_fields", "__dataclass_fields__", "__dict__"))
        fields: Iterable[str] = next(filter(None, named), ())
        parts = ((f".{name}", getattr(output, name, None)) for name in fields if not name.startswith("_"))
    for path, one in parts:
        for further, tensor in _tensors_by_path(one, depth - 1):
            yield path + further, tensor
