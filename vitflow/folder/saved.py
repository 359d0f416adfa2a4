"""Reader of a run on disk: one SQLite file in the output folder, with a row and the maps of each input.

Run files are untrusted: a file is opened only if its schema is exactly the one below (no views, triggers or generated
columns), the length of a value is checked before it is read, and invalid rows are skipped. Reading uses many short
transactions, so that a reader does not block an active run.
"""

import json
import math
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from vitflow.errors import OptionError, VitflowError, printable
from vitflow.files import is_file, is_link, is_there
from vitflow.folder.columns import COLUMNS, Grid, Maps, Row, kinds_in, unpack_half
from vitflow.folder.fingerprints import REMEDY

T = TypeVar("T")

#: The name of the store in the output folder.
FILE = "run.sqlite"
#: The columns that an SQL condition may use.
CONDITION_COLUMNS = tuple(kinds_in("condition"))

APPLICATION, VERSION = 0x7669_7466, 1
_SQL_TYPES = {"text": "TEXT", "whole": "INTEGER", "number": "REAL"}
_CONDITION_SQL = ", ".join(f"{name} {_SQL_TYPES[kind]}" for name, kind in kinds_in("condition").items())
SCHEMA = (
    "CREATE TABLE run (fingerprint TEXT NOT NULL)",
    # The name is the bytes of the input's name; the position is NULL for inputs that are not in the latest run.
    f"CREATE TABLE rows (id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, position INTEGER, status TEXT NOT NULL, "
    f"{_CONDITION_SQL}, record TEXT NOT NULL)",
    "CREATE TABLE maps (row INTEGER NOT NULL, number INTEGER NOT NULL, label TEXT NOT NULL, grid BLOB NOT NULL, "
    "rows INTEGER NOT NULL, cols INTEGER NOT NULL, scale REAL NOT NULL, PRIMARY KEY (row, number)) WITHOUT ROWID",
)
# Functions allowed in a condition: none of them expands short text to long text.
_FUNCTIONS = {"abs", "coalesce", "glob", "ifnull", "instr", "length", "like", "lower", "max", "min", "nullif", "round"}
_FUNCTIONS |= {"substr", "trim", "upper"}
# Timeouts in seconds: of a condition, and of a reader or writer that waits for a lock.
_LONGEST_CONDITION, _PATIENCE = 60.0, 10.0
# Rows per query, and the maximal lengths of a value in bytes and of an SQL statement.
_TOGETHER, _LARGEST, _LONGEST_SQL = 32, 2**23, 10_000


class SavedRun:
    """Reader of the run in an output folder, which may still be active.

    Args:
        folder: the output folder.

    Attributes:
        fingerprint: what the run computes.

    Raises:
        OptionError: the folder has no run, or one of another version, or a damaged one.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.path = self.folder / FILE
        if not is_file(self.path) or is_link(self.path) or not self.path.stat().st_size:
            raise OptionError(f"No run in {str(self.folder)!r}: pass the output folder of a run.")
        with self._reading():
            self._db = self._open("ro")
            try:
                self._load()
            except BaseException:
                self.close()
                raise

    def _open(self, mode: str) -> sqlite3.Connection:
        db = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=_PATIENCE,
            isolation_level=None,
            check_same_thread=False,
        )
        for name, value in (("trusted_schema", "OFF"), ("cell_size_check", "ON"), ("mmap_size", 0)):
            db.execute(f"PRAGMA {name} = {value}")
        if mode == "ro":
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST)
            db.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, _LONGEST_SQL)
            db.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100)
        return db

    def _load(self) -> None:
        """Check that the file is a store of this version, and read the run's settings."""
        if self._db.execute("PRAGMA application_id").fetchone() != (APPLICATION,):
            raise OptionError(f"{str(self.path)!r} is not a vitflow run: move or rename it.")
        if self._db.execute("PRAGMA user_version").fetchone() != (VERSION,):
            raise OptionError(f"The folder {str(self.folder)!r} contains a run of another version of vitflow. {REMEDY}")
        schema = self._db.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        is_run = len(schema) == len(SCHEMA) and set(schema) == {("table", sql.split()[2], sql) for sql in SCHEMA}
        [(mode,)] = self._db.execute("PRAGMA journal_mode")
        [record] = (self._db.execute("SELECT fingerprint FROM run").fetchone() if is_run else None) or [None]
        self.fingerprint: Mapping[str, Any] = _parsed(record) or {}
        if not self.fingerprint or mode == "wal":
            raise OptionError(self._damaged("its tables are not those of a run"))

    def _damaged(self, why: object) -> str:
        return f"The run in {str(self.folder)!r} is damaged ({why}): repeat it with --overwrite."

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                raise VitflowError(f"The run in {str(self.folder)!r} is being written: try again.") from error
            if is_there(f"{self.path}-journal"):
                raise OptionError(
                    f"A run was stopped while writing to {str(self.path)!r}: run the same command again first."
                ) from error
            raise OptionError(self._damaged(printable(str(error)))) from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the latest run in the order of its inputs."""
        for ids in _chunks(self._latest()):
            yield from self._rows(ids).values()

    def all_rows(self) -> Iterator[Row]:
        """Yield every row, including those of inputs that are not in the latest run."""
        for ids in _chunks(self._ids("SELECT id FROM rows")):
            yield from self._rows(ids).values()

    def with_maps(self, names: Iterable[str] | None = None, where: str | None = None) -> Iterator[tuple[Row, Maps]]:
        """Yield each row with its maps by label, float32 [rows, cols].

        Args:
            names: inputs; by default those of the latest run. Inputs without a row are skipped.
            where: SQL condition that selects rows.

        Raises:
            OptionError: the condition is invalid, or a map is damaged.
        """
        every = self._latest() if names is None else self._named(names)
        if where is not None:
            chosen = self._select(where)
            every = [row_id for row_id in every if row_id in chosen]
        for ids in _chunks(every):
            rows = self._rows(ids)
            maps = self._maps(list(rows))
            for row_id, row in rows.items():
                yield row, maps.get(row_id, {})

    def names(self) -> set[str]:
        """Return the names of all inputs that have a row."""
        with self._reading():
            rows = self._db.execute("SELECT name FROM rows").fetchall()
        return {os.fsdecode(name) for (name,) in rows if isinstance(name, bytes)}

    def _ids(self, query: str) -> list[int]:
        with self._reading():
            return [row_id for (row_id,) in self._db.execute(query)]

    def _latest(self) -> list[int]:
        return self._ids("SELECT id FROM rows WHERE position IS NOT NULL ORDER BY position, id")

    def _named(self, names: Iterable[str]) -> list[int]:
        """Return the ids of these inputs' rows."""
        ids: dict[bytes, int] = {}
        keys = [os.fsencode(name) for name in names]
        with self._reading():
            for chunk in _chunks(keys):
                ids |= dict(self._db.execute(f"SELECT name, id FROM rows WHERE name IN ({_marks(chunk)})", chunk))
        return [ids[key] for key in keys if key in ids]

    def _rows(self, ids: Sequence[int]) -> dict[int, Row]:
        """Return the valid rows with these ids, in their order."""
        with self._reading():
            query = f"SELECT id, name, record FROM rows WHERE id IN ({_marks(ids)})"
            drawn = self.fingerprint.get("kind") == "folder"
            rows = {row_id: _row(name, record, drawn) for row_id, name, record in self._db.execute(query, ids)}
        return {row_id: row for row_id in ids if (row := rows.get(row_id)) is not None}

    def _maps(self, ids: Sequence[int]) -> dict[int, dict[str, Grid]]:
        query = (
            "SELECT row, label, CASE WHEN length(grid) = 2 * rows * cols THEN grid END, rows, cols, scale "
            f"FROM maps WHERE row IN ({_marks(ids)}) ORDER BY row, number"
        )
        maps_by_row: dict[int, dict[str, Grid]] = {}
        with self._reading():
            for row_id, label, *packed in self._db.execute(query, ids):
                grid = unpack_half(*packed)
                if grid is None or not isinstance(label, str):
                    raise OptionError(self._damaged(f"a map {printable(str(label))!r} is not rows × cols values"))
                maps_by_row.setdefault(row_id, {})[label] = grid
        return maps_by_row

    def _select(self, where: str) -> set[int]:
        """Return the ids of the rows that satisfy an SQL condition."""
        deadline = time.monotonic() + _LONGEST_CONDITION
        self._db.set_authorizer(_authorize)
        self._db.set_progress_handler(lambda: time.monotonic() > deadline, 1000)
        try:
            # On separate lines, so that a trailing comment does not include the closing bracket.
            return {row_id for (row_id,) in self._db.execute(f"SELECT id FROM rows WHERE (\n{where}\n)")}
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
                raise OptionError(self._damaged(error)) from error
            why = printable(str(error))
            if name == "SQLITE_INTERRUPT":
                why = f"it takes longer than {_LONGEST_CONDITION:g} seconds"
            raise OptionError(
                f"Expected an SQL condition such as \"probability < 0.5 AND class_name = 'cat'\", got "
                f"{printable(where[:80])!r}: {why}. Columns: {', '.join(CONDITION_COLUMNS)}. Functions: "
                f"{', '.join(sorted(_FUNCTIONS))}."
            ) from error
        finally:
            self._db.set_progress_handler(None, 0)
            self._db.set_authorizer(None)


def _chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[start : start + _TOGETHER] for start in range(0, len(values), _TOGETHER))


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
    """Allow the columns and functions of CONDITION_COLUMNS and _FUNCTIONS only."""
    column = first == "rows" and second in ("id", *CONDITION_COLUMNS)
    function = str(second).lower() in _FUNCTIONS
    allowed = {sqlite3.SQLITE_SELECT: True, sqlite3.SQLITE_READ: column, sqlite3.SQLITE_FUNCTION: function}
    return sqlite3.SQLITE_OK if allowed.get(action, False) else sqlite3.SQLITE_DENY


# -- validation of rows

_TYPES: dict[str, tuple[type, ...]] = {"text": (str,), "whole": (int,), "number": (int, float), "json": (dict, list)}
# The columns of every explained image; missing values are None.
_FILLED = tuple(dict.fromkeys([*kinds_in("folder"), *kinds_in("condition")]))
_SURROGATES = re.compile("[\ud800-\udfff]")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _parsed(text: object) -> Row | None:
    """Return the object in a JSON text; None if there is none, or if a number is not finite."""
    try:
        value = _DECODER.decode(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _row(name: object, record: object, drawn: bool) -> Row | None:
    """Return the row of an input, or None if it is invalid; `drawn` requires all columns of a folder run."""
    row = _parsed(record)
    if row is None or not isinstance(name, bytes):
        return None
    row = {"input": os.fsdecode(name)} | row
    if row.get("status") == "measured" or (row.get("status") == "failed" and "stem" not in row):
        return row  # evaluations validate their rows
    paths = (row["input"], row.get("stem"))
    if not all(isinstance(path, str) and is_inside(path) for path in paths) or not _is_valid(row):
        return None
    if row.get("status") != "explained":
        return row if row.get("status") == "failed" else None
    needed = ("outputs", "written", *(("facts", "placement") if drawn else ()))
    sides: tuple[Any, Any] = (row.get("width") or 0, row.get("height") or 0)
    if any(row.get(column) is None for column in needed) or not all(0 < side < 2**31 for side in sides):
        return None
    return {**dict.fromkeys(_FILLED), **row}


def _is_valid(row: Row) -> bool:
    """Return True if the values of a row have the types of their columns, and its text can be encoded as UTF-8."""
    for name, value in row.items():
        if value is None or name not in COLUMNS:
            continue
        kind, _, nested = COLUMNS[name]
        if isinstance(value, bool) or not isinstance(value, _TYPES[kind]):
            return False
        if isinstance(value, str) and name != "input" and _SURROGATES.search(value):
            return False
        if nested and not (isinstance(value, dict) and all(isinstance(each, nested) for each in value.values())):
            return False
    scores = row.get("ranks") or ()
    return all(
        isinstance(each, dict) and each.keys() <= kinds_in("score").keys() and _is_valid(each) for each in scores
    )


def is_inside(path: str) -> bool:
    """Return True if a path stays inside the folder that it is joined to.

    >>> is_inside("a/b.jpg"), is_inside("../b.jpg"), is_inside("/b.jpg")
    (True, False, False)
    """
    parts = path.replace(os.sep, "/").split("/")
    rooted = os.path.isabs(path) or os.path.splitdrive(path)[0]  # noqa: PTH117 - once per row and path
    return not rooted and ".." not in parts and parts[-1] not in ("", ".") and "\0" not in path
