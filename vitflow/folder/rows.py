"""What a row of a journal must be to be believed: a journal is a file that anybody may have edited.

A row that is not counts as one that was never written, and its picture is done again.
"""

import base64
import json
import math
import os
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np

from vitflow.errors import OptionError
from vitflow.folder.grids import is_shard
from vitflow.pictures.images import MAX_PIXELS
from vitflow.pictures.options import OVERLAY_FORMATS

Check = Callable[[Any], bool]

# Deeper values are none of ours, and could not be written again.
_DEEPEST = 12
_WHOLE = 2**63


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None where it is torn, nested too deep, or holds numbers that JSON does not have."""
    try:
        record = _DECODER.decode(line.decode("ascii"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and _is_flat(record, _DEEPEST) else None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _is_flat(value: dict[str, Any] | list[Any], deepest: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    return deepest > 0 and all(_is_flat(one, deepest - 1) for one in inside if isinstance(one, dict | list))


def is_name(value: Any) -> bool:
    """Whether a value names a picture: text whose bytes a file name may have."""
    if not isinstance(value, str) or not value or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


def is_inside(value: Any) -> bool:
    """Whether a value is a path that stays below the folder that it is joined to.

    >>> is_inside("a/b.jpg"), is_inside("../b.jpg"), is_inside("/b.jpg"), is_inside(None)
    (True, False, False, False)
    """
    if not is_name(value):
        return False
    parts = value.replace(os.sep, "/").split("/")
    rooted = os.path.isabs(value) or os.path.splitdrive(value)[0]  # noqa: PTH117 - once per row and path
    return not rooted and ".." not in parts and parts[-1] not in ("", ".")


def is_text(value: Any) -> bool:
    """Whether a value is text that can be written as UTF-8."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value))


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number that a table can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and -_WHOLE <= value < _WHOLE


def is_number(value: Any) -> bool:
    """Whether a value is a number that a table can hold."""
    return isinstance(value, float) or is_whole(value)


def or_none(check: Check) -> Check:
    """The same check, which None passes as well."""
    return lambda value: value is None or check(value)


def dict_of(check: Check, names: Set[str] | None = None) -> Check:
    """A check for a dict of such values by name, with exactly these names where they are given."""

    def is_dict(value: Any) -> bool:
        named = isinstance(value, dict) and (all(map(is_text, value)) if names is None else set(value) == names)
        return named and all(map(check, value.values()))

    return is_dict


def list_of(check: Check, length: int | None = None) -> Check:
    """A check for a list of such values, of this length where one is given."""
    return lambda value: isinstance(value, list) and length in (None, len(value)) and all(map(check, value))


def _is_side(value: Any) -> bool:
    return is_whole(value) and 0 < value < 2**31


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 0


_is_shape = list_of(_is_side, 2)


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


def has(row: Mapping[str, Any], fields: Mapping[str, Check]) -> bool:
    """Whether a row has all of these fields, each of its kind."""
    return all(name in row and check(row[name]) for name, check in fields.items())


_EVERY: dict[str, Check] = {
    "input": is_inside,
    "stem": lambda value: is_inside(value) and is_text(value),
    "size": or_none(is_whole),
    "mtime_ns": or_none(is_whole),
    "sha256": or_none(is_text),
}
#: What the row of a failed picture says.
FAILED: dict[str, Check] = {"error": is_text, "message": is_text}
#: What every run notes of a picture and of what the model answered.
ANSWER: dict[str, Check] = {
    "width": _is_side,
    "height": _is_side,
    "class_index": or_none(is_whole),
    "class_name": or_none(is_text),
    "probability": or_none(is_number),
    "predicted_index": or_none(is_whole),
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
        return in_shard and all(map(_is_count, shard[1:])) and _is_of_these(row.get("written"), {shard[0]})
    return (
        all(path in {f"{row['stem']}-{label}.{ending}" for ending in endings} for label, path, endings in named)
        and all(is_inside(path) for _, path, _ in named)
        and ("written" not in row or _is_of_these(row["written"], {path for _, path, _ in named}))
    )


def _is_of_these(lengths: Any, paths: set[str]) -> bool:
    return isinstance(lengths, dict) and set(lengths) == paths and all(map(is_whole, lengths.values()))
