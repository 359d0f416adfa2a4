"""Pictures and outputs that lie elsewhere: URLs such as s3://bucket/folder, through fsspec.

A file is written whole or not at all: an object store does so by itself, and elsewhere it is written beside its place
and moved there. There are no locks and no appending: the journal is a file of the earlier rows and one for each batch
of rows since, and that only one run works in a folder is for its users to see to.
"""

import posixpath
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any
from weakref import finalize

from vitflow.errors import ImageError, OptionError, printable
from vitflow.folder.decoders import Decoded, DecoderPool
from vitflow.folder.journal import Journal, json_line

# Where a file that is put is there whole at once.
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"}
_PARTS = ".vitflow/journal-"


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path on it.

    Raises:
        OptionError: fsspec, or what it needs for such URLs, is not installed.
    """
    try:
        import fsspec
    except ImportError as error:
        raise OptionError(f"Paths such as {url!r} need fsspec: pip install 'vitflow[remote]'.") from error
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise OptionError(f"Cannot reach {url!r}: {error}") from error
    return found


class RemoteFolder:
    """A folder at a URL; small to pickle.

    Args:
        url: of the folder.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}

    @cached_property
    def _system(self) -> tuple[Any, str]:
        return file_system(self.url)

    @cached_property
    def scratch(self) -> Path:
        """A folder on this machine for what is put together here; it is gone with this object."""
        place = Path(mkdtemp(prefix="vitflow-"))
        finalize(self, shutil.rmtree, place, ignore_errors=True)
        return place

    def _path(self, path: str) -> str:
        return f"{self._system[1].rstrip('/')}/{path}"

    def put(self, path: str, content: bytes) -> None:
        """Write a file below the folder, whole or not at all."""
        system, target = self._system[0], self._path(path)
        protocols = system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)
        if _WHOLE & set(protocols):
            system.pipe_file(target, content)
            return
        system.makedirs(posixpath.dirname(target), exist_ok=True)
        unfinished = posixpath.join(posixpath.dirname(target), f".vitflow-{secrets.token_hex(8)}.part")
        system.pipe_file(unfinished, content)
        system.mv(unfinished, target)

    def read(self, path: str) -> bytes:
        """The content of a file below the folder."""
        content: bytes = self._system[0].cat_file(self._path(path))
        return content

    def length(self, path: str) -> int | None:
        """Its length in bytes; None where it is not there."""
        try:
            size: int | None = self._system[0].info(self._path(path))["size"]
        except OSError:
            return None
        return size

    def names(self, folder: str) -> list[str]:
        """The files in a folder below this one, as paths below this one."""
        system = self._system[0]
        system.invalidate_cache()
        try:
            found = system.find(self._path(folder), maxdepth=1)
        except OSError:
            return []
        return sorted(f"{folder}/{posixpath.basename(name)}" for name in found)

    def every(self) -> list[str]:
        """All files below the folder, as paths below it."""
        system, root = self._system[0], self._path("")
        try:
            return [name.removeprefix(root) for name in system.find(root)]
        except OSError:
            return []

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files below the folder, those that are there."""
        for path in paths:
            if self.length(path) is not None:
                self._system[0].rm_file(self._path(path))


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
                file.write(place.read(name))
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


def find_remote(source: str, recursive: bool) -> dict[str, tuple[str, int, int | None]]:
    """The files below a URL: (URL, size, time of the last change in nanoseconds) by their path below it.

    Raises:
        ImageError: there is nothing there.
    """
    system, root = file_system(source)
    try:
        found = system.find(root, maxdepth=None if recursive else 1, detail=True)
    except (OSError, ValueError) as error:
        raise ImageError(f"Could not list {source!r}: {error}.") from error
    if not found:
        raise ImageError(f"Expected a folder with pictures, but there is nothing at {source!r}.")
    base = root.rstrip("/") + "/"
    return {
        name.removeprefix(base): (system.unstrip_protocol(name), int(facts["size"] or 0), _changed(facts))
        for name, facts in found.items()
        if name.startswith(base)
    }


def _changed(facts: Mapping[str, Any]) -> int | None:
    """When a file was last changed, by whichever name its store has for it, in nanoseconds."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = facts.get(name)
        if isinstance(value, datetime):
            return round(value.timestamp() * 1e6) * 1000
        if isinstance(value, int | float):
            return round(value * 1e6) * 1000
    return None


class Fetcher:
    """Brings files to this machine one by one, for the decoders to read.

    Args:
        decoders: the processes that read.
    """

    def __init__(self, decoders: DecoderPool) -> None:
        self._decoders = decoders
        self._scratch = TemporaryDirectory(prefix="vitflow-")
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="vitflow-fetch")

    def submit(self, url: str, changed: int | None) -> "Future[Decoded]":
        """Have a file fetched and read; the future never raises for what is wrong with the file."""
        return self._threads.submit(self._fetch, url, changed)

    def _fetch(self, url: str, changed: int | None) -> Decoded:
        place = Path(self._scratch.name, secrets.token_hex(8))
        try:
            system, path = file_system(url)
            content = system.cat_file(path)
            place.mkdir()
            copy = place / (posixpath.basename(path)[-200:] or "picture")
            copy.write_bytes(content)
            return replace(self._decoders.submit(str(copy)).result(), mtime_ns=changed)
        except Exception as error:  # a store's own errors are of many kinds
            return Decoded(
                mtime_ns=changed,
                error=type(error).__name__,
                message=f"Could not read {printable(url)!r}: {printable(str(error)) or type(error).__name__}.",
            )
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def close(self) -> None:
        """Stop at once."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._scratch.cleanup()
