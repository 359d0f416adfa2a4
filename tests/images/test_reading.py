"""Reading, writing and finding images: every mode, every format, and every fault by causing it."""

import io
import os
import re
import zipfile
from contextlib import nullcontext
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from vitflow.errors import ImageError, ShapeError, VitflowWarning
from vitflow.files import find_images
from vitflow.images.reading import image_name, read_image, write_image

RGB = np.random.default_rng(0).integers(0, 256, (17, 23, 3), dtype=np.uint8)
SMOOTH = np.stack(np.broadcast_arrays(*np.ogrid[0:200:40j, 30:250:48j], 90), axis=-1).astype(np.uint8)
# Older releases of Pillow read no AVIF.
Image.init()
AVIF = ["AVIF"] if "AVIF" in Image.SAVE else []
GREY16 = (np.random.default_rng(1).integers(0, 65536, (17, 23))).astype(np.uint16)


def encode(image: Image.Image | np.ndarray, fmt: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, fmt, **options)
    return file.getvalue()


def grey(values: np.ndarray) -> np.ndarray:
    return np.stack([values] * 3, axis=-1)


def transparency(values: np.ndarray) -> np.ndarray:
    """Mostly opaque or invisible, as transparency is; the rest partly transparent."""
    return np.where(values < 160, 255, np.where(values < 200, 0, values)).astype(np.uint8)


def over_white(color: np.ndarray, alpha: np.ndarray | float) -> np.ndarray:
    """The definition, in float64: α · colour + (1 − α) · white."""
    share = np.asarray(alpha, dtype=np.float64) / 255
    return color * share + 255 * (1 - share)


@pytest.mark.parametrize("name", ["cat.png", "Кошка на снегу.png", "猫 🐈.png", "a%20b#?.png", "no suffix"])
def test_paths_bytes_and_objects_give_the_same_pixels(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(encode(RGB))
    for source in [path, str(path), path.read_bytes(), Image.open(path), Image.fromarray(RGB), RGB]:
        image = read_image(source)
        assert image.dtype == np.uint8
        assert image.flags.c_contiguous
        assert image.flags.writeable
        np.testing.assert_array_equal(image, RGB)


def test_the_result_is_a_copy():
    source = RGB.copy()
    read_image(source)[:] = 0
    np.testing.assert_array_equal(source, RGB)
    image = Image.fromarray(source)
    read_image(image)[:] = 0
    np.testing.assert_array_equal(np.asarray(image), RGB)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("PNG", {}),
        ("BMP", {}),
        ("PPM", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "tiff_adobe_deflate"}),
        ("WEBP", {"lossless": True}),
        ("JPEG2000", {"irreversible": False}),
    ],
)
def test_lossless_formats(fmt, options):
    np.testing.assert_array_equal(read_image(encode(RGB, fmt, **options)), RGB)


@pytest.mark.parametrize("fmt", ["JPEG", "MPO", "WEBP", *AVIF])
def test_lossy_formats(fmt):
    image = read_image(encode(SMOOTH, fmt, quality=95))
    assert image.shape == SMOOTH.shape
    assert np.abs(image.astype(int) - SMOOTH).max() < 10


# Older releases of Pillow write broken MPO files of images so small.
@pytest.mark.parametrize("fmt", ["GIF", "WEBP", "TIFF", "PNG", *(["AVIF", "MPO"] if AVIF else [])])
def test_the_first_frame_is_read(fmt):
    frames = [Image.new("RGB", (16, 12), color) for color in ["red", "lime", "blue"]]
    data = encode(frames[0], fmt, save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.n_frames == 3
    with pytest.warns(VitflowWarning, match="page 1 of 3") if fmt == "TIFF" else nullcontext():
        image = read_image(data)
    assert image.shape == (12, 16, 3)
    assert np.abs(image.astype(int) - [255, 0, 0]).max() < 8


def test_grey_and_one_bit():
    np.testing.assert_array_equal(read_image(encode(RGB[..., 0])), grey(RGB[..., 0]))
    np.testing.assert_array_equal(read_image(encode(RGB[..., 0], "JPEG2000", irreversible=False)), grey(RGB[..., 0]))
    bits = RGB[..., 0] > 127
    for fmt in ["PNG", "TIFF"]:
        np.testing.assert_array_equal(read_image(encode(Image.fromarray(bits), fmt)), grey(bits * np.uint8(255)))


@pytest.mark.parametrize("fmt", ["PNG", "TIFF", "WEBP"])
def test_transparency_lies_over_white(fmt):
    rgba = np.dstack([RGB, transparency(RGB[::-1, :, 1])])
    options = {"lossless": True, "exact": True} if fmt == "WEBP" else {}
    expected = over_white(RGB, rgba[..., 3:])
    assert np.abs(read_image(encode(rgba, fmt, **options)) - expected).max() <= 0.5 + 1e-9
    assert np.abs(read_image(Image.fromarray(rgba)) - expected).max() <= 0.5 + 1e-9
    assert np.abs(read_image(rgba) - expected).max() <= 0.5 + 1e-9


def test_palettes():
    image = Image.new("P", (4, 3), 1)
    image.putpalette([0, 0, 255, 255, 0, 0])
    assert (read_image(encode(image)) == [255, 0, 0]).all()
    assert (read_image(encode(image, "GIF")) == [255, 0, 0]).all()
    assert (read_image(encode(image, "BMP")) == [255, 0, 0]).all()
    for fmt in ["PNG", "GIF"]:
        assert (read_image(encode(image, fmt, transparency=1)) == 255).all()
        assert (read_image(encode(image, fmt, transparency=0)) == [255, 0, 0]).all()
    partly = read_image(encode(image, transparency=bytes([255, 128])))
    np.testing.assert_allclose(partly[0, 0], over_white(np.array([255, 0, 0]), 128), atol=0.5)
    assert (read_image(image.convert("PA")) == [255, 0, 0]).all()


@pytest.mark.parametrize("adobe", [True, False])
def test_cmyk_jpeg(adobe):
    data = encode(Image.new("CMYK", (16, 12), (0, 255, 255, 0)), "JPEG", quality=100)
    marker = data.index(b"\xff\xee")
    assert data[marker + 4 : marker + 9] == b"Adobe"
    if not adobe:
        data = data[:marker] + data[marker + 2 + int.from_bytes(data[marker + 2 : marker + 4], "big") :]
    assert np.abs(read_image(data).astype(int) - [255, 0, 0]).max() < 6


def test_cmyk_tiff():
    image = read_image(encode(Image.new("CMYK", (16, 12), (0, 255, 255, 0)), "TIFF"))
    assert np.abs(image.astype(int) - [255, 0, 0]).max() < 6


def test_every_mode_of_a_pil_image():
    common = ("1", "L", "P", "RGB", "RGBA", "RGBX", "RGBa", "LA", "La", "PA", "CMYK", "YCbCr")
    for mode in (*common, "LAB", "HSV", "I;16", "I;16L", "I;16B"):
        assert read_image(Image.new(mode, (4, 3))).shape == (3, 4, 3), mode


@pytest.mark.parametrize("suffix", [".png", ".tiff", ".pgm", ".jp2"])
def test_16_bit_grey_is_scaled_and_not_clipped(suffix):
    values = np.tile(GREY16, (3, 3))  # JPEG 2000 wants some room
    options = [cv2.IMWRITE_JPEG2000_COMPRESSION_X1000, 1000] if suffix == ".jp2" else []
    data = cv2.imencode(suffix, values, options)[1].tobytes()
    np.testing.assert_array_equal(read_image(data), grey(values // 256))
    for mode, order in [("I;16", "<u2"), ("I;16B", ">u2")]:
        image = Image.frombytes(mode, (23, 17), GREY16.astype(order).tobytes())
        np.testing.assert_array_equal(read_image(image), grey(GREY16 // 256))


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
def test_16_bit_color(suffix):
    values = np.random.default_rng(2).integers(0, 65536, (17, 23, 4)).astype(np.uint16)
    values[..., 3] = transparency(values[..., 3] >> 8).astype(np.uint16) << 8
    color = cv2.imencode(suffix, values[..., 2::-1])[1].tobytes()  # OpenCV takes BGR
    np.testing.assert_array_equal(read_image(color), values[..., :3] // 256)
    transparent = cv2.imencode(suffix, values[..., [2, 1, 0, 3]])[1].tobytes()
    expected = over_white(values[..., :3] // 256, values[..., 3:] // 256)
    assert np.abs(read_image(transparent) - expected).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_32_bit_integers_and_floats_are_refused_with_the_remedy(tmp_path, kind):
    values = Image.fromarray(np.arange(12, dtype=kind).reshape(3, 4))
    values.save(tmp_path / "deep.tif")
    for source in (values, tmp_path / "deep.tif"):
        with pytest.raises(ImageError, match="8 or 16 bits .* floats from 0 to 1"):
            read_image(source)


def written(values: np.ndarray, suffix: str) -> bytes:
    return cv2.imencode(suffix, values[..., ::-1] if values.ndim == 3 else values)[1].tobytes()


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (written(GREY16 >> 4, ".png"), 16),  # 12 bits
        (written(GREY16 >> 2, ".tiff"), 4),  # 14 bits
        (written(RGB.astype(np.uint16) << 2, ".png"), 64),  # 10 bits, in colour
        (GREY16 >> 8, 256),
        (GREY16 / 65535 / 20, 16),
    ],
)
def test_values_in_a_part_of_their_range_are_mentioned_with_the_remedy(source, part):
    with pytest.warns(VitflowWarning, match=rf"1/{part} of their range.*4095 for 12 bits"):
        dark = read_image(source)
    assert dark.max() <= 256 // part
    # the remedy
    np.testing.assert_array_equal(read_image((GREY16 >> 4) / 4095), grey(np.rint((GREY16 >> 4) / 4095 * 255)))


BANDS = np.dstack([RGB, 255 - RGB[..., 0]])


@pytest.mark.parametrize("kind", ["alpha", "unspecified", "planar", "16 bits", "pages", "three pages", "five bands"])
def test_bands_of_a_tiff_file_are_no_transparency(tmp_path, kind):
    tifffile = pytest.importorskip("tifffile")
    planes = BANDS.transpose(2, 0, 1)
    values, options = {
        "alpha": (BANDS, {"photometric": "rgb"}),
        "unspecified": (BANDS, {"photometric": "rgb", "extrasamples": ["unspecified"]}),
        "planar": (planes, {"photometric": "rgb", "planarconfig": "separate"}),
        "16 bits": (BANDS.astype(np.uint16) * 257, {"photometric": "rgb"}),
        "pages": (planes.astype(np.uint16) * 257, {"photometric": "minisblack"}),
        "three pages": (planes[:3], {"photometric": "minisblack"}),
        "five bands": (np.dstack([BANDS, RGB[..., 1]]), {"photometric": "rgb"}),
    }[kind]
    tifffile.imwrite(tmp_path / "field.tif", values, **options)
    with pytest.warns(VitflowWarning, match=r"field\.tif: .* 1, 2 and 3 of \d"):
        image = read_image(tmp_path / "field.tif")
    np.testing.assert_array_equal(image, RGB)


def test_a_fourth_band_of_other_sources_is_mentioned():
    with pytest.warns(VitflowWarning, match="bands 1, 2 and 3 of 4"):
        np.testing.assert_array_equal(read_image(BANDS), RGB)
    infrared = np.tile(BANDS, (4, 4, 1))
    with pytest.warns(VitflowWarning, match="bands 1, 2 and 3 of 4"):
        np.testing.assert_array_equal(read_image(encode(infrared, "JPEG2000", irreversible=False)), infrared[..., :3])
    image = read_image(encode(BANDS))  # as PNG defines it
    assert np.abs(image - over_white(RGB, BANDS[..., 3:])).max() <= 0.5 + 1e-9
    radar = Image.merge("LA", [Image.fromarray(RGB[..., 0]), Image.fromarray(RGB[..., 1])])
    with pytest.warns(VitflowWarning, match="band 1 of 2"):
        np.testing.assert_array_equal(read_image(encode(radar, "TIFF")), grey(RGB[..., 0]))


def test_smaller_pages_of_a_tiff_file_are_not_mentioned(tmp_path):
    small = Image.fromarray(RGB[::2, ::2])
    np.testing.assert_array_equal(read_image(encode(RGB, "TIFF", save_all=True, append_images=[small])), RGB)


@pytest.mark.parametrize("values", [np.zeros((8, 9, 8), np.uint8), np.zeros((8, 9))])
def test_a_tiff_file_that_pillow_does_not_read_is_named(tmp_path, values):
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "field.tif", values, photometric="minisblack", planarconfig="contig")
    with pytest.raises(ImageError, match="TIFF file .*array"):
        read_image(tmp_path / "field.tif")


def test_heic_is_read_with_pillow_heif_or_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "OPEN", {name: opener for name, opener in Image.OPEN.items() if name != "HEIF"})
    monkeypatch.setattr("vitflow.images.reading.find_spec", lambda _: None)
    (tmp_path / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    with pytest.raises(ImageError, match=r"HEIC.*vitflow\[heic\]"):
        read_image(tmp_path / "IMG_1.HEIC")
    monkeypatch.undo()
    pillow_heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(SMOOTH)).save(file, quality=95)
    assert np.abs(read_image(file.getvalue()).astype(int) - SMOOTH).max() < 16


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "TIFF", "WEBP", *AVIF, "MPO"])
def test_exif_orientation(fmt):
    # Quarters of different colours tell all orientations apart, also through lossy compression.
    stored = np.zeros((32, 48, 3), dtype=np.uint8)
    stored[:16, :24], stored[:16, 24:], stored[16:, :24] = (250, 10, 10), (10, 250, 10), (10, 10, 250)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    assert np.abs(read_image(encode(stored, fmt, exif=exif)).astype(int) - np.rot90(stored, -1)).mean() < 12


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP"])
def test_damaged_exif_does_not_spoil_the_image(fmt):
    for exif in [
        b"Exif\0\0",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0" + b"\xff" * 40,
    ]:
        image = read_image(encode(RGB, fmt, exif=exif))
        assert image.shape == RGB.shape


def test_arrays():
    np.testing.assert_array_equal(read_image(RGB[..., 0]), grey(RGB[..., 0]))
    np.testing.assert_array_equal(read_image(RGB[::-1, ::-2]), RGB[::-1, ::-2])
    np.testing.assert_array_equal(read_image(RGB.astype(np.uint16) * 256 + 255), RGB)
    np.testing.assert_array_equal(read_image(GREY16.astype(">u2")), grey(GREY16 // 256))
    for dtype in [np.float16, np.float32, np.float64]:
        np.testing.assert_array_equal(read_image((RGB / 255).astype(dtype)), RGB)
    rgba = np.dstack([RGB, transparency(RGB[..., 0])])
    assert np.abs(read_image(rgba / 255).astype(int) - read_image(rgba)).max() == 0


@pytest.mark.parametrize(
    ("array", "word"),
    [
        (np.zeros((3, 20, 30), np.uint8), "transpose"),
        (np.zeros((20, 30, 2), np.uint8), r"\(20, 30, 2\)"),
        (np.zeros((1, 20, 30, 3), np.uint8), r"\(1, 20, 30, 3\)"),
        (np.zeros(20, np.uint8), r"\(20,\)"),
        (np.zeros((0, 30, 3), np.uint8), r"\(0, 30, 3\)"),
        (np.zeros((20, 30, 3), np.int64), "int64"),
        (np.zeros((20, 30, 3), bool), "255"),
        (np.ma.masked_greater(RGB, 200), "masked"),
        (np.zeros((20, 30), object), "object"),
        (np.full((20, 30), 255.0), "Divide by 255"),
        (np.full((20, 30), -0.1), "-0.1"),
        (np.array([[0.0, np.nan]]), "nan"),
    ],
)
def test_arrays_that_are_no_images(array, word):
    with pytest.raises(ShapeError, match=word):
        read_image(array)


def test_an_open_file_is_the_image_in_it(tmp_path):
    expected, file = SMOOTH, io.BytesIO()
    Image.fromarray(SMOOTH).save(file, "PNG")  # its position is now the end
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        archive.writestr("1.png", file.getvalue())
    (tmp_path / "1.png").write_bytes(file.getvalue())
    with zipfile.ZipFile(tmp_path / "images.zip").open("1.png") as member, (tmp_path / "1.png").open("rb") as opened:
        for source in (file, file, member, opened, file.getbuffer(), bytearray(file.getvalue())):
            np.testing.assert_array_equal(read_image(source), expected)
    with pytest.raises(ImageError, match="closed"):
        read_image(opened)
    with pytest.raises(ImageError, match="empty file"):
        read_image(io.BytesIO())


def test_what_is_no_image(tmp_path):
    (tmp_path / "empty.jpg").touch()
    os.mkfifo(tmp_path / "pipe.jpg")
    cases = [
        (b"", "empty file"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "another type"),
        (None, "NoneType"),
        (io.StringIO("x"), "Open it in mode 'rb'"),
        (torch.zeros(3, 4, 4), "Tensor"),
        ("no/such/image.jpg", "no such file"),
        ("nul\0byte", "no such file"),
        ("https://example.org/cat.jpg", "'https://example.org/cat.jpg'.*downloaded"),
        ("", "folder"),
        (tmp_path, "folder"),
        (tmp_path / "empty.jpg", r"empty\.jpg"),
        (tmp_path / "pipe.jpg", "pipe"),
    ]
    for source, word in cases:
        with pytest.raises(ImageError, match=word):
            read_image(source)


LARGE = np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8)
ENCODED = {
    fmt: encode(LARGE, fmt) for fmt in ["PNG", "JPEG", "WEBP", "GIF", *AVIF, "TIFF", "BMP", "JPEG2000", "PPM", "MPO"]
}


@pytest.mark.parametrize("fmt", ENCODED)
@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_truncated_files(fmt, share):
    data = ENCODED[fmt]
    with pytest.raises(ImageError, match=r"truncated or corrupt|got an empty file"):
        read_image(data[: int(len(data) * share)])


def test_decompression_bombs(monkeypatch):
    with pytest.raises(ImageError, match=r"178,956,970.*MAX_IMAGE_PIXELS"):
        read_image(encode(Image.new("1", (20_000, 9_000))))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match="pixels"):
        read_image(encode(LARGE))
    assert read_image(LARGE).shape == (64, 64, 3), "an image that the caller has opened"


@pytest.mark.parametrize("suffix", [".png", ".PNG", ".jpg", ".jpeg", ".webp"])
def test_what_is_written_is_read_again(tmp_path, suffix):
    path = tmp_path / "новая папка" / ("x" * 240) / f"{'y' * 245}猫 1{suffix}"  # the longest a file system allows
    write_image(path, SMOOTH)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    image = read_image(path)
    assert np.abs(image.astype(int) - SMOOTH).max() < (1 if suffix.lower() == ".png" else 10)
    write_image(str(path), RGB[..., 0])
    assert read_image(path).shape == RGB.shape


def test_a_written_file_has_ordinary_permissions(tmp_path):
    write_image(tmp_path / "map.png", RGB)
    (tmp_path / "other").touch()
    assert (tmp_path / "map.png").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("name", ["map.bmp", "map", "map.png.part", ".png"])
def test_what_cannot_be_written_is_refused(tmp_path, name):
    with pytest.raises(ImageError, match="[Ee]xpected"):
        write_image(tmp_path / name, RGB)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing_and_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "map.png"
    path.write_bytes(b"old")

    def fail(self, file, **options):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(ImageError, match=r"Could not write 'map\.png'.*No space left on device"):
        write_image(path, RGB)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]

    def interrupt(self, file, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_image(path, RGB)
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ImageError, match=r"Could not write 'map\.png'"):
        write_image(tmp_path / "file" / "map.png", RGB)
    with pytest.raises(ImageError, match=r"Could not write 'folder\.png'"):
        write_image(tmp_path / "folder.png", RGB)
    long = np.zeros((17_000, 1, 3), np.uint8)
    with pytest.raises(ValueError, match="encoding error") as limit:
        encode(Image.fromarray(long), "WEBP")
    with pytest.raises(ImageError, match=f"1 × 17000 pixels.*{re.escape(str(limit.value))}"):
        write_image(tmp_path / "long.webp", long)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder.png"]


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_images_come_in_natural_order(tmp_path):
    touch(tmp_path, "img10.png", "img2.PNG", "IMG1.jpg", "img2b.webp", "7.tif", "a.txt", "b.npz", "9/8.gif", "äöü.avif")
    touch(tmp_path, ".hidden.png", "._1.jpg", "album.png/1.jpg")
    (tmp_path / "broken.png").symlink_to("missing.png")
    names = ["7.tif", "IMG1.jpg", "img2.PNG", "img2b.webp", "img10.png", "äöü.avif"]
    with pytest.warns(VitflowWarning, match=r"Hidden image files are left out \(2\)"):
        assert [path.relative_to(tmp_path).as_posix() for path in find_images(tmp_path)] == names
    touch(tmp_path / ".asked for", "1.png")
    assert find_images(tmp_path / ".asked for") == [tmp_path / ".asked for/1.png"]


def test_a_file_is_itself_and_nothing_is_an_error(tmp_path):
    touch(tmp_path, "odd.xyz")
    assert find_images(tmp_path / "odd.xyz") == [tmp_path / "odd.xyz"]
    assert find_images(str(tmp_path)) == []
    with pytest.raises(ImageError, match="there is nothing at"):
        find_images(tmp_path / "missing")


def test_names_to_show(tmp_path):
    path = tmp_path / "кот.png"
    path.write_bytes(encode(RGB))
    assert image_name(path) == image_name(str(path)) == "кот.png"
    with Image.open(path) as opened:
        assert image_name(opened) == "кот.png"
    assert image_name(Image.new("L", (2, 2))) == "image"
    assert image_name(b"abc") == "bytes"
    assert image_name(RGB) == "array"
    assert image_name(os.fsdecode(b"caf\xe9.png")) == "caf\ufffd.png"
    assert image_name("folder/") == "folder/"
