"""What keeps a recording to itself: a turn for each model, hooks of one thread, flags that all recordings share."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitflow.errors import ModelError, OptionError, ShapeError, UnsupportedModelError
from vitflow.models.parts import modules_of
from vitflow.recording.readout import tokens_of, with_tokens

_guard = threading.Lock()
_turns: WeakKeyDictionary[nn.Module, AbstractContextManager[Any]] = WeakKeyDictionary()


def turn(model: nn.Module) -> AbstractContextManager[Any]:
    """The lock of a model: threads that record it or change its mode take turns; a thread may hold it several times."""
    with _guard:
        return _turns.setdefault(model, threading.RLock())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode, in its turn, and give every module its own mode back."""
    with turn(model):
        training = [module for module in modules_of(model) if module.training]
        if training:
            model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def trial(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a model on numbers that were made up, and leave no trace of it: in its turn, in eval mode, and unrecorded.

    Buffers that it writes to, what its modules keep of a pass, and random numbers that it draws, are as before.
    """
    accelerator = "cuda" if device.type == "cpu" else device.type  # of a processor alone, none is looked at
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with (
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=accelerator),
        evaluating(model),
        aside(),
    ):
        kept = [(vars(module), dict(vars(module))) for module in modules_of(model)]
        try:
            yield
        finally:
            for own, attributes in kept:
                for name in own.keys() - attributes.keys():
                    del own[name]
                own.update(attributes)
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def default_device() -> str:
    """The accelerator that is there, or the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def device_in_words(device: str) -> str:
    """What a device is called, or with how many threads torch works on it."""
    more = torch.cuda.get_device_name() if device == "cuda" else f"threads of torch: {torch.get_num_threads()}"
    return f"{device} ({more})"


def device_of(model: nn.Module) -> torch.device:
    """Where a model lies; the processor for one without parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def move_to(model: nn.Module, device: str | torch.device | None, dtype: torch.dtype | None = None) -> torch.device:
    """Move a model, in its turn, and convert it where a precision is asked for; returns where it lies then.

    Raises:
        OptionError: the device cannot be used.
        ModelError: the model has no weights yet.
    """
    refuse_without_weights(model)
    if dtype is not None:
        with turn(model):
            model.to(dtype)
    if device is None:
        return device_of(model)
    try:
        device = torch.device(device)
        if device.type == "meta":
            raise TypeError("it computes shapes and no values.")
        with turn(model):
            model.to(device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise OptionError(f"The device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


class _Thread(threading.local):
    """What is known of each thread by itself."""

    aside = False


_thread = _Thread()


@contextmanager
def aside() -> Iterator[None]:
    """Run a model without any recording of this thread taking notice."""
    before, _thread.aside = _thread.aside, True
    try:
        yield
    finally:
        _thread.aside = before


def is_aside() -> bool:
    """Whether this thread runs a model `aside` now."""
    return _thread.aside


class Hook:
    """A hook on a module that acts for the module itself, in the thread that made it, until it is removed.

    Hooks reach further than they should: other threads run the same module, and `copy.deepcopy` takes them along.
    Anywhere but where it belongs a hook does nothing, and copies of it never do anything.

    Args:
        module: the module to watch.
        act: called as torch calls hooks, without the module: with the arguments and keyword arguments before a forward
            pass, or with the arguments and the output after one.
        before: whether to act before the forward pass; otherwise it acts afterwards, also where that failed.
        in_aside: act while the thread runs a model `aside`, and only then.
    """

    def __init__(self, module: nn.Module, act: Callable[..., Any], *, before: bool, in_aside: bool = False) -> None:
        self._module, self._thread, self._in_aside = module, threading.get_ident(), in_aside
        self._act: Callable[..., Any] | None = act
        with _guard:  # torch numbers hooks without a lock
            self._handle = (
                module.register_forward_pre_hook(self, with_kwargs=True)
                if before
                else module.register_forward_hook(self, always_call=True)
            )

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        """What the hook does, or None where it does not belong."""
        act = self._act
        mine = module is self._module and threading.get_ident() == self._thread and _thread.aside == self._in_aside
        return act(*given) if mine and act is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inert, ()

    def remove(self) -> None:
        """Take it off the module."""
        self._act = None
        self._handle.remove()


class _Inert:
    """What a hook becomes in a copied or pickled module."""

    def __call__(self, *given: Any) -> None:
        """Nothing."""


def has_foreign_hooks(model: nn.Module) -> bool:
    """Whether code that is not vitflow's is called as the model, or any model of the process, runs."""
    every = torch.nn.modules.module
    tables = [every._global_forward_hooks, every._global_forward_pre_hooks, every._global_backward_hooks]
    tables.append(every._global_backward_pre_hooks)
    for module in model.modules():
        tables += [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    return any(not isinstance(hook, Hook | _Inert) for table in tables for hook in table.values())


class _WhileAny:
    """A setting of the whole process, made when the first recording begins and undone when the last one ends."""

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self._setting, self._users = setting, 0
        self._lock, self._undo = threading.Lock(), ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._undo.enter_context(self._setting())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._undo.close()


@contextmanager
def _no_fast_path() -> Iterator[None]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


#: Have torch's own transformer modules take the path on which their attention is seen.
no_fast_path = _WhileAny(_no_fast_path)


def _force_eager() -> AbstractContextManager[Any]:
    # Older releases of torch cannot be told; `refuse_compiled` keeps their compiled models out.
    return torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()


#: Have compiled code run as it was written: compiled code shows no calls.
uncompiled = _WhileAny(_force_eager)


def refuse_compiled() -> None:
    """Raise UnsupportedModelError where torch cannot run compiled code as it was written: before 2.6."""
    if not hasattr(torch.compiler, "set_stance"):
        raise UnsupportedModelError(
            f"Expected a model without compiled parts, since compiled code shows no attention, got some with torch "
            f"{torch.__version__}. Pass the model as it was before torch.compile, or install torch 2.6 or newer."
        )


def refuse_inference_tensors(model: nn.Module) -> None:
    """Raise ModelError if the weights were made where no gradient can pass them."""
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ModelError(
            f"The weights of {type(model).__name__} were made under torch.inference_mode(), and no gradient can pass "
            "them. Build or load the model outside of it; explaining inside is fine."
        )


def refuse_without_weights(model: nn.Module) -> None:
    """Raise ModelError for a model whose weights have no shape yet, or a shape and no values."""
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        lazy = nn.parameter.is_lazy(weight)
        if lazy or weight.is_meta:
            what = "no shape yet: run it on an input, or load its weights" if lazy else "a shape and no values (meta)"
            raise ModelError(
                f"Expected a model with weights, got {type(model).__name__}, whose {name} has {what}"
                f"{', first.' if lazy else ': load its weights first.'}"
            )


def refuse_meta_default(model: nn.Module) -> None:
    """Raise OptionError where new tensors would have no values, unless the model has none either."""
    if torch.empty(0).is_meta and device_of(model).type != "meta":
        raise OptionError(
            f"Expected a default device that computes values, got 'meta', while {type(model).__name__} lies on "
            f"{device_of(model)}: leave torch.device('meta') before the model runs."
        )


def refuse_checkpointing(model: nn.Module) -> None:
    """Raise UnsupportedModelError where parts of a model run once more during its backward pass."""
    for module in model.modules():
        of_timm = getattr(module, "grad_checkpointing", False) is True
        of_transformers = getattr(module, "gradient_checkpointing", False) is True and module.training
        if of_timm or of_transformers:
            newer = hasattr(model, "activation_checkpointing_disable")
            theirs = "activation_checkpointing_disable()" if newer else "gradient_checkpointing_disable()"
            off = "set_grad_checkpointing(False)" if of_timm else theirs
            raise UnsupportedModelError(
                f"{type(module).__name__} uses gradient checkpointing, which computes the attention a second time "
                f"during the backward pass. Call model.{off} first."
            )


#: How many tokens a block is given: a prime, so that no channels and no heads are taken for tokens.
FEW_TOKENS = 7


@contextmanager
def given_few(model: nn.Module, blocks: Sequence[str], whole: dict[str, Tensor]) -> Iterator[None]:
    """Give each block its first tokens alone; `whole` takes in all of them, by the path of the block."""

    def before(path: str) -> Callable[..., Any]:
        def act(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            every = [one for one in (*args, *kwargs.values()) if _is_long(one)]
            if not every:
                raise ShapeError(f"{path} is not given a sequence of tokens.")
            whole[path] = every[0]
            few = every[0][:, :FEW_TOKENS]
            kwargs = {name: few if one is every[0] else one for name, one in kwargs.items()}
            return tuple(few if one is every[0] else one for one in args), kwargs

        return act

    with ExitStack() as stack:
        for path in blocks:
            stack.callback(Hook(model.get_submodule(path), before(path), before=True, in_aside=True).remove)
        yield


@contextmanager
def returning_all(model: nn.Module, blocks: Sequence[str], whole: dict[str, Tensor]) -> Iterator[None]:
    """Let each block return all of its tokens: those that it was given, and the others as they were."""

    def after(path: str) -> Callable[..., Any]:
        def act(args: Any, output: Any) -> Any:
            if output is None:  # an exception passes through
                return None
            tokens, given = tokens_of(output), whole.pop(path)
            if tokens is None or tokens.shape != (len(given), FEW_TOKENS, given.shape[-1]):
                raise ShapeError(f"{path} returns another number of tokens than it was given.")
            return with_tokens(output, torch.cat([tokens, given[:, FEW_TOKENS:].to(tokens)], dim=1))

        return act

    with ExitStack() as stack:
        for path in blocks:
            stack.callback(Hook(model.get_submodule(path), after(path), before=False, in_aside=True).remove)
        yield


def _is_long(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and given.ndim == 3 and given.shape[1] > FEW_TOKENS
