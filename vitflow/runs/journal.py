"""The journal of a run: its rows on the disk, which survive that it is killed.

The journal is `.vitflow/journal.jsonl` in the output folder. Its first line tells what the run computes, every other
line is the row of one input; rows are only ever appended, so that a run that is killed loses no more than its last
line.

A power cut may cost the rows of the last second, whose pictures the next run does again: the journal goes to the disk
once a second, and whole before it replaces an older one. The files of a picture are not waited for; each row tells how
long they are, and one of another length is made again.

A journal is a file that anybody may have edited: a line that is torn, or no row that a run would have written, counts
as none (see `vitflow.runs.checks`), and nothing is written or removed through a link that leads out of the folder.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vitflow.errors import VitflowError
from vitflow.pictures.files import write_atomically
from vitflow.runs.checks import is_name, parse_row

_SYNC_EVERY = 1.0  # seconds; a killed process loses nothing without it, a power cut does
# Bytes of a line; a row is mostly its maps' grids, and those of the largest pictures are a few MiB each.
_LONGEST_LINE = 2**25
#: What kind of journal this version writes and goes on with.
VERSION = 1


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
        """Begin anew, with nothing done.

        Raises:
            VitflowError: the disk is full.
        """
        line = json_line({**header, "vitflow_journal": VERSION})
        try:
            with write_atomically(self.path, durable=True) as file:
                file.write(line)
        except OSError as error:
            raise self._unwritten() from error
        self.header, self._places, self._end, self._pending = dict(header), {}, len(line), b""

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows, to be found again by their "input"; a later row replaces an earlier one.

        On a full disk the rows wait in memory for the next call: the row that says that a picture could not be
        written shall not be lost for the same reason.
        """
        position = self._end + len(self._pending)
        for row in rows:
            line = json_line(row)
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

    def latest(self) -> Iterator[dict[str, Any]]:
        """The rows of the inputs that the latest run was asked for, which are those of its manifest."""
        return (row for row in self.rows() if not row.get("beyond"))

    def compact(self, keys: Iterable[str]) -> None:
        """Write the journal anew: one row per input, in this order, then the inputs that are not among these.

        These are marked: a later run may ask for them again, as one with a larger limit.

        Raises:
            VitflowError: the disk is full.
        """
        if self._pending and not self._write():
            raise self._unwritten()
        asked = dict.fromkeys(keys)
        order = [*asked, *sorted(key for key in self._places if key not in asked)]
        places: dict[str, int] = {}
        try:
            with write_atomically(self.path, durable=True) as file:
                end = file.write(json_line({**(self.header or {}), "vitflow_journal": VERSION}))
                for row in self.rows(order):
                    places[row["input"]] = end
                    row.pop("beyond", None)
                    end += file.write(json_line(row if row["input"] in asked else row | {"beyond": True}))
        except OSError as error:
            raise self._unwritten() from error
        self._places, self._end = places, end

    def _unwritten(self) -> VitflowError:
        return VitflowError(
            f"The rows of this run could not be written to {str(self.path)!r}: the disk is full, or the folder is "
            "read-only. Make room and run the same command again: it does only what is missing."
        )


def _whole_line(file: BinaryIO, line: bytes) -> tuple[int, bool]:
    """How long the line is of which this much was read, the rest skipped; and whether it has an end."""
    length = len(line)
    while len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
        line = file.readline(_LONGEST_LINE)
        length += len(line)
    return length, line.endswith(b"\n")


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as one line of JSON."""
    # ASCII, so that lone surrogates and line separators go through as escapes.
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"
