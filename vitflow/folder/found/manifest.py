"""The manifest of a folder run: one row per input, made from its journal, as JSON lines, CSV or Parquet.

An input is a path below the run's root. JSON holds names that are not valid UTF-8 as lone surrogates (Python's
surrogateescape): `os.fsencode(row["input"])` gives their bytes. CSV and Parquet cannot: there, `input` shows such bytes
as escapes, and `input_hex` holds the whole name's bytes. Text that a spreadsheet would take for a formula stands in
CSV with an apostrophe before it (see `plain_cell`).
"""

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from vitflow.pictures.files import write_atomically
from vitflow.runs.columns import as_text, kinds_in, load_pyarrow, plain_cell, schema_of, shown_name
from vitflow.runs.journal import json_line

#: The columns of a manifest and what they hold; "json" is text in CSV and Parquet.
COLUMNS = kinds_in("manifest")


def write_manifest(path: Path, rows: Iterable[Mapping[str, Any]], common: Mapping[str, Any]) -> None:
    """Write rows as .jsonl, .csv or .parquet, in their order, whole or not at all.

    Args:
        path: where to; its suffix decides.
        rows: as they are in the journal.
        common: columns that are the same in every row. Names that are not in COLUMNS become columns of their own.

    Raises:
        OptionError: Parquet without pyarrow.
    """
    kinds = {**COLUMNS, **{name: _kind(value) for name, value in common.items() if name not in COLUMNS}}
    full = ({name: row.get(name, common.get(name)) for name in kinds} for row in rows)
    # A column of the same name in both, such as an option "input", is the row's.
    writers = {".jsonl": _write_jsonl, ".csv": _write_csv, ".parquet": _write_parquet}
    with write_atomically(path, durable=True) as file:
        writers[path.suffix](file, full, kinds)


def _kind(value: Any) -> str:
    if isinstance(value, bool | list | tuple | dict):
        return "json"
    return "whole" if isinstance(value, int) else "number" if isinstance(value, float) else "text"


def _write_jsonl(file: IO[bytes], rows: Iterable[dict[str, Any]], kinds: Mapping[str, str]) -> None:
    for row in rows:
        del row["input_hex"]  # JSON holds every name as it is
        file.write(json_line(row))


def _write_csv(file: IO[bytes], rows: Iterable[dict[str, Any]], kinds: Mapping[str, str]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    try:
        writer = csv.DictWriter(text, kinds)
        writer.writeheader()
        for row in rows:
            writer.writerow({name: plain_cell(value) for name, value in _with_name(row, kinds).items()})
    finally:
        text.detach()


def _write_parquet(file: IO[bytes], rows: Iterable[dict[str, Any]], kinds: Mapping[str, str]) -> None:
    pyarrow, parquet = load_pyarrow()
    schema = schema_of(kinds)
    with parquet.ParquetWriter(file, schema) as writer:
        group: list[dict[str, Any]] = []
        for row in rows:
            group.append(_with_name(row, kinds))
            if len(group) == 10_000:
                writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
                group.clear()
        writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))


def _with_name(row: dict[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """A row for formats that know only text and numbers."""
    shown = shown_name(row["input"])
    name = {"input": shown, "input_hex": os.fsencode(row["input"]).hex()} if shown != row["input"] else {}
    return as_text(row, kinds) | name
