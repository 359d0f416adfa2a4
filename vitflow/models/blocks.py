"""Transformer blocks of a model, the modules whose outputs are its features, and models without some modules."""

import copy
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn

from vitflow.errors import UnsupportedModelError
from vitflow.methods.fusion import check_layer
from vitflow.models.anatomy import class_tokens, embedding_of, transformer_of
from vitflow.models.parts import CLASSIFIERS, pretrained_of

# Names of the first norm of a block, in transformers, torchvision and open_clip, and in timm.
_FIRST_NORMS = ("layernorm_before", "layer_norm1", "ln_1", "norm1")
_TIMM_NORMS = ("norm1", "in_norm", "norm_out")
# Names of late blocks, which add the class token.
_LATE_BLOCKS = ("blocks_token_only", "cls_attn_blocks")
# Names of the norm after the last block.
_LAST_NORMS = ("norm", "layernorm", "layer_norm", "post_layernorm", "ln")


def _stacks(model: nn.Module) -> dict[str, Any]:
    """Return the stacks of blocks, by module path; empty if those of a timm model have different reductions."""
    if embedding_of(model) is not None:  # of another library: lists of blocks with a first norm
        stacks = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, nn.ModuleList | nn.Sequential)
            and len(module)
            and all(any(hasattr(block, norm) for norm in _FIRST_NORMS) for block in module)
        }
        if stacks:
            return stacks
    blocks, uniform = getattr(transformer_of(model), "blocks", None), len({size for _, size in _stages(model)}) <= 1
    return {f"{_root(model)}blocks": blocks} if uniform and isinstance(blocks, nn.Sequential | nn.ModuleList) else {}


def first_stack(model: nn.Module) -> nn.Sequential | nn.ModuleList | None:
    """Return the module whose children are the blocks of a model, in order, the first if there are several; or None."""
    blocks = getattr(transformer_of(model), "blocks", None)
    known = isinstance(blocks, nn.Sequential | nn.ModuleList) and len(blocks) > 0
    return blocks if known else next(iter(_stacks(model).values()), None)


def _root(model: nn.Module) -> str:
    """Return the path of the timm transformer in a model, with a dot at its end; empty if it is the model itself."""
    transformer = transformer_of(model)
    return next(path and f"{path}." for path, module in model.named_modules() if module is transformer)


def block_norms(model: nn.Module) -> list[str]:
    """Return the paths of the modules whose outputs Grad-CAM can use, first layer first.

    They are the first norms of the blocks if all blocks have the same tokens or the model has a class token; otherwise
    the stages in timm's `feature_info`; the first layer norms of the elements of lists; or the convolutions.
    """
    transformer: Any = transformer_of(model)
    root, stacks, stages = _root(model), _stacks(model), _stages(model)
    paths = [f"{path}.{norm}" for path, blocks in stacks.items() for norm in _first_norms(blocks)]
    if len(paths) < sum(map(len, stacks.values())):
        paths = []
    if stacks:
        late = {name: blocks for name in _LATE_BLOCKS if (blocks := getattr(transformer, name, None)) is not None}
        paths += [f"{root}{name}.{norm}" for name, blocks in late.items() for norm in _first_norms(blocks)]
    modules = dict(transformer.named_modules())
    if not paths and (class_tokens(transformer) or not stages):
        paths = [root + path for path in modules if path.split(".")[-1] == "norm1"]
    paths = paths or [root + path for path, _ in stages] or _listed_norms(model)
    return paths or [root + path for path, module in modules.items() if isinstance(module, nn.Conv2d)]


def _first_norms(blocks: nn.Module) -> list[str]:
    """Return the path of the first norm of each block that has one."""
    paths = []
    for name, block in blocks.named_children():
        norms = [path for path, module in block.named_modules() if "norm" in type(module).__name__.lower()]
        known = [norm for norm in (*_TIMM_NORMS, *_FIRST_NORMS) if hasattr(block, norm)]
        if known or norms:
            paths.append(f"{name}.{(known or norms)[0]}")
    return paths


def _listed_norms(model: nn.Module) -> list[str]:
    """Return the first layer norm of each element of the outermost lists of modules of one class with layer norms.

    Lists of lists are left out: an inner list is not a module that runs, so that its residuals are outside of it.
    Models of transformers have none: their other lists, as of detectors, have tokens of several grids or queries.
    """
    if pretrained_of(model) is not None:
        return []
    lists: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        alike = isinstance(module, nn.ModuleList | nn.Sequential) and len({type(each) for each in module}) == 1
        if (
            not alike
            or len(module) < 2
            or "decoder" in path.lower()
            or any(f"{path}.".startswith(f"{outer}.") for outer in lists)
        ):
            continue
        norms = {f"{path}.{name}.": _first_layer_norm(block) for name, block in module.named_children()}
        if isinstance(module[0], nn.ModuleList):
            lists[path] = []
        elif all(norms.values()):
            lists[path] = [f"{block}{norm}" for block, norm in norms.items()]
    return [norm for norms in lists.values() for norm in norms]


def _first_layer_norm(block: nn.Module) -> str | None:
    kinds = ((path, type(module).__name__.lower()) for path, module in block.named_modules())
    return next((path for path, kind in kinds if path and ("layernorm" in kind or "rmsnorm" in kind)), None)


def _stages(model: nn.Module) -> list[tuple[str, int]]:
    """Return module path in the transformer and reduction of each stage in timm's `feature_info` that is callable."""
    transformer: Any = transformer_of(model)
    try:
        reductions = {str(info["module"]): int(info["reduction"]) for info in transformer.feature_info}
        modules = {path: transformer.get_submodule(path) for path in reductions}
    except (AttributeError, KeyError, TypeError):
        return []
    return [(path, reductions[path]) for path, module in modules.items() if not isinstance(module, nn.ModuleList)]


def block_norm(model: nn.Module, layer: int) -> str:
    """Return the path of the module that Grad-CAM uses for a layer: 1 for the first, −1 for the last."""
    paths = block_norms(model)
    if not paths:
        raise UnsupportedModelError(
            "Grad-CAM requires transformer blocks that are modules with norms, stages or convolutions, and "
            f"{type(model).__name__} has none. Use input_gradient or occlusion."
        )
    return paths[check_layer("layer", layer, len(paths))]


def lower_features(model: nn.Module, path: str) -> list[str]:
    """Return the paths of the blocks below a module of `block_norms`, each before its first norm, last block first."""
    norms = block_norms(model)
    below = [[block_of(norm), norm] for norm in reversed(norms[: norms.index(path)])]
    return list(dict.fromkeys(chain.from_iterable(below)))


def block_of(path: str) -> str:
    """Return the path of the element of a list of modules that contains a module, or of the module itself.

    >>> block_of("blocks.11.norm1"), block_of("layers.encoder_layer_2.ln_1"), block_of("conv1")
    ('blocks.11', 'layers.encoder_layer_2', 'conv1')
    """
    parts = path.split(".")
    return ".".join(parts[: max(_indices(parts), default=len(parts)) + 1])


def _indices(parts: Sequence[str]) -> list[int]:
    """Return which parts of a path are indices of a list, or end in one, as those of torchvision do."""
    exact = [n for n, part in enumerate(parts) if part.isdigit()]
    return exact or [n for n, part in enumerate(parts[:-1]) if part.rpartition("_")[2].isdigit()]


def block_paths(model: nn.Module) -> list[str]:
    """Return the paths of a model's blocks; empty if they do not all have the same tokens."""
    stacks = _stacks(model)
    if len(stacks) != 1:
        return []
    [(path, blocks)] = stacks.items()
    return [f"{path}.{name}" for name, _ in blocks.named_children()]


def block_paths_of(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """Return the block path of each attention layer: the outermost running module without another layer.

    >>> block_paths_of(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())), ["0.0", "1.0"])
    ['0', '1']
    """
    prefixes = {name: [name[:i] for i, sign in enumerate(f"{name}.") if sign == "."] for name in layers}
    layers_in = Counter(chain.from_iterable(prefixes.values()))
    blocks = []
    for name in layers:
        alone = [
            path
            for path in prefixes[name]
            if layers_in[path] == 1 and (len(prefixes) > 1 or path.split(".")[-1].isdigit())
        ]
        running = (path for path in alone if not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict))
        blocks.append(next(running, name))
    return blocks


def layer_output(model: nn.Module, layer: int) -> tuple[str, nn.Module | None]:
    """Return the path of the module whose output is a layer's features, and the norm to apply to them.

    This is the output of a block and the model's last norm; for a model with stages or without blocks, the module that
    Grad-CAM uses and None.
    """
    paths = block_paths(model)
    if not paths:
        return block_norm(model, layer), None
    return paths[check_layer("layer", layer, len(paths))], _last_norm(model, paths[-1])


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


def headless(model: nn.Module) -> nn.Module:
    """Return the model without its head, as a copy that shares its weights; the model itself if it has no head."""
    owner: Any = model
    heads: Any = ()
    if getattr(model, "num_classes", 0) and hasattr(model, "get_classifier"):  # of timm
        heads = owner.get_classifier()
    elif pretrained_of(model) is model:
        heads = tuple(getattr(model, name, None) for name in CLASSIFIERS)
    elif type(model).__module__.startswith("torchvision."):
        heads = getattr(model, "heads", None)
    heads = heads if isinstance(heads, tuple) else (heads,)
    paths = [path for path, module in model.named_modules() if path and any(module is head for head in heads)]
    for path in paths:
        model = without(model, path)
    if paths and hasattr(model, "num_classes"):
        model.num_classes = 0  # type: ignore[assignment]
    return model


def without(model: nn.Module, path: str) -> nn.Module:
    """Return a shallow copy of a model with an identity in place of the module at `path`."""
    copied, (name, _, rest) = copy.copy(model), path.partition(".")
    children = dict(model._modules)
    child = children[name]
    children[name] = nn.Identity() if not rest or child is None else without(child, rest)
    vars(copied)["_modules"] = children
    return copied
