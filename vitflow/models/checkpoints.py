"""Read a checkpoint file into a state dict, without ever running code from it; tell weights apart by a hash."""

import argparse
import hashlib
import json
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitflow.errors import ModelError

# Where training scripts keep the weights inside a checkpoint, the averaged ones first, and the class names.
_WEIGHT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict", "net")
_NAME_KEYS = ("class_names", "classes", "label_names")
# Wrappers (DataParallel, torch.compile, Lightning) prepend these to every name.
_PREFIXES = ("module.", "_orig_mod.", "model.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of a checkpoint file.

    Attributes:
        weights: tensors by name, wrapper prefixes taken off.
        class_names: the names of the classes, where the file tells them.
        metadata: other strings that a safetensors file carries.
    """

    weights: dict[str, Tensor]
    class_names: list[str] | None
    metadata: dict[str, str]


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a `.safetensors` file, or a torch file with `weights_only=True`.

    Raises:
        ModelError: there is no such file, it is damaged, or it holds objects that could run code.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"No checkpoint file at {path}.")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    return _read_torch(path)


def _read_safetensors(path: Path) -> Checkpoint:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a safetensors file, or it is damaged: {error}.") from error
    names = next((_names(metadata[key]) for key in _NAME_KEYS if key in metadata), None)
    return Checkpoint(_without_prefixes(weights), names, metadata)


def _read_torch(path: Path) -> Checkpoint:
    try:
        # timm's own training checkpoints hold their command line, a plain record of values.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unusual pickle protocol, which the error below tells better
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path} holds objects other than tensors, which could run code when loaded, and is refused. Save only the "
            "weights: torch.save(model.state_dict(), 'weights.pth'), or a .safetensors file."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path} is not a torch checkpoint, or it is damaged: {error}.") from error
    names = None
    if isinstance(loaded, Mapping):
        names = next((_names(loaded[key]) for key in _NAME_KEYS if key in loaded), None)
        loaded = next((loaded[key] for key in _WEIGHT_KEYS if isinstance(loaded.get(key), Mapping)), loaded)
    weights = {k: v for k, v in loaded.items() if isinstance(v, Tensor)} if isinstance(loaded, Mapping) else {}
    if not weights:
        raise ModelError(f"Expected a state dict in {path}, got {type(loaded).__name__} without tensors.")
    return Checkpoint(_without_prefixes(weights), names, {})


def _without_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take off prefixes that every name carries; averaged models also carry a counter, which is no weight."""
    weights = {name: value for name, value in weights.items() if name != "n_averaged"}
    stripped = True
    while stripped:
        stripped = False
        for prefix in _PREFIXES:
            if weights and all(name.startswith(prefix) for name in weights):
                weights = {name.removeprefix(prefix): value for name, value in weights.items()}
                stripped = True
    return weights


def _names(value: Any) -> list[str] | None:
    """Class names from a list, from an {index: name} mapping, or from either as JSON; None if it is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, Mapping):
        try:
            value = [value[key] for key in sorted(value, key=int)]
        except (TypeError, ValueError):
            return None
    names = isinstance(value, list | tuple) and all(isinstance(name, str | int | float) for name in value)
    return [str(name) for name in value] if names else None


def read_class_names(path: str | Path) -> list[str]:
    """Read class names from a file: JSON (a list, or {index: name}), or text with one name per line.

    Raises:
        ModelError: the file cannot be read or holds no names.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"Cannot read class names from {path}: {error}.") from error
    names = _names(text) if path.suffix == ".json" else [line.strip() for line in text.splitlines() if line.strip()]
    if not names:
        raise ModelError(f"Expected one class name per line, or a JSON list, in {path}, got none.")
    return names


def weights_sha256(model: nn.Module) -> str:
    """One hash over the names and values of all weights, whatever file they came from."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(memoryview(value.reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()
