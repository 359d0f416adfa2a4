"""The manifest of a run: a row per input and target, as JSON lines, CSV or Parquet.

JSON stores names that are not valid UTF-8 with lone surrogates (Python's surrogateescape): `os.fsencode(row["input"])`
returns their bytes. In CSV and Parquet, `input` shows such bytes as escapes, and lists and dicts are JSON.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any

from vitflow.errors import check_known, load_extra
from vitflow.files import remove_inside, write_atomically
from vitflow.folder.columns import Maps, Row, escape_formula, grid_columns, kinds_in, pack_half, printable_name
from vitflow.images import MANIFEST_FORMATS

# Rows per Parquet row group.
_GROUP = 10_000


def check_manifest(format: str) -> None:
    """Raise OptionError if a format is unknown, or requires pyarrow, which is not installed."""
    check_known("manifest", format, MANIFEST_FORMATS)
    if format.startswith("parquet"):
        load_extra("pyarrow.parquet", "A Parquet manifest", "parquet", otherwise="use --manifest jsonl")


def write_manifest(
    folder: Path,
    rows: Iterable[tuple[Mapping[str, Any], Maps]],
    common: Mapping[str, Any],
    *,
    format: str = "jsonl",
) -> Path:
    """Write the manifest of a run atomically, remove the one in another format, and return its path.

    Args:
        folder: the folder of the run.
        rows: rows of the run in the order of its inputs, with their maps for "parquet+grids".
        common: values that are the same in every row, such as its "methods". Those without a column of the manifest
            become whole numbers.
        format: one of `MANIFEST_FORMATS`.
    """
    kinds = {**kinds_in("manifest")}
    kinds |= {name: "whole" for name in common if name not in kinds}
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
    return row | nested | {"input": printable_name(row["input"])}


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
