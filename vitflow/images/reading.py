"""Read images as RGB and masks, and write images atomically."""

import io
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from vitflow.errors import ImageError, OptionError, ShapeError, VitflowError, load_extra
from vitflow.files import is_file, is_folder, is_there, write_atomically
from vitflow.images import WRITE_OPTIONS

ImageSource = str | os.PathLike[str] | bytes | Image.Image | np.ndarray

#: Maximum number of pixels, against decompression bombs; the limit of Pillow.
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


# Pillow's limit of pixels is global to the process: one thread at a time opens a file without it.
_opening = threading.Lock()


def read_image(source: ImageSource, *, max_pixels: int = MAX_PIXELS, content: bytes | None = None) -> NDArray[np.uint8]:
    """Read an image as RGB: uint8 [height, width, 3], rotated by its EXIF orientation.

    The first frame of an animation or a multi-page file is read. Transparent pixels are blended with white. More than
    8 bits per channel are scaled down to 8, never clipped: 16-bit values are divided by 256. 32-bit integers and
    floats have no defined range: they are divided by the smallest of 1 (floats only), 255, 65535 and 2³² − 1 that is at
    least the largest value, and negative values count as 0.

    Args:
        source: a path, the bytes of a file, a PIL image, or an array with values [height, width] (grey),
            [height, width, 3] (RGB) or [height, width, 4] (RGBA) of type uint8, uint16, or floats from 0 to 1.
        max_pixels: refuse files with more pixels than this.
        content: the bytes of the file at the path, if they are already read.

    Raises:
        ImageError: the file is missing, empty, truncated, too large, or not an image.
        ShapeError: an array of any other shape, type or range.

    >>> read_image(np.zeros((2, 3), dtype=np.uint16)).shape
    (2, 3, 3)
    """
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if not isinstance(source, str | os.PathLike | bytes | Image.Image):
        hint = " For an open file, pass file.read()." if hasattr(source, "read") else ""
        if hasattr(source, "permute"):
            hint = " Pass a tensor [3, height, width] as tensor.permute(1, 2, 0).numpy(), with values from 0 to 1."
        raise ImageError(
            f"Expected an image as a path, bytes, a PIL image or a NumPy array, got {type(source).__name__}.{hint}"
        )
    with _decoding(source, max_pixels):
        if isinstance(source, Image.Image):
            return _from_pillow(source, max_pixels)
        with _open(source if content is None else content) as opened:
            return _from_pillow(opened, max_pixels)


def read_mask(path: str | os.PathLike[str], size: tuple[int, int]) -> NDArray[Any]:
    """Read the values of a mask, [height, width]: the indices of a palette image, or the largest channel.

    Transparent pixels are 0. A file of another size than the image's is refused before it is decoded.

    Args:
        path: the mask's file.
        size: (height, width) of its image.

    Raises:
        ImageError: the file is missing, empty, truncated, or not an image.
        ShapeError: it has another size.
    """
    with _decoding(path, MAX_PIXELS, "the mask "), _open(path) as opened:
        check_mask_size((opened.height, opened.width), size)
        values = np.asarray(opened)
        transparent = opened.getbands()[-1] in ("A", "a")
    if transparent:
        values = values[..., :-1] * (values[..., -1:] > 0)
    return values.max(axis=2) if values.ndim == 3 else values


def check_mask_size(mask_size: tuple[int, ...], size: tuple[int, ...]) -> None:
    """Raise ShapeError unless a mask has its image's (height, width)."""
    if mask_size != size:
        raise ShapeError(
            f"Expected a mask of the image's size, {size[0]} × {size[1]} pixels (height × width), got {mask_size[0]} × "
            f"{mask_size[1]}. Create the mask for this image, without its EXIF rotation."
        )


def write_image(path: str | os.PathLike[str], array: NDArray[np.uint8]) -> None:
    """Write an RGB, RGBA or grey image, uint8 [height, width, 3 or 4] or [height, width], in the format of the suffix.

    The file is written atomically, and folders are created as needed. JPEG and WebP have quality 95.

    Raises:
        ImageError: a suffix other than .png, .jpg, .jpeg and .webp, or the file could not be written.
        ShapeError: the array is not such an image.
    """
    target = Path(path)
    options = WRITE_OPTIONS.get(target.suffix.lower())
    if options is None:
        raise ImageError(
            f"Cannot write an image as {image_name(path)!r}: expected a name that ends in "
            f"{', '.join(sorted(WRITE_OPTIONS))}, got {target.suffix or 'no suffix'!r}."
        )
    if array.dtype != np.uint8 or not (array.ndim == 2 or array.shape[2:] in ((3,), (4,))) or not array.size:
        raise ShapeError(
            f"Expected an image as uint8 [height, width, 3] or [height, width], got {array.dtype} {array.shape}."
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
    if isinstance(source, str | os.PathLike):
        name = os.fsencode(source)
        # Names that are not valid UTF-8 cannot be printed as they are.
        return os.path.basename(name).decode("utf-8", "replace") or name.decode("utf-8", "replace")  # noqa: PTH119
    return {np.ndarray: "array", bytes: "bytes"}.get(type(source), type(source).__name__)


@contextmanager
def _decoding(source: Any, max_pixels: int, kind: str = "") -> Iterator[None]:
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
            f"Expected {name} to have at most {max_pixels:,} pixels, got more. "
            f"If you trust the file, raise the limit with max_pixels."
        ) from error
    except PermissionError as error:
        raise ImageError(f"Could not read {name}: {error.strerror}. Check its permissions.") from error
    except FloatingPointError:
        raise ImageError(
            f"Expected finite pixel values in {name}, got NaN or infinity: pass an array without them."
        ) from None
    except UnidentifiedImageError as error:
        known = ", ".join(_known_formats())
        raise ImageError(
            f"Expected {name} to be an image ({known}), got an empty or another file. Convert it to PNG or JPEG."
        ) from error
    except Exception as error:  # a malformed file makes decoders raise nearly anything
        reason = error or type(error).__name__
        raise ImageError(
            f"Could not read {name}: {reason}. It is truncated or corrupt: download or export it again."
        ) from error


def _open(source: str | os.PathLike[str] | bytes) -> Image.Image:
    """Open an image of any size in one of the supported formats, without decoding it; Pillow tries no others."""
    file: Any = io.BytesIO(source) if isinstance(source, bytes) else _existing(source)
    with _opening:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(file, formats=_known_formats())
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _existing(source: str | os.PathLike[str]) -> Path:
    """Return a path; ImageError unless it is that of a file."""
    path = Path(source)
    if is_folder(path):
        more = "vitflow.explain_folder explains all images in it."
        raise ImageError(f"Expected an image, got the folder {str(path)!r}. {more}")
    if not is_there(path):
        hint = " Images on the web must be downloaded first." if re.match(r"https?:/", str(path)) else ""
        raise ImageError(f"Expected an image at {str(path)!r}, but there is no such file.{hint}")
    if not is_file(path):  # reading from a pipe would wait for ever
        raise ImageError(f"Expected an image at {str(path)!r}, got a device or a pipe. Save it to a file first.")
    return path


def _known_formats() -> list[str]:
    """Return the supported formats that this release of Pillow reads."""
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def _from_pillow(image: Image.Image, max_pixels: int) -> NDArray[np.uint8]:
    """RGB pixels of an opened image, upright."""
    if image.format == "EPS" and getattr(image, "tile", None):  # not decoded yet, which would start Ghostscript
        raise UnidentifiedImageError
    if image.width * image.height > max_pixels:
        raise Image.DecompressionBombError
    image.load()
    # After load(): Pillow's TIFF reader turns the image itself and then forgets the orientation.
    # ImageOps.exif_transpose rewrites the EXIF data, which fails if another tag is malformed; its copy has no format.
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # malformed EXIF, while the image itself may be sound
        orientation = None
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    if turn is not None:
        file_format = image.format
        image = image.transpose(turn)
        image.format = file_format
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode.startswith(("I", "F")):
        return _grey_to_rgb(_eight_bits(image))
    if image.has_transparency_data:
        return _over_white(np.asarray(image.convert("RGBA")))
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _eight_bits(image: Image.Image) -> NDArray[np.uint8]:
    """8-bit grey values [height, width] of an image with one channel of 16 or 32 bits."""
    values = np.asarray(image)
    # Pillow gives a PGM of more than 8 bits as 32 bits, scaled to 16; older releases a PNG, too.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG")):
        return (values >> 8).astype(np.uint8)
    largest = float(values.max())
    if not np.isfinite(values).all():
        raise FloatingPointError
    scales = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
    full = next((scale for scale in scales if largest <= scale), max(2.0**32 - 1, largest))
    return np.clip(np.rint(values.astype(np.float64) * (255.0 / full)), 0, 255).astype(np.uint8)


def _from_array(array: NDArray[Any]) -> NDArray[np.uint8]:
    """RGB pixels of an array of grey, RGB or RGBA values."""
    grey_or_colour = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if not grey_or_colour or array.size == 0:
        first = array.ndim == 3 and array.shape[0] in (3, 4)
        raise ShapeError(
            f"Expected an array [height, width], [height, width, 3] (RGB) or [height, width, 4] (RGBA), "
            f"got {array.shape}." + (" Put the channels last: array.transpose(1, 2, 0)." if first else "")
        )
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:
        array = (array >> 8).astype(np.uint8)
    elif np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # NaN fails both
            raise ShapeError(
                f"Expected a float array with values from 0 to 1, got values from {low:g} to {high:g}. "
                f"Divide by 255, or convert to uint8."
            )
        array = np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise ShapeError(
            f"Expected an array of uint8, uint16, or floats from 0 to 1, got {array.dtype}. "
            f"If its values are from 0 to 255: array.astype(np.uint8)."
        )
    if array.ndim == 2:
        return _grey_to_rgb(array)
    return _over_white(array) if array.shape[2] == 4 else array.copy(order="C")


def read_channels(source: ImageSource, channels: int, **options: Any) -> NDArray[Any]:
    """Read an image by `read_image` for 1 or 3 channels, otherwise by `read_bands`, with their options."""
    return read_image(source, **options) if channels in (1, 3) else read_bands(source, channels, **options)


def read_bands(
    source: ImageSource, channels: int, *, max_pixels: int = MAX_PIXELS, content: bytes | None = None
) -> NDArray[np.float32]:
    """Read an image with any number of channels, in its own units: float32 [height, width, channels].

    Args:
        source: an array [height, width, channels], or the path of a TIFF file or of an array in a `.npy` file.
        channels: the number of channels that the model requires.
        max_pixels: refuse files with more pixels than this.
        content: the bytes of the file at the path, if they are already read.

    Raises:
        ShapeError: another shape, values that are not numbers, or values that are not finite.
        ImageError: the file cannot be read, or is too large.

    >>> read_bands(np.zeros((8, 9, 13), np.uint16), 13).shape
    (8, 9, 13)
    """
    if isinstance(source, np.ndarray):
        _check_bands(source.shape, channels)
        array: NDArray[Any] = source
    elif not isinstance(source, str | os.PathLike) or Path(source).suffix.lower() not in (".npy", ".tif", ".tiff"):
        name = f", or a .npy or TIFF file with one, got {image_name(source)!r}"
        raise ImageError(f"Expected {_bands_in_words(channels)}{name}.")
    else:
        with _decoding(source, max_pixels):
            array = _stored_bands(source, channels, max_pixels, content)
    if array.dtype.kind not in "uif" or not np.isfinite(array).all():
        raise ShapeError(
            f"Expected finite numbers, got {array.dtype} with other values. Replace NaN, as by nan_to_num."
        )
    return np.ascontiguousarray(array, dtype=np.float32)


def _stored_bands(path: str | os.PathLike[str], channels: int, max_pixels: int, content: bytes | None) -> NDArray[Any]:
    """Read the channels of a file; its size is checked before its values are read."""
    name, file = image_name(path), _existing(path) if content is None else io.BytesIO(content)
    if Path(path).suffix.lower() == ".npy":
        array: NDArray[Any] = np.load(file, mmap_mode="r" if content is None else None, allow_pickle=False)
        _check_bands(array.shape, channels, name, max_pixels)
        return array
    tifffile = load_extra("tifffile", f"Reading {name!r} as an image of {channels} channels", "tiff", ImageError)
    with tifffile.TiffFile(file) as opened:
        image = opened.series[0]  # the finest resolution
        first = len(image.shape) == 3 and image.shape[0] == channels and image.axes[-1] != "S"
        _check_bands((*image.shape[1:], channels) if first else image.shape, channels, name, max_pixels)
        return np.moveaxis(image.asarray(), 0, 2) if first else image.asarray()


def _bands_in_words(channels: int) -> str:
    return f"an array [height, width, {channels}], as the model requires images of {channels} channels"


def _check_bands(shape: tuple[int, ...], channels: int, name: str = "", max_pixels: int | None = None) -> None:
    """Raise an error unless a shape is [height, width, channels], with at most `max_pixels` pixels."""
    if len(shape) != 3 or shape[2] != channels or 0 in shape:
        first = len(shape) == 3 and shape[0] == channels
        remedy = " Put the channels last: array.transpose(1, 2, 0)." if first else ""
        of = f" in {name!r}" if name else ""
        raise ShapeError(f"Expected {_bands_in_words(channels)}, got shape {shape}{of}.{remedy}")
    if max_pixels is not None and shape[0] * shape[1] > max_pixels:
        raise Image.DecompressionBombError


def bands_in_colour(bands: NDArray[np.floating[Any]], channels: Sequence[int]) -> NDArray[np.uint8]:
    """Display three channels as red, green and blue, each from its 2nd to its 98th percentile: uint8 RGB.

    Args:
        bands: [height, width, channels].
        channels: indices of the three channels, from 0.
    """
    shown = bands[:, :, list(channels)]
    low, high = np.percentile(shown, (2, 98), axis=(0, 1))
    scaled: NDArray[np.float64] = np.clip((shown - low) / np.maximum(high - low, 1e-12), 0, 1)
    return np.rint(255 * scaled).astype(np.uint8)


def _grey_to_rgb(grey: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.repeat(grey[:, :, None], 3, axis=2)


def _over_white(rgba: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Lay RGBA pixels over white."""
    alpha = rgba[:, :, 3:].astype(np.uint16)
    return ((rgba[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
