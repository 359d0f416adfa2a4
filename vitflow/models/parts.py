"""The modules of a model: looked through once, and again only when one was replaced, wrapped, added or taken away."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn


class _Parts:
    """What is known of the modules of a model, all by their number in the order of `named_modules`."""

    def __init__(self, marks: list[Any]) -> None:
        self.marks = marks
        self.paths: list[str] = []
        self.chosen: dict[Callable[[nn.Module], bool], list[int]] = {}


# Modules are kept by weak references alone, so that a model lives no longer for what is known of it.
_models: WeakKeyDictionary[nn.Module, _Parts] = WeakKeyDictionary()


class _Thread(threading.local):
    """The model that this thread runs now, with its modules."""

    held: tuple[nn.Module, list[nn.Module], _Parts] | None = None


_thread = _Thread()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, itself first, in the order of `modules()`, in a fourth of the time.

    >>> [type(module).__name__ for module in modules_of(nn.Sequential(nn.ReLU(), nn.Linear(2, 3)))]
    ['Sequential', 'ReLU', 'Linear']
    """
    found, seen, waiting = [], set(), [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            found.append(module)
            if module._modules:
                waiting.extend(part for part in reversed(module._modules.values()) if part is not None)
    return found


def those_that(holds: Callable[[nn.Module], bool]) -> Callable[[nn.Module], list[nn.Module]]:
    """Make a question about one module, which its class and its parts answer, one about all modules of a model.

    The answer is kept with the model. It is asked again when any module is another one than before, has a forward
    method of its own, or is compiled: what else may change, such as a flag, is no such question.

    >>> linear = those_that(lambda module: isinstance(module, nn.Linear))
    >>> model = nn.Sequential(nn.ReLU(), nn.Linear(2, 3))
    >>> len(linear(model)), model.append(nn.Linear(3, 1)) and len(linear(model))
    (1, 2)
    """

    @wraps(holds)
    def among(model: nn.Module) -> list[nn.Module]:
        modules, parts = _look(model)
        if holds not in parts.chosen:
            parts.chosen[holds] = [number for number, module in enumerate(modules) if holds(module)]
        return [modules[number] for number in parts.chosen[holds]]

    return among


def with_paths(model: nn.Module, question: Callable[[nn.Module], list[nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The modules that answer a question of `those_that`, each with its path, without that of wrappers around it."""
    found, (modules, parts) = question(model), _look(model)
    if not parts.paths:
        parts.paths = [path for path, _ in model.named_modules()]
    paths = {module: path for path, module in zip(parts.paths, modules, strict=True)}
    return [(".".join(part for part in paths[one].split(".") if part != "_orig_mod"), one) for one in found]


@contextmanager
def unchanging(model: nn.Module) -> Iterator[None]:
    """Take a model for the same until the end of the block, in this thread: it is not looked through again."""
    before = _thread.held
    _thread.held = (model, *_look(model))
    try:
        yield
    finally:
        _thread.held = before


def _look(model: nn.Module) -> tuple[list[nn.Module], _Parts]:
    """The modules of a model, and what is known of them."""
    if _thread.held is not None and _thread.held[0] is model:
        return _thread.held[1:]
    modules = modules_of(model)
    marks: list[Any] = []
    for module in modules:
        own = module.__dict__
        marks.append(ref(module))
        marks.append(type(module))
        marks.append(own.get("forward"))
        marks.append(own.get("_compiled_call_impl"))
        marks.extend(module._modules)
    parts = _models.get(model)
    if parts is None or parts.marks != marks:
        parts = _models[model] = _Parts(marks)
    return modules, parts
