"""Data sets for evaluation: demo images, folders with masks, boxes or classes, COCO JSON, and Python iterables."""

import csv
import os
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitflow.demo import CLASS_NAMES, FIRST_TRAINING_SEED, draw_image
from vitflow.errors import FrameError, ImageError, OptionError, ShapeError, VitflowError
from vitflow.evaluation.annotations import open_annotated, unreadable
from vitflow.evaluation.regions import WRONG, Label, Region, as_label, with_turn
from vitflow.evaluation.samples import Dataset, Labelled, Sample, digest_of, distinct
from vitflow.files import find_images, is_file, is_folder, is_there
from vitflow.images.reading import read_image, read_mask

_DEMO = re.compile(r"demo(?::(\d+))?(?::(\d+))?")
_MASK_ENDINGS = ("_mask", "-mask", ".mask")
_UNKNOWN = 255  # mask value of unknown pixels, as in Pascal VOC
_PROBED = 20  # items of an iterable that are read to detect regions
# Folders of images, and of annotations next to them, which are not classes.
_IMAGE_FOLDERS = ("images", "JPEGImages")
_ANNOTATION_FOLDERS = ("labels", "annotations", "Annotations")


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
      `{"box": […], "label": …}`. Edges are in pixels of the image as displayed; right and bottom are exclusive.
    - A folder with masks: the mask of `NAME.jpg` is `NAME_mask.png`, `NAME-mask.png` or `NAME.mask.png` next to it, or
      `masks/NAME.png`. Pixels other than 0 are the region. If there is a file `classes.txt` next to the masks or the
      images, pixels of value k have the class in its line k, and 255 is unknown.
    - A folder with `labels.csv` (`file,label_index` or `file,label`), optionally with masks: one class per image.
    - A folder for each class, as for torchvision's ImageFolder: the folder's name is the class, or a class index.
    - Any other folder: images without annotations. Pascal VOC's XML and YOLO's text files are not read.
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
        return open_annotated(path, path.name, images) if path.suffix.lower() == ".json" else _images(path.name, [path])
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
        return open_annotated(files[0], path.name, images or path)
    folder = images or path
    if not (paths := find_images(folder)):
        paths = next((find_images(folder / name) for name in _IMAGE_FOLDERS if is_folder(folder / name)), [])
    return _images(path.name, paths, labels=path / "labels.csv") if paths else _by_class(folder)


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
        try:
            has_regions = has_regions or sample.read().regions is not None
        except OptionError:  # boxes of another format
            raise
        except (VitflowError, OSError):
            continue  # reported in its row
    return Dataset(name, "images", samples, has_regions)


def _read_item(items: Any, index: int) -> Labelled:
    item = items[index]
    if isinstance(item, Labelled):
        return item
    source, truth = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    image = read_image(source)
    try:
        regions, label = _truth(truth, image.shape[:2])
    except OptionError:
        raise
    except (TypeError, ValueError, LookupError) as error:
        raise ShapeError(
            "Expected for each image a mask of its size, boxes [objects, 4], a class, or a dict with masks or boxes, "
            f"labels and label, got {reprlib.repr(truth)}."
        ) from error
    return Labelled(image, regions, label, source)


def _truth(truth: Any, size: tuple[int, ...]) -> tuple[tuple[Region, ...] | None, Label]:
    """Return regions and class from the truth of an item."""
    if truth is None or isinstance(truth, str):
        return None, truth
    if not isinstance(truth, Mapping):
        values = np.asarray(truth)
        if values.ndim == 0:
            return None, as_label(values.item())
        boxes = values.shape != size and values.shape[-1] == 4
        truth = {"boxes": truth} if boxes else {"masks": [values]}
    shapes, label = truth.get("masks", truth.get("boxes")), as_label(truth.get("label"))
    if shapes is None:
        return None, label
    order = getattr(shapes, "format", None)  # of torchvision's BoundingBoxes
    if (order := getattr(order, "value", "XYXY")) != "XYXY":
        raise OptionError(f"Expected boxes in the format XYXY, got {order}: convert_bounding_box_format converts them.")
    shapes = [np.asarray(shape) for shape in shapes]
    labels = np.asarray(truth.get("labels", [None] * len(shapes)), dtype=object).tolist()
    return tuple(
        Region(as_label(name), shape if shape.ndim == 2 else shape.tolist())
        for name, shape in zip(labels, shapes, strict=True)
    ), label


# --- Folders ---------------------------------------------------------------------------------------------------------


def _by_class(root: Path) -> Dataset:
    """Open a folder with a folder of images for each class."""
    folders = [folder for folder in sorted(root.iterdir()) if is_folder(folder) and not folder.name.startswith(".")]
    members = {folder: paths for folder in folders if (paths := find_images(folder))}
    if not members:
        within = next((str(deep) for folder in folders for deep in folder.glob("*/") if find_images(deep)), "")
        hint = f" Images are in {within!r}: pass {str(Path(within).parent)!r}." if within else ""
        raise ImageError(f"Expected at least one image in {root.name!r} or its folders, got none.{hint}")
    classes = {path: folder.name for folder, paths in members.items() for path in paths}
    dataset = _images(root.name, list(classes), classes=classes)
    return replace(dataset, kind=f"images in {len(members)} folders, one for each class")


def _images(
    name: str, paths: Sequence[Path], *, labels: Path | None = None, classes: Mapping[Path, str] | None = None
) -> Dataset:
    """Open images with their masks and classes, if any: of `labels.csv`, or the class name or index of each path."""
    masks = {path: mask for path in paths if (mask := _find_mask(path)) is not None}
    paths = [path for path in paths if path not in set(masks.values())]
    if not paths:
        raise ImageError(f"Expected at least one image in {name!r}, got none.")
    folders = dict.fromkeys(path.parent for path in (*masks.values(), *paths))
    names_file = next((folder / "classes.txt" for folder in folders if is_file(folder / "classes.txt")), None)
    try:
        lines = [] if names_file is None else names_file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"Expected class names in 'classes.txt', one per line, got {error}.") from error
    labels = labels if labels is not None and is_file(labels) else None
    rows = {} if labels is None else _read_labels(labels)
    written = {path: rows.get(path.name, ("", "")) for path in paths}
    for path, label in (classes or {}).items():
        written[path] = (label, "") if label.isdecimal() else ("", label)
    mixed = len({path.is_absolute() for path in paths}) > 1
    places = [path.absolute() for path in paths] if mixed else paths
    root = os.path.commonpath([place.parent for place in places])
    names = distinct([place.relative_to(root).as_posix() for place in places])
    samples = [
        Sample(
            unique,
            partial(_read_masked, path, masks.get(path), lines, written[path]),
            (path, masks[path]) if path in masks else (path,),
        )
        for path, unique in zip(paths, names, strict=True)
    ]
    kind = "images" + (" with masks" if masks else "") + (" with classes" if rows else "")
    identity = {"root": root, "annotations": digest_of([file for file in (labels, names_file) if file is not None])}
    return Dataset(name, kind, samples, bool(masks), identity, _unread(paths))


def _find_mask(image: Path) -> Path | None:
    """Return the mask of an image: next to it, in a folder `masks`, or in one next to its folder `images`; or None."""
    candidates = [image.with_name(f"{image.stem}{ending}.png") for ending in _MASK_ENDINGS]
    candidates.append(image.parent / "masks" / f"{image.stem}.png")
    if image.parent.name in _IMAGE_FOLDERS:
        candidates.append(image.parent.parent / "masks" / f"{image.stem}.png")
    return next(filter(is_file, candidates), None)


def _unread(paths: Sequence[Path]) -> tuple[str, ...]:
    """Return a note on XML and text files of these images, which are not read."""
    counts: Counter[str] = Counter()
    for folder, stem in ((path.parent, path.stem) for path in paths):
        places = [folder, *(folder.parent / name for name in _ANNOTATION_FOLDERS)]
        counts.update(kind for kind in ("XML", "TXT") if any(is_file(p / f"{stem}.{kind.lower()}") for p in places))
    if not counts:
        return ()
    listed = " and ".join(f"{count} {kind}" for kind, count in counts.items())
    return (
        f"Not read: {listed} file{'s' if sum(counts.values()) > 1 else ''} of these images, which may be annotations "
        "of Pascal VOC or YOLO. Boxes are read from COCO JSON or boxes.json.",
    )


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
    try:
        values = read_mask(mask, (image.shape[0], image.shape[1]))
    except FrameError as error:
        raise with_turn(error, path) from error
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
