"""Transformer blocks of a model, and the modules whose outputs are its features."""

from typing import Any

from torch import nn

from vitflow.errors import UnsupportedModelError
from vitflow.methods.fusion import check_layer
from vitflow.models.anatomy import class_tokens, transformer_of
from vitflow.models.libraries import FIRST_NORMS, library_blocks

# Names of the first norm of a block in timm.
_TIMM_NORMS = ("norm1", "in_norm", "norm_out")
# Names of late blocks, which add the class token.
_LATE_BLOCKS = ("blocks_token_only", "cls_attn_blocks")
# Names of the norm after the last block.
_LAST_NORMS = ("norm", "layernorm", "layer_norm", "post_layernorm", "ln")


def block_norms(model: nn.Module) -> list[str]:
    """Return the paths of the modules whose outputs Grad-CAM can use, first layer first.

    They are the first norms of the blocks if all blocks have the same tokens or the model has a class token; otherwise
    the stages in timm's `feature_info`, or the convolutions.
    """
    if stacks := library_blocks(model):
        return [f"{path}.{norm}" for path, blocks in stacks.items() for norm in _first_norms(blocks)]
    transformer: Any = transformer_of(model)
    root = next(path for path, module in model.named_modules() if module is transformer)
    blocks, stages = _one_stack(transformer), _stages(transformer)
    paths: list[str] = []
    if blocks is not None:
        paths = _first_norms(blocks)
        paths = [f"blocks.{path}" for path in paths] if len(paths) == len(blocks) else []
        paths += _late_norms(transformer)
    if not paths and (class_tokens(transformer) or not stages):
        paths = [path for path, _ in transformer.named_modules() if path.split(".")[-1] == "norm1"]
    paths = paths or [path for path, _ in stages]
    paths = paths or [path for path, module in transformer.named_modules() if isinstance(module, nn.Conv2d)]
    return [".".join(filter(None, (root, path))) for path in paths]


def _first_norms(blocks: nn.Module) -> list[str]:
    """Return the path of the first norm of each block that has one."""
    paths = []
    for name, block in blocks.named_children():
        norms = [path for path, module in block.named_modules() if "norm" in type(module).__name__.lower()]
        known = [norm for norm in (*_TIMM_NORMS, *FIRST_NORMS) if hasattr(block, norm)]
        if known or norms:
            paths.append(f"{name}.{(known or norms)[0]}")
    return paths


def _late_norms(transformer: nn.Module) -> list[str]:
    """Return the paths of the first norms of late blocks."""
    return [
        f"{name}.{path}"
        for name in _LATE_BLOCKS
        if (blocks := getattr(transformer, name, None)) is not None
        for path in _first_norms(blocks)
    ]


def _stages(transformer: Any) -> list[tuple[str, int]]:
    """Return module path and reduction of each stage in `feature_info` that is a callable module."""
    try:
        reductions = {str(info["module"]): int(info["reduction"]) for info in transformer.feature_info}
        modules = {path: transformer.get_submodule(path) for path in reductions}
    except (AttributeError, KeyError, TypeError):
        return []
    return [(path, reductions[path]) for path, module in modules.items() if not isinstance(module, nn.ModuleList)]


def block_norm(model: nn.Module, layer: int) -> str:
    """Return the path of the module that Grad-CAM uses for a layer: 1 for the first, −1 for the last.

    Raises:
        UnsupportedModelError: the model has no such module.
        OptionError: the layer is out of range.
    """
    paths = block_norms(model)
    if not paths:
        raise UnsupportedModelError(
            f"Grad-CAM requires transformer blocks with norms, stages or convolutions, and {type(model).__name__} has "
            "none. Use input_gradient or occlusion."
        )
    return paths[check_layer("layer", layer, len(paths))]


def block_paths(model: nn.Module) -> list[str]:
    """Return the paths of a model's blocks; empty if they do not all have the same tokens."""
    stacks: dict[str, Any] = dict(library_blocks(model))
    if not stacks:
        transformer = transformer_of(model)
        root = next(path for path, module in model.named_modules() if module is transformer)
        blocks = _one_stack(transformer)
        stacks = {} if blocks is None else {".".join(filter(None, (root, "blocks"))): blocks}
    if len(stacks) != 1:
        return []
    [(path, blocks)] = stacks.items()
    return [f"{path}.{name}" for name, _ in blocks.named_children()]


def layer_output(model: nn.Module, layer: int) -> tuple[str, nn.Module | None]:
    """Return the path of the module whose output is a layer's features, and the norm to apply to them.

    This is the output of a block and the model's last norm; for a model with stages or without blocks, the module that
    Grad-CAM uses and None.

    Args:
        model: any model.
        layer: 1 for the first, −1 for the last.

    Raises:
        UnsupportedModelError: the model has no such module.
        OptionError: the layer is out of range.
    """
    paths = block_paths(model)
    if not paths:
        return block_norm(model, layer), None
    return paths[check_layer("layer", layer, len(paths))], _last_norm(model, paths[-1])


def _one_stack(transformer: Any) -> nn.Sequential | nn.ModuleList | None:
    """Return the blocks of a timm transformer; None if its stages have different reductions."""
    blocks = getattr(transformer, "blocks", None)
    uniform = len({reduction for _, reduction in _stages(transformer)}) <= 1
    return blocks if uniform and isinstance(blocks, nn.Sequential | nn.ModuleList) else None


def _last_norm(model: nn.Module, block: str) -> nn.Module | None:
    """Return the norm after the last block, from the closest parent module that has one."""
    while block:
        block = block.rpartition(".")[0]
        parent = model.get_submodule(block)
        for name in _LAST_NORMS:
            norm = getattr(parent, name, None)
            if isinstance(norm, nn.Module) and "norm" in type(norm).__name__.lower():
                return norm
    return None
