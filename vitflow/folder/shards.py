"""Shards: the maps of a run in Parquet files of some hundred pictures each, instead of a file per overlay.

A shard is there whole or not at all, and has the name of its content. Its rows come into the journal when it is there,
so that what is told as done is on the disk; the journal says of each picture where its maps are. What a kill leaves
between the two, or an older state of a picture, is taken away when the run ends.
"""

import io
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from vitflow.errors import ShapeError, VitflowError
from vitflow.runs.columns import failed_row, load_pyarrow, schema_of, shown_name
from vitflow.runs.grids import (
    SHARDS,
    AnyGrid,
    columns_of,
    grid_columns,
    grid_of,
    is_shard,
    pack_grid,
    record_of,
    shard_name,
    unpack_grid,
)
from vitflow.runs.journal import Journal
from vitflow.runs.places import RunFolder

# Pictures of a shard, and seconds after which one that is not full is written all the same: what a kill may cost.
_ROWS, _PATIENCE = 1024, 30.0
# Characters of maps in a shard's rows; such a shard takes 96 MiB.
_HELD = 2**28
# What is believed to be a shard: rows, and bytes of all that is not a map, unpacked.
_MOST_ROWS, _MOST_WORDS = 2**16, 2**26

Row = dict[str, Any]


class ShardWriter:
    """Takes the maps out of rows and into shards.

    Args:
        write: puts a file with this content at a path below the output folder, whole or not at all.
        labels: the maps of every row.
        rows: pictures of a shard.
        patience: seconds after which a shard is written, full or not.
    """

    def __init__(
        self, write: Callable[[str, bytes], None], labels: Sequence[str], rows: int = _ROWS, patience: float = _PATIENCE
    ) -> None:
        self._write, self._labels, self._rows, self._patience = write, labels, rows, patience
        self._waiting: list[Row] = []
        self._since, self._held = 0.0, 0

    def add(self, rows: Iterable[Row]) -> list[Row]:
        """Take rows in; those whose maps are on the disk now, earlier ones among them, and those that have none."""
        told = []
        for row in rows:
            if row["status"] != "explained":
                told.append(row)
                continue
            if not self._waiting:
                self._since, self._held = time.monotonic(), 0
            self._waiting.append(row)
            self._held += sum(len(grid["values"]) for grid in row["grids"].values())
            if (
                len(self._waiting) >= self._rows
                or self._held > _HELD
                or time.monotonic() - self._since > self._patience
            ):
                told += self.flush()
        return told

    def flush(self) -> list[Row]:
        """Write what waits; its rows, which say where their maps are, or why they could not be written."""
        rows, self._waiting = self._waiting, []
        if not rows:
            return []
        content = _encode(rows, self._labels)
        path = shard_name(content)
        try:
            self._write(path, content)
        except Exception as error:  # a full disk, above all
            reason = getattr(error, "strerror", None) or str(error)
            return [failed_row(row, error, f"The maps could not be written: {reason}.") for row in rows]
        place = {"grids": {}, "written": {path: len(content)}}
        return [row | place | {"shard": [path, index, len(rows)]} for index, row in enumerate(rows)]


def _encode(rows: Sequence[Row], labels: Sequence[str]) -> bytes:
    pyarrow, parquet = load_pyarrow()
    kinds = columns_of(labels)
    records = []
    for row in rows:
        maps = {label: unpack_grid(grid) for label, grid in row["grids"].items()}
        records.append(record_of(row | {"input": shown_name(row["input"])}, maps, labels))
    file = io.BytesIO()
    # Grids hardly repeat or compress; the words beside them do.
    words = [name for name, kind in kinds.items() if kind in ("text", "json")]
    parquet.write_table(
        pyarrow.Table.from_pylist(records, schema=schema_of(kinds)),
        file,
        use_dictionary=words,
        compression={name: "zstd" if name in words else "none" for name in kinds},
        write_statistics=[name for name, kind in kinds.items() if kind != "bytes"],
        write_page_checksum=True,
    )
    return file.getvalue()


class ShardReader:
    """Finds the maps of rows again.

    Args:
        read: the content of a file below the output folder.
    """

    def __init__(self, read: Callable[[str], bytes]) -> None:
        self._read = read
        self._columns = lru_cache(maxsize=4)(self._load)

    def _load(self, path: str) -> tuple[list[str], dict[str, Any]]:
        """The labels of a shard's maps, and its columns."""
        pyarrow, parquet = load_pyarrow()
        try:
            file = parquet.ParquetFile(io.BytesIO(self._read(path)), page_checksum_verification=True)
            labels = [name.removeprefix("grid_") for name in file.schema_arrow.names if name.startswith("grid_")]
            names = ["id", *(name for label in labels for name in grid_columns(label))]
            _check_size(file.metadata, names)
            table = file.read(columns=names)
            return labels, {name: table[name] for name in names}
        except (OSError, KeyError, ValueError, TypeError, OverflowError, pyarrow.ArrowException) as error:
            raise _damaged(path) from error  # its columns may hold anything

    def maps(self, row: Mapping[str, Any]) -> dict[str, AnyGrid]:
        """The maps of an explained picture by their labels, float32 [rows, cols].

        Raises:
            VitflowError: its shard is gone, damaged, or another.
        """
        if "shard" not in row:
            return {label: unpack_grid(packed) for label, packed in row["grids"].items()}
        path, index, _ = row["shard"]
        labels, columns = self._columns(path)
        try:
            record = {name: values[index].as_py() for name, values in columns.items()}
            if record["id"] == shown_name(row["input"]):
                return {label: grid_of(record, label) for label in labels}
        except (ShapeError, IndexError, UnicodeDecodeError) as error:
            raise _damaged(path) from error
        raise _damaged(path)

    def with_grids(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows, each with its maps in it."""
        for row in rows:
            if "shard" in row:
                row = row | {"grids": {label: pack_grid(grid) for label, grid in self.maps(row).items()}}
            yield row


def _check_size(metadata: Any, names: Iterable[str]) -> None:
    """Raise ValueError for columns that would be larger in memory than in the file, before they are read."""
    wanted, words = set(names), 0
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            if column.path_in_schema not in wanted:
                continue
            if column.physical_type != "BYTE_ARRAY" or column.path_in_schema == "id":
                words += column.total_uncompressed_size
            elif column.compression != "UNCOMPRESSED" or any("DICTIONARY" in kind for kind in column.encodings):
                raise ValueError("maps are written as they are")
    if metadata.num_rows > _MOST_ROWS or words > _MOST_WORDS:
        raise ValueError("too large to be a shard")


def _damaged(path: str) -> VitflowError:
    return VitflowError(
        f"The maps in {path!r} are gone, damaged, or others than the journal tells: remove that file and run the same "
        "vitflow folder command again, which does what is missing."
    )


def tidy(journal: Journal, output: RunFolder, labels: Sequence[str]) -> None:
    """Leave each picture in one shard, and shards that are worth a file; the others are removed.

    Args:
        journal: of the run; it tells of the new places afterwards.
        output: the folder of the run.
        labels: the maps of every row.
    """
    reader, writer = ShardReader(output.read), ShardWriter(output.put, labels)
    live: Counter[str] = Counter()
    held: dict[str, int] = {}
    for row in journal.rows():
        if "shard" in row:
            path, _, count = row["shard"]
            live[path] += 1
            held[path] = count
    small = {path for path, count in live.items() if count < _ROWS // 2}
    again = {path for path, count in live.items() if count < held[path]} | (small if len(small) > 1 else set())
    moved = [row["input"] for row in journal.rows() if "shard" in row and row["shard"][0] in again]
    for start in range(0, len(moved), _ROWS):
        try:
            rows = list(reader.with_grids(journal.rows(moved[start : start + _ROWS])))
        except VitflowError:
            break  # whoever asks for these maps is told
        told = [*writer.add(rows), *writer.flush()]
        if any(row["status"] != "explained" for row in told):
            break  # the disk is full: they stay where they are
        journal.append(told)
    kept = {row["shard"][0] for row in journal.rows() if "shard" in row}
    # Shards of a run that was killed before it told of them are among those that are there.
    output.remove(name for name in output.names(SHARDS) if is_shard(name) and name not in kept)
