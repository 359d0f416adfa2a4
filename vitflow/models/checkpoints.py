"""Read checkpoint files without running code from them."""

import argparse
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from vitflow.errors import ModelError
from vitflow.files import is_file

# Keys of the weights in checkpoints of training scripts, averaged ones first.
_WEIGHT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict", "net")
# Prefixes that wrappers (DataParallel, torch.compile, Lightning) add to every name.
_PREFIXES = ("module.", "_orig_mod.", "model.")


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Read the weights in a `.safetensors` file, or in a torch file with `weights_only=True`, without wrapper prefixes.

    Raises:
        ModelError: the file does not exist, is damaged, or contains objects that could run code.
    """
    path = Path(path)
    if not is_file(path):
        raise ModelError(f"Expected a checkpoint, .safetensors or a torch file, got no file at {path}. Check the path.")
    weights = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    for name, weight in weights.items():
        # A view in a file of a few bytes may have the size of a terabyte.
        plain = weight.layout == torch.strided and not weight.is_quantized and not weight.is_meta
        if not plain or weight.untyped_storage().nbytes() < weight.numel() * weight.element_size():
            raise ModelError(f"Expected plain tensors in {path}, got a sparse, quantised or expanded {name}.")
    return _without_prefixes(weights)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # a corrupt file may raise almost any exception
        raise ModelError(f"{path} is not a safetensors file or is damaged: {error}.") from error


def _read_torch(path: Path) -> dict[str, Tensor]:
    _check_container(path)
    try:
        # timm's training checkpoints contain their parsed command line.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle protocol; the error below is clearer
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a corrupt file may raise almost any exception
        if isinstance(error, pickle.UnpicklingError) and re.search("unsupported (global|class)", str(error), re.I):
            raise ModelError(
                f"{path} contains objects other than tensors, which could run code when loaded. Save only the "
                "weights: torch.save(model.state_dict(), 'weights.pth'), or a .safetensors file."
            ) from error
        reason = str(error).partition("\n")[0][:200] if not isinstance(error, pickle.UnpicklingError) else ""
        raise ModelError(
            f"{path} is not a torch checkpoint or is damaged ({type(error).__name__}{reason and ': '}{reason})."
        ) from error
    if isinstance(loaded, Mapping):
        loaded = next((loaded[key] for key in _WEIGHT_KEYS if isinstance(loaded.get(key), Mapping)), loaded)
    entries = loaded.items() if isinstance(loaded, Mapping) else ()
    weights = {name: value for name, value in entries if isinstance(name, str) and isinstance(value, Tensor)}
    if not weights:
        raise ModelError(f"Expected a state dict in {path}, got {type(loaded).__name__} without named tensors.")
    return weights


def _check_container(path: Path) -> None:
    """Raise ModelError for files that torch did not write and for zip bombs."""
    try:
        with path.open("rb") as file:
            start = file.read(2)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    if start not in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise ModelError(f"{path} is not a weights file: expected a file written by torch.save or a .safetensors file.")
    if start == b"PK":
        try:
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
        except Exception as error:  # a corrupt archive may raise almost any exception
            raise ModelError(f"{path} is not a torch checkpoint or is damaged: {error}.") from error
        if unpacked > 10 * path.stat().st_size:
            raise ModelError(f"{path} is not a weights file: it would unpack to {unpacked:,} bytes.")


def _without_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove prefixes that all names share, and the counter of averaged models."""
    weights = {name: value for name, value in weights.items() if name != "n_averaged"}
    while weights and (prefix := next((p for p in _PREFIXES if all(name.startswith(p) for name in weights)), "")):
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights
