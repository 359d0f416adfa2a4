"""Samples of a data set: an image with its annotations, read when needed."""

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ShapeError, VitflowError
from vitflow.evaluation.regions import Label, Mask, Region, check_boxes, naming_turn

_MOST_OBJECTS = 10_000  # of one image, far above real annotations


@dataclass(frozen=True, slots=True, eq=False)
class Labelled:
    """An image and its annotations.

    Attributes:
        image: RGB uint8 [height, width, 3].
        regions: the objects; None if the data has no masks or boxes.
        label: class of the whole image, if known.
        source: its path or PIL image, for errors that concern its EXIF orientation.

    Raises:
        ShapeError: there are too many objects.
        OptionError: boxes have another format.
    """

    image: NDArray[np.uint8]
    regions: tuple[Region, ...] | None = None
    label: Label = None
    source: Any = None

    def __post_init__(self) -> None:
        if self.regions is not None and len(self.regions) > _MOST_OBJECTS:
            raise ShapeError(f"Expected at most {_MOST_OBJECTS} objects in an image, got {len(self.regions)}.")
        check_boxes(region.shape for region in self.regions or ())

    def union(self, regions: Sequence[Region]) -> Mask:
        """Return the union of some of its regions, bool [height, width]; errors as of `Region.paint`."""
        mask = np.zeros(self.image.shape[:2], dtype=np.bool_)
        with naming_turn(self.source):
            for region in regions:
                region.paint(mask)
        return mask


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
                    digest.update(content.union([region]).tobytes())
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
        notes: notes on files that are not read.
    """

    name: str
    kind: str
    samples: Sequence[Sample] = field(repr=False)
    has_regions: bool
    identity: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)


def distinct(names: Sequence[str]) -> list[str]:
    """Return the names, with a number appended to duplicates."""
    chosen: dict[str, None] = {}
    for name in names:
        unique, number = name, 1
        while unique in chosen:
            number += 1
            unique = f"{name} ({number})"
        chosen[unique] = None
    return list(chosen)


def digest_of(files: Sequence[Path]) -> str:
    """Return a hash of the annotation files, to detect changes."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode("utf-8", "surrogateescape"))
        with contextlib.suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()
