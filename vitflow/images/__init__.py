"""Images: reading, placing, drawing. This file has the choices; it loads neither NumPy nor OpenCV."""

from typing import Any, Literal, get_args

#: How an image becomes the model's input.
Fit = Literal["crop", "squash", "pad", "native"]
FITS: tuple[Fit, ...] = get_args(Fit)

#: How the patches of a map become pixels.
Interpolation = Literal["smooth", "linear", "cubic", "nearest", "guided"]
INTERPOLATIONS: tuple[Interpolation, ...] = get_args(Interpolation)

#: Pixels per inch of the images in a figure, in every format; text and lines are vectors in PDF and SVG.
DPI = 200

#: What stands under the colours of a map: the photograph as it is, in darkened grey, or darkened with half its colour.
Background = Literal["photo", "grey", "dim"]
BACKGROUNDS: tuple[Background, ...] = get_args(Background)

#: How an image is written, by the suffix of its file: arguments of Pillow's `save`.
WRITE_OPTIONS: dict[str, dict[str, Any]] = {
    ".png": {"format": "PNG"},
    ".jpg": {"format": "JPEG", "quality": 95, "subsampling": 0},
    ".jpeg": {"format": "JPEG", "quality": 95, "subsampling": 0},
    ".webp": {"format": "WEBP", "quality": 95},
}

#: Suffixes of figures.
FIGURE_FORMATS = (".png", ".pdf", ".svg")

#: Suffixes of video files.
VIDEO_FORMATS = (".mp4", ".mov", ".avi", ".mkv", ".webm")

#: Suffixes of the files of an explained clip.
CLIP_FORMATS = (*FIGURE_FORMATS, ".gif", ".mp4", ".npz")

#: Overlays of a folder run, by their suffix without the dot.
OVERLAY_FORMATS = ("jpg", "png", "webp")

#: Tables of a folder run, by their suffix without the dot; Parquet also with the grids of the maps.
MANIFEST_FORMATS = ("jsonl", "csv", "parquet", "parquet+grids")

#: Where a folder run works: in this process, or on a cluster of Ray.
ENGINES = ("local", "ray")
