"""The modules of a model: searches, and a cache that is valid while the modules are the same."""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

# Modules are kept by weak references, so that the cache does not keep a model alive.
_caches: WeakKeyDictionary[nn.Module, tuple[list[Any], dict[Any, Any]]] = WeakKeyDictionary()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model, itself first, in the order of `modules()`, in a quarter of its time.

    >>> [type(module).__name__ for module in modules_of(nn.Sequential(nn.ReLU(), nn.Linear(2, 3)))]
    ['Sequential', 'ReLU', 'Linear']
    """
    modules, seen, waiting = [], set(), [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            modules.append(module)
            if module._modules:
                waiting.extend(part for part in reversed(module._modules.values()) if part is not None)
    return modules


def those_that(holds: Callable[[nn.Module], bool]) -> Callable[[nn.Module], list[nn.Module]]:
    """Turn a condition on one module into a search among all modules of a model.

    >>> linear = those_that(lambda module: isinstance(module, nn.Linear))
    >>> linear(nn.Sequential(nn.ReLU(), nn.Linear(2, 3)))
    [Linear(in_features=2, out_features=3, bias=True)]
    """

    @wraps(holds)
    def among(model: nn.Module) -> list[nn.Module]:
        return list(filter(holds, modules_of(model)))

    return among


def with_paths(model: nn.Module, search: Callable[[nn.Module], list[nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the modules that a search finds, each with its path, without the path of wrappers."""
    holds = search.__wrapped__  # type: ignore[attr-defined]
    return [
        (".".join(part for part in path.split(".") if part != "_orig_mod"), module)
        for path, module in model.named_modules()
        if holds(module)
    ]


def is_compiled(module: nn.Module) -> bool:
    """Return True if a module is compiled with torch.compile, in any of its forms."""
    return (
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def kept_with(model: nn.Module) -> dict[Any, Any]:
    """Return the cache of a model; a new one if a module was replaced, wrapped, compiled, added or removed."""
    marks = _marks(model)
    known, cache = _caches.get(model, (None, {}))
    if known != marks:
        cache = {}
        _caches[model] = marks, cache
    return cache


def kept_with_outputs(model: nn.Module, outputs: Callable[..., Any]) -> dict[Any, Any]:
    """Return the cache of a model and of a function of its outputs, kept while both exist; see `kept_with`."""
    owner = getattr(outputs, "__self__", outputs)  # each access creates a new bound method
    known, key = kept_with(model), ("outputs", id(owner))
    if key not in known or known[key][0]() is not owner:
        known[key] = ref(owner, lambda _: known.pop(key, None)), {}
    values: dict[Any, Any] = known[key][1]
    return values


def _marks(model: nn.Module) -> list[Any]:
    """Return marks that change if a module is replaced, compiled, added or removed, or gets a forward method."""
    modules = modules_of(model)
    names = [tuple(module._modules) for module in modules]
    forwards = [("forward" in vars(module), is_compiled(module)) for module in modules]
    return [*map(ref, modules), *map(type, modules), *names, *forwards]
