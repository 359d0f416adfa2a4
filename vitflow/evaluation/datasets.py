"""Data sets for evaluation: demo images, folders with masks, boxes or classes, COCO JSON, and Python iterables."""

import os
import re
import reprlib
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from vitflow.demo import CLASS_NAMES, FIRST_TRAINING_SEED, draw_image
from vitflow.errors import ImageError, OptionError, VitflowError, VitflowWarning, printable
from vitflow.evaluation.annotations import parse_mask, parse_truth, read_entries, read_labelled, read_labels
from vitflow.evaluation.samples import Dataset, Labelled, Region, Sample
from vitflow.files import find_images, is_file, is_folder, is_image_name, is_there
from vitflow.folder.saved import is_inside

_DEMO = re.compile(r"demo(?::(\d+))?(?::(\d+))?")
_MASK_ENDINGS = ("_mask", "-mask", ".mask")
_PROBED = 20  # items of an iterable that are read to detect regions
_LONGEST_NAME = 4096  # characters of a path
# Folders of images, which are not classes.
_IMAGE_FOLDERS = ("images", "JPEGImages")


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
      `masks/NAME.png`. Pixels other than 0 are the region.
    - A folder with `labels.csv` (`file,label_index` or `file,label`), optionally with masks: one class per image.
    - A folder for each class, as for torchvision's ImageFolder: the folder's name is the class, or a class index.
    - Any other folder: images without annotations. Pascal VOC's XML and YOLO's text files are not read, and images in
      subfolders neither: a VitflowWarning counts them.
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
    >>> open_dataset([(draw_image(0).image, [[0, 0, 4, 4], [1, 2, 7, 8]])]).has_regions
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
        annotated = path.suffix.lower() == ".json"
        return _open_annotated(path, path.name, images) if annotated else _images(path.name, [path])
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
    folder = images or path
    if files:
        return _open_annotated(files[0], path.name, folder)
    if not (paths := find_images(folder)):
        paths = next((find_images(folder / name) for name in _IMAGE_FOLDERS if is_folder(folder / name)), [])
    dataset = _images(path.name, paths, labels=path / "labels.csv") if paths else _by_class(folder)
    _warn_of_subfolders(folder, {file for sample in dataset.samples for file in sample.files})
    return dataset


def _warn_of_subfolders(root: Path, read: Set[Path]) -> None:
    """Warn if folders below the one that is read have other images; masks and hidden files are not counted."""
    below = (file for file in root.rglob("*") if file.parent != root and is_image_name(file.name) and file not in read)
    parts = [file.relative_to(root).parts for file in below]
    if left_out := [part for part in parts if "masks" not in part and not any(name.startswith(".") for name in part)]:
        warnings.warn(
            f"{len(left_out)} image{'s' if len(left_out) > 1 else ''} in subfolders left out, such as "
            f"{printable('/'.join(left_out[0]))}: pass that folder instead, or a list of files in Python.",
            VitflowWarning,
            stacklevel=4,
        )


def _drawn(name: str, count: int, seed: int) -> Dataset:
    if count < 1 or seed + count > FIRST_TRAINING_SEED:
        raise OptionError(
            f"Expected demo:COUNT with 1 to {FIRST_TRAINING_SEED} images outside the demo model's training set, got "
            f"{name!r}."
        )
    samples = [Sample(f"demo-{index}", partial(_draw, index)) for index in range(seed, seed + count)]
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
    return read_labelled(source, partial(parse_truth, truth))


# --- Annotation files ------------------------------------------------------------------------------------------------


def _open_annotated(path: Path, name: str, images: Path | None) -> Dataset:
    """Open the images of an annotation file."""
    entries = read_entries(path)
    here = path.resolve().parent
    folders = [images] if images is not None else [here, here / "images", here.parent / "images", here.parent]
    names = _distinct([_row_name(file, number) for number, (file, _) in enumerate(entries, start=1)])
    samples = []
    for unique, (file, parse) in zip(names, entries, strict=True):
        try:
            place = _find_image(file, folders)
        except OptionError as error:
            samples.append(Sample(unique, partial(_refuse, error)))
        else:
            samples.append(Sample(unique, partial(read_labelled, place, parse), (place,)))
    if not any(is_file(file) for sample in samples for file in sample.files):
        if not samples[0].files:
            samples[0].read()  # raises a more specific error
        raise OptionError(
            f"None of the {len(samples)} images of {path.name!r} exists, such as {names[0]!r}. Pass their folder with "
            "--images (images=…)."
        )
    identity = {"annotations": sha256(path.read_bytes()).hexdigest()}
    return Dataset(name, "images with annotated regions", samples, True, identity)


def _refuse(problem: Exception) -> Labelled:
    raise problem


def _row_name(file: Any, number: int) -> str:
    """Return the name of an entry's row: the file's name, without its folders if they may lead out."""
    candidates = [file, Path(file).name] if _is_name(file) else []
    return next(filter(is_inside, candidates), f"entry {number}")


def _is_name(file: Any) -> bool:
    # Without a null character or a lone surrogate, which no path can have.
    return isinstance(file, str) and 0 < len(file) <= _LONGEST_NAME and not re.search("[\0\ud800-\udfff]", file)


def _find_image(file: Any, folders: Sequence[Path]) -> Path:
    """Return the path of an image in one of the folders; if it does not exist, its path in the first folder.

    Paths and links to images outside the folders are rejected.
    """
    if not _is_name(file):
        raise OptionError(f"Expected the file name of an image in the annotations, got {reprlib.repr(file)}.")
    inside: list[Path] = [
        folder / file for folder in folders if (folder / file).resolve().is_relative_to(folder.resolve())
    ]
    existing = next(filter(is_file, inside), None)
    if existing is None and len(inside) < len(folders):
        raise OptionError(
            f"The annotations name {file!r}, which is outside the image folders ("
            f"{', '.join(repr(str(folder)) for folder in folders)}). To allow it, pass its folder with --images "
            "(images=…)."
        )
    return inside[0] if existing is None else existing


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names, with a number appended to duplicates."""
    chosen: dict[str, None] = {}
    for name in names:
        unique, number = name, 1
        while unique in chosen:
            number += 1
            unique = f"{name} ({number})"
        chosen[unique] = None
    return list(chosen)


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
    labels = labels if labels is not None and is_file(labels) else None
    rows = {} if labels is None else read_labels(labels)
    places = [path.absolute() for path in paths]
    root = os.path.commonpath([place.parent for place in places])
    names = _distinct([place.relative_to(root).as_posix() for place in places])
    samples = []
    for path, unique in zip(paths, names, strict=True):
        mask, label = masks.get(path), (classes or {}).get(path)
        files = (path,) if mask is None else (path, mask)
        entry = rows.get(path.name, {}) if label is None else {"label_index" if label.isdecimal() else "label": label}
        samples.append(Sample(unique, partial(read_labelled, path, partial(parse_mask, mask, entry)), files))
    kind = "images" + (" with masks" if masks else "") + (" with classes" if rows else "")
    identity = {"root": root, "annotations": "" if labels is None else sha256(labels.read_bytes()).hexdigest()}
    return Dataset(name, kind, samples, bool(masks), identity)


def _find_mask(image: Path) -> Path | None:
    """Return the mask of an image: next to it, in a folder `masks`, or in one next to its folder `images`; or None."""
    candidates = [image.with_name(f"{image.stem}{ending}.png") for ending in _MASK_ENDINGS]
    candidates.append(image.parent / "masks" / f"{image.stem}.png")
    if image.parent.name in _IMAGE_FOLDERS:
        candidates.append(image.parent.parent / "masks" / f"{image.stem}.png")
    return next(filter(is_file, candidates), None)
