"""Isolation of recordings: a lock per model, thread-bound hooks, and process-wide settings."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from vitflow.errors import UnsupportedModelError
from vitflow.models.parts import configured, hidden_attention, modules_of

# Part of the names of the settings of transformers for attention.
_SETTING = "attn_implementation"
_NORMS = (F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm)
_guard = threading.Lock()
_locks: WeakKeyDictionary[nn.Module, AbstractContextManager[Any]] = WeakKeyDictionary()


def model_lock(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the reentrant lock of a model, for threads that record it or change its mode."""
    with _guard:
        return _locks.setdefault(model, threading.RLock())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode under its lock, and restore the mode of each module."""
    with model_lock(model):
        training = [module for module in modules_of(model) if module.training]
        if training:
            model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


class _Thread(threading.local):
    """Thread-local state."""

    unrecorded = False


_thread = _Thread()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Run a model without being recorded by this thread."""
    before, _thread.unrecorded = _thread.unrecorded, True
    try:
        yield
    finally:
        _thread.unrecorded = before


def is_unrecorded() -> bool:
    """Return True if this thread is inside `unrecorded`."""
    return _thread.unrecorded


class Hook:
    """A module hook that acts only for its module and in the thread that created it, until it is removed.

    Other threads may run the same module, and `copy.deepcopy` copies hooks. There, the hook does nothing. One that was
    created inside `unrecorded` acts only there, others only outside of it.

    Args:
        act: called as torch calls hooks, but without the module.
        always: after an exception, also act, with the output None.
        first: act before the module's other hooks, which then see the replaced output (transformers collects hidden
            states by hooks), and may change the input.
    """

    def __init__(
        self, module: nn.Module, act: Callable[..., Any], *, before: bool, always: bool = False, first: bool = False
    ) -> None:
        self._module, self._thread, self._unrecorded = module, threading.get_ident(), _thread.unrecorded
        self._act: Callable[..., Any] | None = act
        with _guard:  # torch assigns hook ids without a lock
            self._handle = (
                module.register_forward_pre_hook(self, with_kwargs=True, prepend=first)
                if before
                else module.register_forward_hook(self, always_call=always, prepend=first)
            )

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        """Call the hook in its thread and on its module; otherwise return None."""
        act = self._act
        mine = module is self._module and threading.get_ident() == self._thread
        applies = mine and _thread.unrecorded == self._unrecorded
        return act(*given) if applies and act is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inert, ()

    def remove(self) -> None:
        """Remove the hook from the module."""
        self._act = None
        self._handle.remove()


@contextmanager
def hooked(hooks: Iterable[Hook]) -> Iterator[None]:
    """Remove these hooks at the end of the block."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        yield


class _Inert:
    """Replacement of a hook in a copied or pickled module."""

    def __call__(self, *given: Any) -> None:
        """Do nothing."""


_eager = ExitStack()
_eager_users: list[object] = []


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled code eagerly, in all threads until the last of them ends, because compiled code hides its calls."""
    user = object()
    with _guard:
        if not _eager_users:
            _eager.enter_context(torch.compiler.set_stance("force_eager"))
        _eager_users.append(user)
    try:
        yield
    finally:
        with _guard:
            _eager_users.remove(user)
            if not _eager_users:
                _eager.close()


@contextmanager
def recordable_attention(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run parts of transformers with flash or flex attention by `scaled_dot_product_attention` inside the block.

    The implementation of each configuration is restored. Models that cannot be switched stay as they are.
    """
    modules = configured(modules)
    hidden = [module for module in modules if hidden_attention(module)]
    every = {id(module.config): vars(module.config) for module in modules if hasattr(module.config, "__dict__")}
    before = [(each, {name: value for name, value in each.items() if _SETTING in name}) for each in every.values()]
    try:
        for module in hidden:
            with suppress(Exception):  # of a model that does not support sdpa
                module.set_attn_implementation("sdpa")  # type: ignore[operator]
        yield
    finally:
        for config, implementations in before:
            config.update(implementations)


class ContiguousNorms(TorchFunctionMode):
    """Function mode that gives batch and instance norms contiguous inputs and gradients.

    On the CPU, torch 2.14 computes wrong gradients of these norms for a single image if its channels and those of the
    gradient are stored in different orders, as below `flatten(2).transpose(1, 2)`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _NORMS or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        named = "input" in kwargs
        given = kwargs.pop("input").contiguous() if named else args[0].contiguous()
        output = func(given, *args[0 if named else 1 :], **kwargs)
        if output.requires_grad:
            output.register_hook(Tensor.contiguous)
        return output


def has_running_norms(modules: Iterable[nn.Module]) -> bool:
    """Return True if one of these modules is a batch or instance norm, or has running means as these."""
    return any("running_mean" in module._buffers for module in modules)


def refuse_checkpointing(model: nn.Module) -> None:
    """Raise UnsupportedModelError if called from a function that `torch.utils.checkpoint` runs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    if frame is not None:
        raise checkpointing_error(model)


def checkpointing_error(model: nn.Module) -> UnsupportedModelError:
    """Return the error for a model with gradient checkpointing."""
    return UnsupportedModelError(
        f"{type(model).__name__} uses gradient checkpointing, which computes the attention a second time during the "
        "backward pass. Switch it off while the model is explained: model.set_grad_checkpointing(False) in timm, "
        "model.gradient_checkpointing_disable() in transformers, or run it without torch.utils.checkpoint."
    )
