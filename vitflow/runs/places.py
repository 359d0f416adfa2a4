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
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, BinaryIO, TypeVar
from weakref import finalize

from vitflow.errors import OptionError, VitflowError, printable
from vitflow.pictures.files import is_remote, stays_inside, write_atomically
from vitflow.runs.journal import Journal, json_line

T = TypeVar("T")

#: Bytes of a picture that is fetched: four times what the largest photographs of cameras take.
LARGEST_PICTURE = 2**28
# Seconds after which what a store is asked for is given up: of all of it, since the last bytes came, and once a run was
# interrupted.
_LONGEST, _STALLED, _HURRY = 600.0, 30.0, 2.0
_WATCH_EVERY = 0.1
_PIECE = 2**20

# Where a file that is put is there whole at once.
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"}
_PARTS = ".vitflow/journal-"
# What stores call the time of a file's last change, and what tells one content from another.
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modify", "created")
_TAGS = ("ETag", "etag", "Content-MD5", "Digest", "md5Hash", "sha", "CRC")


class StoreError(VitflowError, OSError):
    """A store did not do what it was asked for, or not in time."""


class TooLargeError(StoreError):
    """A store's file has more bytes than such a file may have."""


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path on it.

    Raises:
        OptionError: fsspec, or what it needs for such URLs, is not installed, or the store cannot be reached.
    """
    try:
        import fsspec
    except ImportError as error:
        raise OptionError(f"Paths such as {url!r} need fsspec: pip install 'vitflow[remote]'.") from error
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except Exception as error:  # a store's own errors are of many kinds
        raise OptionError(f"Cannot reach {printable(url)!r}: {reason_of(error)}") from error
    return found


def reason_of(error: BaseException) -> str:
    """What an error says, or its kind where it says nothing."""
    return printable(str(error).strip()) or type(error).__name__


def lies_in(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether a path or URL is a folder or lies in it, however the two are written.

    >>> lies_in("file:///photos/../photos/out", "/photos"), lies_in("/photos-2", "/photos")
    (True, False)
    """
    (own, inner), (its, outer) = (_place(os.fspath(one)) for one in (path, folder))
    return bool(own == its) and f"{inner}/".startswith(f"{outer.rstrip('/')}/")


def _place(path: str) -> tuple[Any, str]:
    """What a path is on, None for this machine's disk, and the path there in its shortest spelling."""
    if not is_remote(path):
        return None, os.path.realpath(path)
    system, found = file_system(path)
    return (None, os.path.realpath(found)) if "file" in _protocols(system) else (system, posixpath.normpath(found))


def _protocols(system: Any) -> tuple[str, ...]:
    return system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)


@dataclass(frozen=True, slots=True)
class Known:
    """What a store tells of a file without giving it; None where it does not.

    Attributes:
        size: in bytes.
        changed: when it was last changed, in nanoseconds.
        tag: a text that another content would not have.
    """

    size: int | None = None
    changed: int | None = None
    tag: str | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Known":
        """What the store's own facts say."""
        size, tag = facts.get("size"), next((facts[name] for name in _TAGS if facts.get(name)), None)
        return cls(None if size is None else int(size), _changed(facts), None if tag is None else str(tag))

    def same(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is of this very file, as far as both tell; never where nothing is told."""
        pairs = ((self.size, row["size"]), (self.changed, row["mtime_ns"]), (self.tag, row.get("etag")))
        told = [own == its for own, its in pairs if own is not None and its is not None]
        return bool(told) and all(told)


def _changed(facts: Mapping[str, Any]) -> int | None:
    """When a file was last changed, by whichever name its store has for it, in nanoseconds."""
    for name in _TIMES:
        value = facts.get(name)
        if isinstance(value, str):
            with suppress(ValueError):
                digits = f"{value[:14]}Z"  # of FTP, in UTC
                value = datetime.strptime(digits, "%Y%m%d%H%M%S%z") if value.isdigit() else parsedate_to_datetime(value)
        if isinstance(value, datetime):
            return round(value.timestamp() * 1e6) * 1000
        if isinstance(value, int | float):
            return round(value * 1e6) * 1000
    return None


class RemoteFolder:
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

    def __str__(self) -> str:
        return self.url

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
    def scratch(self) -> Path:
        """A folder on this machine for what is put together here; it is gone with this object."""
        place = Path(mkdtemp(prefix="vitflow-"))
        finalize(self, shutil.rmtree, place, ignore_errors=True)
        return place

    def hurry(self) -> None:
        """Have everything done or given up in a moment."""
        self.patience = min(self.patience, _HURRY)

    def _path(self, path: str) -> str:
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

    def put(self, path: str, content: bytes) -> None:
        """Write a file below the folder, whole or not at all."""
        target = self._path(path)

        def write(system: Any, _: object) -> None:
            if _WHOLE & set(_protocols(system)):
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
        target = self._path(path)

        def copy(system: Any, heard: Callable[[], None]) -> None:
            # As a stream: else a web server is asked for its pieces one by one, and for its length before.
            web: dict[str, Any] = {"block_size": 0, "size": 1} if "http" in _protocols(system) else {}
            count = 0
            with system.open(target, "rb", **web) as source:
                while piece := source.read(_PIECE):
                    heard()
                    count += len(piece)
                    if largest is not None and count > largest:
                        raise TooLargeError(f"Expected a file of at most {largest // 2**20} MiB, got more: {path!r}.")
                    file.write(piece)

        self._ask(f"read {path!r} from {self.url!r}", copy, _STALLED)

    def read(self, path: str, largest: int | None = None) -> bytes:
        """The content of a file below the folder; errors as for `fetch`."""
        file = io.BytesIO()
        self.fetch(path, file, largest)
        return file.getvalue()

    def known(self, path: str) -> Known | None:
        """What is known of a file below the folder; None where it is not there."""
        try:
            facts = self._ask(
                f"look for {path!r} in {self.url!r}", lambda system, _: system.info(self._path(path)), _STALLED
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
            found: Iterable[str] = system.find(self._path(folder), maxdepth=1)
            return found

        try:
            found = self._ask(f"list {folder!r} in {self.url!r}", find)
        except FileNotFoundError:
            return []
        return sorted(f"{folder}/{posixpath.basename(name)}" for name in found)

    def every(self) -> list[str]:
        """All files below the folder, as paths below it."""
        try:
            return [path for path, _ in self.listed()]
        except FileNotFoundError:
            return []

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
        return lambda system, _: system.rm_file(self._path(path))


class RemoteJournal(Journal):
    """A journal at a URL; a copy on this machine is read.

    Args:
        place: the output folder.
        accepts: as for `Journal`.
    """

    def __init__(self, place: RemoteFolder, accepts: Callable[[Mapping[str, Any]], bool]) -> None:
        self._place = place
        copy = place.scratch / ".vitflow" / "journal.jsonl"
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


#: Where files of a run go.
Place = Path | RemoteFolder


def put_file(output: Place, path: str, content: bytes) -> None:
    """Write a file below the output folder, whole or not at all, and never through a link that leads out of it.

    Raises:
        OSError: a link does, or the disk is full.
    """
    if isinstance(output, RemoteFolder):
        output.put(path, content)
        return
    if not stays_inside(output, path):
        raise OSError(f"a link leads out of the folder {str(output)!r}")
    with write_atomically(output / path) as file:
        file.write(content)


# Bytes of a file that is believed to be a shard.
_LARGEST = 2**28


def read_file(output: Path | RemoteFolder, path: str) -> bytes:
    """The content of a file below an output folder.

    Raises:
        OSError: it cannot be read, it is too large to be a shard, or a link leads out of the folder.
    """
    if isinstance(output, RemoteFolder):
        return output.read(path, _LARGEST)
    if not stays_inside(output, path):
        raise OSError(f"a link leads out of the folder {str(output)!r}")
    with (output / path).open("rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise OSError(f"more than {_LARGEST // 2**20} MiB")
    return content
