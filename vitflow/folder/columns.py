"""The columns of a row, maps in half precision, and the manifest: a table of rows as JSON lines, CSV or Parquet.

An input is a path relative to the run's root. Names that are not valid UTF-8 have lone surrogates (Python's
surrogateescape): `os.fsencode(row["input"])` returns their bytes. In SQL, CSV and Parquet, `input` shows such bytes and
control characters as escapes; in CSV and Parquet, lists and dicts are JSON.

A grid of 14 × 14 patches takes 392 bytes: half precision, divided by the smallest power of two that no value exceeds,
so that maps of any scale keep the precision of float16 (the map is the scale times the stored values).
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import check_known, load_extra, printable
from vitflow.files import remove_inside, write_atomically
from vitflow.images import MANIFEST_FORMATS
from vitflow.images.geometry import Placement, Span

Row = dict[str, Any]
Grid = NDArray[np.float32]
AnyGrid = NDArray[np.floating[Any]]
#: The maps of an image by label.
Maps = Mapping[str, AnyGrid]

# The scale of a map that contains the largest value of float32.
_LARGEST_SCALE = 2.0**128
# Rows per Parquet row group.
_GROUP = 10_000
_SCORE = "manifest record condition"

# The kind of each column, in table order, and the tables that contain it. The kind "json" is a list or a dict. Rows are
# "folder" (all rows of a folder run); tables are the "manifest", a "record", the columns of an SQL "condition", and the
# "results" of an evaluation.
_COLUMNS = {
    "input": ("text", "folder manifest condition results"),
    "target_source": ("text", "results"),
    "stem": ("text", "folder"),
    "status": ("text", "manifest record"),
    "error": ("text", "manifest record"),
    "message": ("text", "manifest record"),
    "size": ("whole", "folder manifest condition"),
    "mtime_ns": ("whole", "folder manifest"),
    "sha256": ("text", "folder manifest"),
    "width": ("whole", "manifest record condition"),
    "height": ("whole", "manifest record condition"),
    "class_index": ("whole", f"{_SCORE} results"),
    "class_name": ("text", f"{_SCORE} results"),
    "probability": ("number", f"{_SCORE} results"),
    "target": ("text", _SCORE),
    "value": ("number", _SCORE),
    "predicted_index": ("whole", f"{_SCORE} results"),
    "model": ("text", "manifest"),
    "weights_sha256": ("text", "manifest"),
    "methods": ("json", "manifest"),
    "options": ("json", "manifest"),
    "outputs": ("json", "manifest"),
    "facts": ("json", "manifest record"),
    "placement": ("json", "record"),
    "seconds": ("number", "manifest condition"),
    "region_share": ("number", "results"),
}


@cache
def kinds_in(table: str) -> Mapping[str, str]:
    """Return the columns of a table with their kinds."""
    return {name: kind for name, (kind, tables) in _COLUMNS.items() if table in tables.split()}


# Spreadsheets evaluate text with these prefixes; the apostrophe is included to keep the escape reversible.
_COMPUTED = ("=", "+", "-", "@", "\t", "\r", "'")


def escape_formula(value: Any) -> Any:
    """Prefix text that a spreadsheet would evaluate with an apostrophe, which readers strip; numbers are unchanged.

    >>> escape_formula("=1+2.jpg"), escape_formula("a.jpg"), escape_formula(-1.5)
    ("'=1+2.jpg", 'a.jpg', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_COMPUTED) else value


def failed_row(known: Mapping[str, Any], error: Exception | str, message: str = "") -> Row:
    """Return the row of an image that failed, with the columns of its file among those known.

    `error` is the exception or the name of its type, and `message` is by default that of the exception.
    """
    kind = error if isinstance(error, str) else type(error).__name__
    failure = {"status": "failed", "error": kind, "message": printable(message or str(error)) or kind}
    return {name: known[name] for name in kinds_in("folder") if name in known} | failure


# -- maps in half precision


def grid_columns(label: str) -> dict[str, str]:
    """Return the columns of one map with their kinds: values, rows, cols, scale."""
    return {f"grid_{label}": "bytes", f"rows_{label}": "whole", f"cols_{label}": "whole", f"scale_{label}": "number"}


def pack_half(grid: AnyGrid) -> tuple[bytes, int, int, float]:
    """Return a grid as bytes of little-endian float16, its rows, its columns, and its scale.

    >>> pack_half(np.array([[1.0, 3.0]]))
    (b'\\x004\\x00:', 1, 2, 4.0)
    """
    largest = float(np.abs(grid).max())
    scale = 2.0 ** math.frexp(largest)[1] if largest else 1.0
    rows, cols = grid.shape
    return (grid.astype(np.float64) / scale).astype("<f2").tobytes(), rows, cols, scale


def unpack_half(values: Any, rows: Any, cols: Any, scale: Any) -> Grid | None:
    """Return the grid packed by `pack_half`, float32 [rows, cols]; None if it is damaged."""
    sides = all(isinstance(side, int | np.integer) and side > 0 for side in (rows, cols))
    whole = isinstance(values, bytes | bytearray) and sides and len(values) == 2 * rows * cols
    half = np.frombuffer(values, "<f2") if whole else np.empty(0)
    if not whole or not np.isfinite(half).all() or not isinstance(scale, float) or not 0 < scale <= _LARGEST_SCALE:
        return None
    # Values that were rounded up to the largest scale exceed the range of float32.
    most = np.finfo(np.float32).max
    return (half.reshape(rows, cols).astype(np.float64) * scale).clip(-most, most).astype(np.float32)


def placement_row(placements: Mapping[str, Placement]) -> dict[str, Any]:
    """Return the placement of an image's maps for its row; `extents` has those of maps that are not divided evenly."""
    first = next(iter(placements.values()))
    extents = {label: each.to_dict()["extent"] for label, each in placements.items() if each.extent is not None}
    return replace(first, extent=None).to_dict() | ({"extents": extents} if extents else {})


def placement_of(known: Mapping[str, Any], label: str | None = None) -> Placement:
    """Return the placement of a map (None: of the model input) from that of its row."""
    fields = {**known}
    spans = fields.pop("extents", {}).get(label)
    extent: Any = None if spans is None else tuple(Span(*span) for span in spans)
    fields = {name: value if isinstance(value, str) else tuple(value) for name, value in fields.items()}
    return Placement(**fields, extent=extent)


# -- the manifest


def check_manifest(format: str) -> None:
    """Raise OptionError if a format is unknown, or requires pyarrow, which is not installed."""
    check_known("manifest", format, MANIFEST_FORMATS)
    if format.startswith("parquet"):
        load_extra("pyarrow.parquet", "A Parquet manifest", "parquet", otherwise="use --manifest jsonl")


def write_manifest(
    folder: Path, rows: Iterable[tuple[Mapping[str, Any], Maps]], common: Mapping[str, Any], *, format: str = "jsonl"
) -> Path:
    """Write the manifest of a run atomically, remove the one in another format, and return its path.

    The rows are in the order of the inputs, with their maps for "parquet+grids". `common` has values that are the same
    in every row.
    """
    kinds = {**kinds_in("manifest")}
    suffix, _, grids = format.partition("+")
    if grids:
        kinds["placement"] = "json"
        kinds |= {name: kind for label in common["methods"] for name, kind in grid_columns(label).items()}

    def record(row: Mapping[str, Any], maps: Maps) -> Row:
        packed = {
            name: value
            for label, grid in (maps.items() if grids else ())
            for name, value in zip(grid_columns(label), pack_half(grid), strict=True)
        }
        return {name: packed.get(name, row.get(name, common.get(name))) for name in kinds}

    records = (record(row, maps) for row, maps in rows)
    path = folder / f"manifest.{suffix}"
    with write_atomically(path, durable=True) as file:
        if suffix == "jsonl":
            for each in records:
                # ASCII, so that lone surrogates and line separators are escaped.
                file.write(json.dumps(each, allow_nan=False).encode("ascii") + b"\n")
        else:
            plain = (_as_text(each, kinds) for each in records)
            (_write_csv if suffix == "csv" else _write_parquet)(file, plain, kinds)
    remove_inside(folder, (f"manifest.{other}" for other in MANIFEST_FORMATS if other != suffix))
    return path


def _as_text(row: Row, kinds: Mapping[str, str]) -> Row:
    """Return a row for formats that are limited to text and numbers."""
    nested = {name: json.dumps(row[name]) for name, kind in kinds.items() if kind == "json" and row[name] is not None}
    return row | nested | {"input": printable(row["input"])}


def _write_csv(file: IO[bytes], rows: Iterable[Row], kinds: Mapping[str, str]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    try:
        writer = csv.DictWriter(text, kinds)
        writer.writeheader()
        writer.writerows({name: escape_formula(value) for name, value in row.items()} for row in rows)
    finally:
        text.detach()


def _write_parquet(file: IO[bytes], rows: Iterable[Row], kinds: Mapping[str, str]) -> None:
    import pyarrow
    from pyarrow import parquet

    types = {"whole": pyarrow.int64(), "number": pyarrow.float64(), "bytes": pyarrow.binary()}
    schema = pyarrow.schema([(name, types.get(kind, pyarrow.string())) for name, kind in kinds.items()])
    with parquet.ParquetWriter(file, schema) as writer:
        remaining = iter(rows)
        while group := list(islice(remaining, _GROUP)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
