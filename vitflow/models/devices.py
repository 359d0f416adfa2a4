"""Devices, precision and weights of a model, and the random state of its device."""

import torch
from torch import Tensor, nn

from vitflow.errors import ModelError, OptionError

# Devices on which nothing can be explained.
_UNUSABLE = {
    "meta": "it computes shapes, but no values.",
    "mps": "it has no float64, in which readouts and affinities are computed. Use the CPU.",
}


def random_state(device: torch.device) -> Tensor:
    """Return the state of the random numbers that a model on a device uses."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def autocast_state(device: torch.device) -> tuple[bool, torch.dtype]:
    """Return whether autocast is enabled on a device, and its type."""
    kind = autocast_kind(device)
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def autocast_kind(device: torch.device) -> str:
    """Return the type of a device for autocast, which does not know the meta device."""
    return "cpu" if device.type == "meta" else device.type


def default_device() -> str:
    """Return "cuda" if there is a GPU that computes float64, or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_in_words(device: str) -> str:
    """Describe a device by its name, or by the number of torch threads."""
    more = torch.cuda.get_device_name() if device == "cuda" else f"threads of torch: {torch.get_num_threads()}"
    return f"{device} ({more})"


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model; the CPU for a model without parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def move_to(model: nn.Module, device: str | torch.device | None, dtype: torch.dtype | None = None) -> torch.device:
    """Move a model, and convert it to `dtype` if given; return its device.

    Raises OptionError if the device cannot be used, and ModelError if the model has no weights yet.
    """
    refuse_without_weights(model)
    if dtype is not None:
        model.to(dtype)
    try:
        moved = device_of(model) if device is None else torch.device(device)
    except RuntimeError as error:
        expected = "cpu, cuda, cuda:1 or another name of torch.device"
        raise OptionError(f"Unknown device {device!r}: expected {expected}.") from error
    try:
        if moved.type in _UNUSABLE:
            raise TypeError(_UNUSABLE[moved.type])
        if device is not None:
            model.to(moved)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise OptionError(
            f"The device {str(moved)!r} cannot be used, use cpu instead: {str(error).splitlines()[0]}"
        ) from error
    return moved


def refuse_inference_tensors(model: nn.Module) -> None:
    """Raise ModelError if the weights are inference tensors, which do not support gradients."""
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ModelError(
            f"The weights of {type(model).__name__} were made under torch.inference_mode() and do not support "
            "gradients. Build or load the model outside of it; explaining inside is fine."
        )


def refuse_without_weights(model: nn.Module) -> None:
    """Raise ModelError if weights are uninitialized or on the meta device."""
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        lazy = nn.parameter.is_lazy(weight)
        if lazy or weight.is_meta:
            what = "no shape yet: run it on an input" if lazy else "a shape and no values (meta): load its weights"
            raise ModelError(
                f"Expected a model with weights, got {type(model).__name__}, whose {name} has {what} first."
            )
