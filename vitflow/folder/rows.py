"""What a row of a journal must be to be believed: a journal is a file that anybody may have edited.

A row that is not counts as one that was never written, and its picture is done again.
"""

from collections.abc import Mapping
from typing import Any

from vitflow.errors import OptionError
from vitflow.pictures.options import OVERLAY_FORMATS
from vitflow.runs.checks import (
    Check,
    dict_of,
    has,
    is_count,
    is_dict,
    is_inside,
    is_name,
    is_number,
    is_side,
    is_text,
    is_whole,
    list_of,
    or_none,
)
from vitflow.runs.columns import checks_of
from vitflow.runs.grids import is_shard
from vitflow.runs.journal import Journal
from vitflow.runs.places import RunFolder

_DRAWING: dict[str, Check] = {
    "cmap": is_text,
    "alpha": is_number,
    "vmin": or_none(is_number),
    "vmax": or_none(is_number),
    "contours": lambda value: isinstance(value, bool),
}
_RUN: dict[str, Check] = {
    **checks_of("run"),
    "root": is_name,
    "fit": is_text,
    "format": is_text,
    "drawing": lambda value: is_dict(value) and all(_DRAWING.get(k, is_text)(v) for k, v in value.items()),
}


def open_run(folder: RunFolder) -> tuple[Journal, Mapping[str, Any], int]:
    """The journal of the run in a folder, what the run was asked for, and its bound on pixels.

    Raises:
        OptionError: there is no folder run, or its record is damaged.
    """
    journal = folder.open_journal(is_folder_row)
    header = journal.header or {}
    run = header.get("run", {})
    if not run or run.get("kind") in ("evaluation", "captions"):
        raise OptionError(
            f"There is no folder run in {str(folder)!r}: make one with vitflow folder IN -o OUT, and name OUT."
        )
    max_pixels: Any = header.get("max_pixels")
    if not has(run, _RUN) or not is_side(max_pixels):
        raise OptionError(
            f"The record of the run in {str(folder)!r} is damaged: do it again with vitflow folder --overwrite."
        )
    return journal, run, max_pixels


def is_folder_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is one of a folder run: complete, every field of its kind, and no path that leaves the folder.

    The files of a picture are its stem and an ending each, so that no other file can be named by a row.
    """
    if not has(row, checks_of("folder")) or row.get("status") != "explained":
        return _is_failed(row)
    if not has(row, checks_of("explained")):
        return False
    named: list[tuple[str, str, tuple[str, ...]]] = [
        (label, path, OVERLAY_FORMATS) for label, path in row["outputs"].items()
    ]
    named += [(label, path, ("npz",)) for label, path in (row["maps"] or {}).items()]
    if "shard" in row:
        shard = row["shard"]
        in_shard = isinstance(shard, list) and len(shard) == 3 and is_shard(shard[0]) and not named and not row["grids"]
        return in_shard and all(map(is_count, shard[1:])) and set(row["written"]) == {shard[0]}
    return (
        all(path in {f"{row['stem']}-{label}.{ending}" for ending in endings} for label, path, endings in named)
        and all(is_inside(path) for _, path, _ in named)
        and set(row["written"]) == {path for _, path, _ in named}
    )


def _is_failed(row: Mapping[str, Any]) -> bool:
    return row.get("status") == "failed" and has(row, {**checks_of("folder"), **checks_of("failed")})


#: A word of a caption, with the shares of its row.
_WORD: dict[str, Check] = {"word": is_text, "on_picture": is_number, "on_edges": is_number, "on_first_patch": is_number}


def is_caption_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is one of a run of captions, as `is_folder_row` tells one of a folder run."""
    if not has(row, checks_of("folder")) or row.get("status") != "explained":
        return _is_failed(row)
    texts, outputs, written = list_of(is_text), dict_of(is_text), dict_of(is_whole)
    words = list_of(lambda word: is_dict(word) and has(word, _WORD))
    fields = {"caption": is_text, "words": words, "left_out": texts, "outputs": outputs, "written": written}
    return (
        has(row, fields | {"width": is_side, "height": is_side, "seconds": is_number})
        and all(path == f"{row['stem']}-caption.{ending}" for ending, path in row["outputs"].items())
        and set(row["outputs"]) <= {"png", "npz"}
        and set(row["written"]) == set(row["outputs"].values())
    )
