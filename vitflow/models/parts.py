"""The modules of a model: wrappers, parts of language models, refusals, and a cache for modules and weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import FunctionType, NoneType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from vitflow.errors import OTHER_METHODS, UnsupportedModelError

Result = TypeVar("Result")

#: Names of the classification heads of transformers.
CLASSIFIERS = ("classifier", "cls_classifier")
# Attention implementations of transformers that call functions of torch and can be recorded.
_RECORDABLE = ("sdpa", "eager")
# Wrappers of timm with averaged weights.
_AVERAGED = ("ModelEmaV2", "ModelEmaV3")
# Types of settings whose values are compared, the attributes of a module that are no settings, and its tables of hooks.
_PLAIN = (bool, int, float, str, NoneType)
_NOT_SETTINGS = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# The number of entries of a weight that are compared, at least; and the size up to which other tensors are compared.
_ENTRIES, _SMALL = 8, 1024
# Modules are kept by weak references, so that the cache does not keep a model alive.
_caches: WeakKeyDictionary[nn.Module, tuple[list[Any], dict[Any, Any]]] = WeakKeyDictionary()


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers of torch.compile, parallel training, and averaged weights."""
    if not isinstance(model, nn.Module):
        names = ("model", "module", "ema")  # type: ignore[unreachable]
        inner = [name for name in names if isinstance(getattr(model, name, None), nn.Module)]
        got, remedy = f"{model!r:.80}", f" Pass its .{inner[0]}." if inner else ""
        if isinstance(model, Mapping):
            got = "a dictionary"
            remedy = " Load a state dict into its model, or pass timm's id of the model with checkpoint=FILE."
        elif isinstance(model, type):
            got, remedy = f"the class {model.__name__}", f" Pass an instance: {model.__name__}(…)."
        raise UnsupportedModelError(f"Expected a model as a torch.nn.Module, got {got}.{remedy}")
    while True:
        if isinstance(model, torch.jit.ScriptModule | torch.fx.GraphModule):
            raise UnsupportedModelError(
                f"{type(model).__name__}: attention of a scripted, traced or exported model cannot be recorded. "
                "Pass the original module."
            )
        wraps = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel | AveragedModel)
        if wraps or type(model).__name__ in _AVERAGED:
            model = model.module  # type: ignore[assignment]
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model, itself first, in the order of `modules()`, but four times as fast."""
    modules, seen, waiting = [], set(), [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            modules.append(module)
            if module._modules:
                waiting.extend(part for part in reversed(module._modules.values()) if part is not None)
    return modules


class ModelState:
    """The modules of a model as they are now, and the cache of what is known of them, from one walk.

    Attributes:
        modules: all modules by path as by `named_modules`, in half of the time, and without torch.compile wrappers.
        wrappers: those of torch.compile, which have the paths of the modules inside.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.wrappers = model, list[nn.Module]()
        self.modules: dict[str, nn.Module] = {}
        seen, waiting = set(), [("", model)]
        while waiting:
            path, module = waiting.pop()
            if module in seen:
                continue
            seen.add(module)
            parts = module._modules
            if "_orig_mod" in parts:
                self.wrappers.append(module)
                waiting += [(path, part) for part in parts.values() if part is not None]
                continue
            self.modules[path] = module
            if parts:
                prefix = path and f"{path}."
                waiting += [(prefix + name, part) for name, part in reversed(parts.items()) if part is not None]

    @cached_property
    def every(self) -> list[nn.Module]:
        """All modules, with wrappers."""
        return [*self.modules.values(), *self.wrappers]

    @cached_property
    def cache(self) -> dict[Any, Any]:
        """Cache of the model; a new one if a weight, module, method, hook or setting was changed or removed.

        This takes most of a millisecond. Values must not refer to the model, which they would keep alive.
        """
        marks = _marks(self.every)
        known, cache = _caches.get(self.model, (None, {}))
        if known != marks:
            cache = {}
            _caches[self.model] = marks, cache
        return cache

    def cached(self, key: Any, compute: Callable[[], Result]) -> Result:
        """Return the cached result of a function, which is called if there is none."""
        if key not in self.cache:
            self.cache[key] = compute()
        result: Result = self.cache[key]
        return result


def pretrained_of(model: nn.Module) -> nn.Module | None:
    """Return the outermost transformers model in a module, or None."""
    modules = modules_of(model)
    kinds = {kind for kind in set(map(type, modules)) if any(one.__name__ == "PreTrainedModel" for one in kind.__mro__)}
    return next((module for module in modules if type(module) in kinds), None) if kinds else None


def library_id(model: nn.Module) -> str | None:
    """Return the name by which a transformers model was loaded, or None."""
    name = getattr(pretrained_of(model), "name_or_path", None)
    return name if isinstance(name, str) and name else None


def runs_compiled(modules: Sequence[nn.Module]) -> bool:
    """Return True if one of these modules is compiled with torch.compile, in any of its forms."""
    kinds: set[type[nn.Module]] = set(map(type, modules))
    forwards = [*(kind.forward for kind in kinds), *(vars(each).get("forward") for each in modules)]
    return any(map(_is_compiled, forwards)) or any(
        "_orig_mod" in module._modules or module._compiled_call_impl is not None for module in modules
    )


def _is_compiled(forward: Any) -> bool:
    return hasattr(forward, "_torchdynamo_orig_callable")


def output_cache(model: nn.Module, outputs: Callable[..., Any]) -> dict[Any, Any]:
    """Return the cache of a model for a function of its outputs; see `ModelState`."""
    owner = getattr(outputs, "__self__", outputs)  # each access creates a new bound method
    values: dict[Any, Any] = ModelState(model).cache.setdefault(("outputs", ref(owner)), {})
    return values


def foreign_hooks(modules: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return torch's ids of the hooks of these modules that are not vitflow's, and of global module hooks."""
    every = torch.nn.modules.module
    tables = [every._global_forward_hooks, every._global_forward_pre_hooks, every._global_backward_hooks]
    tables.append(every._global_backward_pre_hooks)
    for attributes in map(vars, modules):
        tables += [table for name in _HOOKS if (table := attributes[name])]
    isolation = "vitflow.recording.isolation"
    return tuple(key for table in tables for key, hook in table.items() if type(hook).__module__ != isolation)


def _marks(modules: Sequence[nn.Module]) -> list[Any]:
    """Return marks that change if a module is replaced, compiled, added or removed, or gets a method, hook or setting.

    The methods are those of instances and of classes; settings are attributes that are plain values, containers of
    these, or functions. Marks change with the weights, too, and with small tensors that are plain attributes.
    """
    marks: list[Any] = []
    tensors: list[Tensor] = []
    for module in modules:
        marks += ref(module), type(module), *module._modules
        for name, value in vars(module).items():
            if name in _NOT_SETTINGS:
                continue
            if (mark := _setting(value)) is not None:
                marks += name, mark
            elif type(value) is Tensor and value.numel() <= _SMALL:
                tensors.append(value)
    kinds = {base for kind in set(map(type, modules)) for base in kind.__mro__}
    marks += [_is_compiled(getattr(kind, "forward", None)) for kind in kinds]
    marks += [
        (name, ref(value))
        for kind in kinds
        if not kind.__module__.startswith("torch.") and kind is not object
        for name, value in vars(kind).items()
        if type(value) is FunctionType
    ]
    groups = (group for module in modules for group in (module._parameters, module._buffers) if group)
    weights = {id(tensor): tensor for group in groups for tensor in group.values() if tensor is not None}
    return [*marks, foreign_hooks(modules), *_weight_marks(list(weights.values()), tensors)]


def _setting(value: Any) -> Any:
    """Return a copy of a plain value or of a container of settings, or a reference to a function; None for others."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple, set, dict):
        parts = [_setting(each) for each in (value.items() if isinstance(value, dict) else value)]
        return None if None in parts else (kind, parts)
    if not callable(value) or isinstance(value, nn.Module):
        return None
    try:
        return ref(value)
    except TypeError:
        return id(value)


def _weight_marks(weights: Sequence[Tensor], others: Sequence[Tensor]) -> list[Any]:
    """Return marks that change with tensors: address and version of each weight, and a few entries of each tensor.

    Writes through `.data` change only the entries. Other tensors than weights are without their address, as a forward
    pass may store them anew.
    """
    versions = [(id(each), 0 if each.is_inference() else each._version) for each in weights]
    entries: dict[Any, list[Tensor]] = {}
    addresses: list[int] = []
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for tensor in (*weights, *others):
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
            if plain and not tensor.is_meta and not tensor.is_quantized:
                step = max(1, (count := tensor.numel()) // _ENTRIES)
                in_order = tensor if tensor.is_contiguous() else tensor.contiguous()
                few = in_order.as_strided((-(-count // step),), (step,))
                entries.setdefault((tensor.device, tensor.dtype), []).append(few)
                addresses.append(tensor.data_ptr() if len(addresses) < len(weights) else 0)
            else:
                addresses.append(0)
        sums = [torch.cat(each).cpu().view(torch.uint8).numpy().tobytes() for each in entries.values()]
    return [addresses, versions, list(entries), sums]


# -- refusals ---------------------------------------------------------------------------------------------------------


def configured(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that have a configuration, as those of transformers."""
    return [module for module in modules if "config" in module.__dict__]


def hidden_attention(module: nn.Module) -> str:
    """Return the attention implementation of a module of transformers if it cannot be recorded; else an empty string.

    >>> hidden_attention(nn.Linear(2, 2))
    ''
    """
    implementation = getattr(vars(module).get("config"), "_attn_implementation", None)
    return implementation if isinstance(implementation, str) and implementation not in _RECORDABLE else ""


def check_recordable(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Check that no module of a model is scripted, and that the attention of a transformers model can be recorded."""
    refuse_scripted(model, modules)
    for module in configured(modules):
        if implementation := hidden_attention(module):
            raise UnsupportedModelError(
                f"{type(module).__name__} uses the attention implementation {implementation!r}, which cannot be "
                "recorded, and cannot be switched to sdpa: load it with attn_implementation='eager'."
            )
    if isinstance(getattr(model, "text_model", None), nn.Module) and hasattr(model, "vision_model"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has a text and a vision model. Pass the vision model, model.vision_model."
        )


def refuse_volumes(model: nn.Module) -> None:
    """Raise UnsupportedModelError if the first convolution of a model is over volumes."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    first = next((module for module in modules_of(model) if isinstance(module, convolutions)), None)
    if isinstance(first, nn.Conv3d) and pretrained_of(model) is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} reads volumes [batch, channels, depth, height, width], and volumes are not "
            "supported: pass a model of slices, and a slice as the image."
        )


def refuse_scripted(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Raise UnsupportedModelError if one of the modules of a model is scripted or traced."""
    if any(issubclass(kind, torch.jit.ScriptModule) for kind in set(map(type, modules))):
        raise UnsupportedModelError(
            f"{type(model).__name__} contains a scripted or traced module, whose attention cannot be recorded. Pass a "
            "model of the original modules."
        )


def refuse_deformable(model: nn.Module) -> None:
    """Raise UnsupportedModelError if a model has deformable attention, of which there is no matrix."""
    if any("deformable" in type(module).__name__.lower() for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has deformable attention, of which there is no matrix. {OTHER_METHODS}"
        )


# -- language models --------------------------------------------------------------------------------------------------


def word_embedding(model: nn.Module) -> nn.Module | None:
    """Return the token embedding of a model, or None if it has none."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None


def plain_token_ids(model: nn.Module, count: int) -> list[int]:
    """Return `count` token ids spread over a model's vocabulary, without special tokens."""
    modules = (word_embedding(model), *model.modules())
    size = next((module.num_embeddings for module in modules if isinstance(module, nn.Embedding)), count)
    configs = getattr(model, "config", None), text_config(model)
    entries = [entry for config in configs if hasattr(config, "__dict__") for entry in vars(config).items()]
    special = {id for name, id in entries if isinstance(id, int) and name.endswith(("_token_id", "_index"))}
    plain = [id for id in range(size) if id not in special] or [0]
    return [plain[index * max(len(plain) // count, 1) % len(plain)] for index in range(count)]


def text_config(model: nn.Module) -> Any:
    """Return the configuration of a model, or of the text part of a multimodal model."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the decoder of a transformers model."""
    pretrained: Any = model
    decoder: nn.Module = pretrained.get_decoder()
    return decoder


def decoder_path(model: nn.Module) -> str:
    """Return the module path of the decoder in a model; empty if it is the model itself."""
    decoder = decoder_of(model)
    return next((path for path, module in model.named_modules() if module is decoder), "")
