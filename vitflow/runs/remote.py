"""Pictures and outputs that lie elsewhere: URLs such as s3://bucket/folder, through fsspec.

A file is written whole or not at all: an object store does so by itself, and elsewhere it is written beside its place
and moved there. There are no locks and no appending: the journal is a file of the earlier rows and one for each batch
of rows since, and that only one run works in a folder is for its users to see to.
"""

import io
import os
import posixpath
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, BinaryIO, TypeVar
from weakref import finalize

from vitflow.errors import VitflowError
from vitflow.pictures.files import is_remote
from vitflow.runs.journal import Journal, json_line
from vitflow.runs.places import LARGEST, RunFolder
from vitflow.runs.stores import Known, StoreError, TooLargeError, file_system, protocols_of, reason_of

T = TypeVar("T")

# Seconds after which what a store is asked for is given up: of all of it, since the last bytes came, and once a run was
# interrupted.
_LONGEST, _STALLED, _HURRY = 600.0, 30.0, 2.0
_WATCH_EVERY = 0.1
_PIECE = 2**20

# Where a file that is put is there whole at once.
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"}
_PARTS = ".vitflow/journal-"


class RemoteFolder(RunFolder):
    """A folder at a URL; small to pickle. What it is asked for is given up when it takes too long.

    Args:
        url: of the folder.

    Attributes:
        patience: seconds after which anything is given up; what runs already, too.
    """

    def __init__(self, url: str) -> None:
        scheme, mark, rest = url.partition("://")
        self.url = scheme + mark + (rest.rstrip("/") or rest[:1])
        self.patience = _LONGEST

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "patience": self.patience}

    @cached_property
    def _system(self) -> tuple[Any, str]:
        return file_system(self.url)

    @cached_property
    def _alone(self) -> Any:
        """Held by those that use a connection which several threads must not share."""
        return nullcontext() if self._system[0].async_impl else threading.Lock()

    @cached_property
    def path(self) -> Path:
        """A folder on this machine for what is put together here; it is gone with this object."""
        scratch = Path(mkdtemp(prefix="vitflow-"))
        finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        return scratch

    @property
    def address(self) -> str:
        """The URL."""
        return self.url

    def open_journal(self, accepts: Callable[[Mapping[str, Any]], bool]) -> Journal:
        """The journal, with the rows that are there."""
        return RemoteJournal(self, accepts)

    def publish(self, path: Path) -> str:
        """Put a file there that was put together here; its URL."""
        self.put(path.name, path.read_bytes())
        return f"{self.url}/{path.name}"

    def hurry(self) -> None:
        """Have everything done or given up in a moment."""
        self.patience = min(self.patience, _HURRY)

    def _at(self, path: str) -> str:
        root = self._system[1]
        return f"{root.rstrip('/')}/{path}" if root else path  # what lies in an archive has no root

    def _ask(self, what: str, work: Callable[[Any, Callable[[], None]], T], stalled: float | None = None) -> T:
        """What `work` gives, in time: it is called with the file system, and a function to call when something came.

        It runs in a thread that nobody waits for: no store of fsspec can be stopped.

        Raises:
            FileNotFoundError: there is no such file.
            StoreError: whatever else is wrong.
        """
        system, alone = self._system[0], self._alone
        done = threading.Event()
        found: list[T] = []
        failed: list[BaseException] = []
        began = time.monotonic()
        heard = [began]

        def run() -> None:
            try:
                with alone:
                    found.append(work(system, lambda: heard.__setitem__(0, time.monotonic())))
            except BaseException as error:
                failed.append(error)
            finally:
                done.set()

        threading.Thread(target=run, name="vitflow-store", daemon=True).start()
        while not done.wait(_WATCH_EVERY):
            now = time.monotonic()
            if now - began > self.patience or (stalled is not None and now - heard[0] > stalled):
                raise StoreError(f"Could not {what}: the store did not answer in time.")
        if not failed:
            return found[0]
        [error] = failed
        if isinstance(error, FileNotFoundError | VitflowError):
            raise error
        raise StoreError(f"Could not {what}: {reason_of(error)}.") from error

    def put(self, path: str, content: bytes, *, durable: bool = False) -> None:
        """Write a file below the folder, whole or not at all."""
        target = self._at(path)

        def write(system: Any, _: object) -> None:
            if _WHOLE & set(protocols_of(system)):
                system.pipe_file(target, content)
                return
            system.makedirs(posixpath.dirname(target), exist_ok=True)
            unfinished = posixpath.join(posixpath.dirname(target), f".vitflow-{secrets.token_hex(8)}.part")
            system.pipe_file(unfinished, content)
            system.mv(unfinished, target)

        try:
            self._ask(f"write {path!r} to {self.url!r}", write)
        except FileNotFoundError as error:
            raise StoreError(f"Could not write {path!r} to {self.url!r}: {reason_of(error)}.") from error

    def fetch(self, path: str, file: BinaryIO, largest: int | None = None) -> None:
        """Copy a file below the folder into one of this machine, piece by piece.

        Raises:
            FileNotFoundError: it is not there.
            TooLargeError: it has more bytes than the largest may have, whatever the store says of its length.
            StoreError: it cannot be read, or no more of it comes.
        """
        target = self._at(path)

        def copy(system: Any, heard: Callable[[], None]) -> None:
            # As a stream: else a web server is asked for its pieces one by one, and for its length before.
            web: dict[str, Any] = {"block_size": 0, "size": 1} if "http" in protocols_of(system) else {}
            count = 0
            with system.open(target, "rb", **web) as source:
                while piece := source.read(_PIECE):
                    heard()
                    count += len(piece)
                    if largest is not None and count > largest:
                        raise TooLargeError(f"Expected a file of at most {largest // 2**20} MiB, got more: {path!r}.")
                    file.write(piece)

        self._ask(f"read {path!r} from {self.url!r}", copy, _STALLED)

    def read(self, path: str) -> bytes:
        """The content of a file below the folder; errors as for `fetch`."""
        file = io.BytesIO()
        self.fetch(path, file, LARGEST)
        return file.getvalue()

    def known(self, path: str) -> Known | None:
        """What is known of a file below the folder; None where it is not there."""
        try:
            facts = self._ask(
                f"look for {path!r} in {self.url!r}", lambda system, _: system.info(self._at(path)), _STALLED
            )
        except FileNotFoundError:
            return None
        return Known.of(facts)

    def length(self, path: str) -> int | None:
        """Its length in bytes; None where it is not there."""
        found = self.known(path)
        return None if found is None else found.size

    def names(self, folder: str) -> list[str]:
        """The files in a folder below this one, as paths below this one."""

        def find(system: Any, _: object) -> Iterable[str]:
            system.invalidate_cache()
            found: Iterable[str] = system.find(self._at(folder), maxdepth=1)
            return found

        try:
            found = self._ask(f"list {folder!r} in {self.url!r}", find)
        except FileNotFoundError:
            return []
        return sorted(f"{folder}/{posixpath.basename(name)}" for name in found)

    def first_of(self, paths: Iterable[str]) -> str | None:
        """The first of these paths at which there is a file."""
        try:
            there = {path for path, _ in self.listed()}
        except FileNotFoundError:
            return None
        return next((path for path in paths if path in there), None)

    def listed(self, *, recursive: bool = True) -> list[tuple[str, Known]]:
        """The files below the folder, as paths below it, with what the listing tells of them.

        Raises:
            FileNotFoundError: there is no such folder.
            StoreError: it cannot be listed.
        """
        root, depth = self._system[1], None if recursive else 1
        found = self._ask(f"list {self.url!r}", lambda system, _: system.find(root, maxdepth=depth, detail=True))
        # The files of an archive have names without a slash before them.
        base = f"{root.rstrip('/')}/" if root.strip("/") else root
        return [
            (name.removeprefix(base).lstrip("/"), Known.of(facts))
            for name, facts in found.items()
            if name.startswith(base)
        ]

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files below the folder, those that are there."""
        for path in paths:
            if self.known(path) is not None:
                self._ask(f"remove {path!r} from {self.url!r}", self._removal(path))

    def _removal(self, path: str) -> Callable[[Any, object], None]:
        return lambda system, _: system.rm_file(self._at(path))


class RemoteJournal(Journal):
    """A journal at a URL; a copy on this machine is read.

    Args:
        place: the output folder.
        accepts: as for `Journal`.
    """

    def __init__(self, place: RemoteFolder, accepts: Callable[[Mapping[str, Any]], bool]) -> None:
        self._place = place
        copy = place.path / ".vitflow" / "journal.jsonl"
        copy.parent.mkdir(parents=True, exist_ok=True)
        self._parts = [name for name in place.names(".vitflow") if name.startswith(_PARTS)]
        whole = [".vitflow/journal.jsonl"] if place.length(".vitflow/journal.jsonl") is not None else []
        with copy.open("wb") as file:
            for name in [*whole, *self._parts] if whole else []:
                place.fetch(name, file)
        super().__init__(copy, accepts)

    def start(self, header: Mapping[str, Any]) -> None:
        """Begin anew, with nothing done."""
        super().start(header)
        self._put_whole()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows, to be found again by their "input"; a later row replaces an earlier one."""
        rows = list(rows)
        super().append(rows)
        if rows:
            # Numbers that go on from those that are there: read in the order of their names.
            number = int(self._parts[-1][len(_PARTS) :].split(".")[0]) + 1 if self._parts else 1
            self._parts.append(f"{_PARTS}{number:08}.jsonl")
            self._place.put(self._parts[-1], b"".join(map(json_line, rows)))

    def compact(self, keys: Iterable[str]) -> None:
        """Write the journal anew, as `Journal.compact` does."""
        super().compact(keys)
        self._put_whole()

    def _put_whole(self) -> None:
        self._place.put(".vitflow/journal.jsonl", self.path.read_bytes())
        self._place.remove(self._parts)
        self._parts = []


def open_folder(output: str | os.PathLike[str]) -> RunFolder:
    """The output folder at a path or a URL."""
    return RemoteFolder(os.fspath(output)) if is_remote(output) else RunFolder(Path(output))
