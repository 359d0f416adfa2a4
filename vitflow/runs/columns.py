"""The columns of a row, maps as columns, and the tables that are exported: JSON lines, CSV and Parquet.

An input is a path below the run's root. JSON holds names that are not valid UTF-8 as lone surrogates (Python's
surrogateescape): `os.fsencode(row["input"])` returns their bytes. CSV, Parquet and SQL cannot: there, `input` shows
such bytes as escapes, and `input_hex` holds the bytes of the whole name. Text that a spreadsheet would compute has an
apostrophe before it in CSV (see `plain_cell`).

A grid of 14 × 14 patches takes 392 bytes: half precision, divided by the least power of two that no value exceeds, so
that maps of any scale keep the precision of float16 (`scale_METHOD` times the stored values is the map).
"""

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ShapeError, load_extra, printable
from vitflow.files import write_atomically
from vitflow.images.geometry import Placement

Row = dict[str, Any]
Grid = NDArray[np.float32]
AnyGrid = NDArray[np.floating[Any]]
#: The maps of an image by their labels.
Maps = Mapping[str, AnyGrid]

# The scale of a map with the largest values of float32.
_LARGEST_SCALE = 2.0**128
# Rows that are written to Parquet at once.
_GROUP = 10_000


class Column(NamedTuple):
    """What a column holds, and where it is.

    The kind "json" is text in tables that hold nothing else. Rows are "folder" (all of a folder run) and "measured" (by
    an evaluation); tables are the "manifest" of maps or of "captions", a "record", the columns of an SQL "condition",
    and the "results" of an evaluation.
    """

    kind: str
    where: str


_ANSWER = "manifest record condition"

#: The columns of all rows, in the order in which tables show them.
COLUMNS = {
    "input": Column("text", "folder manifest captions condition results"),
    "input_hex": Column("text", "manifest"),
    "target_source": Column("text", "measured results"),
    "stem": Column("text", "folder"),
    "status": Column("text", "manifest captions record"),
    "error": Column("text", "manifest captions record"),
    "message": Column("text", "manifest captions record"),
    "size": Column("whole", "folder manifest captions condition"),
    "mtime_ns": Column("whole", "folder manifest captions"),
    "sha256": Column("text", "folder manifest captions"),
    "width": Column("whole", f"captions {_ANSWER} measured"),
    "height": Column("whole", f"captions {_ANSWER} measured"),
    "class_index": Column("whole", f"{_ANSWER} measured results"),
    "class_name": Column("text", f"{_ANSWER} measured results"),
    "probability": Column("number", f"{_ANSWER} measured results"),
    "caption": Column("text", "captions"),
    "words": Column("json", "captions"),
    "left_out": Column("json", "captions"),
    "target": Column("text", _ANSWER),
    "value": Column("number", _ANSWER),
    "predicted_index": Column("whole", f"{_ANSWER} measured results"),
    "model": Column("text", "manifest"),
    "weights_sha256": Column("text", "manifest"),
    "methods": Column("json", "manifest"),
    "options": Column("json", "manifest"),
    "outputs": Column("json", "manifest captions"),
    "maps": Column("json", "manifest"),
    "facts": Column("json", "manifest record"),
    "placement": Column("json", "record"),
    "saturated_share": Column("number", "manifest condition"),
    "seconds": Column("number", "manifest captions condition"),
    "region_share": Column("number", "measured results"),
    "groups": Column("json", "measured"),
    "constant": Column("json", "measured"),
}


@cache
def kinds_in(where: str) -> Mapping[str, str]:
    """The columns that are there, and what they hold."""
    return {name: column.kind for name, column in COLUMNS.items() if where in column.where.split()}


def failed_row(known: Mapping[str, Any], error: Exception | str, message: str = "") -> Row:
    """The row of an image that failed.

    Args:
        known: what is known of its file, or a whole row, of which that part is taken.
        error: what went wrong, or the name of its kind.
        message: in words; by default those of the error.
    """
    kind = error if isinstance(error, str) else type(error).__name__
    failure = {"status": "failed", "error": kind, "message": printable(message or str(error)) or kind}
    return {name: known[name] for name in kinds_in("folder") if name in known} | failure


def as_text(row: Mapping[str, Any], kinds: Mapping[str, str]) -> Row:
    """These columns of a row for tables that hold text and numbers alone."""
    return {
        name: json.dumps(row[name]) if kind == "json" and row.get(name) is not None else row.get(name)
        for name, kind in kinds.items()
    }


# Excel, LibreOffice and others compute what begins so; the apostrophe is there to tell ours from theirs.
_COMPUTED = ("=", "+", "-", "@", "\t", "\r", "'")


def plain_cell(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would compute, for readers to take away; numbers stay.

    >>> plain_cell("=1+2.jpg"), plain_cell("a.jpg"), plain_cell(-1.5)
    ("'=1+2.jpg", 'a.jpg', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_COMPUTED) else value


def load_pyarrow() -> tuple[Any, Any]:
    """The modules pyarrow and pyarrow.parquet; OptionError with the way to install it if it is missing."""
    parquet = load_extra("pyarrow.parquet", "Parquet", "parquet", otherwise="take --manifest jsonl")
    return load_extra("pyarrow", "Parquet", "parquet"), parquet


def shown_name(name: str) -> str:
    """An input's name as text; bytes that are not UTF-8 become escapes.

    >>> shown_name("caf\\udce9.jpg")
    'caf\\\\xe9.jpg'
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")


# -- maps as columns


def grid_columns(label: str) -> dict[str, str]:
    """The columns that hold one map of an image: its values, its numbers of rows and columns, and its scale."""
    return {f"grid_{label}": "bytes", f"rows_{label}": "whole", f"cols_{label}": "whole", f"scale_{label}": "number"}


def columns_of(labels: Sequence[str]) -> dict[str, str]:
    """The columns of records with these maps, and what they hold."""
    return {"id": "text", **kinds_in("record"), **_columns_of_maps(labels)}


def record_of(row: Mapping[str, Any], maps: Maps, labels: Sequence[str]) -> Row:
    """An image's row and maps as a record; what it does not have is None.

    Args:
        row: as a folder run keeps it; its `input` is the record's `id`.
        maps: the unscaled grid of each map, [rows, cols].
        labels: the maps of every record.
    """
    return {"id": row["input"]} | as_text(row, kinds_in("record")) | _values_of_maps(maps, labels)


def _columns_of_maps(labels: Sequence[str]) -> dict[str, str]:
    return {name: kind for label in labels for name, kind in grid_columns(label).items()}


def _values_of_maps(maps: Maps, labels: Sequence[str]) -> Row:
    found: Row = {}
    for label in labels:
        values = pack_half(maps[label]) if label in maps else (None,) * 4
        found |= dict(zip(grid_columns(label), values, strict=True))
    return found


def pack_half(grid: AnyGrid) -> tuple[bytes, int, int, float]:
    """A grid as the bytes of little-endian float16, its rows and columns, and its scale.

    >>> pack_half(np.array([[1.0, 3.0]]))
    (b'\\x004\\x00:', 1, 2, 4.0)
    """
    largest = float(np.abs(grid).max())
    scale = 2.0 ** math.frexp(largest)[1] if largest else 1.0
    rows, cols = grid.shape
    return (grid.astype(np.float64) / scale).astype("<f2").tobytes(), rows, cols, scale


def unpack_half(values: Any, rows: Any, cols: Any, scale: Any) -> Grid | None:
    """The grid that `pack_half` packed, float32 [rows, cols]; None if it is damaged."""
    sides = all(isinstance(side, int | np.integer) and side > 0 for side in (rows, cols))
    whole = isinstance(values, bytes | bytearray) and sides and len(values) == 2 * rows * cols
    half = np.frombuffer(values, "<f2") if whole else np.empty(0)
    if not whole or not np.isfinite(half).all() or not isinstance(scale, float) or not 0 < scale <= _LARGEST_SCALE:
        return None
    # The scale of the largest values, and what rounds up to it, are more than float32 holds.
    most = np.finfo(np.float32).max
    return (half.reshape(rows, cols).astype(np.float64) * scale).clip(-most, most).astype(np.float32)


def map_of(record: Mapping[str, Any], label: str) -> tuple[Grid, Placement]:
    """A record's map, float32 [rows, cols], and its placement on the image.

    Args:
        record: a row of a `BatchExplainer`, of a manifest with grids, or of a table that was made of them.
        label: the map, such as "rollout".

    Raises:
        ShapeError: the record has no such map, as that of an image which failed, or it is damaged.
    """
    values, *others = (record.get(name) for name in grid_columns(label))
    if not values:
        raise ShapeError(f"Expected a record with a map {label!r}, got {record.get('id')!r}, which has none.")
    grid = unpack_half(values, *others)
    if grid is None:
        raise ShapeError(
            f"Expected the map {label!r} of {record.get('id')!r} as rows × cols finite values in half precision and "
            f"their scale, got {values!r:.40} with {others!r}: it is damaged."
        )
    try:
        known = json.loads(record["placement"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ShapeError(
            f"Expected the placement of a map as JSON, got {record.get('placement')!r:.80}: it is damaged."
        ) from error
    return grid, placement_of(known)


def placement_of(known: Mapping[str, Any]) -> Placement:
    """The placement that `Placement.to_dict` returned.

    Raises:
        ShapeError: it is not a placement.
    """
    try:
        found = {name: value if isinstance(value, str) else tuple(map(int, value)) for name, value in known.items()}
        return Placement(**found)  # type: ignore[arg-type]
    except (AttributeError, TypeError, ValueError) as error:
        raise ShapeError(f"Expected the placement of a map, got {known!r}.") from error


# -- tables


def write_manifest(
    path: Path,
    rows: Iterable[tuple[Mapping[str, Any], Maps]],
    common: Mapping[str, Any],
    labels: Sequence[str] = (),
    where: str = "manifest",
) -> None:
    """Write rows as .jsonl, .csv or .parquet, in their order, whole or not at all.

    Args:
        path: the file; its suffix is the format.
        rows: of a run, with their maps.
        common: columns that are the same in every row. Names that are not in COLUMNS become columns of their own.
        labels: maps to write as columns, in Parquet.
        where: the table of COLUMNS.

    Raises:
        OptionError: Parquet without pyarrow.
    """
    kinds = {**kinds_in(where)}
    # A column of the same name in both, such as an option "input", is the row's.
    kinds |= {name: _kind(value) for name, value in common.items() if name not in kinds}
    if labels:
        kinds |= {"placement": "json"} | _columns_of_maps(labels)
    writers = {".jsonl": _write_jsonl, ".csv": _write_csv, ".parquet": _write_parquet}
    full = (
        {name: row.get(name, common.get(name)) for name in kinds} | _values_of_maps(maps, labels) for row, maps in rows
    )
    with write_atomically(path, durable=True) as file:
        writers[path.suffix](file, full, kinds)


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as one line of JSON."""
    # ASCII, so that lone surrogates and line separators go through as escapes.
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def _kind(value: Any) -> str:
    if isinstance(value, bool | list | tuple | dict):
        return "json"
    return "whole" if isinstance(value, int) else "number" if isinstance(value, float) else "text"


def _write_jsonl(file: IO[bytes], rows: Iterable[Row], kinds: Mapping[str, str]) -> None:
    for row in rows:
        row.pop("input_hex", None)  # JSON holds every name as it is
        file.write(json_line(row))


def _write_csv(file: IO[bytes], rows: Iterable[Row], kinds: Mapping[str, str]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    try:
        writer = csv.DictWriter(text, kinds)
        writer.writeheader()
        for row in rows:
            writer.writerow({name: plain_cell(value) for name, value in _with_name(row, kinds).items()})
    finally:
        text.detach()


def _write_parquet(file: IO[bytes], rows: Iterable[Row], kinds: Mapping[str, str]) -> None:
    pyarrow, parquet = load_pyarrow()
    types = {"whole": pyarrow.int64(), "number": pyarrow.float64(), "bytes": pyarrow.binary()}
    schema = pyarrow.schema([(name, types.get(kind, pyarrow.string())) for name, kind in kinds.items()])
    with parquet.ParquetWriter(file, schema) as writer:
        for group in _groups(_with_name(row, kinds) for row in rows):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))


def _groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows, some at a time; at least one group."""
    group: list[Row] = []
    for row in rows:
        group.append(row)
        if len(group) == _GROUP:
            yield group
            group = []
    yield group


def _with_name(row: Row, kinds: Mapping[str, str]) -> Row:
    """A row for formats that hold text and numbers alone."""
    shown = shown_name(row["input"])
    name = {"input": shown, "input_hex": os.fsencode(row["input"]).hex()} if shown != row["input"] else {}
    return as_text(row, kinds) | name
