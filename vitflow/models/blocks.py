"""The blocks that a model is made of, and where their features are found."""

from typing import Any

from torch import nn

from vitflow.errors import UnsupportedModelError
from vitflow.methods.fusion import check_layer
from vitflow.models.anatomy import class_tokens, transformer_of
from vitflow.models.libraries import library_blocks, library_norms

# What they call the norm that a block begins with.
_FIRST_NORMS = ("norm1", "in_norm", "norm_out")
# What they call further blocks, in which a class token joins the patches.
_LATE_BLOCKS = ("blocks_token_only", "cls_attn_blocks")
# What they call the norm behind the last block.
_LAST_NORMS = ("norm", "layernorm", "layer_norm", "post_layernorm", "ln")


def block_norms(model: nn.Module) -> list[str]:
    """Paths of the modules whose outputs Grad-CAM can read, first layer first; empty where there are none.

    Each block's first norm in a transformer whose tokens stay the same, or that ends in a class token. Otherwise each
    stage's output, as timm's `feature_info` names it; in a network that names none, its convolutions.
    """
    own = library_norms(model)
    if own:
        return own
    transformer: Any = transformer_of(model)
    root = next(path for path, module in model.named_modules() if module is transformer)
    blocks, stages = _one_stack(transformer), _stages(transformer)
    found: list[str] = []
    if blocks is not None:
        found = _first_norms(blocks)
        found = [f"blocks.{path}" for path in found] if len(found) == len(blocks) else []
        found += _late_norms(transformer)
    if not found and (class_tokens(transformer) or not stages):
        found = [path for path, _ in transformer.named_modules() if path.split(".")[-1] == _FIRST_NORMS[0]]
    found = found or [path for path, _ in stages]
    found = found or [path for path, module in transformer.named_modules() if isinstance(module, nn.Conv2d)]
    return [".".join(filter(None, (root, path))) for path in found]


def _first_norms(blocks: nn.Module) -> list[str]:
    """The first norm of each block that has one."""
    found = []
    for number, block in enumerate(blocks.children()):
        norms = [path for path, module in block.named_modules() if "norm" in type(module).__name__.lower()]
        first = next((name for name in _FIRST_NORMS if hasattr(block, name)), norms[0] if norms else None)
        if first is not None:
            found.append(f"{number}.{first}")
    return found


def _late_norms(transformer: nn.Module) -> list[str]:
    """The first norms of further blocks, in which a class token joins the patches."""
    return [
        f"{name}.{path}"
        for name in _LATE_BLOCKS
        if (blocks := getattr(transformer, name, None)) is not None
        for path in _first_norms(blocks)
    ]


def _stages(transformer: Any) -> list[tuple[str, int]]:
    """Module path and reduction of each stage that timm names and that runs as a module of its own."""
    try:
        named = {str(one["module"]): int(one["reduction"]) for one in transformer.feature_info}
        modules = {path: transformer.get_submodule(path) for path in named}
    except (AttributeError, KeyError, TypeError):
        return []
    return [(path, named[path]) for path, module in modules.items() if not isinstance(module, nn.ModuleList)]


def block_norm(model: nn.Module, layer: int) -> str:
    """Path of one of the modules that Grad-CAM can read, 1 for the first, −1 for the last.

    Raises:
        UnsupportedModelError: the model has none.
        OptionError: it has no such layer.
    """
    paths = block_norms(model)
    if not paths:
        raise UnsupportedModelError(
            f"{type(model).__name__} has neither transformer blocks with norms, nor stages, nor convolutions, whose "
            "features Grad-CAM needs. Use input_gradient or occlusion, which need none."
        )
    return paths[check_layer("layer", layer, len(paths))]


def block_paths(model: nn.Module) -> list[str]:
    """Paths of the blocks of a model whose tokens stay the same from its first block to its last; else none."""
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
    """Where the features of a layer are found: the path of the module that gives them, and the norm that is to follow.

    They are the output of a block, and the norm is the model's last; of a model with stages, or without blocks, they
    are what Grad-CAM reads, and there is none.

    Args:
        model: any model.
        layer: 1 for the first, −1 for the last.

    Raises:
        UnsupportedModelError: the model has none.
        OptionError: it has no such layer.
    """
    paths = block_paths(model)
    if not paths:
        return block_norm(model, layer), None
    return paths[check_layer("layer", layer, len(paths))], _last_norm(model, paths[-1])


def _one_stack(transformer: Any) -> nn.Sequential | nn.ModuleList | None:
    """The blocks of a transformer of timm whose stages, as far as it names any, all have the same tokens."""
    blocks = getattr(transformer, "blocks", None)
    same = len({reduction for _, reduction in _stages(transformer)}) <= 1
    return blocks if same and isinstance(blocks, nn.Sequential | nn.ModuleList) else None


def _last_norm(model: nn.Module, block: str) -> nn.Module | None:
    """The norm that the model, or the part of it that holds the block, puts behind its last block."""
    while block:
        block = block.rpartition(".")[0]
        holder = model.get_submodule(block)
        for name in _LAST_NORMS:
            found = getattr(holder, name, None)
            if isinstance(found, nn.Module) and "norm" in type(found).__name__.lower():
                return found
    return None
