"""Read images as RGB and masks, and write images atomically."""

import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageSequence, TiffImagePlugin, UnidentifiedImageError

from vitflow.errors import FrameError, ImageError, OptionError, VitflowError, VitflowWarning
from vitflow.files import is_file, is_folder, is_there, write_atomically
from vitflow.images import WRITE_OPTIONS, conversion
from vitflow.images.conversion import FIRST_THREE

ImageSource = str | os.PathLike[str] | bytes | BinaryIO | Image.Image | np.ndarray

#: Maximum number of pixels, against decompression bombs: Pillow's limit, twice `PIL.Image.MAX_IMAGE_PIXELS`.
MAX_PIXELS = 178_956_970

# Raster formats only: Pillow also opens EPS through Ghostscript, and formats without a signature.
_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "HEIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


# Brands of HEIC files in their "ftyp" box.
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")


def read_image(source: ImageSource) -> NDArray[np.uint8]:
    """Read an image as RGB: uint8 [height, width, 3], rotated by its EXIF orientation.

    The first frame of an animation or a multi-page file is read. Transparent pixels are blended with white. More than
    8 bits per channel are scaled down to 8, never clipped: 16-bit values are divided by 256. 32-bit integers and
    floats are refused, as they have no defined range.

    A VitflowWarning names bands and pages that are not used, and values that fill a small part of their range, such as
    12 bits in 16. A fourth band of a TIFF or JPEG 2000 file or of an array is transparency only if most visible pixels
    are opaque or equally transparent; three or four grey pages of a TIFF file are its bands.

    Args:
        source: a path, the bytes of a file, an open binary file (read from its start), a PIL image, or an array with
            values [height, width] (grey), [height, width, 3] (RGB) or [height, width, 4] (RGBA or a fourth band) of
            type uint8, uint16, or floats from 0 to 1.

    Raises:
        ImageError: the file is missing, empty, truncated, not an image, or has more pixels than Pillow's limit.
        ShapeError: an array of any other shape, type or range.

    >>> read_image(np.zeros((2, 3), dtype=np.uint16)).shape
    (2, 3, 3)
    """
    image, notes = read_with_notes(source)
    for note in notes:
        warnings.warn(f"{image_name(source)}: {note}", VitflowWarning, stacklevel=2)
    return image


def read_with_notes(source: ImageSource, *, content: bytes | None = None) -> tuple[NDArray[np.uint8], list[str]]:
    """Read an image as `read_image` does, and return its warnings, without the image's name, instead of issuing them.

    `content` are the bytes of the file at the path, if they are already read.

    >>> read_with_notes(np.array([[0, 4095]], np.uint16))[1][0].partition(":")[0]
    'its values fill 1/16 of their range'
    """
    if isinstance(source, np.ndarray):
        return conversion.from_array(source)
    source = _content(source)
    if not isinstance(source, str | os.PathLike | bytes | Image.Image):
        hint = ""
        if hasattr(source, "permute"):
            hint = " Pass a tensor [3, height, width] as tensor.permute(1, 2, 0).numpy(), with values from 0 to 1."
        raise ImageError(
            f"Expected an image as a path, bytes, a binary file, a PIL image or a NumPy array, got "
            f"{type(source).__name__}.{hint}"
        )
    with _decoding(source, content=content):
        if isinstance(source, Image.Image):
            return _from_pillow(source, image_name(source))
        with _open(source if content is None else content) as opened:
            return _from_pillow(opened, image_name(source))


def is_open_file(source: object) -> bool:
    """Return True for an object that is read like a file, such as BytesIO."""
    return hasattr(source, "read") and not isinstance(source, os.PathLike)


def _content(source: Any) -> Any:
    """Return the bytes of an open file or a buffer; anything else unchanged."""
    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    if not is_open_file(source):
        return source
    try:
        if getattr(source, "seekable", bool)():  # as Pillow does: it may just have been written
            source.seek(0)
        content = source.read()
    except (OSError, ValueError) as error:  # such as a closed file
        raise ImageError(f"Could not read the given {image_name(source)}: {error}. Open it in mode 'rb'.") from error
    if not isinstance(content, bytes):
        raise ImageError(f"Expected an image as a binary file, got {type(source).__name__}. Open it in mode 'rb'.")
    return content


def read_mask(path: str | os.PathLike[str], size: tuple[int, int]) -> NDArray[Any]:
    """Read the values of a mask, [height, width]: the indices of a palette image, or the largest channel.

    Transparent pixels are 0. A FrameError is raised before a file is decoded that has not the size of its image.
    """
    with _decoding(path, "the mask "), _open(path) as opened:
        if (actual := (opened.height, opened.width)) != size:
            raise FrameError(f"Expected a mask of the image's size, {size} pixels (height, width), got {actual}.")
        values = np.asarray(opened)
        transparent = opened.getbands()[-1] in ("A", "a")
    if transparent:
        values = values[..., :-1] * (values[..., -1:] > 0)
    return values.max(axis=2) if values.ndim == 3 else values


def write_image(path: str | os.PathLike[str], array: NDArray[np.uint8]) -> None:
    """Write an RGB, RGBA or grey image, uint8 [height, width, 3 or 4] or [height, width], in the format of the suffix.

    The file is written atomically, and folders are created as needed.
    """
    target = Path(path)
    options = WRITE_OPTIONS.get(target.suffix.lower())
    if options is None:
        raise ImageError(
            f"Cannot write an image as {image_name(path)!r}: expected a name that ends in "
            f"{', '.join(sorted(WRITE_OPTIONS))}, got {target.suffix or 'no suffix'!r}."
        )
    if array.shape[2:] == (4,) and options["format"] == "JPEG":
        raise OptionError("JPEG has no transparency: write a .png or .webp, or use another background than none.")
    try:
        with write_atomically(target) as file:
            Image.fromarray(array).save(file, **options)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error  # the rest of the error names the unfinished file
        size = f"{array.shape[1]} × {array.shape[0]} pixels"
        raise ImageError(
            f"Could not write {image_name(path)!r} ({size}) in {str(target.parent)!r}: {reason}. Choose another place."
        ) from error


def image_name(source: object) -> str:
    """Return a short name of an image: the file name, if there is one.

    >>> image_name("photos/cat.jpg"), image_name(b"..."), image_name(np.zeros((2, 2)))
    ('cat.jpg', 'bytes', 'array')
    """
    if isinstance(source, Image.Image):
        source = getattr(source, "filename", "") or "image"
    if is_open_file(source) and isinstance(name := getattr(source, "name", None), str):
        source = name
    if isinstance(source, str | os.PathLike):
        name = os.fsencode(source)
        # Names that are not valid UTF-8 cannot be printed as they are.
        return os.path.basename(name).decode("utf-8", "replace") or name.decode("utf-8", "replace")  # noqa: PTH119
    return {np.ndarray: "array", bytes: "bytes"}.get(type(source), type(source).__name__)


@contextmanager
def _decoding(source: Any, kind: str = "", content: bytes | None = None) -> Iterator[None]:
    """Turn whatever a decoder raises into an ImageError that names the source and the remedy."""
    name = (
        f"{kind}{image_name(source)!r}" if isinstance(source, str | os.PathLike) else f"the given {image_name(source)}"
    )
    try:
        yield
    except VitflowError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"Expected {name} to have at most {MAX_PIXELS:,} pixels, got more. Resize it, or, if you trust the file, "
            "raise Pillow's limit, PIL.Image.MAX_IMAGE_PIXELS, and pass the image that it reads."
        ) from error
    except PermissionError as error:
        raise ImageError(f"Could not read {name}: {error.strerror}. Check its permissions.") from error
    except UnidentifiedImageError as error:
        known = ", ".join(_known_formats())
        raise ImageError(
            f"Expected {name} to be an image ({known}), got {_kind_of(source if content is None else content)}"
        ) from error
    except Exception as error:  # a malformed file makes decoders raise nearly anything
        reason = str(error) or type(error).__name__
        raise ImageError(
            f"Could not read {name}, which is truncated or corrupt ({reason}): download or export it again."
        ) from error


def _open(source: str | os.PathLike[str] | bytes) -> Image.Image:
    """Open an image in one of the supported formats, without decoding it; Pillow tries no others."""
    file: Any = io.BytesIO(source) if isinstance(source, bytes) else _existing(source)
    with suppress(UnidentifiedImageError):  # loading the readers of all formats takes longer than most images
        return Image.open(file, formats=("JPEG", "PNG"))
    return Image.open(file, formats=_known_formats())


def _existing(source: str | os.PathLike[str]) -> Path:
    """Return a path; ImageError unless it is that of a file."""
    path = Path(source)
    if is_folder(path):
        more = "vitflow.explain_folder explains all images in it."
        raise ImageError(f"Expected an image, got the folder {str(path)!r}. {more}")
    if not is_there(path):
        shown, web = re.subn(r"^(https?:)/+", r"\1//", str(path))  # of which a path keeps one
        hint = " Images on the web must be downloaded first." if web else ""
        raise ImageError(f"Expected an image at {shown!r}, but there is no such file.{hint}")
    if not is_file(path):  # reading from a pipe would wait for ever
        raise ImageError(f"Expected an image at {str(path)!r}, got a device or a pipe. Save it to a file first.")
    return path


def _known_formats() -> list[str]:
    """Return the supported formats that this installation reads; pillow-heif adds HEIF."""
    Image.init()
    if "HEIF" not in Image.OPEN and find_spec("pillow_heif"):
        import_module("pillow_heif").register_heif_opener()
    return [name for name in _FORMATS if name in Image.OPEN]


def _kind_of(source: Any) -> str:
    """Return what a file that Pillow does not open is, and the remedy, for an error."""
    convert = "Convert it to PNG or JPEG."
    if isinstance(source, Image.Image):
        return f"another one. {convert}"
    with io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file:
        start = file.read(12)
    if start[4:8] == b"ftyp" and start[8:] in _HEIF_BRANDS and "HEIF" not in Image.OPEN:
        return f"a HEIC file, which requires pillow-heif: pip install 'vitflow[heic]'. {convert}"
    if start[:4] in TiffImagePlugin.PREFIXES:
        return (
            "a TIFF file that is damaged, or has channels or a compression that Pillow does not read: read it with "
            "another package, such as tifffile, and pass three of its channels as an array of uint8, or of floats from "
            "0 to 1; for a model of other channels, pass the normalised tensor."
        )
    return f"an empty file, or one of another type. {convert}"


def _from_pillow(image: Image.Image, name: str) -> tuple[NDArray[np.uint8], list[str]]:
    """RGB pixels of an opened image, upright, and notes."""
    if image.format == "EPS" and getattr(image, "tile", None):  # not decoded yet, which would start Ghostscript
        raise UnidentifiedImageError
    file_format = image.format
    # Pillow gives a PGM of more than 8 bits as 32 bits, scaled to 16; older releases a PNG, too.
    if image.mode == "F" or (image.mode == "I" and file_format not in ("PPM", "PNG")):
        raise ImageError(
            f"Expected {name!r} to have 8 or 16 bits per channel, got 32, whose range is unknown: "
            "pass an array of floats from 0 to 1, which are its values divided by the largest possible one."
        )
    pages, notes = conversion.pages_of(image), list[str]()
    if pages in (3, 4) and image.mode.startswith(("L", "I;16")):
        notes = [f"pages 1, 2 and 3 of {pages} are read as the bands red, green and blue"]
        bands = np.stack([np.array(page) for page in islice(ImageSequence.Iterator(image), 3)], axis=2)
        wide = bands.dtype.itemsize > 1
        return conversion.to_rgb((bands >> 8 if wide else bands).astype(np.uint8), notes, deep=wide, used=None), notes
    if pages > 1:
        notes = [f"page 1 of {pages} is read; the others are left out"]
    samples = image.tag_v2.get(TiffImagePlugin.SAMPLESPERPIXEL, 1) if hasattr(image, "tag_v2") else 0
    deep = any(";16" in str(tile[3:]) for tile in getattr(image, "tile", ()))
    image.load()
    # After load(): Pillow's TIFF reader turns the image itself and then forgets the orientation.
    # ImageOps.exif_transpose rewrites the EXIF data, which fails if another tag is malformed.
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # malformed EXIF, while the image itself may be sound
        orientation = None
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    image = image if turn is None else image.transpose(turn)
    image = image.convert("LA") if image.mode == "La" else image
    used = "band 1 of 2 is read as grey, the other not" if image.mode == "LA" else FIRST_THREE.format(4)
    if image.mode in ("RGB", "RGBX") and samples > 3:  # Pillow gave the fourth band, too, before 10.4
        notes.append(FIRST_THREE.format(samples))
    if image.mode.startswith("I"):
        values = np.asarray(image)
        pixels, deep = (values >> 8).astype(np.uint8), bool(values.any())
    else:
        pixels = np.array(image.convert("RGBA" if image.has_transparency_data else "RGB"))
    used_bands = used if file_format in ("TIFF", "JPEG2000") else None
    return conversion.to_rgb(pixels, notes, deep=deep, used=used_bands), notes
