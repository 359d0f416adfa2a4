"""Read checkpoint files without running code from them."""

import argparse
import json
import pickle
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vitflow.errors import ModelError
from vitflow.files import is_file, is_folder

# Keys of the weights in checkpoints of training scripts, averaged ones first.
_WEIGHT_KEYS = ("state_dict_ema", "model_ema", "ema", "teacher", "state_dict", "model", "model_state_dict", "net")
#: Weights in the folder of a model, in order of preference.
WHOLE = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_INDEX = ".index.json"
_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
# Beginnings of the names of files with the state of a training run.
_OF_TRAINING = ("optimizer", "scheduler", "scaler", "rng_state", "random_states", "training_args", ".")
_ADAPTER = "{} has the weights of an adapter (peft): merge it into its model by merge_and_unload(), and save that."
# Depth of nested dicts in which weights are looked for.
_DEPTH = 4

Weights = Mapping[str, Tensor]


def read_checkpoint(path: str | Path) -> dict[str, dict[str, Tensor]]:
    """Read the tensors of each dict in a `.safetensors` file, or in a torch file with `weights_only=True`.

    A folder is that of a training run (see `weights_in`), and an `.index.json` lists the files that share the weights.
    The dicts are by their keys joined by "."; "" is the file's own dict.
    """
    path = weights_in(Path(path)) if is_folder(path) else Path(path)
    if not is_file(path):
        raise ModelError(f"Expected a checkpoint, .safetensors or a torch file, got no file at {path}. Check the path.")
    if path.name.endswith(_INDEX):
        return {"": _read_shards(path)}
    if re.search(r"-\d+-of-\d+$", path.stem):
        raise ModelError(f"{path} has a part of the weights only: pass the {_INDEX[1:]} next to it, or the folder.")
    return {"": _read_safetensors(path)} if path.suffix == ".safetensors" else _read_torch(path)


def weights_in(folder: Path) -> Path:
    """Return the weights in the folder of a training run; ModelError if there are none or several."""
    try:
        names = sorted(each.name for each in folder.iterdir())
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}.") from error
    if known := [name for name in WHOLE if name in names]:
        return folder / known[0]
    if any(name.endswith(".distcp") for name in names):
        dcp = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        raise ModelError(f"{folder} has the parts of distributed training: join them by {dcp} {folder} weights.pth.")
    if "zero_to_fp32.py" in names:
        raise ModelError(f"{folder} is a checkpoint of DeepSpeed: run python zero_to_fp32.py . weights in it.")
    if "adapter_config.json" in names:
        raise ModelError(_ADAPTER.format(folder))
    files = [name for name in names if name.endswith((*_SUFFIXES, _INDEX)) and not name.startswith(_OF_TRAINING)]
    if len(files) == 1:
        return folder / files[0]
    listed = [*files, *(f"{name}/" for name in names if is_folder(folder / name))]
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    raise ModelError(
        f"Expected one file of weights in the folder {folder}, got {len(files)}: pass the path of one instead "
        f"({', '.join(listed[:5]) or 'there are none'}{more})."
    )


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Read the weights that are listed in an index, from files next to it."""
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(file) for file in listed.values()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"Expected an index of files by the names of weights, 'weight_map', in {index}.") from error
    weights = dict[str, Tensor]()
    for file in files:
        path = index.parent / Path(file).name
        if path.name != file or not is_file(path):
            raise ModelError(
                f"{index} lists weights in {file!r}, which is not next to it: copy all files of the folder."
            )
        weights |= _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path).get("", {})
    return weights


def weights_for(names: Collection[str], path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Read the weights of a model from a file, without the prefix that the file has before the model's names.

    Notes on entries next to them that are left out are returned, too.
    """
    dicts = read_checkpoint(path)
    if any(".lora_A." in name for weights in dicts.values() for name in weights):
        raise ModelError(_ADAPTER.format(path))
    known, matching = set(names), dict[tuple[str, str], int]()
    for key, weights in dicts.items():
        for name in weights:
            for start in (0, *(at.end() for at in re.finditer(r"\.", name))):
                if name[start:] in known:
                    matching[key, name[:start]] = matching.get((key, name[:start]), 0) + 1
    most = max(matching.values(), default=0)
    if 2 * most < len(known):  # names of another library, or of another model
        key, prefix = min(dicts, key=_preference), ""
        weights = dicts[key]
    else:
        key, prefix = min((place for place, count in matching.items() if count == most), key=_preference)
        weights = {name.removeprefix(prefix): each for name, each in dicts[key].items() if name.startswith(prefix)}
    for name, weight in weights.items():
        # A view in a file of a few bytes may have the size of a terabyte.
        plain = weight.layout == torch.strided and not weight.is_quantized and not weight.is_meta
        if not plain or weight.untyped_storage().nbytes() < weight.numel() * weight.element_size():
            raise ModelError(f"Expected plain tensors in {path}, got a sparse, quantised or expanded {name}.")
    rest = [name for name in dicts[key] if prefix and not name.startswith(prefix) and name != "n_averaged"]
    more = f" and {len(rest) - 3} more" if len(rest) > 3 else ""
    chosen = f"{key}.{prefix}" if key else prefix
    left_out = f"{path.name}: the weights are those of {chosen}*; {', '.join(rest[:3])}{more} are left out."
    return weights, [left_out] if rest else []


def _preference(place: str | tuple[str, str]) -> tuple[int, int, str]:
    """Return a sort key of a dict in a file, or of a dict and a prefix: averaged weights first, then the outermost."""
    keys = place.split(".") if isinstance(place, str) else f"{place[0]}.{place[1]}".split(".")
    rank = min((_WEIGHT_KEYS.index(key) for key in keys if key in _WEIGHT_KEYS), default=len(_WEIGHT_KEYS))
    averaged = any("ema" in key.split("_") or "averaged" in key for key in keys)
    return (-1 if averaged else rank), len(keys), ".".join(keys)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # a corrupt file may raise almost any exception
        raise ModelError(f"{path} is not a safetensors file or is damaged: {error}.") from error


def _read_torch(path: Path) -> dict[str, dict[str, Tensor]]:
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
    dicts = dict(_dicts_in(loaded))
    if not dicts:
        keys = f", whose keys are {', '.join(map(str, [*loaded][:8]))}," if isinstance(loaded, Mapping) else ""
        raise ModelError(f"Expected a state dict in {path}, got {type(loaded).__name__}{keys} without named tensors.")
    return dicts


def _dicts_in(loaded: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the dicts in a file that have named tensors, with their keys."""
    if not isinstance(loaded, Mapping):
        return
    tensors = {name: value for name, value in loaded.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if tensors:
        yield ".".join(path), tensors
    for key, value in loaded.items() if len(path) < _DEPTH else ():
        yield from _dicts_in(value, (*path, str(key)))
