"""What a folder run remembers: a journal that survives being killed, and the manifest made from it.

The journal is `.vitflow/journal.jsonl` in the output folder. Its first line tells what the run computes, every other
line is the row of one input; rows are only ever appended, so that a run that is killed loses no more than its last
line. The manifest (`manifest.jsonl`, `.csv` or `.parquet`) and `run.json` are written whole when a run ends.

A power cut may cost the rows of the last second, whose pictures the next run does again: the journal goes to the disk
once a second, and whole, like manifest and run.json, before it replaces an older one. The files of a picture are not
waited for; each row tells how long they are, and one of another length is made again.

A journal is a file that anybody may have edited: a line that is torn, or no row that a run would have written, counts
as none (see `vitflow.folder.rows`), and nothing is written or removed through a link that leads out of the folder.

An input is a path below the run's root. JSON holds names that are not valid UTF-8 as lone surrogates (Python's
surrogateescape): `os.fsencode(row["input"])` gives their bytes. CSV and Parquet cannot: there, `input` shows such bytes
as escapes, and `input_hex` holds the whole name's bytes. Text that a spreadsheet would take for a formula stands in
CSV with an apostrophe before it (see `vitflow.folder.spreadsheet`).
"""

import csv
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from vitflow.errors import OptionError, VitflowError
from vitflow.folder.rows import is_name, parse_row
from vitflow.folder.spreadsheet import plain_cell
from vitflow.pictures.files import write_atomically

FORMATS = ("csv", "jsonl", "parquet")

#: The columns of a manifest and what they hold; "json" is text in CSV and Parquet.
COLUMNS = {
    "input": "text",
    "input_hex": "text",
    "status": "text",
    "error": "text",
    "message": "text",
    "size": "whole",
    "mtime_ns": "whole",
    "sha256": "text",
    "width": "whole",
    "height": "whole",
    "class_index": "whole",
    "class_name": "text",
    "probability": "number",
    "predicted_index": "whole",
    "model": "text",
    "weights_sha256": "text",
    "methods": "json",
    "options": "json",
    "outputs": "json",
    "maps": "json",
    "facts": "json",
    "saturated_share": "number",
    "seconds": "number",
}

_FOLDER = ".vitflow"
_SYNC_EVERY = 1.0  # seconds; a killed process loses nothing without it, a power cut does
# Bytes of a line; a row is mostly its maps' grids, and those of the largest pictures are a few MiB each.
_LONGEST_LINE = 2**25
#: The journals that this version writes: those before did not tell how pictures were prepared for the model.
VERSION = 2


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The output folder of a run, and where things are in it."""

    path: Path

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.path / _FOLDER / "journal.jsonl"

    @property
    def run_json(self) -> Path:
        """Versions, command, options and totals of the last run."""
        return self.path / "run.json"

    def manifest(self, kind: str) -> Path:
        """The manifest's file for a format."""
        return self.path / f"manifest.{kind}"

    def remove_leftovers(self) -> int:
        """Remove the unfinished files of a run that was killed, and say how many there were."""
        count = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                if name.startswith(".vitflow-") and name.endswith(".part"):
                    Path(folder, name).unlink(missing_ok=True)
                    count += 1
        return count

    def lock(self) -> IO[bytes]:
        """Make the folder, and keep a second run out of it while this one lives: the returned file holds the lock.

        Raises:
            OptionError: another run is writing here, or nobody may.
        """
        place = self.path / _FOLDER
        for path, is_ours in ((place, Path.is_dir), (self.journal, Path.is_file), (place / "lock", Path.is_file)):
            if path.is_symlink() or (path.exists() and not is_ours(path)):
                raise OptionError(
                    f"Expected {str(path)!r} to be the run's own, got a link or another kind of file: remove it, or "
                    "choose another folder."
                )
        try:
            place.mkdir(parents=True, exist_ok=True)
            file = (place / "lock").open("ab")
        except OSError as error:
            raise OptionError(
                f"The output folder {str(self.path)!r} cannot be written to: {error.strerror or error}. Choose another "
                "one with -o (output=…)."
            ) from error
        try:
            import fcntl
        except ImportError:  # not on this system
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise OptionError(
                f"Another run is writing to {str(self.path)!r}: wait for it, or choose another folder."
            ) from error
        return file


class Journal:
    """The rows of a run on disk: appended while it works, found again by input; only positions are kept in memory.

    Args:
        path: the file; it is made when the first row is written.
        accepts: says of a row whether it is one that the run would have written; the others count as not there.

    Raises:
        VitflowError: the file is something else than a journal.
    """

    def __init__(self, path: Path, accepts: Callable[[Mapping[str, Any]], bool] = lambda row: True) -> None:
        self.path = path
        self.header: dict[str, Any] | None = None
        self._accepts = accepts
        self._places: dict[str, int] = {}
        self._end = 0
        self._pending = b""
        self._synced = time.monotonic()
        if path.is_file():
            self._load()

    def _load(self) -> None:
        with self.path.open("rb") as file:
            while line := file.readline(_LONGEST_LINE):
                length, ended = _whole_line(file, line)
                if not ended:
                    break  # cut off by a kill, or by a full disk: the next row is written over it
                record = parse_row(line) if length == len(line) else None
                if self.header is None:
                    if record is None:
                        break
                    if not isinstance(record.get("vitflow_journal"), int) or not isinstance(record.get("run"), dict):
                        raise VitflowError(f"{str(self.path)!r} is not a journal of vitflow: move it away.")
                    self.header = record
                elif record is not None and is_name(record.get("input")) and self._accepts(record):
                    self._places[record["input"]] = self._end
                self._end += length

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def start(self, header: Mapping[str, Any]) -> None:
        """Begin anew, with nothing done."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = _line({**header, "vitflow_journal": VERSION})
        with write_atomically(self.path, durable=True) as file:
            file.write(line)
        self.header, self._places, self._end, self._pending = dict(header), {}, len(line), b""

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows, to be found again by their "input"; a later row replaces an earlier one.

        On a full disk the rows wait in memory for the next call: the row that says that a picture could not be
        written shall not be lost for the same reason.
        """
        position = self._end + len(self._pending)
        for row in rows:
            line = _line(row)
            self._places[row["input"]] = position
            self._pending += line
            position += len(line)
        self._write()

    def _write(self) -> bool:
        try:
            # Not in append mode: what a kill or a full disk has left of a line is overwritten.
            with self.path.open("r+b") as file:
                file.seek(self._end)
                file.write(self._pending)
                file.truncate()
                file.flush()
                if time.monotonic() - self._synced > _SYNC_EVERY:
                    os.fsync(file.fileno())
                    self._synced = time.monotonic()
        except OSError:
            return False
        self._end, self._pending = self._end + len(self._pending), b""
        return True

    def rows(self, keys: Iterable[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows of these inputs, or of all; those that are not there are left out."""
        if not self._places:
            return
        with self.path.open("rb") as file:
            for key in self._places if keys is None else keys:
                place = self._places.get(key)
                if place is None:
                    continue
                if place >= self._end:
                    line = self._pending[place - self._end :].split(b"\n", 1)[0]
                else:
                    file.seek(place)
                    line = file.readline()
                yield json.loads(line)  # one that was accepted

    def compact(self, keys: Iterable[str]) -> None:
        """Write the journal anew: one row per input, in this order, then the inputs that are not among these.

        Raises:
            VitflowError: the disk is full.
        """
        if self._pending and not self._write():
            raise VitflowError(
                f"The rows of this run could not be written to {str(self.path)!r}: the disk is full, or the folder is "
                "read-only. Make room and run the same command again: it does only what is missing."
            )
        asked = dict.fromkeys(keys)
        order = [*asked, *sorted(key for key in self._places if key not in asked)]
        places: dict[str, int] = {}
        with write_atomically(self.path, durable=True) as file:
            end = file.write(_line({**(self.header or {}), "vitflow_journal": VERSION}))
            for row in self.rows(order):
                places[row["input"]] = end
                end += file.write(_line(row))
        self._places, self._end = places, end


def _whole_line(file: BinaryIO, line: bytes) -> tuple[int, bool]:
    """How long the line is of which this much was read, the rest skipped; and whether it has an end."""
    length = len(line)
    while len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
        line = file.readline(_LONGEST_LINE)
        length += len(line)
    return length, line.endswith(b"\n")


def _line(record: Mapping[str, Any]) -> bytes:
    # ASCII, so that lone surrogates and line separators go through as escapes.
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write one JSON object, whole or not at all."""
    with write_atomically(path, durable=True) as file:
        file.write(json.dumps(record, indent=2).encode("ascii") + b"\n")


def write_manifest(path: Path, rows: Iterable[Mapping[str, Any]], common: Mapping[str, Any]) -> None:
    """Write rows as .jsonl, .csv or .parquet, in their order, whole or not at all.

    Args:
        path: where to; its suffix decides.
        rows: as they are in the journal.
        common: columns that are the same in every row. Names that are not in COLUMNS become columns of their own.

    Raises:
        OptionError: Parquet without pyarrow.
    """
    kinds = COLUMNS | {name: _kind(value) for name, value in common.items() if name not in COLUMNS}
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
        file.write(_line(row))


def _write_csv(file: IO[bytes], rows: Iterable[dict[str, Any]], kinds: Mapping[str, str]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    try:
        writer = csv.DictWriter(text, kinds)
        writer.writeheader()
        for row in rows:
            writer.writerow({name: plain_cell(value) for name, value in _as_text(row, kinds).items()})
    finally:
        text.detach()


def _write_parquet(file: IO[bytes], rows: Iterable[dict[str, Any]], kinds: Mapping[str, str]) -> None:
    pyarrow, parquet = load_pyarrow()
    types = {"text": pyarrow.string(), "json": pyarrow.string(), "whole": pyarrow.int64(), "number": pyarrow.float64()}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in kinds.items()])
    with parquet.ParquetWriter(file, schema) as writer:
        group: list[dict[str, Any]] = []
        for row in rows:
            group.append(_as_text(row, kinds))
            if len(group) == 10_000:
                writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
                group.clear()
        writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))


def load_pyarrow() -> tuple[Any, Any]:
    """The modules pyarrow and pyarrow.parquet; OptionError that says how to get it if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise OptionError(
            "A Parquet manifest needs pyarrow: pip install 'vitflow[parquet]', or take --manifest csv or jsonl."
        ) from error
    return pyarrow, pyarrow.parquet


def _as_text(row: dict[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """A row for formats that know only text and numbers."""
    for name, kind in kinds.items():
        if kind == "json" and row[name] is not None:
            row[name] = json.dumps(row[name])
    raw = os.fsencode(row["input"])
    shown = raw.decode("utf-8", "backslashreplace")
    if shown.encode() != raw:
        row |= {"input": shown, "input_hex": raw.hex()}
    return row
