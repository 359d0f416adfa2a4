"""What is made of the maps that a run keeps: overlays, its report, and its display in a notebook."""

import contextlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import (
    ImageError,
    OptionError,
    ShapeError,
    VitflowError,
    VitflowWarning,
    check_known,
    printable,
    whole_number,
)
from vitflow.explaining.captions import departures
from vitflow.explaining.method_table import get_method
from vitflow.explaining.saliency import Saliency
from vitflow.files import is_remote, write_inside
from vitflow.folder.decoders import decode_file
from vitflow.folder.work import encode_overlay
from vitflow.images import OVERLAY_FORMATS
from vitflow.images.pen import Pen
from vitflow.images.reading import read_image
from vitflow.runs.columns import Maps, Row, placement_of
from vitflow.runs.saved import FILE, SavedRun

# What a run must have been asked for to be drawn.
_RUN = {"root": str, "model": str, "format": str, "fit": str, "methods": dict, "options": dict, "drawing": dict}
# Options of the drawing that are not text.
_DRAWING = {"alpha": (int, float), "vmin": (int, float), "vmax": (int, float), "contours": (bool,)}
# Classes that are listed.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Drawn:
    """What became of one image that was to be drawn.

    Attributes:
        input: its name in the run.
        paths: the overlays that were written.
        error: why there are none.
    """

    input: str
    paths: tuple[Path, ...] = ()
    error: str | None = None


def open_run(folder: str | os.PathLike[str]) -> SavedRun:
    """The folder run in a folder, checked as far as drawing it needs.

    Raises:
        OptionError: there is no folder run, or its record is damaged.
    """
    run = SavedRun(folder) if Path(folder, FILE).is_file() else None
    if run is None or run.fingerprint.get("kind") != "folder":
        raise OptionError(
            f"There is no folder run in {os.fspath(folder)!r}: make one with vitflow folder IN -o OUT, and name OUT."
        )
    settings = run.fingerprint
    known = all(isinstance(settings.get(name), kind) for name, kind in _RUN.items()) and run.max_pixels
    if not known or not all(
        value is None or isinstance(value, _DRAWING.get(name, (str,))) for name, value in settings["drawing"].items()
    ):
        raise OptionError(
            f"The record of the run in {os.fspath(folder)!r} is damaged: do it again with vitflow folder --overwrite."
        )
    return run


def read_grids(run: str | os.PathLike[str], where: str | None = None) -> Iterator[tuple[Row, Maps]]:
    """Read the maps of a run back: (row, maps by their labels) for each explained image, in the order of the inputs.

    Args:
        run: the output folder of `explain_folder`.
        where: take the images for which this SQL expression holds, such as "probability < 0.5".

    Raises:
        OptionError: the folder holds no run, its record is damaged, or the condition is wrong.

    >>> import tempfile
    >>> from vitflow.demo import SAMPLE_FOLDER
    >>> from vitflow.folder.run import explain_folder
    >>> summary = explain_folder(SAMPLE_FOLDER, tempfile.mkdtemp(), model="demo", overlays=False, limit=3)
    >>> [maps["rollout"].shape for row, maps in read_grids(summary.output, "probability > 0")]
    [(12, 12), (12, 12), (12, 12)]
    """
    with open_run(run) as saved:
        yield from _explained(saved, where)


def _explained(run: SavedRun, where: str | None) -> Iterator[tuple[Row, Maps]]:
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
    """Draw overlays of the images of a run into a folder, named as the run would have named them.

    Args:
        run: the output folder of `explain_folder`.
        output: where the overlays go.
        where: draw the images for which this SQL expression holds, such as
            "probability < 0.5 AND class_name != 'cat'".
        methods: the maps to draw, by their labels; by default all of the run.
        limit: draw the first so many only, at least 1.
        format: "jpg", "png" or "webp"; by default what the run was asked for.
        drawing: options of `Saliency.overlay`, which come before those that the run was asked for.
        images: folder or URL of the photographs; by default the folder that the run read. A URL is never taken from
            the record of a run, which anybody may have written: it must be named here.
        progress: called for each image as it is done.

    Raises:
        OptionError: the folder holds no run, its record is damaged, an option is wrong, or the photographs are at a URL
            that was not named.
    """
    if limit is not None:
        limit = min(whole_number("limit", limit, 1), sys.maxsize)
    with open_run(run) as saved:
        settings, folder = saved.fingerprint, Path(output)
        if images is None and is_remote(settings["root"]):
            raise OptionError(not_named(settings["root"]))
        source = settings["root"] if images is None else os.fspath(images)
        root = os.path.realpath(source)
        labels = list(settings["methods"]) if methods is None else list(methods)
        for label in labels:
            check_known("map of this run", label, settings["methods"])
        format = format or settings["format"]
        if format not in OVERLAY_FORMATS:
            raise OptionError(f"Expected a format of {', '.join(OVERLAY_FORMATS)}, got {format!r}.")
        options = {**settings["drawing"], **(drawing or {})}

        names = saved.names()

        def draw(row: Row, maps: Maps) -> Drawn:
            try:
                pixels = read_photograph(row, source, saved.max_pixels)
                placement = placement_of(row["placement"])
                paths = []
                for label in labels:
                    saliency = Saliency(maps[label], placement, pixels, row["input"], settings["model"], label, {})
                    path = f"{row['stem']}-{label}.{format}"
                    if os.path.relpath(os.path.realpath(folder / path), root) in names:
                        raise ShapeError(
                            f"The overlay {path!r} would replace a photograph: choose another folder with -o."
                        )
                    write_inside(folder, path, encode_overlay(saliency.overlay(**options), format))
                    paths.append(folder / path)
                return Drawn(row["input"], tuple(paths))
            except OptionError:
                raise  # of every image
            except (VitflowError, OSError) as error:
                return Drawn(row["input"], error=printable(str(error)))
            except KeyError as error:
                return Drawn(row["input"], error=f"The record of this image has no {error}.")

        results = []
        for drawn in _in_parallel(draw, islice(_explained(saved, where), limit)):
            results.append(drawn)
            progress(drawn)
        if where and not results:
            _hint(where, sorted(saved.classes()))
        return results


def _hint(where: str, classes: Sequence[str]) -> None:
    """Warn of text in a condition that is close to the name of a class."""
    for text in re.findall(r"'((?:[^']|'')*)'", where):
        close = [] if text in classes else get_close_matches(text, classes, n=1)
        if close:
            known = f"{', '.join(classes[:_SHOWN])}{', …' if len(classes) > _SHOWN else ''}"
            note = f"No image has the class {text!r}. Did you mean {close[0]!r}? Known: {known}."
            warnings.warn(printable(note), VitflowWarning, stacklevel=3)


def not_named(url: str) -> str:
    """Why photographs are not fetched from a URL that the record of a run alone names."""
    return (
        f"The record of this run says that its photographs lie at {printable(url)!r}, and nothing is fetched because a "
        "record says so: name that place with vitflow draw --images URL (images=…) if you trust it."
    )


def read_photograph(row: Mapping[str, Any], root: str, max_pixels: int) -> NDArray[np.uint8]:
    """The pixels of the very file that was explained, uint8 RGB [height, width, 3].

    Args:
        row: of the image.
        root: the folder or URL that the run read.
        max_pixels: images of more pixels are refused.

    Raises:
        VitflowError: it cannot be read, or is another one now.
    """
    decoded = decode_file(f"{root.rstrip('/')}/{row['input']}", max_pixels)
    if decoded.image is None:
        raise VitflowError(decoded.message)
    if decoded.sha256 != row["sha256"] or decoded.image.shape[:2] != (row["height"], row["width"]):
        raise ShapeError("The photograph has changed since the run: run vitflow folder again.")
    return decoded.image


def _in_parallel(draw: Callable[[Row, Maps], Drawn], rows: Iterable[tuple[Row, Maps]]) -> Iterator[Drawn]:
    """Draw on every core, in order, with a few images in memory at once."""
    count = os.cpu_count() or 1
    with ThreadPoolExecutor(count, thread_name_prefix="vitflow-draw") as threads:
        ahead: list[Future[Drawn]] = []
        for row, maps in rows:
            ahead.append(threads.submit(draw, row, maps))
            if len(ahead) > 2 * count:
                yield ahead.pop(0).result()
        for future in ahead:
            yield future.result()


class Thumbnails:
    """The photographs that a run has in hand, made small for its report, so that none is decoded twice.

    They wait in a file without a name, which is gone with the run however it ends; in memory are their places alone.

    Args:
        folder: where there is room for the file.
    """

    def __init__(self, folder: Path) -> None:
        self._file = SpooledTemporaryFile(1, "w+b", dir=str(folder))  # noqa: SIM115 - made at the first, closed with the run
        self._places: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def add(self, key: str, pixels: NDArray[np.uint8]) -> None:
        """Keep an input's photograph; on a full disk it will be decoded again."""
        from vitflow.viewer.pages import thumbnail  # loads matplotlib, as all of the viewer

        small = thumbnail(pixels)
        with self._lock, contextlib.suppress(OSError):
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(small)
            self._file.flush()
            self._places[key] = (place, len(small))

    def get(self, key: str) -> bytes | None:
        """The photograph of an input as JPEG; None where the run did not have it in hand."""
        if key not in self._places:
            return None
        place, length = self._places[key]
        self._file.seek(place)
        return self._file.read(length)

    def close(self) -> None:
        """Give the room on the disk back."""
        self._file.close()


def report_run(
    output: str | os.PathLike[str],
    *,
    thumbnails: Thumbnails | None = None,
    **options: Any,
) -> Path:
    """Write the report of the run in a folder, `report.html` and further pages; the first page's path.

    Args:
        output: the run's output folder.
        thumbnails: the photographs that need not be read again.
        options: per_page and embed_bytes as for `vitflow.viewer.report.write_report`.

    Raises:
        OptionError: the folder holds no run, or its record is damaged.
    """
    from vitflow.viewer.pages import thumbnail
    from vitflow.viewer.report import write_report

    with open_run(output) as saved:
        run = saved.fingerprint
        states = {row["input"]: row["status"] for row in saved.rows()}

        def photograph(row: Mapping[str, Any]) -> bytes:
            if thumbnails is not None and (small := thumbnails.get(row["input"])) is not None:
                return small
            if is_remote(run["root"]):
                raise ImageError(not_named(run["root"]))
            return thumbnail(read_photograph(row, run["root"], saved.max_pixels))

        def rows(keys: Iterable[str]) -> Iterator[dict[str, Any]]:
            for row, maps in saved.with_maps(keys):
                window = placement_of(row["placement"]).window if row["status"] == "explained" else None
                yield row | {"grids": maps, "window": window}

        notes = {label: _departures(run, label) for label in run["methods"]}
        return write_report(saved.folder, run, states, rows, photograph, departures=notes, **options)


def _departures(run: Mapping[str, Any], label: str) -> str:
    """How a method's maps depart from its publication; nothing of a method of its author's, or an edited record."""
    try:
        return departures(get_method(run["methods"][label]), run["options"][label])
    except (OptionError, KeyError, TypeError, ValueError, AttributeError):
        return ""


# -- the display in a notebook

#: Images that are shown.
SHOWN = 6
_WIDTH = 1.5  # of an image, in inches


def show_run(text: str, output: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The first overlay of each row's image, as one figure, and what the rows say."""
    from vitflow.images.figures import NOTEBOOK_DPI, Cell, Column, bundle, draw_bands, html_table  # loads matplotlib

    pen, cells, columns, overlays = Pen(_WIDTH, NOTEBOOK_DPI), [], [], []
    for row in rows:
        probability = row.get("probability")
        prediction = (
            row.get("class_name") or row.get("class_index"),
            "" if probability is None else f"{probability:.1%}",
        )
        cells.append(
            (printable(row["input"]), row["status"], *(prediction if row["status"] == "explained" else ("", "")))
        )
        for label, file in list(row.get("outputs", {}).items())[:1]:
            with contextlib.suppress(ImageError):  # it may have been moved away since
                overlay = pen.photograph(read_image(output / file))
                columns.append(Column(Path(row["input"]).name, label))
                overlays.append([Cell(overlay, (str(row["class_name"] or ""),))])
    sheet = draw_bands([(columns, [overlays])], dpi=NOTEBOOK_DPI) if columns else None
    head = ("image", "status", "class", "probability")
    return bundle(text, sheet, [html_table(cells, head)])
