"""The store of a run while it works: open, missing, put, finish.

A batch of rows is one transaction with a rollback journal: a run that is killed loses no more than the batch that it
was writing, and the file alone is the run. One run at a time writes into a folder, which is locked meanwhile; others
may read.
"""

import json
import os
import platform
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vitflow.errors import OptionError, VitflowError
from vitflow.files import is_file, is_link, is_there, remove_leftovers, write_inside
from vitflow.runs.columns import Maps, Row, pack_half, shown_name
from vitflow.runs.fingerprints import check_same_run, without_probe
from vitflow.runs.saved import APPLICATION, CONDITION_COLUMNS, FILE, SCHEMA, VERSION, SavedRun

_INSERT = (
    f"INSERT INTO rows (name, position, status, {', '.join(CONDITION_COLUMNS)}, record) "
    f"VALUES ({', '.join('?' * (4 + len(CONDITION_COLUMNS)))})"
)
# Distributions whose versions run.json has.
_DISTRIBUTIONS = ("vitflow", "torch", "timm", "numpy", "opencv-python-headless", "pillow")


class Run(SavedRun):
    """A run that writes: the rows of an earlier run that computed the same are kept, and others are added.

    Args:
        folder: the output folder, which is made, and locked until the run is closed.
        fingerprint: what the rows depend on; a folder with a run of another one is refused.
        max_pixels: kept with the run.
        overwrite: begin anew, whatever run the folder holds.
        clear: called before a run begins anew, with all rows of the run that was there.

    Raises:
        OptionError: the folder holds another run, another one is working in it, or it cannot be written to.
        VitflowError: the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Mapping[str, Any],
        *,
        max_pixels: int = 0,
        overwrite: bool = False,
        clear: Callable[[Iterable[Row]], None] = lambda _: None,
    ) -> None:
        self.folder, self.path = folder, folder / FILE
        self._lock = _locked(folder)
        self._pending: list[tuple[Mapping[str, Any], Maps]] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="vitflow-store")
        self._written: Future[None] | None = None
        self._positions: dict[str, int] = {}
        try:
            remove_leftovers(folder)
            known = self._earlier(clear, overwrite=overwrite)
            if known is None:
                self._begin(fingerprint, max_pixels)
            else:
                check_same_run(known, folder, fingerprint)
                self._db = self._open("rw")
                with self._writing():
                    self._remember(fingerprint, max_pixels)
            self.fingerprint, self.max_pixels = fingerprint, max_pixels
        except BaseException:
            self._release()
            raise

    def _earlier(self, clear: Callable[[Iterable[Row]], None], *, overwrite: bool) -> Mapping[str, Any] | None:
        """The fingerprint of the run that is there; None if there is none, or no more."""
        journal = Path(f"{self.path}-journal")
        for path in (self.path, journal):
            if is_link(path) or (is_there(path) and not is_file(path)):
                raise OptionError(
                    f"Expected {str(path)!r} to be the run's own file, got a link or another kind of file: remove it, "
                    "or choose another folder."
                )
        if not self._is_ours():
            clear([])
        elif not overwrite:
            with SavedRun(self.folder) as earlier:
                return earlier.fingerprint
        else:
            with suppress(OptionError), SavedRun(self.folder) as earlier:
                clear(earlier.all_rows())
        self.path.unlink(missing_ok=True)
        journal.unlink(missing_ok=True)
        return None

    def _is_ours(self) -> bool:
        """Whether there is a run, also a damaged one.

        Raises:
            OptionError: there is a file that no run made.
        """
        if not is_there(self.path):
            return False
        # This takes back what a killed run wrote in part.
        with suppress(sqlite3.DatabaseError, UnicodeDecodeError), closing(self._open("rw")) as db:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        with self.path.open("rb") as file:
            header = file.read(100)
        if header and (header[:16], header[68:72]) != (b"SQLite format 3\0", APPLICATION.to_bytes(4, "big")):
            raise OptionError(f"Expected {str(self.path)!r} to be a run of vitflow, got another file: move it away.")
        return bool(header)

    def _begin(self, fingerprint: Mapping[str, Any], max_pixels: int) -> None:
        try:
            self._db = self._open("rwc")
        except sqlite3.Error as error:
            raise OptionError(cannot_write(self.folder, error)) from error
        with self._writing():
            self._db.execute(f"PRAGMA application_id = {APPLICATION}")
            self._db.execute(f"PRAGMA user_version = {VERSION}")
            for statement in SCHEMA:
                self._db.execute(statement)
            self._remember(fingerprint, max_pixels)

    def _remember(self, fingerprint: Mapping[str, Any], max_pixels: int) -> None:
        header = json.dumps({"fingerprint": fingerprint, "max_pixels": max_pixels}, allow_nan=False)
        self._db.execute("INSERT OR REPLACE INTO run VALUES ('run', ?)", (header,))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction.

        Raises:
            VitflowError: the disk is full.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if type(error) is sqlite3.DatabaseError or isinstance(error, UnicodeDecodeError):  # in SQLite's own words
                raise OptionError(self._damaged(error)) from error
            if not isinstance(error, sqlite3.OperationalError):
                raise
            raise VitflowError(
                f"The rows of this run could not be written to {str(self.path)!r} ({error}): the disk is full, the "
                "folder is read-only, or another program is reading the file. Then run the same command again: it does "
                "only what is missing."
            ) from error
        finally:
            if self._db.in_transaction:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")

    def missing(self, names: Sequence[str], is_done: Callable[[Row], bool]) -> list[str]:
        """The inputs of this run that have no row, or one that is not done; called once, with all inputs in order."""
        self._positions = {name: position for position, name in enumerate(names)}
        with self._reading():
            before = self._db.execute("SELECT id, name, position FROM rows").fetchall()
        own = ((one, self._positions.get(os.fsdecode(name)), position) for one, name, position in before)
        with self._writing():
            self._db.executemany(
                "UPDATE rows SET position = ? WHERE id = ?", [(now, one) for one, now, then in own if now != then]
            )
        done = {row["input"] for row in self.rows() if is_done(row)}
        return [name for name in names if name not in done]

    def put(self, rows: Iterable[tuple[Mapping[str, Any], Maps]]) -> None:
        """Write rows with their maps in one transaction; a later row of an input replaces an earlier one.

        A thread writes, since a disk takes its time; rows that come meanwhile are written together. Rows that cannot be
        written, as on a full disk, are kept in memory for the next call: the row that says that an image could not be
        written must not be lost for the same reason.
        """
        self._pending += rows
        if self._written is None or self._written.done():
            self._written = self._writer.submit(self._write)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if self._written is not None:  # one thread at a time has the connection
            wait([self._written])
        with super()._reading():
            yield

    def _write(self) -> None:
        rows = list(self._pending)
        if not rows:
            return
        with self._writing():
            for row, maps in rows:
                name = os.fsencode(row["input"])
                self._db.execute("DELETE FROM maps WHERE row = (SELECT id FROM rows WHERE name = ?)", (name,))
                self._db.execute("DELETE FROM rows WHERE name = ?", (name,))
                one = self._db.execute(_INSERT, self._values(name, row)).lastrowid
                self._db.executemany(
                    "INSERT INTO maps (row, label, grid, rows, cols, scale) VALUES (?, ?, ?, ?, ?, ?)",
                    [(one, label, *pack_half(grid)) for label, grid in maps.items()],
                )
        del self._pending[: len(rows)]

    def _values(self, name: bytes, row: Mapping[str, Any]) -> list[Any]:
        own = {**row, "input": shown_name(row["input"])}
        columns = [own.get(column) for column in CONDITION_COLUMNS]
        columns = [None if isinstance(value, dict | list) else value for value in columns]
        record = {column: value for column, value in row.items() if column != "input"}
        return [name, self._positions.get(row["input"]), row["status"], *columns, json.dumps(record, allow_nan=False)]

    def finish(self) -> dict[str, int]:
        """Write what is left, and count the inputs of this run: "total", "explained" and "failed".

        Raises:
            VitflowError: the disk is full.
        """
        with self._reading():
            self._write()
            query = "SELECT count(*) FROM rows WHERE position IS NOT NULL AND status != 'failed'"
            [(explained,)] = self._db.execute(query)
        total = len(self._positions)
        return {"total": total, "explained": explained, "failed": total - explained}

    def write_summary(
        self, settings: Mapping[str, Any], totals: Mapping[str, int], seconds: Mapping[str, Any], command: Any
    ) -> None:
        """Write run.json: versions, command, options, totals and times."""
        record = {
            "versions": versions(),
            "command": list(command) if command else None,
            "run": {**without_probe(self.fingerprint), **settings},
            "totals": totals,
            "time": seconds,
        }
        write_inside(self.folder, "run.json", json.dumps(record, indent=2).encode("ascii") + b"\n", durable=True)

    def close(self) -> None:
        """Write what can be written of what is left, close the file, and let others write."""
        try:
            with suppress(VitflowError), self._reading():
                self._write()
        finally:
            self._release()

    def _release(self) -> None:
        self._writer.shutdown()
        if hasattr(self, "_db"):
            self._db.close()
        os.close(self._lock)


def _locked(folder: Path) -> int:
    """Make a folder, and lock it against a second run; what is returned is to be closed.

    Raises:
        OptionError: another run is writing there, or nobody may.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise OptionError(cannot_write(folder, error)) from error
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise OptionError(
            f"Another run is writing to {str(folder)!r}: wait for it, or choose another folder."
        ) from error
    except (ImportError, OSError):  # this system or file system has no such locks
        pass
    return lock


def cannot_write(folder: object, error: Exception) -> str:
    """The message for an output folder that cannot be written to."""
    reason = getattr(error, "strerror", None) or error
    return f"The output folder {str(folder)!r} cannot be written to: {reason}. Choose another one with -o (output=…)."


# -- the end of a run


def versions() -> dict[str, str]:
    """The versions of what a run's results come from."""
    found = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    for name in _DISTRIBUTIONS:
        with suppress(PackageNotFoundError):  # built another way, such as opencv without its wheel
            found[name] = version(name)
    return found


@contextmanager
def finishing(output: object) -> Iterator[None]:
    """Say of what a run writes at its end, and could not write, that nothing else is lost.

    Raises:
        VitflowError: the disk is full, or the folder is read-only.
    """
    try:
        yield
    except OSError as error:
        raise VitflowError(
            f"What was done is kept, but the tables and reports could not be written to {str(output)!r}: "
            f"{error.strerror or error}. Make room and run the same command again."
        ) from error
