"""Plan a folder run: its inputs, the names of their outputs, and the inputs that are done. Does not import torch."""

import fnmatch
import glob as globbing
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitflow.errors import ImageError, OptionError, printable
from vitflow.files import is_folder, is_image_name, is_remote, natural_order, remove_inside
from vitflow.folder.decoders import file_system
from vitflow.runs.columns import Row

if TYPE_CHECKING:
    from vitflow.runs.store import Run

# Maximal length of a file name on common file systems, in bytes.
_LONGEST_NAME = 255
# The names of a file's modification time in stores.
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a run.

    Attributes:
        key: its path relative to the root, with slashes. Bytes that are not UTF-8 are kept as lone surrogates
            (Python's surrogateescape).
        path: the path or URL from which it is read.
        stem: the outputs' path relative to the output folder, without "-method.suffix"; always valid UTF-8.
        problem: the reason why it cannot be read, if known in advance.
        listed: (size, modification time in nanoseconds) as listed by a store, each None if not listed; None for local
            files.
    """

    key: str
    path: str
    stem: str
    problem: str | None = None
    listed: tuple[int | None, int | None] | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that a run reads, without the names of their outputs.

    Attributes:
        root: the folder or URL that keys are relative to.
        output: the output folder, which mirrors the folders of the inputs.
        files: (path, problem) by key, in natural order.
        real: the real paths of all matching files, including those beyond the run's limit.
        listed: size and modification time by key, as listed by a store.
    """

    root: str
    output: Path
    files: Mapping[str, tuple[str, str | None]]
    real: frozenset[str] = frozenset()
    listed: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)

    def plan(self, endings: Sequence[str], taken: Mapping[str, str] | None = None) -> list[Input]:
        """Name the outputs of each input: no two inputs claim one output, and no output is an input.

        Args:
            endings: suffixes of a stem, one for each output, such as "-rollout.jpg".
            taken: stems by key from an earlier run.
        """
        name_for = _namer(self.output, endings, self.real, dict(taken or {}))
        return [
            Input(key, path, name_for(key), problem, self.listed.get(key))
            for key, (path, problem) in self.files.items()
        ]


def list_inputs(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: Path,
    *,
    recursive: bool = False,
    glob: str | None = None,
    limit: int | None = None,
) -> Listing:
    """Find the inputs of a run in natural order.

    Hidden files, hidden folders and the output folder are skipped; links to folders are followed, each folder once.
    A folder `x.jpg` or a broken link with the name of an image is an input, too, and its row will have an error.

    Args:
        sources: a folder, a file, a pattern with * (if no file has that exact name), or several of them; or one folder
            at a URL.
        output: the output folder.
        recursive: include subfolders.
        glob: select the files whose name, or path relative to the source, matches this pattern, with any suffix.
        limit: maximal number of inputs.

    Raises:
        OptionError: no sources, or the output folder is a source.
        ImageError: a source does not exist, or no source has an image.
    """
    items = [sources] if isinstance(sources, str | os.PathLike) else sources
    given = [os.fspath(source).removeprefix("file://") for source in items]
    if any(map(is_remote, given)):
        return _list_url(given, output, recursive, glob, limit)
    paths = [match for source in given for match in _expand(source)]
    if not paths:
        raise OptionError("Expected at least one folder or image, got none.")
    absolute = [os.path.abspath(path) for path in paths]  # noqa: PTH100 - links are not resolved
    for path in absolute:
        if os.path.realpath(path) == os.path.realpath(output):
            raise OptionError(
                f"The output folder {str(output)!r} is also a source: choose another one, such as "
                f"{str(output / 'vitflow')!r}."
            )
    one_folder = len(absolute) == 1 and is_folder(absolute[0])
    root = absolute[0] if one_folder else os.path.commonpath(map(os.path.dirname, absolute))
    files: dict[str, tuple[str, str | None]] = {}
    for path in absolute:
        for file, problem in _files(path, recursive, glob, os.path.realpath(output)):
            files.setdefault(Path(os.path.relpath(file, root)).as_posix(), (file, problem))
    keys = _in_order(files, paths, recursive, glob)[:limit]
    real = frozenset(os.path.realpath(file) for file, _ in files.values())
    return Listing(root, output, {key: files[key] for key in keys}, real)


def _in_order(keys: Iterable[str], sources: Sequence[str], recursive: bool, glob: str | None) -> list[str]:
    ordered = sorted(keys, key=lambda key: ([natural_order(part) for part in key.split("/")], key))
    if not ordered:
        below = "" if recursive else " --recursive (recursive=True) includes subfolders."
        what = f"file that matches {glob!r}" if glob else "image"
        raise ImageError(f"Expected at least one {what} in {', '.join(map(repr, sources))}, found none.{below}")
    return ordered


def _list_url(sources: Sequence[str], output: Path, recursive: bool, glob: str | None, limit: int | None) -> Listing:
    if len(sources) > 1:
        raise OptionError(f"Expected a URL as the only source, got {len(sources)}: {', '.join(map(repr, sources))}.")
    url = sources[0].rstrip("/")
    system, root = file_system(url)
    try:
        details = system.find(root, maxdepth=None if recursive else 1, detail=True)
    except Exception as error:  # stores raise errors of many types
        reason = printable(str(error)) or type(error).__name__
        raise ImageError(f"Could not list {printable(url)!r}: {reason}.") from error
    base = f"{root.rstrip('/')}/"
    listed = {
        name.removeprefix(base): (facts.get("size"), _changed(facts))
        for name, facts in details.items()
        if name.startswith(base)
    }
    selected = [
        key
        for key in listed
        if not any(part.startswith(".") for part in key.split("/"))
        and _is_selected(key.rpartition("/")[2], key, glob, folder=False)
    ]
    keys = _in_order(selected, sources, recursive, glob)[:limit]
    return Listing(url, output, {key: (f"{url}/{key}", None) for key in keys}, listed=listed)


def _changed(facts: Mapping[str, Any]) -> int | None:
    """Return a file's modification time in nanoseconds, None if it is not listed."""
    value = next((facts[name] for name in _TIMES if facts.get(name) is not None), None)
    value = value.timestamp() if isinstance(value, datetime) else value
    return round(value * 1e6) * 1000 if isinstance(value, int | float) else None


def _expand(source: str) -> list[str]:
    if os.path.lexists(source):
        return [source]
    matches = sorted(globbing.glob(source, recursive=True)) if globbing.has_magic(source) else []  # noqa: PTH207
    if not matches:
        raise ImageError(f"Expected a folder or an image, but there is nothing at {source!r}.")
    return matches


def _files(source: str, recursive: bool, glob: str | None, output: str) -> Iterator[tuple[str, str | None]]:
    """Yield (file, problem) for each input of a source; a file given as source may have any name."""
    if not is_folder(source):
        yield source, None
        return
    problems: list[OSError] = []
    visited: set[tuple[int, int]] = set()
    for folder, subfolders, names in os.walk(source, onerror=problems.append, followlinks=True):
        status = os.stat(folder)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in visited or os.path.realpath(folder) == output:
            subfolders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        for name in (*names, *subfolders):
            path = os.path.join(folder, name)  # noqa: PTH118
            inside = os.path.relpath(path, source)
            if not name.startswith(".") and _is_selected(name, inside, glob, name in subfolders):
                yield path, None
        subfolders[:] = [name for name in subfolders if recursive and not name.startswith(".")]
    for problem in problems:
        yield str(problem.filename), f"Could not read this folder: {problem.strerror}."


def _is_selected(name: str, inside: str, glob: str | None, folder: bool) -> bool:
    if glob is None:
        return is_image_name(name)
    return not folder and (fnmatch.fnmatch(name, glob) or fnmatch.fnmatch(Path(inside).as_posix(), glob))


def _namer(
    output: Path, endings: Sequence[str], inputs: frozenset[str], taken: Mapping[str, str]
) -> Callable[[str], str]:
    """Return a function from keys to unique stems, which keeps the stems of an earlier run."""
    claimed: set[str] = set()
    base = os.path.realpath(output)
    room = _LONGEST_NAME - max(len(ending.encode()) for ending in endings)

    def free(stem: str) -> bool:
        return not any(
            _folded(stem + ending) in claimed or os.path.join(base, stem + ending) in inputs  # noqa: PTH118
            for ending in endings
        )

    kept: dict[str, str] = {}
    times = Counter(map(_folded, taken.values()))
    for key, stem in taken.items():  # in an edited record, inputs may share a stem: assign new ones
        if times[_folded(stem)] == 1 and free(stem) and len(stem.rpartition("/")[2].encode()) <= room:
            kept[key] = stem
            claimed.update(_folded(stem + ending) for ending in endings)

    def name_for(key: str) -> str:
        if key in kept:
            return kept[key]
        *folders, name = (_writable(part) for part in key.split("/"))
        first = os.path.splitext(name)[0] or name  # noqa: PTH122
        count, extra = 1, ""
        while True:
            stem = "/".join([*folders, first.encode()[: room - len(extra)].decode("utf-8", "ignore") + extra])
            if free(stem):
                break
            count += 1
            extra = f"-{count}"
        claimed.update(_folded(stem + ending) for ending in endings)
        return stem

    return name_for


def _folded(name: str) -> str:
    """Return the same form for all names that some file system treats as equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _writable(name: str) -> str:
    """Return a printable name: bytes that are not UTF-8, and control characters, become underscores."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace").replace("\ufffd", "_")
    return "".join("_" if unicodedata.category(char).startswith("C") else char for char in text)


# -- an earlier run in the output folder


def clear_outputs(rows: Iterable[Row], listing: Listing, endings: Sequence[str], *, overwrite: bool) -> None:
    """Remove the outputs of an earlier run before a new one, if `overwrite` permits.

    Raises:
        OptionError: a file that no run has written would be replaced without `overwrite`.
    """
    output = listing.output
    if overwrite:
        for row in rows:
            # Rows are untrusted: remove only files whose names consist of the stem and an ending.
            paths = [*(row.get("outputs") or {}).values(), *(row.get("maps") or {}).values()]
            remove_inside(output, (path for path in paths if path.startswith(f"{row['stem']}-")))
        return
    names = (item.stem + ending for item in listing.plan(endings) for ending in endings)
    foreign = next((name for name in names if os.path.lexists(output / name)), None)
    if foreign is not None:
        raise OptionError(
            f"{str(output)!r} already has a file {foreign!r}, which is not from a recorded run. Choose another folder, "
            "or replace it with --overwrite (overwrite=True)."
        )


def done_before(inputs: Sequence[Input], run: "Run") -> set[str]:
    """Return the keys of the inputs that an earlier run has explained."""
    by_key = {item.key: item for item in inputs}
    return set(by_key) - set(run.missing(list(by_key), lambda row: _is_done(by_key[row["input"]], row, run.folder)))


def _is_done(item: Input, row: Mapping[str, Any], output: Path) -> bool:
    """Return True if an earlier run explained this file, and neither the file nor its outputs have changed."""
    if item.problem is not None or row["status"] != "explained" or row["stem"] != item.stem:
        return False
    pairs = zip(item.listed or _size_and_time(item.path), (row["size"], row["mtime_ns"]), strict=True)
    # If a store lists neither, the file counts as unchanged; otherwise the run could never be resumed.
    same = all(value == before for value, before in pairs if value is not None or item.listed is None)
    return same and all(_size_and_time(output / path)[0] == size for path, size in row["written"].items())


def _size_and_time(path: str | Path) -> tuple[int | None, int | None]:
    """Return the size of a file in bytes and its modification time in nanoseconds; None if it does not exist."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a name that may not be text
    except OSError:
        return None, None
    return status.st_size, status.st_mtime_ns
