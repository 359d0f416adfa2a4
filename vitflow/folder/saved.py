"""Reader of a run on disk, one SQLite file in the output folder with a row and the maps of each input; its fingerprint.

Run files are untrusted: a file is opened only if its schema is exactly the one below (no views, triggers or generated
columns), the length of a value is limited, and no path of a row leads out of its folder. Rows are validated when they
are written; a row or map that is not the one that was written is a failed row. Reading uses many short transactions,
so that a reader does not block an active run.
"""

import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from vitflow.errors import OptionError, VitflowError, printable
from vitflow.files import is_file, is_link, is_there
from vitflow.folder.columns import Grid, Maps, Row, failed_row, kinds_in, unpack_half
from vitflow.registry.choices import Chosen

#: The name of the store in the output folder.
FILE = "run.sqlite"
#: The columns that an SQL condition may use.
CONDITION_COLUMNS = tuple(kinds_in("condition"))

APPLICATION, VERSION = 0x7669_7466, 2
_SQL_TYPES = {"text": "TEXT", "whole": "INTEGER", "number": "REAL"}
_CONDITION_SQL = ", ".join(f"{name} {_SQL_TYPES[kind]}" for name, kind in kinds_in("condition").items())
SCHEMA = (
    "CREATE TABLE run (fingerprint TEXT NOT NULL)",
    # The name is the bytes of the input's name; the position is NULL for inputs that are not in the latest run.
    f"CREATE TABLE rows (id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, position INTEGER, status TEXT NOT NULL, "
    f"{_CONDITION_SQL}, record TEXT NOT NULL, checksum INTEGER NOT NULL)",
    "CREATE TABLE maps (row INTEGER NOT NULL, number INTEGER NOT NULL, label TEXT NOT NULL, grid BLOB NOT NULL, "
    "rows INTEGER NOT NULL, cols INTEGER NOT NULL, scale REAL NOT NULL, PRIMARY KEY (row, number)) WITHOUT ROWID",
)
# Seconds that a reader or writer waits for a lock.
_PATIENCE = 10.0
# What to do about a folder that contains another run.
_REMEDY = "Choose another folder, or replace that run with --overwrite (overwrite=True)."
# Rows per query, and the maximal lengths of a value in bytes and of an SQL statement.
_TOGETHER, _LARGEST, _LONGEST_SQL = 32, 2**23, 10_000


class SavedRun:
    """Reader of the run in an output folder, which may still be active; OptionError if there is none or a damaged one.

    `fingerprint` is everything that its rows depend on.
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
            raise OptionError(
                f"The folder {str(self.folder)!r} contains a run of another version of vitflow. {_REMEDY}"
            )
        schema = self._db.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        is_run = len(schema) == len(SCHEMA) and set(schema) == {("table", sql.split()[2], sql) for sql in SCHEMA}
        [(mode,)] = self._db.execute("PRAGMA journal_mode")
        [record] = (self._db.execute("SELECT fingerprint FROM run").fetchone() if is_run else None) or ["{}"]
        try:
            self.fingerprint: Mapping[str, Any] = {**json.loads(record, parse_constant=int)}
        except (ValueError, TypeError, RecursionError):
            self.fingerprint = {}
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
                raise OptionError(f"A run was stopped while writing {str(self.path)!r}: run it again first.") from error
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
        return (row for row, _ in self._read(self._latest()))

    def all_rows(self) -> Iterator[Row]:
        """Yield every row, including those of inputs that are not in the latest run."""
        return (row for row, _ in self._read(self._ids("SELECT id FROM rows")))

    def with_maps(self, where: str | None = None) -> Iterator[tuple[Row, Maps]]:
        """Yield each row of the latest run with its maps by label, float32 [rows, cols]; `where`: an SQL condition."""
        selected = None if where is None else self._select(where)
        yield from self._read([each for each in self._latest() if selected is None or each in selected], maps=True)

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

    def _read(self, ids: Sequence[int], *, maps: bool = False) -> Iterator[tuple[Row, Maps]]:
        """Yield the rows with these ids in order, with their maps if requested; damaged ones are failed rows."""
        for start in range(0, len(ids), _TOGETHER):
            chunk = ids[start : start + _TOGETHER]
            marks = ", ".join("?" * len(chunk))
            grids: dict[int, dict[str, Grid | None]] = {}
            with self._reading():
                query = f"SELECT id, name, record, checksum FROM rows WHERE id IN ({marks})"
                rows = {row_id: _row(*values) for row_id, *values in self._db.execute(query, chunk)}
                query = (
                    "SELECT row, label, CASE WHEN length(grid) = 2 * rows * cols THEN grid END, rows, cols, scale "
                    f"FROM maps WHERE row IN ({marks}) ORDER BY row, number"
                )
                for row_id, label, *packed in self._db.execute(query, chunk) if maps else ():
                    grids.setdefault(row_id, {})[str(label)] = unpack_half(*packed)
            for row_id in filter(rows.__contains__, chunk):
                row, stored = rows[row_id], grids.get(row_id, {})
                intact = {label: grid for label, grid in stored.items() if grid is not None}
                yield (row, intact) if len(intact) == len(stored) else (_damaged_row(row["input"], "map"), {})

    def _select(self, where: str) -> set[int]:
        """Return the ids of the rows that satisfy an SQL condition."""
        try:
            # On separate lines, so that a trailing comment does not include the closing bracket.
            return {row_id for (row_id,) in self._db.execute(f"SELECT id FROM rows WHERE (\n{where}\n)")}
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
                raise OptionError(self._damaged(error)) from error
            raise OptionError(
                f'Expected an SQL condition such as "probability < 0.5", got {printable(where[:80])!r}: '
                f"{printable(str(error))}. Columns: {', '.join(CONDITION_COLUMNS)}."
            ) from error


# -- rows


def checksum(name: bytes, record: str) -> int:
    """Return the checksum that shows that a row is the one that was written."""
    return zlib.crc32(name + record.encode())


def _row(name: bytes, record: str, written: int) -> Row:
    """Return a row; a failed row if it is damaged, or if a path leads out of its folder."""
    try:
        if checksum(name, record) == written:
            row: Row = {"input": os.fsdecode(name), **json.loads(record)}
            paths = [row["input"], row.get("stem", "-"), *row.get("outputs", {}).values(), *row.get("written", {})]
            if row["status"] and all(map(is_inside, paths)):
                return row
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        pass  # an edited row
    return _damaged_row(os.fsdecode(name) if isinstance(name, bytes) else str(name))


def _damaged_row(name: str, part: str = "row") -> Row:
    remedy = "run the same command again" if part == "row" else "repeat the run with --overwrite"
    return failed_row({"input": name}, "DamagedRow", f"The {part} of this image in {FILE} is damaged: {remedy}.")


def is_inside(path: str) -> bool:
    """Return True if a path stays inside the folder that it is joined to.

    >>> is_inside("a/b.jpg"), is_inside("../b.jpg"), is_inside("/b.jpg")
    (True, False, False)
    """
    parts = path.replace(os.sep, "/").split("/")
    rooted = os.path.isabs(path) or os.path.splitdrive(path)[0]  # noqa: PTH117 - once per row and path
    return not rooted and ".." not in parts and parts[-1] not in ("", ".") and "\0" not in path


# -- fingerprints: a run is resumed only with options that give the same results

# Messages for differences whose values (hashes) mean nothing to a reader.
_MESSAGES = {
    "weights_sha256": "the model has other weights",
    "state_sha256": "the model has other code, attributes or hooks",
    "class_names": "the classes have other names",
    "outputs.state_sha256": "the function of the outputs was changed",
    "outputs.weights_sha256": "the function of the outputs has other weights",
    "outputs.reference.state_sha256": "the function subtracted from the outputs was changed",
    "outputs.reference.weights_sha256": "the function subtracted from the outputs has other weights",
    "outputs.vectors_sha256": "the prompts or reference images have other embeddings",
}


def run_fingerprint(
    kind: str, source: Mapping[str, Any], model: Mapping[str, Any], methods: Chosen, how: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that a run's results depend on, as JSON values.

    `kind` is "folder" or "evaluation", `source` identifies the images, `model` is the explainer's fingerprint, `how`
    has further options. The labels of the methods are distinct.
    """
    record = {
        "kind": kind,
        **source,
        **model,
        "methods": {choice.label: choice.name for choice in methods},
        "options": {choice.label: choice.options for choice in methods},
        **how,
    }
    plain: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return plain


def check_same_run(before: Mapping[str, Any], folder: object, fingerprint: Mapping[str, Any]) -> None:
    """Raise OptionError for a folder that contains a run with another fingerprint."""
    if before.get("kind") != fingerprint["kind"]:
        raise OptionError(f"The folder {str(folder)!r} contains the output of another command. {_REMEDY}")
    if different := "; ".join(fingerprint_difference(before, fingerprint)):
        raise OptionError(f"The folder {str(folder)!r} contains a run with other options: {different}. {_REMEDY}")


def fingerprint_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two runs' fingerprints.

    >>> fingerprint_difference({"fit": "crop", "options": {"rollout": {"residual": 0.5}}}, {"fit": "crop"})
    ['options.rollout.residual was 0.5 and is not set']
    >>> both = {"methods": {"rollout": "rollout", "gae": "gae"}, "options": {"rollout": {}, "gae": {"layer": 1}}}
    >>> fingerprint_difference(both, {"methods": {"rollout": "rollout"}, "options": {"rollout": {}}})
    ['methods was [rollout, gae] and is [rollout]']
    """
    had, has = (list(record.get("methods") or ()) for record in (old, new))
    differences = [f"methods was [{', '.join(had)}] and is [{', '.join(has)}]"] if had != has else []
    differing = set(had) ^ set(has)
    before, after = (
        {path: value for path, value in _leaves(record) if not differing.intersection(path)} for record in (old, new)
    )
    for path in dict.fromkeys([*before, *after]):
        if before.get(path, ...) != after.get(path, ...):
            name = ".".join(path)
            was, now = (repr(values[path]) if path in values else "not set" for values in (before, after))
            differences.append(_MESSAGES.get(name, f"{name} was {was} and is {now}"))
    return differences


def _leaves(record: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value
