"""What a run over many pictures remembers, so that the same command goes on where a run was ended.

One run at a time works in an output folder, and only one that would give the same results goes on with its rows. Folder
runs and evaluations are kept alike.
"""

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from vitflow.errors import OptionError, VitflowError
from vitflow.pictures.files import is_file, is_folder, is_link, is_remote, is_there, write_atomically
from vitflow.runs.fingerprints import check_same_run
from vitflow.runs.journal import Journal
from vitflow.runs.places import RemoteFolder, RemoteJournal, StoreError

_RECORD = ".vitflow"
# Distributions whose versions a run's record tells.
_DISTRIBUTIONS = ("vitflow", "torch", "timm", "numpy", "opencv-python-headless", "pillow")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The output folder of a run, and where things are in it.

    Attributes:
        path: the folder; of one that is elsewhere, a folder on this machine for what is put together here.
        remote: the folder that is elsewhere.
    """

    path: Path
    remote: RemoteFolder | None = None

    @property
    def place(self) -> Path | RemoteFolder:
        """Where the run's files go."""
        return self.remote or self.path

    def open_journal(self, accepts: Callable[[Mapping[str, Any]], bool]) -> Journal:
        """The journal, with the rows that are there."""
        return Journal(self.journal, accepts) if self.remote is None else RemoteJournal(self.remote, accepts)

    def publish(self, path: Path) -> Path | str:
        """Where users find a file that was put together: in a folder that is elsewhere it is put there first."""
        if self.remote is None:
            return path
        self.remote.put(path.name, path.read_bytes())
        return f"{self.remote}/{path.name}"

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.path / _RECORD / "journal.jsonl"

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
        place = self.path / _RECORD
        for path, is_ours in ((place, is_folder), (self.journal, is_file), (place / "lock", is_file)):
            if is_link(path) or (is_there(path) and not is_ours(path)):
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


def open_folder(output: str | os.PathLike[str]) -> RunFolder:
    """The output folder at a path or a URL."""
    if not is_remote(output):
        return RunFolder(Path(output))
    remote = RemoteFolder(os.fspath(output))
    return RunFolder(remote.scratch, remote)


@contextmanager
def keep_rows(
    folder: RunFolder,
    header: Mapping[str, Any],
    accepts: Callable[[Mapping[str, Any]], bool],
    *,
    overwrite: bool,
    clear: Callable[[Journal], None] = lambda _: None,
) -> Iterator[Journal]:
    """The journal of a run, with the rows of an earlier one that computed the same; the folder is locked meanwhile.

    Args:
        folder: the output folder.
        header: the journal's first line; "run" in it is the fingerprint.
        accepts: says of a row whether this run could have written it.
        overwrite: begin anew, whatever run the folder holds.
        clear: called with the journal that was there before a run begins anew.

    Raises:
        OptionError: the folder holds another run, another one is working in it, or it cannot be written to.
    """
    with folder.lock():
        journal = folder.open_journal(accepts)
        if journal.header is None or overwrite:
            clear(journal)
            try:
                journal.start(header)
            except StoreError as error:
                raise OptionError(
                    f"The output folder {str(folder.place)!r} cannot be written to: {error} Choose another one with -o "
                    "(output=…)."
                ) from error
        else:
            check_same_run(journal.header, folder.place, header["run"])
            journal.header = dict(header)  # what no row depends on may have changed; it is written at the end
        folder.remove_leftovers()
        yield journal


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Where a run stands, for a progress callback: called at the start (without a row), then once per picture.

    Attributes:
        done: pictures with a row, those of earlier runs included.
        total: pictures of the run.
        row: the newest row.
        under_way: how many more pictures' worth of work is done, as far as it is known. Methods that take long are told
            of in between, without a row.
    """

    done: int
    total: int
    row: Mapping[str, Any] | None
    under_way: float = 0.0


class Tally:
    """Counts the pictures of a run that have a row, and tells a callback where the run stands."""

    def __init__(self, tell: Callable[[RunProgress], None] | None, total: int, done: int = 0) -> None:
        self._tell, self._total, self.done = tell, total, done
        self.share(0.0)

    def row(self, row: Mapping[str, Any], under_way: float = 0.0) -> None:
        """One more picture has a row."""
        self.done += 1
        self._say(row, under_way)

    def share(self, under_way: float) -> None:
        """So many more pictures' worth of work is done."""
        self._say(None, under_way)

    def _say(self, row: Mapping[str, Any] | None, under_way: float) -> None:
        if self._tell is not None:
            self._tell(RunProgress(self.done, self._total, row, under_way))


def versions() -> dict[str, str]:
    """The versions of what a run's results come from."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # built another way, such as opencv without its wheel
            continue
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


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write one JSON object, whole or not at all."""
    with write_atomically(path, durable=True) as file:
        file.write(json.dumps(record, indent=2).encode("ascii") + b"\n")
