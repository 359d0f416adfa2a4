"""Hashes that identify a model: its weights, and what else determines its outputs.

Finished runs are resumed only with the model that they were made with. Weights do not determine what a model computes:
code, attributes and hooks do as well, and the versions of the libraries that its classes come from.
"""

import hashlib
import linecache
import secrets
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitflow.models.parts import ModelState

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
_LEFT_OUT = {"training", "_parameters", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl"}
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

    For modules: their paths and classes, buffers outside of the state_dict, attributes and hooks; for functions: their
    defaults and the values in their closure. The code of functions and classes is their source file; without one they
    never have the same hash again. Code of known libraries counts by its name; see `library_versions`.

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
        self._known: dict[int, tuple[int, Any]] = {}  # values that were added, by id: their number, and themselves

    def add(self, value: Any) -> None:
        """Add a value."""
        value = _original(value)
        self._text(type(value).__qualname__)
        if isinstance(value, _PLAIN):
            self._text(repr(value))
        elif isinstance(value, Tensor | np.ndarray):
            self._array(value)
        elif id(value) in self._known:
            self._text(f"number {self._known[id(value)][0]}")
        else:
            self._known[id(value)] = len(self._known), value
            for part in _parts(value):
                self.add(part)
            self._text("end")

    def _text(self, text: str) -> None:
        self.digest.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))

    def _array(self, value: Any) -> None:
        """Add the values of a tensor or array; of quantised and sparse ones those that they stand for."""
        self._text(f"{value.dtype} {tuple(value.shape)}")
        if isinstance(value, np.ndarray):
            self.digest.update(np.ascontiguousarray(value).tobytes())
        elif not value.is_meta:
            plain = value.detach()
            plain = plain.dequantize() if plain.is_quantized or type(value).__module__.startswith("torchao") else plain
            plain = (plain if plain.layout == torch.strided else plain.to_dense()).cpu().resolve_conj().resolve_neg()
            self.digest.update(memoryview(plain.contiguous().reshape(-1).view(torch.uint8).numpy()))


def _original(value: Any) -> Any:
    """Return what a function of torch.compile wraps."""
    return getattr(value, "_torchdynamo_orig_callable", value) if callable(value) else value


def _parts(value: Any) -> Iterable[Any]:
    """Return the values that a module, function, class, container or object consists of."""
    if isinstance(value, nn.Module):
        return [(path, type(module), *_settings(module)) for path, module in ModelState(value).modules.items()]
    if isinstance(value, FunctionType | type):
        return (value.__qualname__, *(_code(value) if _is_custom(value) else ()))
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
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    # Other objects may hold what changes from process to process.
    known = _is_custom(type(value)) or hasattr(value, "to_dict") or hasattr(value, "__dataclass_fields__")
    return (str(name), *(_settings(value) if known and hasattr(value, "__dict__") else ()))


def _code(code: Any) -> Iterable[Any]:
    """Return the bases and methods of a class, or the source and state of a function."""
    if isinstance(code, type):
        methods = [each for each in vars(code).values() if isinstance(each, FunctionType)]
        module = getattr(sys.modules.get(code.__module__), "__file__", None) or ""
        bases = [base for base in code.__mro__[1:] if base is not object]
        return (*bases, *methods) if methods else (*bases, _source(module))
    closure: list[Any] = []
    with suppress(ValueError):  # a variable has no value yet
        closure += (cell.cell_contents for cell in code.__closure__ or ())
    place = repr([*code.__code__.co_positions()])  # several functions may be in one file, or one line
    return _source(code.__code__.co_filename), place, code.__defaults__, code.__kwdefaults__, closure


def _source(path: str) -> str:
    """Return the text of a source file; without one, a text that is never the same."""
    return "".join(linecache.getlines(path)) or secrets.token_hex()


def _settings(owner: Any) -> Iterable[Any]:
    """Yield the attributes of a module or object that may change what it computes."""
    for name, value in sorted(vars(owner).items()):
        if name == "_buffers":
            yield from ((each, value.get(each)) for each in sorted(owner._non_persistent_buffers_set))
            continue
        compiled = name == "forward" and getattr(_original(value), "__func__", None) is type(owner).forward
        if name not in _LEFT_OUT and not compiled and ("hooks" not in name or value):
            yield name, [*value.values()] if "hooks" in name and isinstance(value, Mapping) else value


def _is_custom(code: Any) -> bool:
    """Return True for classes and functions outside of the known libraries and the standard library."""
    return str(code.__module__).partition(".")[0] not in {*_LIBRARIES, *sys.stdlib_module_names}
