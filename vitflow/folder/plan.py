"""Plan a folder run: which files go in, and where each one's outputs go. Loads no torch."""

import fnmatch
import glob as globbing
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitflow.errors import ImageError, OptionError
from vitflow.files import is_folder, is_remote
from vitflow.folder.fetching import find_remote
from vitflow.pictures.images import is_image_name, natural_order
from vitflow.runs.remote import RemoteFolder
from vitflow.runs.stores import Known

# Longest file name that common file systems take, in bytes.
_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a run.

    Attributes:
        key: its path below the root, with slashes. Bytes that are not UTF-8 are kept as lone surrogates
            (Python's surrogateescape).
        path: where it is read.
        store: URL of the folder that it is read from, where that lies elsewhere; the path is then the key.
        stem: the outputs' path below the output folder, without "-method.suffix"; always valid UTF-8.
        problem: why it cannot be read, where that is known before.
        known: what the store's listing told of it.
    """

    key: str
    path: str
    stem: str
    problem: str | None = None
    store: str | None = None
    known: Known | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that a run reads, without the names of their outputs.

    Attributes:
        root: the folder that keys are relative to.
        output: where outputs go, in the tree of the inputs.
        files: (path, problem) by key, in natural order.
        real: where all files that were found really are, those beyond the run's limit, too.
        store: URL of the folder, where that lies elsewhere.
        known: what is known of the files of a store.
    """

    root: Path | str
    output: Path
    files: Mapping[str, tuple[str, str | None]]
    real: frozenset[str]
    store: str | None = None
    known: Mapping[str, Known] = field(default_factory=dict)

    def plan(self, endings: Sequence[str], taken: Mapping[str, str] | None = None) -> list[Input]:
        """Give each input its outputs: no two inputs claim one output, and no output is an input.

        Args:
            endings: what is appended to a stem for each output, such as "-rollout.jpg".
            taken: stems by key that an earlier run gave out.
        """
        name_for = _namer(self.output, endings, self.real, dict(taken or {}))
        return [
            Input(key, path, name_for(key), problem, self.store, self.known.get(key))
            for key, (path, problem) in self.files.items()
        ]


def list_inputs(
    sources: Iterable[str | os.PathLike[str]],
    output: Path,
    *,
    recursive: bool = False,
    glob: str | None = None,
    limit: int | None = None,
) -> Listing:
    """Find the inputs of a run in natural order.

    Hidden files and folders and the output folder are left out; links to folders are followed, each folder once.
    What has the name of a picture but is none, such as a folder `x.jpg` or a broken link, is an input too, and will
    fail with a row of its own.

    Args:
        sources: folders, files, or patterns with * where nothing has that very name; or one folder at a URL.
        output: where outputs go.
        recursive: look into the folders below, too.
        glob: take the files whose name, or path below the source, matches this pattern, whatever their suffix.
        limit: take no more than this many.

    Raises:
        OptionError: no sources, or an output folder that is a source.
        ImageError: there is nothing at a source, or no picture in any.
    """
    given = [os.fspath(source) for source in sources]
    if any(map(is_remote, given)):
        return _list_remote(given, output, recursive, glob, limit)
    paths = [found for source in given for found in _expand(source)]
    if not paths:
        raise OptionError("Expected at least one folder or picture, got none.")
    absolute = [os.path.abspath(path) for path in paths]  # noqa: PTH100 - links stay as they are written
    for path in absolute:
        if os.path.realpath(path) == os.path.realpath(output):
            raise OptionError(
                f"The output folder {str(output)!r} is also read from: choose another one, such as "
                f"{str(output / 'vitflow')!r}."
            )
    one_folder = len(absolute) == 1 and is_folder(absolute[0])
    root = absolute[0] if one_folder else os.path.commonpath(map(os.path.dirname, absolute))
    found: dict[str, tuple[str, str | None]] = {}
    for path in absolute:
        for file, problem in _files(path, recursive, glob, os.path.realpath(output)):
            found.setdefault(Path(os.path.relpath(file, root)).as_posix(), (file, problem))
    keys = _in_order(found, paths, recursive, glob)[:limit]
    real = frozenset(os.path.realpath(file) for file, _ in found.values())
    return Listing(Path(root), output, {key: found[key] for key in keys}, real)


def _in_order(found: Iterable[str], sources: Sequence[str], recursive: bool, glob: str | None) -> list[str]:
    keys = sorted(found, key=lambda key: ([natural_order(part) for part in key.split("/")], key))
    if not keys:
        below = "" if recursive else " Folders below are read with --recursive (recursive=True)."
        what = f"file that matches {glob!r}" if glob else "picture"
        raise ImageError(f"Expected at least one {what} in {', '.join(map(repr, sources))}, found none.{below}")
    return keys


def _list_remote(sources: Sequence[str], output: Path, recursive: bool, glob: str | None, limit: int | None) -> Listing:
    if len(sources) > 1:
        raise OptionError(
            f"Expected one folder where it is a URL, got {len(sources)}: {', '.join(map(repr, sources))}."
        )
    found = find_remote(sources[0], recursive)
    wanted = [
        key
        for key in found
        if not any(part.startswith(".") for part in key.split("/"))
        and _wanted(key.rpartition("/")[2], key, glob, folder=False)
    ]
    keys = _in_order(wanted, sources, recursive, glob)[:limit]
    url = RemoteFolder(sources[0]).url
    files = {key: (key, None) for key in keys}
    return Listing(url, output, files, frozenset(), url, {key: found[key] for key in keys})


def _expand(source: str) -> list[str]:
    if os.path.lexists(source):
        return [source]
    matches = sorted(globbing.glob(source, recursive=True)) if globbing.has_magic(source) else []  # noqa: PTH207
    if not matches:
        raise ImageError(f"Expected a folder or a picture, but there is nothing at {source!r}.")
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
            if not name.startswith(".") and _wanted(name, inside, glob, name in subfolders):
                yield path, None
        subfolders[:] = [name for name in subfolders if recursive and not name.startswith(".")]
    for problem in problems:
        yield str(problem.filename), f"Could not read this folder: {problem.strerror}."


def _wanted(name: str, inside: str, glob: str | None, folder: bool) -> bool:
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
