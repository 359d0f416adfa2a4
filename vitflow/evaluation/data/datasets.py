"""Data to evaluate on: drawn pictures, or folders with masks, boxes, classes, or nothing but pictures."""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.demo import CLASS_NAMES, FIRST_TRAINING_SEED, draw_picture
from vitflow.errors import ImageError, OptionError, ShapeError, VitflowError
from vitflow.evaluation.data.annotations import Annotation, read_annotations
from vitflow.evaluation.data.finder import PictureFinder
from vitflow.evaluation.data.masks import find_class_names, find_mask, read_mask_regions
from vitflow.evaluation.data.regions import Label, Region, check_count, mask_region
from vitflow.files import is_file, is_folder, is_there
from vitflow.pictures.images import ImageSource, find_images, read_image

_ANNOTATIONS = (".csv", ".json", ".xml")
_DEMO = re.compile(r"demo(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, slots=True, eq=False)
class Labelled:
    """A picture and the truth about it.

    Attributes:
        image: RGB uint8 [height, width, 3].
        regions: its objects; None where the data says nothing about where they are.
        label: the class of the whole picture, where the data tells one.
    """

    image: NDArray[np.uint8]
    regions: tuple[Region, ...] | None = None
    label: Label = None


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A picture of a data set, read when it is needed.

    Attributes:
        name: what it is called in tables; no two samples of a data set share one.
        read: gives the picture and the truth; raises ImageError or ShapeError where something is wrong with it.
        files: what it is read from, so that a changed file is noticed.
        fixed: whether its name alone tells it from every other picture, as that of a drawn one.
    """

    name: str
    read: Callable[[], Labelled]
    files: tuple[Path, ...] = ()
    fixed: bool = False

    def stamp(self) -> list[Any]:
        """Size and time of change of its files, or a hash of what is in memory: another stamp is another picture."""
        if not self.files and not self.fixed:
            return self._content()
        found = []
        for file in self.files:
            try:
                status = file.stat()
                found.append([status.st_size, status.st_mtime_ns])
            except OSError:
                found.append([])
        return found

    def _content(self) -> list[str]:
        """A hash over pixels, regions and classes; empty where they cannot be read."""
        try:
            picture = self.read()
            size = picture.image.shape[:2]
            digest = hashlib.sha256(f"{picture.image.shape} {picture.label!r}".encode("utf-8", "surrogatepass"))
            digest.update(picture.image.tobytes())
            for region in picture.regions or ():
                digest.update(f"{region.label!r} {region.unknown}".encode("utf-8", "surrogatepass"))
                digest.update(region.mask((size[0], size[1])).tobytes())
        except (VitflowError, OSError):
            return []
        return [digest.hexdigest()]


@dataclass(frozen=True, slots=True)
class Dataset:
    """Pictures with what is known about them.

    Attributes:
        name: how it was named.
        kind: what it is, in words.
        samples: its pictures.
        has_regions: whether it says where objects are; without, nothing can be localised.
        identity: what tells it from other data, ready for JSON.
    """

    name: str
    kind: str
    samples: Sequence[Sample] = field(repr=False)
    has_regions: bool
    identity: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.samples)


def open_dataset(
    data: "str | os.PathLike[str] | Dataset | Iterable[ImageSource]",
    *,
    images: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> Dataset:
    """Open data to evaluate on; pictures are read later, one by one.

    - `demo:500`: that many drawn pictures with the exact mask of every object (`demo:500:1000`: from seed 1000 on).
    - A file with annotations (see `read_annotations`), or a folder with one beside the pictures. With XML, a folder
      `Annotations` or the XML files beside the pictures.
    - A folder with masks: the mask of `NAME.jpg` is `NAME_mask.png`, `NAME-mask.png` or `NAME.mask.png` beside it, or
      `masks/NAME.png`. Pixels other than 0 are the region. Where a file `classes.txt` lies beside the masks or the
      pictures, pixels of value k have the class on its line k, and 255 is unknown.
    - A folder with `labels.csv` (`file,label_index` or `file,label`), which may stand beside masks: a class each.
    - Any other folder, or a list of pictures: pictures alone, of a list of files with their masks.

    Args:
        data: any of these.
        images: where the pictures of an annotation file are; by default beside it, or in a folder beside it or above.
            Pictures that lie outside, by their name or by a link, are not read.
        limit: take no more than this many pictures.

    Raises:
        OptionError: there is nothing like this.
        ImageError: the folder holds no pictures.

    >>> open_dataset("demo:20").kind
    '20 drawn pictures with exact masks'
    """
    if isinstance(data, Dataset):
        return data if limit is None else _cut(data, limit)
    if limit is not None and limit < 1:
        raise OptionError(f"Expected a limit of at least 1 picture, got {limit}.")
    if isinstance(data, str) and (match := _DEMO.fullmatch(data)) and not is_there(data):
        count, seed = int(match[1] or 100), int(match[2] or 0)
        return _cut(_drawn(data, count, seed), limit)
    if not isinstance(data, str | os.PathLike):
        return _cut(_listed(list(data)), limit)
    if images is not None and not is_folder(images):
        raise OptionError(f"Expected the folder with the pictures, but there is none at {str(images)!r}.")
    path = Path(data)
    extra = Path(images) if images is not None else None
    if is_file(path) and path.suffix.lower() in _ANNOTATIONS:
        return _cut(_annotated([path], path.name, extra), limit)
    if is_file(path):
        return _pictures(path.name, [path], None)
    if is_folder(path):
        return _cut(_folder(path, extra), limit)
    raise OptionError(
        f"Expected data to evaluate on, but there is nothing at {str(path)!r}. Give a folder with pictures, a file "
        "with annotations, or demo:500 for pictures that vitflow draws itself."
    )


def _cut(dataset: Dataset, limit: int | None) -> Dataset:
    if limit is None or limit >= len(dataset):
        return dataset
    kind = re.sub(r"^\d+", str(limit), dataset.kind)
    return Dataset(dataset.name, kind, dataset.samples[:limit], dataset.has_regions, dataset.identity)


def _listed(sources: Sequence[ImageSource]) -> Dataset:
    """Pictures from a list: files, with their masks where they have any, or pictures that are already in memory."""
    if not sources:
        raise OptionError("Expected at least one picture, got none.")
    name = f"{len(sources)} pictures"
    if all(isinstance(source, str | os.PathLike) for source in sources):
        return _pictures(name, [Path(source) for source in sources if isinstance(source, str | os.PathLike)], None)
    samples = [
        Sample(f"picture {number}", partial(_read_plain, source)) for number, source in enumerate(sources, start=1)
    ]
    return Dataset(name, name, samples, False)


def _read_plain(source: ImageSource) -> Labelled:
    return Labelled(read_image(source))


# --- Drawn pictures --------------------------------------------------------------------------------------------------


def _drawn(name: str, count: int, seed: int) -> Dataset:
    if count < 1 or seed + count > FIRST_TRAINING_SEED:
        raise OptionError(
            f"Expected demo:COUNT with 1 to {FIRST_TRAINING_SEED} pictures that the demo model was not trained on, got "
            f"{name!r}."
        )
    samples = [Sample(f"demo-{number}", partial(_draw, number), fixed=True) for number in range(seed, seed + count)]
    return Dataset(name, f"{count} drawn pictures with exact masks", samples, True, {"demo": seed})


def _draw(seed: int) -> Labelled:
    picture = draw_picture(seed)
    regions = tuple(
        mask_region(CLASS_NAMES[label], mask) for label, mask in zip(picture.labels, picture.masks, strict=True)
    )
    return Labelled(picture.image, regions)


# --- Folders ---------------------------------------------------------------------------------------------------------


def _folder(path: Path, images: Path | None) -> Dataset:
    xml_folder = path / "Annotations" if (path / "Annotations").is_dir() else path
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in (".json", ".csv") and file.is_file())
    xml = sorted(filter(is_file, xml_folder.rglob("*.xml") if xml_folder != path else path.glob("*.xml")))
    labels = next((file for file in files if file.name == "labels.csv"), None)
    files = [file for file in files if file != labels]
    named = [file for file in files if file.name in ("boxes.json", "annotations.json", "boxes.csv", "annotations.csv")]
    chosen = named or (files if not xml else [])
    if len(chosen) > 1:
        raise OptionError(
            f"Expected one file with annotations in {str(path)!r}, got {', '.join(file.name for file in chosen)}. Name "
            "the one to use instead of the folder."
        )
    if chosen or xml:
        return _annotated(chosen or xml, path.name, images or path)
    return _pictures(path.name, find_images(images or path), labels)


def _annotated(files: Sequence[Path], name: str, images: Path | None) -> Dataset:
    """Pictures by their annotations; files of several pictures stand alone, XML files are one picture each."""
    entries = _read_all(files)
    here = files[0].resolve().parent
    beside = [here, here / "images", here.parent / "images", here.parent / "JPEGImages", here.parent]
    finder = PictureFinder([images] if images is not None else beside)
    names = _distinct([entry.file for entry in entries])
    samples = [_annotated_sample(own, entry, finder) for entry, own in zip(entries, names, strict=True)]
    if not any(is_file(file) for sample in samples for file in sample.files):
        for sample in samples:
            if not sample.files:
                sample.read()  # tells what is wrong
        raise OptionError(
            f"None of the {len(samples)} pictures of {files[0].name!r} was found, such as {entries[0].file!r}. Say "
            "where they are with --images (images=…)."
        )
    located = any(entry.regions is not None for entry in entries)
    kind = f"{len(samples)} pictures with " + ("annotated regions" if located else "classes")
    return Dataset(name, kind, samples, located, {"annotations": _digest(files)})


def _read_all(files: Sequence[Path]) -> list[Annotation]:
    """The entries of all files; of several, one that cannot be read is an entry with a problem."""
    entries: list[Annotation] = []
    problems = []
    for file in files:
        try:
            entries += read_annotations(file)
        except VitflowError as error:
            problems.append(error)
            entries.append(Annotation(file.stem, None, problem=error))
    if len(problems) == len(files):
        raise problems[0]
    return entries


def _annotated_sample(name: str, entry: Annotation, finder: PictureFinder) -> Sample:
    problem = entry.problem
    if problem is None:
        try:
            picture = finder.find(entry.file)
            return Sample(name, partial(_read_annotated, picture, entry), (picture,))
        except OptionError as error:
            problem = error
    return Sample(name, partial(_refuse, problem))


def _refuse(problem: VitflowError) -> Labelled:
    raise problem


def _read_annotated(path: Path, entry: Annotation) -> Labelled:
    image = read_image(path)
    if entry.size is not None and entry.size != image.shape[:2]:
        raise ShapeError(
            f"The annotations of {path.name!r} are for a picture of {entry.size[0]} × {entry.size[1]} pixels (height × "
            f"width), and it has {image.shape[0]} × {image.shape[1]}. Give the picture that they were made for."
        )
    check_count(len(entry.regions or ()), path.name)
    return Labelled(image, entry.regions, entry.label)


def _pictures(name: str, paths: Sequence[Path], labels: Path | None) -> Dataset:
    """Pictures with their masks and their classes, where there are any."""
    masks = {path: mask for path in paths if (mask := find_mask(path)) is not None}
    taken = set(masks.values())
    paths = [path for path in paths if path not in taken]
    if not paths:
        raise ImageError(f"Expected at least one picture in {name!r}, found none.")
    classes, lines = find_class_names([*masks.values(), paths[0]])
    own = {entry.file: entry for entry in read_annotations(labels)} if labels is not None else {}
    mixed = len({path.is_absolute() for path in paths}) > 1
    root = os.path.commonpath([path.absolute().parent if mixed else path.parent for path in paths])
    names = _distinct([path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path) for path in paths])
    samples = [
        Sample(
            unique,
            partial(_read_masked, path, masks.get(path), lines, own.get(path.name, Annotation(path.name, None))),
            (path, masks[path]) if path in masks else (path,),
        )
        for path, unique in zip(paths, names, strict=True)
    ]
    kind = f"{len(paths)} pictures" + (" with masks" if masks else "") + (" with classes" if own else "")
    facts = [file for file in (labels, classes) if file is not None]
    return Dataset(name, kind, samples, bool(masks), {"root": root, "annotations": _digest(facts)})


def _read_masked(path: Path, mask: Path | None, names: Sequence[str], entry: Annotation) -> Labelled:
    if entry.problem is not None:
        raise entry.problem
    image = read_image(path)
    size = image.shape[0], image.shape[1]
    regions = None if mask is None else read_mask_regions(mask, size, names, entry.label)
    return Labelled(image, regions, entry.label)


# --- What they share -------------------------------------------------------------------------------------------------


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number behind those that were there before."""
    found: dict[str, None] = {}
    count: dict[str, int] = {}
    for name in names:
        unique = name
        while unique in found:
            count[name] = count.get(name, 1) + 1
            unique = f"{name} ({count[name]})"
        found[unique] = None
    return list(found)


def _digest(files: Sequence[Path]) -> str:
    """One hash over the annotations, so that a changed file is another data set."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode("utf-8", "surrogateescape"))
        with contextlib.suppress(OSError):  # what cannot be read is an entry with a problem
            digest.update(file.read_bytes())
    return digest.hexdigest()
