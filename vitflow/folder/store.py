"""Writer of a run's store: open, missing, put, finish.

Rows are written once a second, in one transaction with a rollback journal: a killed run loses at most the rows of its
last second, and the run consists of this file only. A lock on the folder restricts it to one writer; others may read.
"""

import json
import math
import os
import platform
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from vitflow.errors import OptionError, VitflowError, printable
from vitflow.files import is_file, is_link, is_there, remove_leftovers, write_inside
from vitflow.folder.columns import Maps, Row, failed_row, pack_half
from vitflow.folder.saved import (
    APPLICATION,
    CONDITION_COLUMNS,
    FILE,
    SCHEMA,
    VERSION,
    SavedRun,
    check_same_run,
    checksum,
)

_INSERT = (
    f"INSERT INTO rows (position, name, status, {', '.join(CONDITION_COLUMNS)}, record, checksum) "
    f"VALUES ({', '.join('?' * (5 + len(CONDITION_COLUMNS)))})"
)
# Seconds between two transactions.
_INTERVAL = 1.0
# Distributions whose versions are written to run.json.
_DISTRIBUTIONS = ("vitflow", "torch", "timm", "numpy", "opencv-python-headless", "pillow")


class Run(SavedRun):
    """Writer of a run, which resumes the run in its folder if that has the same fingerprint, and refuses any other.

    The folder is created, and locked until the run is closed. With `overwrite`, any run in it is replaced; `clear` is
    called with the rows of the replaced run before a new one starts.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Mapping[str, Any],
        *,
        overwrite: bool = False,
        clear: Callable[[Iterable[Row]], None] = lambda _: None,
    ) -> None:
        self.folder, self.path, self._journal = folder, folder / FILE, folder / f"{FILE}-journal"
        self._lock = _locked(folder)
        self._pending: list[tuple[list[Any], list[tuple[Any, ...]]]] = []  # values of rows and of their maps
        self._last_write = -math.inf
        self._positions: dict[bytes, int] = {}
        try:
            remove_leftovers(folder)
            exists = self._is_run()
            resumed = exists and not overwrite
            if resumed:
                with SavedRun(folder) as earlier:
                    check_same_run(earlier.fingerprint, folder, fingerprint)
            elif exists:
                with suppress(OptionError), SavedRun(folder) as earlier:  # the rows of a damaged run are lost
                    clear(earlier.all_rows())
            else:
                clear([])
            self._begin(fingerprint, new=not resumed)
            self.fingerprint = fingerprint
        except BaseException:
            self._release()
            raise

    def _is_run(self) -> bool:
        """Return True if there is a run, maybe a damaged one; roll back the unfinished transaction of a killed run."""
        for path in (self.path, self._journal):
            if is_link(path) or (is_there(path) and not is_file(path)):
                raise OptionError(f"{str(path)!r} must be a regular file: remove it, or choose another folder.")
        if not is_there(self.path):
            return False
        with suppress(sqlite3.DatabaseError, UnicodeDecodeError), closing(self._open("rw")) as db:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        with self.path.open("rb") as file:
            header = file.read(100)
        if header and (header[:16], header[68:72]) != (b"SQLite format 3\0", APPLICATION.to_bytes(4, "big")):
            raise OptionError(f"{str(self.path)!r} is not a vitflow run: move or rename it.")
        return bool(header)

    def _begin(self, fingerprint: Mapping[str, Any], *, new: bool) -> None:
        if new:
            self.path.unlink(missing_ok=True)
            self._journal.unlink(missing_ok=True)
        try:
            self._db = self._open("rwc" if new else "rw")
        except sqlite3.Error as error:
            raise OptionError(_cannot_write(self.folder, error)) from error
        if new:
            pragmas = (f"PRAGMA application_id = {APPLICATION}", f"PRAGMA user_version = {VERSION}")
            with self._writing():
                for statement in (*pragmas, *SCHEMA):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO run VALUES (?)", (json.dumps(fingerprint, allow_nan=False),))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Run the body in a transaction."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if type(error) in (sqlite3.DatabaseError, UnicodeDecodeError):  # the file is damaged
                raise OptionError(self._damaged(error)) from error
            if not isinstance(error, sqlite3.OperationalError):
                raise
            raise VitflowError(
                f"The rows of this run could not be written to {str(self.path)!r} ({error}): the disk is full, the "
                "folder is read-only, or another program is reading the file. Run the same command again to resume."
            ) from error
        finally:
            if self._db.in_transaction:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")

    def missing(self, names: Sequence[str], is_done: Callable[[Row], bool]) -> list[str]:
        """Return the inputs of this run without a finished row; called once, with all inputs in order."""
        self._positions = {os.fsencode(name): position for position, name in enumerate(names)}
        with self._reading():
            before = self._db.execute("SELECT id, name, position FROM rows").fetchall()
        moves = [
            (self._positions.get(name), row_id) for row_id, name, then in before if self._positions.get(name) != then
        ]
        with self._writing():
            self._db.executemany("UPDATE rows SET position = ? WHERE id = ?", moves)
        done = {row["input"] for row in self.rows() if row["status"] != "failed" and is_done(row)}
        return [name for name in names if name not in done]

    def put(self, rows: Iterable[tuple[Mapping[str, Any], Maps]]) -> None:
        """Store rows with their maps, which replace earlier ones of their inputs; an invalid row is a failed row.

        Rows of the last second, and rows that a full disk refuses, stay in memory until a later call.
        """
        self._pending += (_encoded(row, maps) for row, maps in rows)
        if time.monotonic() - self._last_write >= _INTERVAL:
            with suppress(VitflowError):
                self._write()
            self._last_write = time.monotonic()

    def _write(self) -> None:
        if not self._pending:
            return
        with self._writing():
            for (key, *values), maps in self._pending:
                self._db.execute("DELETE FROM maps WHERE row = (SELECT id FROM rows WHERE name = ?)", (key,))
                self._db.execute("DELETE FROM rows WHERE name = ?", (key,))
                row_id = self._db.execute(_INSERT, [self._positions.get(key), key, *values]).lastrowid
                self._db.executemany(
                    "INSERT INTO maps VALUES (?, ?, ?, ?, ?, ?, ?)", [(row_id, *each) for each in maps]
                )
        self._pending.clear()

    def finish(self) -> dict[str, int]:
        """Write the remaining rows, and count the inputs of this run: "total", "explained" and "failed"."""
        self._write()
        with self._reading():
            query = "SELECT count(*) FROM rows WHERE position IS NOT NULL AND status != 'failed'"
            [(explained,)] = self._db.execute(query)
        total = len(self._positions)
        return {"total": total, "explained": explained, "failed": total - explained}

    def write_summary(self, settings: Mapping[str, Any], totals: Mapping[str, int], seconds: Mapping[str, Any]) -> None:
        """Write run.json: versions, options, totals and times."""
        run = {**self.fingerprint, **settings}
        record = {"versions": versions(), "run": run, "totals": totals, "time": seconds}
        with write_inside(self.folder, "run.json", durable=True) as file:
            file.write(json.dumps(record, indent=2).encode("ascii") + b"\n")

    def close(self) -> None:
        """Write the remaining rows if possible, close the file, and release the lock."""
        try:
            with suppress(VitflowError):
                self._write()
        finally:
            self._release()

    def _release(self) -> None:
        if hasattr(self, "_db"):
            self._db.close()
        os.close(self._lock)


def _encoded(row: Mapping[str, Any], maps: Maps) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Return the values of a row and its maps for SQLite; those of a failed row if a value is invalid."""
    try:
        for name, value in row.items():
            if isinstance(value, str) and name != "input":
                value.encode()  # raises for surrogates
        record = json.dumps({name: value for name, value in row.items() if name != "input"}, allow_nan=False)
        key, shown = os.fsencode(row["input"]), {**row, "input": printable(row["input"])}
        columns = [
            value if isinstance(value := shown.get(name), str | int | float) else None for name in CONDITION_COLUMNS
        ]
        if not all(np.isfinite(grid).all() for grid in maps.values()):
            raise ValueError("Expected maps of finite values.")
        packed = [(number, label, *pack_half(grid)) for number, (label, grid) in enumerate(maps.items())]
        return [key, row["status"], *columns, record, checksum(key, record)], packed
    except (TypeError, ValueError) as error:
        return _encoded(failed_row({name: row[name] for name in ("input", "stem") if name in row}, error), {})


def _locked(folder: Path) -> int:
    """Create a folder, lock it against a second run, and return the lock's file descriptor, which must be closed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise OptionError(_cannot_write(folder, error)) from error
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise OptionError(f"Another run is writing to {str(folder)!r}: wait for it, or choose another one.") from error
    except (ImportError, OSError):  # the system or file system does not support locks
        pass
    return lock


def _cannot_write(folder: object, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or error
    return f"The output folder {str(folder)!r} cannot be written to: {reason}. Choose another one with -o (output=…)."


# -- the end of a run


def versions() -> dict[str, str]:
    """Return the versions of Python, SQLite and the distributions that determine a run's results."""
    result = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    for name in _DISTRIBUTIONS:
        with suppress(PackageNotFoundError):  # installed without metadata, such as a system build of OpenCV
            result[name] = version(name)
    return result


@contextmanager
def finishing(output: object) -> Iterator[None]:
    """Convert write errors at the end of a run to VitflowError."""
    try:
        yield
    except OSError as error:
        raise VitflowError(
            f"The results are saved, but the tables and reports could not be written to {str(output)!r}: "
            f"{error.strerror or error}. Free some space and run the same command again."
        ) from error
