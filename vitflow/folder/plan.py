"""Plan a folder run: its inputs, the names of their outputs, and the inputs that are done. Does not import torch."""

import glob
import itertools
import os
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitflow.errors import ImageError, OptionError, VitflowWarning, load_extra, printable, whole_number
from vitflow.files import (
    is_folder,
    is_image_name,
    is_remote,
    natural_order,
    remove_inside,
    unread_in_words,
    unread_suffix,
)
from vitflow.folder.columns import Row

# Maximal length of a file name on common file systems, in bytes.
_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a run.

    `key` is its path relative to the root, with slashes; `stem` is the path of its outputs in the output folder without
    "-method.suffix", in valid UTF-8; `listed` is the size and modification time in a store, in nanoseconds.
    """

    key: str
    path: str
    stem: str
    listed: tuple[int | None, int | None] | None = None

    @property
    def known(self) -> Row:
        """The columns of its row that are known before it is read."""
        times = {} if self.listed is None else {"mtime_ns": self.listed[1]}
        return {"input": self.key, "stem": self.stem} | times


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that a run reads, as paths or URLs by key in natural order, without the names of their outputs.

    `real` has the real paths of all matching files, also those beyond the run's limit; `listed` is size and time in a
    store; `unread` is the number of image files that are left out, by suffix.
    """

    root: str
    output: Path
    files: Mapping[str, str]
    real: frozenset[str] = frozenset()
    listed: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)
    unread: Mapping[str, int] = field(default_factory=dict)

    def plan(self, endings: Sequence[str], taken: Mapping[str, str] | None = None) -> list[Input]:
        """Name the outputs of each input: no two inputs claim one output, and no output is an input.

        `endings` are the suffixes of a stem, such as "-rollout.jpg"; `taken` are the stems of an earlier run by key.
        """
        base, claimed = os.path.realpath(self.output), set[str]()
        room = _LONGEST_NAME - max(len(ending.encode()) for ending in endings)

        def claim(stem: str) -> bool:
            names = {_folded(stem + ending) for ending in endings}
            if names & claimed or any(os.path.join(base, stem + ending) in self.real for ending in endings):  # noqa: PTH118
                return False
            claimed.update(names)
            return True

        stems = {key: stem for key, stem in (taken or {}).items() if claim(stem)}
        for key in self.files:
            if key not in stems:
                stems[key] = next(filter(claim, _stems(key, room)))
        return [Input(key, path, stems[key], self.listed.get(key)) for key, path in self.files.items()]


def list_inputs(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    recursive: bool = False,
    limit: int | None = None,
    urls: bool = False,
) -> Listing:
    """Find the inputs of a run in natural order.

    Hidden files, hidden folders and the output folder are skipped; links to folders are followed, each folder once.
    A folder `x.jpg` or a broken link with the name of an image is an input, too, and its row will have an error. With
    `urls`, a source may be the URL of a folder.
    """
    if is_remote(output):
        raise OptionError(
            f"Expected a local output folder, got {os.fspath(output)!r}: copy the folder there afterwards."
        )
    if limit is not None:
        whole_number("limit", limit, 1)
    output = Path(output)
    items = [sources] if isinstance(sources, str | os.PathLike) else sources
    given = [os.fspath(source).removeprefix("" if urls else "file://") for source in items]
    if url := next(filter(is_remote, given), None):
        if not urls:
            raise OptionError(
                f"A local run reads local files, not {printable(url)!r}: copy them (aws s3 sync {url} images/), mount "
                "them, or use --engine ray (engine='ray')."
            )
        return _list_url(given, output, recursive, limit)
    paths = [match for source in given for match in _expand(source)]
    if not paths:
        raise OptionError("Expected at least one folder or image, got none.")
    absolute = [os.path.abspath(path) for path in paths]  # noqa: PTH100 - links are not resolved
    for path in absolute:
        if os.path.realpath(path) == os.path.realpath(output):
            other = str(output / "vitflow")
            raise OptionError(
                f"The output folder {str(output)!r} is also a source: choose another one, such as {other!r}."
            )
    one_folder = len(absolute) == 1 and is_folder(absolute[0])
    root = absolute[0] if one_folder else os.path.commonpath(map(os.path.dirname, absolute))
    files: dict[str, str] = {}
    unread, real_output = Counter[str](), os.path.realpath(output)
    for path in absolute:
        for file in _files(path, recursive, real_output, unread):
            files.setdefault(Path(os.path.relpath(file, root)).as_posix(), file)
    notes = [unread_in_words(unread)] if unread else []
    deeper = (file for path in absolute for file in _files(path, True, real_output, Counter()))
    left_out = (Path(os.path.relpath(file, root)) for file in deeper)
    if not recursive and any("masks" not in path.parts and path.as_posix() not in files for path in left_out):
        notes.append("Images in subfolders are left out: --recursive (recursive=True) includes them.")
    keys = _in_order(files, paths, notes)[:limit]
    for note in notes:
        warnings.warn(note, VitflowWarning, stacklevel=3)
    real = frozenset(map(os.path.realpath, files.values()))
    return Listing(root, output, {key: files[key] for key in keys}, real, unread=dict(sorted(unread.items())))


def _in_order(keys: Iterable[str], sources: Sequence[str], notes: Sequence[str]) -> list[str]:
    """Return the keys in natural order; ImageError with the notes if there are none."""
    ordered = sorted(keys, key=lambda key: ([natural_order(part) for part in key.split("/")], key))
    if not ordered:
        first = f"Expected at least one image in {', '.join(map(repr, sources))}, got none."
        raise ImageError(" ".join((first, *notes)))
    return ordered


def _list_url(sources: Sequence[str], output: Path, recursive: bool, limit: int | None) -> Listing:
    if len(sources) > 1:
        raise OptionError(f"Expected a URL as the only source, got {len(sources)}: {', '.join(map(repr, sources))}.")
    url, mark, options = sources[0].partition("?")
    url, options = url.rstrip("/"), mark + options
    filesystem, root = open_url(url + options)
    try:
        from pyarrow.fs import FileSelector

        files = [info for info in filesystem.get_file_info(FileSelector(root, recursive=recursive)) if info.is_file]
    except Exception as error:  # stores raise errors of many types
        raise ImageError(f"Could not list {printable(url)!r}: {printable(str(error))}.") from error
    listed = {info.path[len(root.rstrip("/")) + 1 :]: (info.size, info.mtime_ns) for info in files}
    visible = [key for key in listed if not any(part.startswith(".") for part in key.split("/")[:-1])]
    unread = Counter[str]()
    selected = [key for key in visible if _is_input(key.rpartition("/")[2], unread)]
    if note := unread_in_words(unread):
        warnings.warn(note, VitflowWarning, stacklevel=4)
    notes = () if recursive else ("--recursive (recursive=True) includes subfolders.",)
    keys = _in_order(selected, sources, notes)[:limit]
    urls = {key: f"{url}/{quote(key)}{options}" for key in keys}
    return Listing(url + options, output, urls, listed=listed, unread=dict(sorted(unread.items())))


def open_url(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, as Ray Data opens it, and the path in it."""
    filesystems = load_extra("pyarrow.fs", f"A source such as {printable(url)!r}", "ray")
    try:
        result: tuple[Any, str] = filesystems.FileSystem.from_uri(url)
    except Exception as error:
        raise OptionError(f"Cannot open {printable(url)!r}: {printable(str(error))}") from error
    return result


def _expand(source: str) -> list[str]:
    if os.path.lexists(source):
        return [source]
    matches = sorted(glob.glob(source, recursive=True)) if glob.has_magic(source) else []  # noqa: PTH207
    if not matches:
        raise ImageError(f"Expected a folder or an image, but there is nothing at {source!r}.")
    return matches


def _files(source: str, recursive: bool, output: str, unread: Counter[str]) -> Iterator[str]:
    """Yield each input of a source; `unread` counts hidden images, and other formats by suffix."""
    if not is_folder(source):
        yield source
        return
    unreadable: list[OSError] = []
    visited: set[tuple[int, int]] = set()
    for folder, subfolders, names in os.walk(source, onerror=unreadable.append, followlinks=True):
        status = os.stat(folder)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in visited or os.path.realpath(folder) == output:
            subfolders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        for name in (*names, *subfolders):
            if _is_input(name, unread, folder=name in subfolders):
                yield os.path.join(folder, name)  # noqa: PTH118
        subfolders[:] = [name for name in subfolders if recursive and not name.startswith(".")]
    yield from (str(error.filename) for error in unreadable)


def _is_input(name: str, unread: Counter[str], *, folder: bool = False) -> bool:
    """Return True for the name of an input; count an image file that is left out."""
    if not is_image_name(name) and not folder and (suffix := unread_suffix(name)):
        unread[suffix] += 1
    return is_image_name(name)


def _stems(key: str, room: int) -> Iterator[str]:
    """Yield possible stems of a key with names of at most `room` bytes: its path without suffix, then numbered."""
    *folders, name = (_writable(part) for part in key.split("/"))
    first = os.path.splitext(name)[0] or name  # noqa: PTH122
    for count in itertools.count(1):
        extra = f"-{count}" if count > 1 else ""
        yield "/".join([*folders, first.encode()[: room - len(extra)].decode("utf-8", "ignore") + extra])


def _folded(name: str) -> str:
    """Return the same form for all names that some file system treats as equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _writable(name: str) -> str:
    """Return a printable name: bytes that are not UTF-8, and control characters, become underscores."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace").replace("\ufffd", "_")
    return "".join("_" if unicodedata.category(char).startswith("C") else char for char in text)


# -- an earlier run in the output folder


def clear_outputs(rows: Iterable[Row], listing: Listing, endings: Sequence[str], *, overwrite: bool) -> None:
    """Remove the outputs of an earlier run; without `overwrite`, refuse to replace files that no run has written."""
    output = listing.output
    if overwrite:
        for row in rows:
            # Rows are untrusted: remove only files whose names consist of the stem and an ending.
            remove_inside(output, (path for path in row.get("written", {}) if path.startswith(f"{row.get('stem')}-")))
        return
    names = (item.stem + ending for item in listing.plan(endings) for ending in endings)
    foreign = next((name for name in names if os.path.lexists(output / name)), None)
    if foreign is not None:
        raise OptionError(
            f"{str(output)!r} already has a file {foreign!r}, which is not from a recorded run: choose another one, or "
            "--overwrite (overwrite=True)."
        )


def remove_orphans(rows: Iterable[Row], listing: Listing) -> str:
    """Remove unchanged outputs of inputs that no longer exist; return a note, empty if there are none.

    Their rows stay in the store: an input that returns is explained again.
    """
    removed = []
    for row in rows:
        gone = row["input"] not in listing.files and not os.path.lexists(os.path.join(listing.root, row["input"]))  # noqa: PTH118
        # Rows are untrusted: see `clear_outputs`.
        written = [path for path in row.get("written", {}) if path.startswith(f"{row.get('stem')}-")] if gone else []
        written = [path for path in written if _size_and_time(listing.output / path)[0] == row["written"][path]]
        remove_inside(listing.output, written)
        removed += [row["input"]] * bool(written)
    more = f" and {len(removed) - 3} more" if len(removed) > 3 else ""
    names = ", ".join(map(printable, removed[:3]))
    return f"Outputs of inputs that no longer exist are removed ({names}{more})." if removed else ""


def is_done(item: Input, row: Mapping[str, Any], output: Path) -> bool:
    """Return True if neither an explained file nor its outputs have changed since an earlier run."""
    if row.get("stem") != item.stem:
        return False
    same = (item.listed or _size_and_time(item.path)) == (row["size"], row["mtime_ns"])
    return same and all(_size_and_time(output / path)[0] == size for path, size in row["written"].items())


def _size_and_time(path: str | Path) -> tuple[int | None, int | None]:
    """Return the size of a file in bytes and its modification time in nanoseconds; None if it does not exist."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a name that may not be text
    except OSError:
        return None, None
    return status.st_size, status.st_mtime_ns
