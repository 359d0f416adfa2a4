"""Where a run's files go: a folder, and what is done in it; `vitflow.runs.remote` has that of one at a URL."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from vitflow.errors import OptionError
from vitflow.pictures.files import is_file, is_folder, is_link, is_there, remove_inside, stays_inside, write_atomically
from vitflow.runs.journal import Journal

#: Bytes of a file that is read whole: a shard takes less, and the largest photographs of cameras a quarter of it.
LARGEST = 2**28
_RECORD = ".vitflow"


class RunFolder:
    """The output folder of a run, and where things are in it.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self.address)

    @property
    def path(self) -> Path:
        """The folder on this machine in which files are put together."""
        return self._path

    @property
    def address(self) -> Path | str:
        """Where users find it."""
        return self._path

    def open_journal(self, accepts: Callable[[Mapping[str, Any]], bool]) -> Journal:
        """The journal, with the rows that are there."""
        return Journal(self.journal, accepts)

    def publish(self, path: Path) -> Path | str:
        """Where users find a file that was put together in `path`."""
        return path

    def hurry(self) -> None:
        """Have everything done or given up in a moment."""

    def put(self, path: str, content: bytes, *, durable: bool = False) -> None:
        """Write a file below the folder, whole or not at all, and never through a link that leads out of it.

        Args:
            path: of the file below the folder.
            content: of the file.
            durable: wait until a disk has it.

        Raises:
            OSError: a link does, or the disk is full.
        """
        with write_atomically(self._inside(path), durable=durable) as file:
            file.write(content)

    def read(self, path: str) -> bytes:
        """The content of a file below the folder.

        Raises:
            OSError: it cannot be read, it is too large to be a shard, or a link leads out of the folder.
        """
        with self._inside(path).open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise OSError(f"more than {LARGEST // 2**20} MiB")
        return content

    def _inside(self, path: str) -> Path:
        if not stays_inside(self._path, path):
            raise OSError(f"a link leads out of the folder {str(self)!r}")
        return self._path / path

    def length(self, path: str) -> int | None:
        """The length of a file below the folder in bytes; None where it is not there."""
        try:
            return (self._path / path).stat().st_size
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """The files in a folder below this one, as paths below this one."""
        return sorted(f"{folder}/{path.name}" for path in (self._path / folder).glob("*"))

    def first_of(self, paths: Iterable[str]) -> str | None:
        """The first of these paths at which there is a file."""
        return next((path for path in paths if os.path.lexists(os.path.join(self._path, path))), None)  # noqa: PTH118

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files below the folder, those that are there."""
        remove_inside(self._path, paths)

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.path / _RECORD / "journal.jsonl"

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
