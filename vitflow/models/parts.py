"""Cached searches among the modules of a model, repeated only if a module is replaced, wrapped, added or removed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn


class _Parts:
    """Cached properties of a model's modules, valid while the marks are unchanged."""

    def __init__(self, marks: list[Any]) -> None:
        self.marks = marks
        self.chosen: dict[Callable[[nn.Module], bool], list[tuple[str, ref[nn.Module]]]] = {}
        self.kept: dict[Any, Any] = {}


# Modules are kept by weak references, so that the cache does not keep a model alive.
_models: WeakKeyDictionary[nn.Module, _Parts] = WeakKeyDictionary()


class _Thread(threading.local):
    """The model that this thread runs now, with its cached properties."""

    held: tuple[nn.Module, _Parts] | None = None


_thread = _Thread()


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
    """Turn a condition on one module into a cached search among all modules of a model.

    The search is repeated if a module is replaced, gets an instance's forward method, or is compiled. The condition
    must depend only on the class and the submodules of a module, not on flags.

    >>> linear = those_that(lambda module: isinstance(module, nn.Linear))
    >>> model = nn.Sequential(nn.ReLU(), nn.Linear(2, 3))
    >>> len(linear(model)), model.append(nn.Linear(3, 1)) and len(linear(model))
    (1, 2)
    """

    @wraps(holds)
    def among(model: nn.Module) -> list[nn.Module]:
        return [module for _, module in _answer(model, holds)]

    return among


def with_paths(model: nn.Module, question: Callable[[nn.Module], list[nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the modules selected by `those_that`, each with its path, without the path of wrappers."""
    return _answer(model, question.__wrapped__)  # type: ignore[attr-defined]


def kept_with(model: nn.Module) -> dict[Any, Any]:
    """Return a cached value of a model; recomputed if a module is replaced, wrapped, added or removed."""
    return _look(model).kept


def kept_with_outputs(model: nn.Module, outputs: Callable[..., Any]) -> dict[Any, Any]:
    """Return cached values of a model and of a function of its outputs, kept while both exist; see `kept_with`."""
    owner = getattr(outputs, "__self__", outputs)  # each access creates a new bound method
    known, key = kept_with(model), ("outputs", id(owner))
    if key not in known or known[key][0]() is not owner:
        known[key] = ref(owner, lambda _: known.pop(key, None)), {}
    values: dict[Any, Any] = known[key][1]
    return values


@contextmanager
def unchanging(model: nn.Module) -> Iterator[None]:
    """Assume until the end of the block, in this thread, that the modules of a model do not change."""
    before = _thread.held
    _thread.held = model, _look(model)
    try:
        yield
    finally:
        _thread.held = before


def _answer(model: nn.Module, holds: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    """Return the modules of a model that satisfy a condition, each with its path."""
    chosen = _look(model).chosen
    if holds not in chosen:
        chosen[holds] = [
            (".".join(part for part in path.split(".") if part != "_orig_mod"), ref(module))
            for path, module in model.named_modules()
            if holds(module)
        ]
    return [(path, module) for path, kept in chosen[holds] if (module := kept()) is not None]


def _look(model: nn.Module) -> _Parts:
    """Return the cached properties of a model's modules."""
    if _thread.held is not None and _thread.held[0] is model:
        return _thread.held[1]
    marks = _marks(model)
    parts = _models.get(model)
    if parts is None or parts.marks != marks:
        parts = _models[model] = _Parts(marks)
    return parts


def _marks(model: nn.Module) -> list[Any]:
    """Return marks that change if a module is replaced, wrapped, added, removed, or given a forward method."""
    marks: list[Any] = [type(model)]
    level, seen = [model], {model}
    while level:
        dicts = [module.__dict__ for module in level]
        inside = [attributes["_modules"] for attributes in dicts]
        parts = [part for modules in inside for part in modules.values()]
        marks += map(len, inside)
        marks += chain.from_iterable(inside)
        marks += map(type, parts)
        marks += ["forward" in attributes and _is_compiled(attributes["forward"]) for attributes in dicts]
        marks += [attributes.get("_compiled_call_impl") is None for attributes in dicts]
        level = [part for part in parts if part is not None]
        marks += map(ref, level)
        level = [part for part in dict.fromkeys(level) if part not in seen]
        seen.update(level)
    return marks


def _is_compiled(forward: Any) -> str:
    """Return the objects on which a module's forward method may depend."""
    return "compiled" if hasattr(forward, "_torchdynamo_orig_callable") else "as written"
