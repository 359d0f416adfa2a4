"""Write files atomically, and find the images of a folder."""

import errno
import os
import re
import secrets
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from vitflow.errors import ImageError, VitflowWarning

#: Suffixes of HEIC files, which pillow-heif reads.
HEIC_SUFFIXES = frozenset({".heic", ".heics", ".heif", ".heifs", ".hif"})
_READ = ".avif .bmp .dib .gif .jfif .jp2 .jpe .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp"
#: Suffixes of image files that are read.
READ_SUFFIXES = frozenset(_READ.split()) | (HEIC_SUFFIXES if find_spec("pillow_heif") else frozenset())
# Image files of cameras, medicine, microscopes and graphics.
_UNREAD = (
    ".arw .cr2 .cr3 .dng .nef .nrw .orf .pef .raf .raw .rw2 .srw .dcm .dicom .nii .nrrd .czi .lif .nd2 .ndpi .svs "
    ".fits .hdr .eps .exr .ico .j2k .jpx .jxl .pcx .psd .svg .tga .xcf"
)
#: Suffixes of image files that are not read.
UNREAD_SUFFIXES = (frozenset(_UNREAD.split()) | HEIC_SUFFIXES) - READ_SUFFIXES
# Key under which hidden image files are counted.
_HIDDEN = "hidden"

# Methods of Path would raise for a name that the system rejects, such as one of 300 letters; these return False.
is_folder, is_file, is_link, is_there = os.path.isdir, os.path.isfile, os.path.islink, os.path.exists


@contextmanager
def write_atomically(path: str | os.PathLike[str], *, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block succeeds, and is removed when it fails.

    Parent folders are created. With `durable`, a power cut leaves the old file or the new one, but no empty one.
    """
    target = Path(path)
    if not target.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # A short name: the target's may be as long as the file system allows.
    unfinished = target.with_name(f".vitflow-{secrets.token_hex(8)}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is a URL.

    >>> is_remote("s3://bucket/photographs"), is_remote("photographs")
    (True, False)
    """
    return "://" in os.fspath(path)


def stays_inside(folder: Path, path: str) -> bool:
    """Return True if a path below a folder is inside the folder after its links are resolved."""
    base = os.path.realpath(folder)
    parent = os.path.realpath(os.path.dirname(os.path.join(base, path)))  # noqa: PTH118, PTH120
    return os.path.commonpath([base, parent]) == base


def remove_inside(folder: Path, paths: Iterable[str]) -> None:
    """Remove files below a folder if they exist, except those that links lead outside the folder."""
    for path in paths:
        target = folder / path
        if stays_inside(folder, path) and (target.is_file() or target.is_symlink()):
            target.unlink(missing_ok=True)


@contextmanager
def write_inside(folder: Path, path: str, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a file below a folder as `write_atomically` does; OSError for a link that leads out of the folder."""
    if not stays_inside(folder, path):
        raise OSError(f"a link leads out of the folder {str(folder)!r}")
    with write_atomically(folder / path, durable=durable) as file:
        yield file


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished files of killed processes below a folder."""
    for place, _, names in os.walk(folder):
        for name in names:
            if name.startswith(".vitflow-") and name.endswith(".part"):
                Path(place, name).unlink(missing_ok=True)


def find_images(path: str | os.PathLike[str]) -> list[Path]:
    """Return the images in a folder by their suffix, in natural order; of a file, its path, whatever its suffix.

    Hidden files are skipped. A VitflowWarning counts them, and image files that cannot be read.
    """
    root = Path(path)
    if is_file(root):
        return [root]
    if not is_folder(root):
        raise ImageError(f"Expected a folder or an image, but there is nothing at {str(root)!r}.")
    try:
        present = [file for file in root.iterdir() if is_file(file)]
    except OSError as error:
        raise ImageError(f"Could not read the folder {str(root)!r}: {error.strerror}.") from error
    if note := unread_in_words(Counter(suffix for file in present if (suffix := unread_suffix(file.name)))):
        warnings.warn(note, VitflowWarning, stacklevel=2)
    files = [file for file in present if is_image_name(file.name)]
    return sorted(files, key=lambda file: (natural_order(file.name), file.name))


def is_image_name(name: str) -> bool:
    """Return True if a file name has an image suffix and is not hidden."""
    return not name.startswith(".") and Path(name).suffix.lower() in READ_SUFFIXES


def unread_suffix(name: str) -> str:
    """Return the suffix of an image file that is not read, or "hidden"; empty for images that are, and other files."""
    suffix = Path(name).suffix.lower()
    if name.startswith("."):
        return _HIDDEN if suffix in READ_SUFFIXES | UNREAD_SUFFIXES else ""
    return suffix if suffix in UNREAD_SUFFIXES else ""


def unread_in_words(unread: Mapping[str, int]) -> str:
    """Return a line on image files that are left out, given their number by suffix; empty if there are none.

    >>> unread_in_words({".tga": 1, ".cr2": 2})
    'Image files that cannot be read are left out (2 .cr2, 1 .tga): convert them to PNG or JPEG.'
    >>> unread_in_words({"hidden": 3})
    'Hidden image files are left out (3).'
    """
    counts = ", ".join(f"{count} {suffix}" for suffix, count in sorted(unread.items()) if suffix != _HIDDEN)
    remedy = "for HEIC, pip install 'vitflow[heic]'; or " if HEIC_SUFFIXES & unread.keys() else ""
    sentence = f"Image files that cannot be read are left out ({counts}): {remedy}convert them to PNG or JPEG."
    hidden = f"Hidden image files are left out ({unread[_HIDDEN]})." if unread.get(_HIDDEN) else ""
    return " ".join(filter(None, (sentence if counts else "", hidden)))


def natural_order(name: str) -> list[str | int]:
    """Sort key that compares runs of digits as numbers (of at most 300 digits: int() has a limit).

    >>> sorted(["10.jpg", "9.jpg", "a2", "A10"], key=natural_order)
    ['9.jpg', '10.jpg', 'a2', 'A10']
    """
    return [int(part) if part.isdecimal() else part.casefold() for part in re.split(r"(\d{1,300})", name)]


def in_file_name(label: str) -> str:
    """Return a label without the colon of methods of other packages, which Windows does not allow in file names."""
    return label.replace(":", "-")
