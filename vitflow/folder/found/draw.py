"""Draw what a run has found, for the pictures that are asked for: grids first, overlays on demand."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, ShapeError, VitflowError, VitflowWarning, check_known, printable, whole_number
from vitflow.explaining.saliency import Saliency
from vitflow.folder.decoders import decode_file, decode_given
from vitflow.folder.found.conditions import misspelt, parse_condition
from vitflow.folder.rows import open_run
from vitflow.folder.shards import ShardReader
from vitflow.folder.work import encode_overlay
from vitflow.pictures.files import is_remote
from vitflow.pictures.options import OVERLAY_FORMATS
from vitflow.runs.grids import Grid, placement_of
from vitflow.runs.journal import Journal
from vitflow.runs.places import RunFolder
from vitflow.runs.remote import RemoteFolder, open_folder

# A picture's row and its maps by their labels.
Explained = tuple[dict[str, Any], Mapping[str, Grid]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What became of one picture that was to be drawn.

    Attributes:
        input: its name in the run.
        paths: the overlays that were written.
        error: why there are none.
    """

    input: str
    paths: tuple[Path, ...] = ()
    error: str | None = None


def read_grids(run: str | os.PathLike[str], where: str | None = None) -> Iterator[Explained]:
    """Read the maps of a run back: (row, maps by their labels) for each explained picture, in the order of the inputs.

    Args:
        run: the output folder of `explain_folder`, whatever it stores.
        where: take the pictures for which this holds, such as "probability < 0.5".

    Raises:
        OptionError: the folder holds no run, or the condition is none.
        VitflowError: a file with maps is gone or damaged.

    >>> import tempfile
    >>> from vitflow.demo import SAMPLE_FOLDER
    >>> from vitflow.folder.run import explain_folder
    >>> summary = explain_folder(SAMPLE_FOLDER, tempfile.mkdtemp(), model="demo", store="grids", limit=3)
    >>> [maps["rollout"].shape for row, maps in read_grids(summary.output, "probability > 0")]
    [(12, 12), (12, 12), (12, 12)]
    """
    folder = open_folder(run)
    journal, _, _ = open_run(folder)
    yield from _maps(folder, journal, where)


def _maps(folder: RunFolder, journal: Journal, where: str | None) -> Iterator[Explained]:
    holds = parse_condition(where) if where else None
    reader = ShardReader(folder.read)
    for row in journal.latest():
        if row["status"] == "explained" and (holds is None or holds(row)):
            yield row, reader.maps(row)


def draw_run(
    run: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    where: str | None = None,
    methods: Sequence[str] | None = None,
    limit: int | None = None,
    format: str | None = None,
    drawing: Mapping[str, Any] | None = None,
    images: str | os.PathLike[str] | None = None,
    progress: Callable[[Drawn], None] = lambda _: None,
) -> list[Drawn]:
    """Draw overlays of the pictures of a run into a folder, named as the run would have named them.

    Args:
        run: the output folder of `explain_folder`.
        output: where the overlays go.
        where: draw the pictures for which this holds, such as "probability < 0.5 and class_name != 'cat'".
        methods: the maps to draw, by their labels; by default all of the run.
        limit: draw the first so many only, at least 1.
        format: "jpg", "png" or "webp"; by default what the run was asked for.
        drawing: options of `Saliency.overlay`, which come before those that the run was asked for.
        images: folder or URL of the photographs; by default the folder that the run read. A URL is never taken from
            the record of a run, which anybody may have written: it must be named here.
        progress: called for each picture as it is done.

    Raises:
        OptionError: the folder holds no run, an option is wrong, or the photographs lie at a URL that was not named.
        VitflowError: a file with maps is gone or damaged.
    """
    if limit is not None:
        limit = min(whole_number("limit", limit, 1), sys.maxsize)
    folder, target = open_folder(run), RunFolder(Path(output))
    journal, asked, max_pixels = open_run(folder)
    if images is None and is_remote(asked["root"]):
        raise OptionError(not_named(asked["root"]))
    source = asked["root"] if images is None else os.fspath(images)
    root = os.path.realpath(source)
    labels = list(asked["methods"]) if methods is None else list(methods)
    for label in labels:
        check_known("map of this run", label, asked["methods"])
    format = format or asked["format"]
    if format not in OVERLAY_FORMATS:
        raise OptionError(f"Expected a format of {', '.join(OVERLAY_FORMATS)}, got {format!r}.")
    options = {**asked["drawing"], **(drawing or {})}

    def draw(row: Mapping[str, Any], maps: Mapping[str, Grid]) -> Drawn:
        try:
            pixels, placement = read_photograph(row, source, max_pixels), placement_of(row["placement"])
            paths = []
            for label in labels:
                saliency = Saliency(maps[label], placement, pixels, row["input"], asked["model"], label, {})
                path = f"{row['stem']}-{label}.{format}"
                if os.path.relpath(os.path.realpath(target.path / path), root) in journal:
                    raise ShapeError(f"The overlay {path!r} would replace a photograph: choose another folder with -o.")
                target.put(path, encode_overlay(saliency.overlay(**options), format))
                paths.append(target.path / path)
            return Drawn(row["input"], tuple(paths))
        except OptionError:
            raise  # of every picture
        except (VitflowError, OSError, KeyError) as error:
            return Drawn(row["input"], error=printable(str(error)))

    found = []
    for drawn in _side_by_side(draw, islice(_maps(folder, journal, where), limit)):
        found.append(drawn)
        progress(drawn)
    if where and not found:
        for told in misspelt(where, (row for row in journal.latest() if row["status"] == "explained")):
            warnings.warn(told, VitflowWarning, stacklevel=2)
    return found


def not_named(url: str) -> str:
    """Why photographs are not fetched from a URL that the record of a run alone names."""
    return (
        f"The record of this run says that its photographs lie at {printable(url)!r}, and nothing is fetched because a "
        "record says so: name that place with vitflow draw --images URL (images=…) if you trust it."
    )


def read_photograph(row: Mapping[str, Any], root: str, max_pixels: int) -> NDArray[np.uint8]:
    """The pixels of the very file that was explained, uint8 RGB [height, width, 3].

    Args:
        row: of the picture.
        root: the folder or URL that the run read.
        max_pixels: pictures of more pixels are refused.

    Raises:
        VitflowError: it cannot be read, or is another one now.
    """
    if is_remote(root):
        decoded = decode_given(RemoteFolder(root).read(row["input"]), row["input"], max_pixels)
    else:
        decoded = decode_file(os.path.join(root, row["input"]), max_pixels)  # noqa: PTH118 - a name that may not be text
    if decoded.image is None:
        raise VitflowError(decoded.message)
    if decoded.sha256 != row["sha256"] or decoded.image.shape[:2] != (row["height"], row["width"]):
        raise ShapeError("The photograph has changed since the run: run vitflow folder again.")
    return decoded.image


def _side_by_side(
    draw: Callable[[Mapping[str, Any], Mapping[str, Grid]], Drawn], found: Iterable[Explained]
) -> Iterator[Drawn]:
    """Draw on every core, in order, with a few pictures in memory at once."""
    count = os.cpu_count() or 1
    with ThreadPoolExecutor(count, thread_name_prefix="vitflow-draw") as threads:
        ahead: list[Future[Drawn]] = []
        for row, maps in found:
            ahead.append(threads.submit(draw, row, maps))
            if len(ahead) > 2 * count:
                yield ahead.pop(0).result()
        for future in ahead:
            yield future.result()
