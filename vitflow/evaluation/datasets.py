"""Data to evaluate on: drawn images, folders with masks, boxes or classes, COCO JSON, and any iterable in Python."""

import contextlib
import csv
import hashlib
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitflow.demo import CLASS_NAMES, FIRST_TRAINING_SEED, draw_image
from vitflow.errors import ImageError, OptionError, ShapeError, VitflowError
from vitflow.evaluation.annotations import (
    WRONG,
    Label,
    Labelled,
    Parse,
    Region,
    as_label,
    check_count,
    read_annotations,
    unreadable,
)
from vitflow.files import find_images, is_file, is_folder, is_there
from vitflow.images.reading import read_image, read_mask

_DEMO = re.compile(r"demo(?::(\d+))?(?::(\d+))?")
_MASK_ENDINGS = ("_mask", "-mask", ".mask")
_UNKNOWN = 255  # a value of a mask with classes, as in Pascal VOC
_LONGEST_NAME = 4096  # bytes of a path
_LONGEST_MESSAGE = 200  # characters of an error's own words, which may quote the file
_PROBED = 20  # items of an iterable that are read to see whether regions are known


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """An image of a data set, read when it is needed.

    Attributes:
        name: what it is called in tables; no two samples of a data set share one.
        read: returns the image and what is known about it; raises VitflowError if something is wrong with it.
        files: what it is read from, so that a changed file is noticed.
        fixed: whether its name identifies it, as that of a drawn image.
    """

    name: str
    read: Callable[[], Labelled]
    files: tuple[Path, ...] = ()
    fixed: bool = False

    def stamp(self) -> list[Any]:
        """Return size and time of change of its files, or a hash of what is in memory: it changes with the image."""
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
    """Images with what is known about them.

    Attributes:
        name: how it was named.
        kind: what it is, in words.
        samples: its images.
        has_regions: whether it says where objects are; without, nothing can be localised.
        identity: what distinguishes it from other data, ready for JSON.
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
    """Open data to evaluate on; images are read later, one by one.

    - `demo:500`: 500 drawn images with the exact mask of every object (`demo:500:1000`: from seed 1000 on).
    - COCO JSON (boxes, polygons, run lengths), or a JSON list of `{"file": …, "boxes": [[left, top, right, bottom], …],
      "label": …}` such as boxes.json; a folder with one of these. `label` is a class name and `label_index` an index,
      `size` [width, height] is compared with the image, and a box may be `{"box": […], "label": …}`. Edges are in
      pixels; right and bottom are the first ones outside.
    - A folder with masks: the mask of `NAME.jpg` is `NAME_mask.png`, `NAME-mask.png` or `NAME.mask.png` next to it, or
      `masks/NAME.png`. Pixels other than 0 are the region. If there is a file `classes.txt` next to the masks or the
      images, pixels of value k have the class in its line k, and 255 is unknown.
    - A folder with `labels.csv` (`file,label_index` or `file,label`), which may have masks, too: a class each.
    - Any other folder: images alone.
    - In Python any iterable or torch dataset: of image files (with their masks), of images, or of pairs of an image
      and its truth. An image is a path, a PIL image or an array. The truth is a mask [height, width], boxes [objects,
      4], a class (index or name), or a dict with any of `masks`, `boxes`, `labels` (of the objects) and `label`.

    Args:
        data: any of these.
        images: folder of the images of an annotation file; by default the file's own, or a folder `images` in it or
            next to it. Images outside, by their name or by a link, are not read.
        limit: take no more than this many images.

    Raises:
        OptionError: there is no such data.
        ImageError: the folder has no images.

    >>> open_dataset("demo:20").kind
    '20 drawn images with exact masks'
    >>> open_dataset([(np.zeros((8, 8, 3), np.uint8), [[0, 0, 4, 4], [1, 2, 7, 8]])]).has_regions
    True
    """
    if limit is not None and limit < 1:
        raise OptionError(f"Expected a limit of at least 1 image, got {limit}.")
    if images is not None and not is_folder(images):
        raise OptionError(f"Expected the folder with the images, but there is none at {str(images)!r}.")
    if isinstance(data, Dataset):
        dataset = data
    elif isinstance(data, str | os.PathLike):
        dataset = _open_path(data, None if images is None else Path(images))
    else:
        dataset = _open_iterable(data)
    if limit is None or limit >= len(dataset):
        return dataset
    kind = re.sub(r"^\d+", str(limit), dataset.kind)
    return Dataset(dataset.name, kind, dataset.samples[:limit], dataset.has_regions, dataset.identity)


def _open_path(data: str | os.PathLike[str], images: Path | None) -> Dataset:
    path = Path(data)
    if isinstance(data, str) and (match := _DEMO.fullmatch(data)) and not is_there(data):
        return _drawn(data, int(match[1] or 100), int(match[2] or 0))
    if is_file(path):
        return _annotated(path, path.name, images) if path.suffix.lower() == ".json" else _images(path.name, [path])
    if not is_folder(path):
        raise OptionError(
            f"Expected data to evaluate on, but there is nothing at {str(path)!r}. Give a folder with images, a file "
            "with annotations, or demo:500 for images that vitflow draws itself."
        )
    files = sorted(filter(is_file, path.glob("*.json")))
    files = [file for file in files if file.name in ("boxes.json", "annotations.json")] or files
    if len(files) > 1:
        raise OptionError(
            f"Expected one file with annotations in {str(path)!r}, got {', '.join(file.name for file in files)}. Name "
            "the one to use instead of the folder."
        )
    if files:
        return _annotated(files[0], path.name, images or path)
    return _images(path.name, find_images(images or path), path / "labels.csv")


def _drawn(name: str, count: int, seed: int) -> Dataset:
    if count < 1 or seed + count > FIRST_TRAINING_SEED:
        raise OptionError(
            f"Expected demo:COUNT with 1 to {FIRST_TRAINING_SEED} images that the demo model was not trained on, got "
            f"{name!r}."
        )
    samples = [Sample(f"demo-{number}", partial(_draw, number), fixed=True) for number in range(seed, seed + count)]
    return Dataset(name, f"{count} drawn images with exact masks", samples, True, {"demo": seed})


def _draw(seed: int) -> Labelled:
    image = draw_image(seed)
    objects = zip(image.labels, image.masks, strict=True)
    return Labelled(image.image, tuple(Region(CLASS_NAMES[label], mask) for label, mask in objects))


# --- Iterables -------------------------------------------------------------------------------------------------------


def _open_iterable(data: Any) -> Dataset:
    """Any iterable of image files, of images, or of pairs of an image and its truth."""
    items = data if hasattr(data, "__getitem__") and hasattr(data, "__len__") else list(data)
    count = len(items)
    if not count:
        raise OptionError("Expected at least one image, got none.")
    name = f"{count} images"
    if isinstance(items, list | tuple) and all(isinstance(item, str | os.PathLike) for item in items):
        return _images(name, [Path(item) for item in items])
    samples = [Sample(f"image {number + 1}", partial(_read_item, items, number)) for number in range(count)]
    has_regions = False
    for sample in samples[:_PROBED]:
        with contextlib.suppress(VitflowError, OSError):  # its row has the error
            has_regions = has_regions or sample.read().regions is not None
    return Dataset(name, name, samples, has_regions)


def _read_item(items: Any, number: int) -> Labelled:
    item = items[number]
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
    """Regions and class from what an item of an iterable has besides its image."""
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
        Region(as_label(each), shape if shape.ndim == 2 else shape.tolist())
        for each, shape in zip(labels, shapes, strict=True)
    ), label


# --- Files -----------------------------------------------------------------------------------------------------------


def _annotated(path: Path, name: str, images: Path | None) -> Dataset:
    """Images by an annotation file."""
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
            samples[0].read()  # its error is more to the point
        raise OptionError(
            f"None of the {len(samples)} images of {path.name!r} was found, such as {names[0]!r}. Say where they are "
            "with --images (images=…)."
        )
    kind = f"{len(samples)} images with annotated regions"
    return Dataset(name, kind, samples, True, {"annotations": _digest([path])})


def _is_name(file: Any) -> bool:
    try:
        return isinstance(file, str) and file != "" and "\0" not in file and len(os.fsencode(file)) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False


def _find_image(file: Any, folders: Sequence[Path]) -> Path:
    """Return the path of an image in one of the folders; by default in the first.

    Nothing outside the folders is read, whether a name leads there by its path or by a link.
    """
    if not _is_name(file):
        raise ValueError(f"expected an image's file name, got {reprlib.repr(file)}")
    places: list[Path] = [folder / file for folder in folders]
    inside = [
        place for place, folder in zip(places, folders, strict=True) if place.resolve().is_relative_to(folder.resolve())
    ]
    there = next(filter(is_file, inside), None)
    if there is None and len(inside) < len(places):
        raise OptionError(
            f"The annotations name {file[:_LONGEST_MESSAGE]!r}, which lies outside the folders with images ("
            f"{', '.join(repr(str(folder)) for folder in folders)}). If that is meant, name its folder with "
            "--images (images=…)."
        )
    return there or inside[0]


def _read_annotated(path: Path, name: str, place: Path, parse: Parse) -> Labelled:
    image = read_image(place)
    try:
        return Labelled(image, *parse((image.shape[0], image.shape[1])))
    except WRONG as error:
        raise unreadable(path, error, name) from error


def _refuse(problem: VitflowError) -> Labelled:
    raise problem


def _images(name: str, paths: Sequence[Path], labels: Path | None = None) -> Dataset:
    """Images with their masks and their classes, if there are any."""
    masks = {path: mask for path in paths if (mask := _find_mask(path)) is not None}
    taken = set(masks.values())
    paths = [path for path in paths if path not in taken]
    if not paths:
        raise ImageError(f"Expected at least one image in {name!r}, found none.")
    folders = dict.fromkeys(path.parent for path in (*masks.values(), *paths))
    classes = next((folder / "classes.txt" for folder in folders if is_file(folder / "classes.txt")), None)
    try:
        lines = [] if classes is None else classes.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"Expected the names of the classes in 'classes.txt', one per line, got {error}.") from error
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
    kind = f"{len(paths)} images" + (" with masks" if masks else "") + (" with classes" if rows else "")
    facts = [file for file in (labels, classes) if file is not None]
    return Dataset(name, kind, samples, bool(masks), {"root": root, "annotations": _digest(facts)})


def _find_mask(image: Path) -> Path | None:
    """Return the mask of an image, next to it or in a folder `masks`, or None."""
    candidates = [image.with_name(f"{image.stem}{ending}.png") for ending in _MASK_ENDINGS]
    return next(filter(is_file, [*candidates, image.parent / "masks" / f"{image.stem}.png"]), None)


def _read_labels(path: Path) -> dict[str, tuple[str, str]]:
    """Read the class index and name of each file."""
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
    check_count(len(present))
    regions = []
    for value in present:
        unknown = value > len(names) and value == _UNKNOWN
        if not unknown and (value > len(names) or value != int(value)):
            raise ShapeError(f"Pixels of {mask.name!r} have the value {value}, and classes.txt has {len(names)} lines.")
        name = None if unknown else names[int(value) - 1].strip()
        regions.append(Region(name, partial(np.equal, values, value), unknown))
    return Labelled(image, tuple(regions), label)


def _distinct(names: Sequence[str]) -> list[str]:
    """Make names unique with an index."""
    distinct: dict[str, None] = {}
    for name in names:
        unique, index = name, 1
        while unique in distinct:
            index += 1
            unique = f"{name} ({index})"
        distinct[unique] = None
    return list(distinct)


def _digest(files: Sequence[Path]) -> str:
    """One hash over the annotations, so that a changed file is another data set."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode("utf-8", "surrogateescape"))
        with contextlib.suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()
