"""Outputs from the maps of a run: overlays, and the notebook display."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitflow.errors import ImageError, OptionError, ShapeError, VitflowError, check_known, printable, whole_number
from vitflow.explaining.saliency import Saliency
from vitflow.files import in_file_name, is_remote, write_inside
from vitflow.folder.columns import Maps, Row, placement_of
from vitflow.folder.decoders import decode_file
from vitflow.folder.saved import SavedRun
from vitflow.folder.work import Job, SaliencyMaps, in_order
from vitflow.images import OVERLAY_FORMATS, WRITE_OPTIONS
from vitflow.images.geometry import place
from vitflow.images.pen import Pen
from vitflow.images.reading import read_image


@dataclass(frozen=True, slots=True)
class Drawn:
    """The overlays of an image, or its error.

    Attributes:
        input: its name in the run.
        paths: the written overlays.
        error: the error message if there are none.
    """

    input: str
    paths: tuple[Path, ...] = ()
    error: str | None = None


def draw_files(folder: Path, row: Row, maps: SaliencyMaps, job: Job) -> Row:
    """Write the overlays of an image below the output folder, and return its row with their paths and sizes."""
    started = time.perf_counter()
    drawn = maps if job.overlays else {}
    outputs = {label: f"{row['stem']}-{in_file_name(label)}.{job.format}" for label in drawn}
    written = {outputs[label]: write_overlay(folder, outputs[label], drawn[label], **job.drawing) for label in drawn}
    seconds = round(row["seconds"] + time.perf_counter() - started, 4)
    return row | {"outputs": outputs, "written": written, "seconds": seconds}


def check_drawing(drawing: Mapping[str, Any], format: str) -> None:
    """Raise OptionError for options of overlays that are invalid or do not suit the format."""
    pen, grid = Pen(None, **drawing), np.eye(2, dtype=np.float32)
    pen.overlay(grid, place((8, 8), (8, 8)), np.zeros((8, 8, 3), np.uint8), pen.limits(grid))
    if pen.transparent and format == "jpg":
        raise OptionError("JPEG has no transparency: use format png or webp, or another background than none.")


def write_overlay(folder: Path, path: str, saliency: Saliency, **drawing: Any) -> int:
    """Draw an overlay, write it below a folder in the format of the suffix, and return the size of the file in bytes.

    Pillow encodes a JPEG into a file without holding Python's lock, which it holds for a buffer in memory.
    """
    overlay = Image.fromarray(saliency.overlay(**drawing))
    with write_inside(folder, path) as file:
        overlay.save(file, **WRITE_OPTIONS[Path(path).suffix])
        return file.seek(0, os.SEEK_END)


@contextlib.contextmanager
def open_run(folder: str | os.PathLike[str]) -> Iterator[SavedRun]:
    """Open a folder run; OptionError for the output of another command."""
    with SavedRun(folder) as run:
        needed = {"root", "model", "format", "methods", "options", "drawing"}
        if run.fingerprint.get("kind") != "folder" or not needed <= run.fingerprint.keys():
            raise OptionError(f"No intact folder run in {os.fspath(folder)!r}: pass the output folder of one.")
        yield run


def read_grids(run: str | os.PathLike[str], where: str | None = None) -> Iterator[tuple[Row, Maps]]:
    """Read the maps of a run: (row, maps by label) for each explained image, in the order of the inputs.

    Args:
        run: the output folder of `explain_folder`.
        where: SQL condition that selects images, such as "probability < 0.5".

    Raises:
        OptionError: the folder has no run, the run is damaged, or the condition is invalid.

    >>> import tempfile
    >>> from vitflow.demo import SAMPLE_FOLDER
    >>> from vitflow.folder.run import explain_folder
    >>> summary = explain_folder(SAMPLE_FOLDER, tempfile.mkdtemp(), model="demo", overlays=False, limit=3)
    >>> [maps["rollout"].shape for row, maps in read_grids(summary.output, "probability > 0")]
    [(12, 12), (12, 12), (12, 12)]
    """
    with SavedRun(run) as saved:
        yield from explained(saved, where)


def explained(run: SavedRun, where: str | None) -> Iterator[tuple[Row, Maps]]:
    """Yield the rows of explained images with their maps."""
    return ((row, maps) for row, maps in run.with_maps(where=where) if row["status"] == "explained")


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
    """Draw overlays of a run's images into a folder, with the same names as in a folder run.

    Args:
        run: the output folder of `explain_folder`.
        output: the folder for the overlays.
        where: SQL condition that selects images, such as "probability < 0.5 AND class_name != 'cat'".
        methods: labels of the maps to draw; by default all maps of the run.
        limit: maximal number of images, at least 1.
        format: "jpg", "png" or "webp"; by default that of the run.
        drawing: options of `Saliency.overlay`, which override those of the run.
        images: local folder of the images; by default the folder that the run read.
        progress: called for each image when it is done.

    Raises:
        OptionError: the folder has no run, its record is damaged, or an option is invalid.
    """
    if limit is not None:
        limit = min(whole_number("limit", limit, 1), sys.maxsize)
    with open_run(run) as saved:
        settings, folder = saved.fingerprint, Path(output)
        source = settings["root"] if images is None else os.fspath(images)
        root = os.path.realpath(source)
        labels = list(settings["methods"]) if methods is None else list(methods)
        for label in labels:
            check_known("map of this run", label, settings["methods"])
        format = format or settings["format"]
        check_known("format", format, OVERLAY_FORMATS)
        options = {**settings["drawing"], **(drawing or {})}
        check_drawing(options, format)
        names = saved.names()

        def draw(row: Row, maps: Maps) -> Drawn:
            try:
                pixels = read_photograph(row, source)
                paths = []
                for label in maps:
                    if label not in labels:
                        continue
                    placement = placement_of(row["placement"], label)
                    saliency = Saliency(
                        maps[label],
                        placement,
                        pixels,
                        row["input"],
                        settings["model"],
                        settings["methods"][label],
                        {},
                    )
                    path = f"{row['stem']}-{in_file_name(label)}.{format}"
                    if os.path.relpath(os.path.realpath(folder / path), root) in names:
                        raise ShapeError(f"The overlay {path!r} would overwrite an input: choose another folder (-o).")
                    write_overlay(folder, path, saliency, **options)
                    paths.append(folder / path)
                return Drawn(row["input"], tuple(paths))
            except OptionError:
                raise  # applies to every image
            except (VitflowError, OSError, KeyError) as error:
                return Drawn(row["input"], error=printable(str(error)))

        results, cores = [], os.cpu_count() or 1
        with ThreadPoolExecutor(cores, thread_name_prefix="vitflow-draw") as threads:
            rows = islice(explained(saved, where), limit)
            for drawn in in_order((threads.submit(draw, *pair) for pair in rows), 2 * cores):
                results.append(drawn)
                progress(drawn)
        return results


def read_photograph(row: Mapping[str, Any], root: str) -> NDArray[np.uint8]:
    """Read the image of a row below the run's root, uint8 RGB [height, width, 3]; VitflowError if it has changed."""
    if is_remote(root):
        raise ImageError(
            f"The images of this run are at {printable(root)!r}: pass a local copy with --images (images=…)."
        )
    decoded = decode_file(f"{root.rstrip('/')}/{row['input']}")
    if decoded.row.get("sha256") not in (None, row["sha256"]):
        raise ShapeError("The image has changed since the run: run vitflow folder again.")
    if decoded.image is None:
        raise ImageError(decoded.row["message"])
    if decoded.image.shape[:2] != (row["height"], row["width"]):
        raise ShapeError(f"The image does not have the size in its row, {row['width']} × {row['height']} pixels.")
    return decoded.image


# -- the display in a notebook

# Maximal number of images in a notebook display.
_SHOWN = 6


def show_run(text: str, output: Path, rows: Iterable[Row]) -> Any:
    """Return a figure with the first overlay of each of the first images."""
    from vitflow.images.figures import NOTEBOOK_DPI, NOTEBOOK_WIDTH, Cell, Column, bundle, draw_bands

    pen, columns, overlays = Pen(NOTEBOOK_WIDTH, dpi=NOTEBOOK_DPI), [], []
    for row in islice(rows, _SHOWN):
        for label, file in list(row.get("outputs", {}).items())[:1]:
            with contextlib.suppress(ImageError):  # the file may have been moved
                overlay = pen.photograph(read_image(output / file))
                columns.append(Column(Path(row["input"]).name, label))
                overlays.append([Cell(overlay, (str(row["class_name"] or ""),))])
    return bundle(text, draw_bands([(columns, [overlays])], dpi=NOTEBOOK_DPI) if columns else None)
