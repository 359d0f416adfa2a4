"""What a row of a journal must be to be believed: a journal is a file that anybody may have edited.

A row that is not counts as one that was never written, and its picture is done again.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from vitflow.errors import OptionError
from vitflow.pictures.images import MAX_PIXELS
from vitflow.pictures.options import OVERLAY_FORMATS
from vitflow.runs.checks import (
    ANSWER,
    FAILED,
    Check,
    dict_of,
    has,
    is_count,
    is_inside,
    is_name,
    is_number,
    is_side,
    is_text,
    is_whole,
    list_of,
    or_none,
)
from vitflow.runs.grids import is_shard

_is_shape = list_of(is_side, 2)


def _is_grid(value: Any) -> bool:
    """Whether a value is a map as the journal keeps it: a shape, and so many finite float32 in base 64."""
    if not isinstance(value, dict) or not _is_shape(value.get("shape")) or not isinstance(value.get("values"), str):
        return False
    try:
        values = base64.b64decode(value["values"], validate=True)
    except ValueError:
        return False
    rows, cols = value["shape"]
    return len(values) == 4 * rows * cols and bool(np.isfinite(np.frombuffer(values, "<f4")).all())


_EVERY: dict[str, Check] = {
    "input": is_inside,
    "stem": lambda value: is_inside(value) and is_text(value),
    "size": or_none(is_whole),
    "mtime_ns": or_none(is_whole),
    "sha256": or_none(is_text),
}
_EXPLAINED: dict[str, Check] = {
    **ANSWER,
    "target": or_none(is_text),
    "value": or_none(is_number),
    "outputs": dict_of(is_text),
    "maps": or_none(dict_of(is_text)),
    "facts": dict_of(lambda value: isinstance(value, dict)),
    "saturated_share": or_none(is_number),
    "grids": dict_of(_is_grid),
    "window": list_of(is_number, 4),
    "seconds": is_number,
}


_DRAWING: dict[str, Check] = {
    "cmap": is_text,
    "alpha": is_number,
    "vmin": or_none(is_number),
    "vmax": or_none(is_number),
    "contours": lambda value: isinstance(value, bool),
}
_RUN: dict[str, Check] = {
    "root": is_name,
    "model": is_text,
    "weights_sha256": is_text,
    "fit": is_text,
    "methods": dict_of(is_text),
    "options": dict_of(lambda value: isinstance(value, dict)),
    "drawing": lambda value: isinstance(value, dict) and all(_DRAWING.get(k, is_text)(v) for k, v in value.items()),
}


def folder_run(header: Mapping[str, Any] | None, folder: object) -> tuple[Mapping[str, Any], int]:
    """What the folder run with this journal's header was asked for, and its bound on pixels.

    Raises:
        OptionError: there is no folder run, or its record is damaged.
    """
    header = header or {}
    run = header.get("run", {})
    if not run or run.get("kind") == "evaluation":
        raise OptionError(
            f"There is no folder run in {str(folder)!r}: make one with vitflow folder IN -o OUT, and name OUT."
        )
    max_pixels = header.get("max_pixels", MAX_PIXELS)  # runs of earlier versions did not keep it
    if not has(run, _RUN) or not is_whole(max_pixels) or max_pixels < 1:
        raise OptionError(
            f"The record of the run in {str(folder)!r} is damaged: do it again with vitflow folder --overwrite."
        )
    return run, max_pixels


def is_folder_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is one of a folder run: complete, every field of its kind, and no path that leaves the folder.

    The files of a picture are its stem and an ending each, so that no other file can be named by a row.
    """
    if not has(row, _EVERY) or row.get("status") not in ("failed", "explained"):
        return False
    if row["status"] == "failed":
        return has(row, FAILED)
    if not has(row, _EXPLAINED):
        return False
    named: list[tuple[str, str, tuple[str, ...]]] = [
        (label, path, OVERLAY_FORMATS) for label, path in row["outputs"].items()
    ]
    named += [(label, path, ("npz",)) for label, path in (row["maps"] or {}).items()]
    if "shard" in row:
        shard = row["shard"]
        in_shard = isinstance(shard, list) and len(shard) == 3 and is_shard(shard[0]) and not named and not row["grids"]
        return in_shard and all(map(is_count, shard[1:])) and _is_of_these(row.get("written"), {shard[0]})
    return (
        all(path in {f"{row['stem']}-{label}.{ending}" for ending in endings} for label, path, endings in named)
        and all(is_inside(path) for _, path, _ in named)
        and ("written" not in row or _is_of_these(row["written"], {path for _, path, _ in named}))
    )


def _is_of_these(lengths: Any, paths: set[str]) -> bool:
    return isinstance(lengths, dict) and set(lengths) == paths and all(map(is_whole, lengths.values()))
