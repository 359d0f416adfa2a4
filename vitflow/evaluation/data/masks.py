"""Masks beside pictures: where they lie, and which objects their values stand for."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitflow.errors import OptionError, ShapeError
from vitflow.evaluation.data.regions import Label, Region, check_count, mask_region, value_region
from vitflow.files import is_file
from vitflow.pictures.images import read_mask

_ENDINGS = ("_mask", "-mask", ".mask")
_UNKNOWN = 255  # a value of a mask with classes, as in Pascal VOC


def find_mask(picture: Path) -> Path | None:
    """The mask of a picture, beside it or in a folder `masks`, where there is one."""
    candidates = [picture.with_name(f"{picture.stem}{ending}.png") for ending in _ENDINGS]
    candidates.append(picture.parent / "masks" / f"{picture.stem}.png")
    return next((mask for mask in candidates if is_file(mask)), None)


def find_class_names(files: Sequence[Path]) -> tuple[Path | None, list[str]]:
    """The file `classes.txt` beside the first or the last of these files, and its lines; None and no lines without.

    Raises:
        OptionError: it cannot be read.
    """
    folders = dict.fromkeys([files[0].parent, files[-1].parent])
    path = next((folder / "classes.txt" for folder in folders if (folder / "classes.txt").is_file()), None)
    if path is None:
        return None, []
    try:
        return path, path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"Expected the names of the classes in {path.name!r}, one per line, got {error}.") from error


def read_mask_regions(path: Path, size: tuple[int, int], names: Sequence[str], label: Label) -> tuple[Region, ...]:
    """The objects of a mask for a picture of this (height, width).

    Args:
        path: the mask.
        size: of its picture.
        names: of the classes, for the values from 1 on; without, all pixels other than 0 are one object.
        label: what that one is.

    Raises:
        ShapeError: the mask has another size, or values without a name.
    """
    values = read_mask(path, size)
    if not names:
        return (mask_region(label, values > 0),)
    present = np.unique(values[values > 0]).tolist()
    check_count(len(present), path.name)
    found = []
    for value in present:
        unknown = value > len(names) and value == _UNKNOWN
        if not unknown and (value > len(names) or value != int(value)):
            raise ShapeError(f"Pixels of {path.name!r} have the value {value}, and classes.txt has {len(names)} lines.")
        own = None if unknown else names[int(value) - 1].strip()
        found.append(value_region(own, values, value, unknown=unknown))
    return tuple(found)
