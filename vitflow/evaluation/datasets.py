"""Data sets for evaluation: demo images, folders with masks, boxes or classes, COCO JSON, and Python iterables."""

import contextlib
import csv
import hashlib
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitflow.demo import CLASS_NAMES, FIRST_TRAINING_SEED, draw_image
from vitflow.errors import ImageError, OptionError, ShapeError, VitflowError
from vitflow.evaluation.annotations import (
    LONGEST_MESSAGE,
    WRONG,
    Label,
    Labelled,
    Parse,
    Region,
    as_label,
    read_annotations,
    unreadable,
)
from vitflow.files import find_images, is_file, is_folder, is_there
from vitflow.images.reading import read_image, read_mask

_DEMO = re.compile(r"demo(?::(\d+))?(?::(\d+))?")
_MASK_ENDINGS = ("_mask", "-mask", ".mask")
_UNKNOWN = 255  # mask value of unknown pixels, as in Pascal VOC
_LONGEST_NAME = 4096  # bytes of a path
_PROBED = 20  # items of an iterable that are read to detect regions


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """An image of a data set, read when needed.

    Attributes:
        name: unique name in tables.
        read: returns the image and its annotations, or raises VitflowError.
        files: files that it is read from, to detect changes.
        fixed: True if the name determines the image, as for demo images.
    """

    name: str
    read: Callable[[], Labelled]
    files: tuple[Path, ...] = ()
    fixed: bool = False

    def stamp(self) -> list[Any]:
        """Return size and modification time of its files, or a hash of an image in memory, to detect changes."""
        stamps: list[Any] = []
        for file in self.files:
            try:
                status = file.stat()
                stamps.append([status.st_size, status.st_mtime_ns])
            except OSError:
                stamps.append([])
        if not self.files and not self.fixed:
            with contextlib.suppress(VitflowError, OSError):
                content = self.read()
                digest = hashlib.sha256(f"{content.image.shape} {content.label!r}".encode("utf-8", "surrogatepass"))
                digest.update(content.image.tobytes())
                for region in content.regions or ():
                    digest.update(f"{region.label!r} {region.unknown}".encode("utf-8", "surrogatepass"))
                    digest.update(region.mask((content.image.shape[0], content.image.shape[1])).tobytes())
                stamps.append(digest.hexdigest())
        return stamps


@dataclass(frozen=True, slots=True)
class Dataset:
    """Images with their annotations.

    Attributes:
        name: name of the data set.
        kind: the kind of the images, for display.
        samples: the images.
        has_regions: True if it has masks or boxes, which localisation requires.
        identity: fingerprint as JSON data.
    """

    name: str
    kind: str
    samples: Sequence[Sample] = field(repr=False)
    has_regions: bool
    identity: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.samples)


def open_dataset(
    data: "str | os.PathLike[str] | Dataset | Iterable[Any]",
    *,
    images: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> Dataset:
    """Open data to evaluate on; images are read later.

    - `demo:500`: 500 demo images with an exact mask of every object (`demo:500:1000`: starting at seed 1000).
    - COCO JSON (boxes, polygons, run lengths), or a JSON list such as boxes.json, with entries
      `{"file": …, "boxes": [[left, top, right, bottom], …], "label": …}`; a folder with one of these. `label` is a
      class name and `label_index` an index, `size` [width, height] is compared with the image, and a box may be
      `{"box": […], "label": …}`. Edges are in pixels; right and bottom are exclusive.
    - A folder with masks: the mask of `NAME.jpg` is `NAME_mask.png`, `NAME-mask.png` or `NAME.mask.png` next to it, or
      `masks/NAME.png`. Pixels other than 0 are the region. If there is a file `classes.txt` next to the masks or the
      images, pixels of value k have the class in its line k, and 255 is unknown.
    - A folder with `labels.csv` (`file,label_index` or `file,label`), optionally with masks: one class per image.
    - Any other folder: images without annotations.
    - In Python any iterable or torch dataset: image files (with their masks), images, or pairs of an image and its
      truth. An image is a path, a PIL image or an array. The truth is a mask [height, width], boxes [objects,
      4], a class (index or name), or a dict with any of `masks`, `boxes`, `labels` (of the objects) and `label`.

    Args:
        data: any of these.
        images: folder of the images of an annotation file; by default the file's folder, its parent, or a folder
            `images` in either. Images outside, by their path or by a link, are not read.
        limit: maximum number of images.

    Raises:
        OptionError: the data does not exist or is invalid.
        ImageError: the folder has no images.

    >>> open_dataset("demo:20").kind
    'drawn images with exact masks'
    >>> open_dataset([(np.zeros((8, 8, 3), np.uint8), [[0, 0, 4, 4], [1, 2, 7, 8]])]).has_regions
    True
    """
    if limit is not None and limit < 1:
        raise OptionError(f"Expected a limit of at least 1 image, got {limit}.")
    if images is not None and not is_folder(images):
        raise OptionError(f"Expected a folder with images, got {str(images)!r}, which is not a folder.")
    if isinstance(data, Dataset):
        dataset = data
    elif isinstance(data, str | os.PathLike):
        dataset = _open_path(data, None if images is None else Path(images))
    else:
        dataset = _open_iterable(data)
    if not len(dataset):
        raise OptionError("Expected at least one image, got none.")
    return replace(dataset, samples=dataset.samples[:limit])


def _open_path(data: str | os.PathLike[str], images: Path | None) -> Dataset:
    path = Path(data)
    if isinstance(data, str) and (match := _DEMO.fullmatch(data)) and not is_there(data):
        return _drawn(data, int(match[1] or 100), int(match[2] or 0))
    if is_file(path):
        return _annotated(path, path.name, images) if path.suffix.lower() == ".json" else _images(path.name, [path])
    if not is_folder(path):
        raise OptionError(
            f"No data at {str(path)!r}. Expected a folder with images, an annotation file, or demo:500 for demo images."
        )
    files = sorted(filter(is_file, path.glob("*.json")))
    files = [file for file in files if file.name in ("boxes.json", "annotations.json")] or files
    if len(files) > 1:
        raise OptionError(
            f"Expected one annotation file in {str(path)!r}, got {', '.join(file.name for file in files)}. Pass one of "
            "them instead of the folder."
        )
    if files:
        return _annotated(files[0], path.name, images or path)
    return _images(path.name, find_images(images or path), path / "labels.csv")


def _drawn(name: str, count: int, seed: int) -> Dataset:
    if count < 1 or seed + count > FIRST_TRAINING_SEED:
        raise OptionError(
            f"Expected demo:COUNT with 1 to {FIRST_TRAINING_SEED} images outside the demo model's training set, got "
            f"{name!r}."
        )
    samples = [Sample(f"demo-{index}", partial(_draw, index), fixed=True) for index in range(seed, seed + count)]
    return Dataset(name, "drawn images with exact masks", samples, True, {"demo": seed})


def _draw(seed: int) -> Labelled:
    image = draw_image(seed)
    objects = zip(image.labels, image.masks, strict=True)
    return Labelled(image.image, tuple(Region(CLASS_NAMES[label], mask) for label, mask in objects))


# --- Iterables -------------------------------------------------------------------------------------------------------


def _open_iterable(data: Any) -> Dataset:
    """Open an iterable of image files, images, or pairs of an image and its truth."""
    items = data if hasattr(data, "__getitem__") and hasattr(data, "__len__") else list(data)
    count = len(items)
    name = f"{count} images"
    if count and isinstance(items, list | tuple) and all(isinstance(item, str | os.PathLike) for item in items):
        return _images(name, [Path(item) for item in items])
    samples = [Sample(f"image {index + 1}", partial(_read_item, items, index)) for index in range(count)]
    has_regions = False
    for sample in samples[:_PROBED]:
        with contextlib.suppress(VitflowError, OSError):  # reported in its row
            has_regions = has_regions or sample.read().regions is not None
    return Dataset(name, "images", samples, has_regions)


def _read_item(items: Any, index: int) -> Labelled:
    item = items[index]
    if isinstance(item, Labelled):
        return item
    source, truth = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    image = read_image(source)
    try:
        return Labelled(image, *_truth(truth, image.shape[:2]))
    except (TypeError, ValueError, LookupError) as error:
        raise ShapeError(
            "Expected for each image a mask of its size, boxes [objects, 4], a class, or a dict with masks or boxes, "
            f"labels and label, got {reprlib.repr(truth)}."
        ) from error


def _truth(truth: Any, size: tuple[int, ...]) -> tuple[tuple[Region, ...] | None, Label]:
    """Return regions and class from the truth of an item."""
    if truth is None or isinstance(truth, str):
        return None, truth
    if not isinstance(truth, Mapping):
        values = np.asarray(truth)
        if values.ndim == 0:
            return None, as_label(values.item())
        truth = {"boxes": values} if values.shape != size and values.shape[-1] == 4 else {"masks": [values]}
    shapes, label = truth.get("masks", truth.get("boxes")), as_label(truth.get("label"))
    if shapes is None:
        return None, label
    shapes = [np.asarray(shape) for shape in shapes]
    labels = np.asarray(truth.get("labels", [None] * len(shapes)), dtype=object).tolist()
    return tuple(
        Region(as_label(name), shape if shape.ndim == 2 else shape.tolist())
        for name, shape in zip(labels, shapes, strict=True)
    ), label


# --- Files -----------------------------------------------------------------------------------------------------------


def _annotated(path: Path, name: str, images: Path | None) -> Dataset:
    """Open the images of an annotation file."""
    entries = read_annotations(path)
    here = path.resolve().parent
    folders = [images] if images is not None else [here, here / "images", here.parent / "images", here.parent]
    names = _distinct([file if _is_name(file) else f"entry {n}" for n, (file, _) in enumerate(entries, start=1)])
    samples = []
    for unique, (file, parse) in zip(names, entries, strict=True):
        try:
            place = _find_image(file, folders)
            samples.append(Sample(unique, partial(_read_annotated, path, unique, place, parse), (place,)))
        except WRONG as error:
            samples.append(Sample(unique, partial(_refuse, unreadable(path, error, unique))))
    if not any(is_file(file) for sample in samples for file in sample.files):
        if not samples[0].files:
            samples[0].read()  # raises a more specific error
        raise OptionError(
            f"None of the {len(samples)} images of {path.name!r} exists, such as {names[0]!r}. Pass their folder with "
            "--images (images=…)."
        )
    return Dataset(name, "images with annotated regions", samples, True, {"annotations": _digest([path])})


def _is_name(file: Any) -> bool:
    try:
        return isinstance(file, str) and file != "" and "\0" not in file and len(os.fsencode(file)) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False


def _find_image(file: Any, folders: Sequence[Path]) -> Path:
    """Return the path of an image in one of the folders; if it does not exist, its path in the first folder.

    Paths and links to images outside the folders are rejected.
    """
    if not _is_name(file):
        raise ValueError(f"expected an image's file name, got {reprlib.repr(file)}")
    candidates: list[Path] = [folder / file for folder in folders]
    inside = [
        place
        for place, folder in zip(candidates, folders, strict=True)
        if place.resolve().is_relative_to(folder.resolve())
    ]
    existing = next(filter(is_file, inside), None)
    if existing is None and len(inside) < len(candidates):
        raise OptionError(
            f"The annotations name {file[:LONGEST_MESSAGE]!r}, which is outside the image folders ("
            f"{', '.join(repr(str(folder)) for folder in folders)}). To allow it, pass its folder with --images "
            "(images=…)."
        )
    return existing or inside[0]


def _read_annotated(path: Path, name: str, place: Path, parse: Parse) -> Labelled:
    image = read_image(place)
    try:
        return Labelled(image, *parse((image.shape[0], image.shape[1])))
    except WRONG as error:
        raise unreadable(path, error, name) from error


def _refuse(problem: VitflowError) -> Labelled:
    raise problem


def _images(name: str, paths: Sequence[Path], labels: Path | None = None) -> Dataset:
    """Open images with their masks and classes, if any."""
    masks = {path: mask for path in paths if (mask := _find_mask(path)) is not None}
    taken = set(masks.values())
    paths = [path for path in paths if path not in taken]
    if not paths:
        raise ImageError(f"Expected at least one image in {name!r}, got none.")
    folders = dict.fromkeys(path.parent for path in (*masks.values(), *paths))
    classes = next((folder / "classes.txt" for folder in folders if is_file(folder / "classes.txt")), None)
    try:
        lines = [] if classes is None else classes.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"Expected class names in 'classes.txt', one per line, got {error}.") from error
    labels = labels if labels is not None and is_file(labels) else None
    rows = {} if labels is None else _read_labels(labels)
    mixed = len({path.is_absolute() for path in paths}) > 1
    root = os.path.commonpath([path.absolute().parent if mixed else path.parent for path in paths])
    names = _distinct([path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path) for path in paths])
    samples = [
        Sample(
            unique,
            partial(_read_masked, path, masks.get(path), lines, rows.get(path.name, ("", ""))),
            (path, masks[path]) if path in masks else (path,),
        )
        for path, unique in zip(paths, names, strict=True)
    ]
    kind = "images" + (" with masks" if masks else "") + (" with classes" if rows else "")
    facts = [file for file in (labels, classes) if file is not None]
    return Dataset(name, kind, samples, bool(masks), {"root": root, "annotations": _digest(facts)})


def _find_mask(image: Path) -> Path | None:
    """Return the mask of an image, next to it or in a folder `masks`, or None."""
    candidates = [image.with_name(f"{image.stem}{ending}.png") for ending in _MASK_ENDINGS]
    return next(filter(is_file, [*candidates, image.parent / "masks" / f"{image.stem}.png"]), None)


def _read_labels(path: Path) -> dict[str, tuple[str, str]]:
    """Return class index and class name of each file, as text."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            return {row["file"]: (row.get("label_index") or "", row.get("label") or "") for row in rows}
    except (*WRONG, csv.Error) as error:
        raise unreadable(path, error) from error


def _read_masked(path: Path, mask: Path | None, names: Sequence[str], written: tuple[str, str]) -> Labelled:
    image = read_image(path)
    try:
        label = as_label(float(written[0])) if written[0] else written[1] or None
    except ValueError as error:
        raise OptionError(f"Expected a class index in labels.csv, got {reprlib.repr(written[0])}.") from error
    if mask is None:
        return Labelled(image, None, label)
    values = read_mask(mask, (image.shape[0], image.shape[1]))
    if not names:
        return Labelled(image, (Region(label, values > 0),), label)
    present = np.unique(values[values > 0]).tolist()
    regions = []
    for value in present:
        unknown = value > len(names) and value == _UNKNOWN
        if not unknown and (value > len(names) or value != int(value)):
            raise ShapeError(f"Pixels of {mask.name!r} have the value {value}, and classes.txt has {len(names)} lines.")
        name = None if unknown else names[int(value) - 1].strip()
        regions.append(Region(name, partial(np.equal, values, value), unknown))
    return Labelled(image, tuple(regions), label)


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names, with a number appended to duplicates."""
    distinct: dict[str, None] = {}
    for name in names:
        unique, number = name, 1
        while unique in distinct:
            number += 1
            unique = f"{name} ({number})"
        distinct[unique] = None
    return list(distinct)


def _digest(files: Sequence[Path]) -> str:
    """Return a hash of the annotation files, to detect changes."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode("utf-8", "surrogateescape"))
        with contextlib.suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()
