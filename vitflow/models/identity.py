"""Hashes that identify a model: its weights, and what else determines its outputs.

Finished runs are resumed only with the model that they were made with. Weights do not determine what a model computes:
code, attributes and hooks do as well, and the versions of the libraries that its classes come from.
"""

import hashlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitflow.models.parts import module_paths

# Libraries whose code is identified by its version, with the names of their distributions.
_LIBRARIES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "timm": "timm",
    "transformers": "transformers",
    "open_clip": "open_clip_torch",
    "vitflow": "vitflow",
}
# Attributes of modules that do not change their outputs, or are hashed with the weights.
_LEFT_OUT = {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl"}
_LEFT_OUT |= {"_is_full_backward_hook", "call_super_init", "dump_patches", "_loaded_as", "_loaded_tokenizer", "note"}
_LEFT_OUT |= {"pretrained_cfg", "default_cfg", "name_or_path", "_name_or_path", "_commit_hash", "warnings_issued"}
_LEFT_OUT |= {"transformers_version", "generation_config", "_is_hf_initialized", "_is_torch_compile"}
# Types of values whose repr is the value.
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), slice, range, np.generic)
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)


def weights_sha256(model: nn.Module) -> str:
    """Return a hash of the names and values of a model's state_dict, independent of its file."""
    state = _State()
    for name, value in model.state_dict().items():
        state.add(name)
        state.add(value)
    return state.digest.hexdigest()


def state_sha256(value: Any) -> str:
    """Return a hash of the code and state of a model or function, without a model's weights.

    For modules: their paths and classes, buffers outside of the state_dict, attributes and hooks. For functions:
    bytecode, defaults, the values in their closure, and the global values and functions that they read. Code of known
    libraries counts by its name; see `library_versions`.

    >>> two, three = partial(torch.mul, 2), partial(torch.mul, 3)
    >>> state_sha256(two) == state_sha256(partial(torch.mul, 2)), state_sha256(two) == state_sha256(three)
    (True, False)
    """
    state = _State()
    state.add(value)
    return state.digest.hexdigest()


def library_versions(model: nn.Module) -> dict[str, str]:
    """Return the versions of the libraries that a model's classes come from.

    >>> list(library_versions(nn.Linear(2, 3)))
    ['torch']
    """
    packages = {kind.__module__.partition(".")[0] for module in model.modules() for kind in type(module).__mro__}
    versions: dict[str, str] = {}
    for package, distribution in _LIBRARIES.items():
        with suppress(PackageNotFoundError):
            versions |= {package: version(distribution)} if package in packages and package != "vitflow" else {}
    return versions


class _State:
    """A hash of values of any type, each with the name of its type."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._known: dict[int, int] = {}  # modules, functions and classes that were added, by id
        self._open: set[int] = set()  # ids of the values that contain the current one

    def add(self, value: Any) -> None:
        """Add a value."""
        value = _original(value)
        self._text(type(value).__qualname__)
        if isinstance(value, _PLAIN):
            self._text(repr(value))
        elif isinstance(value, Tensor | np.ndarray):
            self._array(value)
        elif id(value) in self._known:
            self._text(f"number {self._known[id(value)]}")
        elif isinstance(value, nn.Module | FunctionType | type):
            self._known[id(value)] = len(self._known)
            if isinstance(value, nn.Module):
                self._module(value)
            elif isinstance(value, FunctionType):
                self._function(value)
            else:
                self._class(value)
        elif id(value) not in self._open:
            self._open.add(id(value))
            self._each(_parts(value))
            self._open.remove(id(value))

    def _text(self, text: str) -> None:
        self.digest.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))

    def _each(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)
        self._text("end")

    def _array(self, value: Any) -> None:
        """Add the values of a tensor or array; of quantised and sparse ones those that they stand for."""
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            return self._each(value.ravel().tolist())
        self._text(f"{value.dtype} {tuple(value.shape)}")
        if isinstance(value, np.ndarray):
            return self.digest.update(np.ascontiguousarray(value).tobytes())
        if value.is_meta:
            return None
        plain = value.detach()
        plain = plain.dequantize() if plain.is_quantized or type(value).__module__.startswith("torchao") else plain
        plain = (plain if plain.layout == torch.strided else plain.to_dense()).cpu().resolve_conj().resolve_neg()
        return self.digest.update(memoryview(plain.contiguous().reshape(-1).view(torch.uint8).numpy()))

    def _module(self, model: nn.Module) -> None:
        for path, module in module_paths(model):
            self._each((path, type(module)))
            self._each((name, module._buffers.get(name)) for name in sorted(module._non_persistent_buffers_set))
            self._each(_settings(module))

    def _function(self, function: FunctionType) -> None:
        self._text(function.__qualname__)
        if _is_custom(function):
            self._each((function.__code__, function.__defaults__, function.__kwdefaults__))
            with suppress(ValueError):  # a variable of the closure has no value yet
                read = inspect.getclosurevars(function)
                self._each(read.nonlocals.items())
                self._each(pair for pair in read.globals.items() if _is_read(pair[1], function))

    def _class(self, kind: type) -> None:
        self._text(kind.__qualname__)
        if _is_custom(kind):
            self._each(base for base in kind.__mro__[1:] if base is not object)
            members = ((name, getattr(value, "__func__", value)) for name, value in sorted(vars(kind).items()))
            for name, value in members:
                value = value.fget if isinstance(value, property) else value
                dunder = name.startswith("__") and not isinstance(value, FunctionType)
                if not dunder and isinstance(value, (*_PLAIN, FunctionType, Tensor, list, tuple, dict)):
                    self._each((name, value))


def _original(value: Any) -> Any:
    """Return what a function of torch.compile wraps."""
    return getattr(value, "_torchdynamo_orig_callable", value) if callable(value) else value


def _parts(value: Any) -> Iterable[Any]:
    """Return the values that a container, bytecode or object consists of."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, AbstractSet):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, value.co_consts
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    # Other objects may hold what changes from process to process.
    known = _is_custom(type(value)) or hasattr(value, "to_dict") or hasattr(value, "__dataclass_fields__")
    return (str(name), *(_settings(value) if known and hasattr(value, "__dict__") else ()))


def _settings(owner: Any) -> Iterable[Any]:
    """Yield the attributes of a module or object that may change what it computes."""
    for name, value in sorted(vars(owner).items()):
        if name in _LEFT_OUT or ("hooks" in name and not value):
            continue
        if name == "forward" and getattr(_original(value), "__func__", None) is type(owner).forward:
            continue  # compiled
        yield name, [*value.values()] if "hooks" in name and isinstance(value, Mapping) else value


def _is_custom(code: Any) -> bool:
    """Return True for classes and functions outside of the known libraries and the standard library."""
    return str(code.__module__).partition(".")[0] not in {*_LIBRARIES, *sys.stdlib_module_names}


def _is_read(value: Any, reader: FunctionType) -> bool:
    """Return True if a global variable belongs to the state of a function: a plain value, or code of its package."""
    if isinstance(value, FunctionType | type):
        return str(value.__module__).partition(".")[0] == str(reader.__module__).partition(".")[0]
    return isinstance(value, (*_PLAIN, Tensor))
