"""Plan a folder run: its inputs, the names of their outputs, and what an earlier run has done. Loads no torch."""

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

# Longest file name that common file systems take, in bytes.
_LONGEST_NAME = 255
# The names that stores have for the time of a file's last change.
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a run.

    Attributes:
        key: its path below the root, with slashes. Bytes that are not UTF-8 are kept as lone surrogates
            (Python's surrogateescape).
        path: the path or URL from which it is read.
        stem: the outputs' path below the output folder, without "-method.suffix"; always valid UTF-8.
        problem: why it cannot be read, if that is known before.
        listed: (size, time of the last change in nanoseconds) as a store lists it, None for what it does not list;
            the file of this machine is read for both.
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
        output: the folder for outputs, in the tree of the inputs.
        files: (path, problem) by key, in natural order.
        real: the real paths of all files that were found, those beyond the run's limit, too.
        listed: size and time by key, as a store lists them.
    """

    root: str
    output: Path
    files: Mapping[str, tuple[str, str | None]]
    real: frozenset[str] = frozenset()
    listed: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)

    def plan(self, endings: Sequence[str], taken: Mapping[str, str] | None = None) -> list[Input]:
        """Name the outputs of each input: no two inputs claim one output, and no output is an input.

        Args:
            endings: what is appended to a stem for each output, such as "-rollout.jpg".
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

    Hidden files and folders and the output folder are left out; links to folders are followed, each folder once.
    A folder `x.jpg` or a broken link has the name of an image: it is an input, too, and will fail with a row.

    Args:
        sources: a folder, a file, or a pattern with * if nothing has that very name, or several; or one folder at a
            URL.
        output: the folder for outputs.
        recursive: read the folders below, too.
        glob: take the files whose name, or path below the source, matches this pattern, whatever their suffix.
        limit: take no more than this number.

    Raises:
        OptionError: no sources, or an output folder that is a source.
        ImageError: there is nothing at a source, or no image in any.
    """
    several = [sources] if isinstance(sources, str | os.PathLike) else sources
    given = [os.fspath(source).removeprefix("file://") for source in several]
    if any(map(is_remote, given)):
        return _list_url(given, output, recursive, glob, limit)
    paths = [match for source in given for match in _expand(source)]
    if not paths:
        raise OptionError("Expected at least one folder or image, got none.")
    absolute = [os.path.abspath(path) for path in paths]  # noqa: PTH100 - links stay as they are written
    for path in absolute:
        if os.path.realpath(path) == os.path.realpath(output):
            raise OptionError(
                f"The output folder {str(output)!r} is also read from: choose another one, such as "
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
        below = "" if recursive else " Folders below are read with --recursive (recursive=True)."
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
    except Exception as error:  # a store's own errors are of many kinds
        reason = printable(str(error)) or type(error).__name__
        raise ImageError(f"Could not list {printable(url)!r}: {reason}.") from error
    base = f"{root.rstrip('/')}/"
    listed = {
        name.removeprefix(base): (facts.get("size"), _changed(facts))
        for name, facts in details.items()
        if name.startswith(base)
    }
    shown = [
        key
        for key in listed
        if not any(part.startswith(".") for part in key.split("/"))
        and _is_selected(key.rpartition("/")[2], key, glob, folder=False)
    ]
    keys = _in_order(shown, sources, recursive, glob)[:limit]
    return Listing(url, output, {key: (f"{url}/{key}", None) for key in keys}, listed=listed)


def _changed(facts: Mapping[str, Any]) -> int | None:
    """The time of a file's last change, in nanoseconds."""
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
    """(file, problem) for each input below a source; a file that is named itself is taken whatever its name."""
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
    """A function that gives each key a stem of its own, the one it had before if it had one."""
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
    for key, stem in taken.items():  # a record may have been edited: two inputs that share a stem have lost it
        if times[_folded(stem)] == 1 and free(stem) and len(stem.rpartition("/")[2].encode()) <= room:
            kept[key] = stem
            claimed.update(_folded(stem + ending) for ending in endings)

    def name_for(key: str) -> str:
        if key in kept:
            return kept[key]
        *folders, name = (_writable(part) for part in key.split("/"))
        first = os.path.splitext(name)[0] or name  # noqa: PTH122
        number, extra = 1, ""
        while True:
            stem = "/".join([*folders, first.encode()[: room - len(extra)].decode("utf-8", "ignore") + extra])
            if free(stem):
                break
            number += 1
            extra = f"-{number}"
        claimed.update(_folded(stem + ending) for ending in endings)
        return stem

    return name_for


def _folded(name: str) -> str:
    """One form for all names that some file system takes for the same."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _writable(name: str) -> str:
    """A name that every tool can show: what is not text, and control characters, become underscores."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace").replace("\ufffd", "_")
    return "".join("_" if unicodedata.category(char).startswith("C") else char for char in text)


# -- an earlier run in the output folder


def clear_outputs(rows: Iterable[Row], listing: Listing, endings: Sequence[str], *, overwrite: bool) -> None:
    """Make room for a run that begins anew: remove what an earlier one has made, if that may be.

    Raises:
        OptionError: a file that no run made is in the way, and may not be replaced.
    """
    output = listing.output
    if overwrite:
        for row in rows:
            # The files of an image are its stem and an ending each: no other file is removed, whatever a row says.
            paths = [*(row.get("outputs") or {}).values(), *(row.get("maps") or {}).values()]
            remove_inside(output, (path for path in paths if path.startswith(f"{row['stem']}-")))
        return
    names = (item.stem + ending for item in listing.plan(endings) for ending in endings)
    foreign = next((name for name in names if os.path.lexists(output / name)), None)
    if foreign is not None:
        raise OptionError(
            f"There is already a file {foreign!r} in {str(output)!r}, and no record of a run that made it. Choose "
            "another folder, or replace it with --overwrite (overwrite=True)."
        )


def done_before(inputs: Sequence[Input], run: "Run") -> set[str]:
    """The keys of the inputs that an earlier run has explained."""
    by_key = {item.key: item for item in inputs}
    return set(by_key) - set(run.missing(list(by_key), lambda row: _is_done(by_key[row["input"]], row, run.folder)))


def _is_done(item: Input, row: Mapping[str, Any], output: Path) -> bool:
    """Whether an earlier run explained this very file, and its outputs are still there."""
    if item.problem is not None or row["status"] != "explained" or row["stem"] != item.stem:
        return False
    pairs = zip(item.listed or _size_and_time(item.path), (row["size"], row["mtime_ns"]), strict=True)
    # Neither may be listed: then the file counts as the same, or a run on such a store could never be resumed.
    same = all(value == before for value, before in pairs if value is not None or item.listed is None)
    return same and all(_size_and_time(output / path)[0] == size for path, size in row["written"].items())


def _size_and_time(path: str | Path) -> tuple[int | None, int | None]:
    """The length of a file in bytes and the time of its last change; None if it is not there."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a name that may not be text
    except OSError:
        return None, None
    return status.st_size, status.st_mtime_ns
