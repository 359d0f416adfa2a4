"""Stores that lie elsewhere: what can go wrong with them, and what they tell of a file without giving it."""

import os
import posixpath
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from vitflow.errors import OptionError, VitflowError, load_extra, printable
from vitflow.files import is_remote

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
    fsspec = load_extra("fsspec", f"A path such as {url!r}", "remote")
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
    (own, inner), (its, outer) = (_place_of(os.fspath(one)) for one in (path, folder))
    return bool(own == its) and f"{inner}/".startswith(f"{outer.rstrip('/')}/")


def _place_of(path: str) -> tuple[Any, str]:
    """What a path is on, None for this machine's disk, and the path there in its shortest spelling."""
    if not is_remote(path):
        return None, os.path.realpath(path)
    system, found = file_system(path)
    return (None, os.path.realpath(found)) if "file" in protocols_of(system) else (system, posixpath.normpath(found))


def protocols_of(system: Any) -> tuple[str, ...]:
    """The names of a file system's kind."""
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
