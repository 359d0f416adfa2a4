"""The columns of a row, and how tables hold what stands in them."""

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from vitflow.errors import load_extra, printable
from vitflow.runs.checks import (
    Check,
    dict_of,
    is_dict,
    is_grid,
    is_inside,
    is_number,
    is_side,
    is_text,
    is_whole,
    list_of,
    or_none,
)


class Column(NamedTuple):
    """What a column holds, what a value in a journal must be to be believed, and which rows and tables have it.

    The kind "json" is text in tables that hold nothing else. Rows are "folder" (all of a folder run), "explained",
    "measured" (by an evaluation), "failed", and "run", the header's; tables are a "manifest", a "record", what a
    "condition" may ask for, and the "results" of an evaluation.
    """

    kind: str
    check: Check
    where: str


_ANSWER = "explained manifest record condition"

#: The columns of all rows, in the order in which tables show them.
COLUMNS = {
    "input": Column("text", is_inside, "folder manifest condition results"),
    "input_hex": Column("text", is_text, "manifest"),
    "asked": Column("text", lambda value: value in ("label", "prediction"), "measured results"),
    "stem": Column("text", lambda value: is_inside(value) and is_text(value), "folder"),
    "status": Column("text", is_text, "manifest record"),
    "error": Column("text", is_text, "failed manifest record"),
    "message": Column("text", is_text, "failed manifest record"),
    "size": Column("whole", or_none(is_whole), "folder manifest condition"),
    "mtime_ns": Column("whole", or_none(is_whole), "folder manifest"),
    "sha256": Column("text", or_none(is_text), "folder manifest"),
    "width": Column("whole", is_side, f"{_ANSWER} measured"),
    "height": Column("whole", is_side, f"{_ANSWER} measured"),
    "class_index": Column("whole", or_none(is_whole), f"{_ANSWER} measured results"),
    "class_name": Column("text", or_none(is_text), f"{_ANSWER} measured results"),
    "probability": Column("number", or_none(is_number), f"{_ANSWER} measured results"),
    "target": Column("text", or_none(is_text), _ANSWER),
    "value": Column("number", or_none(is_number), _ANSWER),
    "predicted_index": Column("whole", or_none(is_whole), f"{_ANSWER} measured results"),
    "model": Column("text", is_text, "run manifest"),
    "weights_sha256": Column("text", is_text, "run manifest"),
    "methods": Column("json", dict_of(is_text), "run manifest"),
    "options": Column("json", dict_of(is_dict), "run manifest"),
    "outputs": Column("json", dict_of(is_text), "explained manifest"),
    "maps": Column("json", or_none(dict_of(is_text)), "explained manifest"),
    "facts": Column("json", dict_of(is_dict), "explained manifest record"),
    "placement": Column("json", is_dict, "explained record"),
    "saturated_share": Column("number", or_none(is_number), "explained manifest condition"),
    "seconds": Column("number", is_number, "explained manifest condition"),
    "written": Column("json", dict_of(is_whole), "explained"),
    "grids": Column("json", dict_of(is_grid), "explained"),
    "window": Column("json", list_of(is_number, 4), "explained"),
    "region_share": Column("number", or_none(is_number), "measured results"),
    "groups": Column("json", list_of(is_text), "measured"),
    "constant": Column("json", list_of(is_text), "measured"),
}


@cache
def kinds_in(where: str) -> Mapping[str, str]:
    """The columns that stand there, and what they hold."""
    return {name: column.kind for name, column in COLUMNS.items() if where in column.where.split()}


@cache
def checks_of(where: str) -> Mapping[str, Check]:
    """The columns that stand there, and what their values must be."""
    return {name: COLUMNS[name].check for name in kinds_in(where)}


def failed_row(known: Mapping[str, Any], error: Exception | str, message: str = "") -> dict[str, Any]:
    """The row of a picture that failed.

    Args:
        known: what is known of its file; of a whole row that is taken alone.
        error: what went wrong, or the name of its kind.
        message: in words; by default those of the error.
    """
    kind = error if isinstance(error, str) else type(error).__name__
    told = {"status": "failed", "error": kind, "message": printable(message or str(error)) or kind}
    return {name: known[name] for name in (*kinds_in("folder"), "etag") if name in known} | told


def as_text(row: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """These columns of a row for tables that hold text and numbers alone."""
    return {
        name: json.dumps(row[name]) if kind == "json" and row.get(name) is not None else row.get(name)
        for name, kind in kinds.items()
    }


def schema_of(kinds: Mapping[str, str]) -> Any:
    """The schema of such columns in Parquet."""
    pyarrow, _ = load_pyarrow()
    types = {"whole": pyarrow.int64(), "number": pyarrow.float64(), "bytes": pyarrow.binary()}
    return pyarrow.schema([(name, types.get(kind, pyarrow.string())) for name, kind in kinds.items()])


# Excel, LibreOffice and others compute what begins so; the apostrophe is there to tell ours from theirs.
_COMPUTED = ("=", "+", "-", "@", "\t", "\r", "'")


def plain_cell(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would compute, for readers to take away; numbers stay.

    >>> plain_cell("=1+2.jpg"), plain_cell("a.jpg"), plain_cell(-1.5)
    ("'=1+2.jpg", 'a.jpg', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_COMPUTED) else value


def load_pyarrow() -> tuple[Any, Any]:
    """The modules pyarrow and pyarrow.parquet; OptionError that says how to get it if it is not installed."""
    otherwise = "take --manifest jsonl and --store overlays"
    parquet = load_extra("pyarrow.parquet", "Parquet", "parquet", otherwise=otherwise)
    return load_extra("pyarrow", "Parquet", "parquet"), parquet


def shown_name(name: str) -> str:
    """An input's name as text; bytes that are none become escapes.

    >>> shown_name("caf\\udce9.jpg")
    'caf\\\\xe9.jpg'
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")
