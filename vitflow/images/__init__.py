"""Images: reading, placement, drawing. This module defines the choices and imports neither NumPy nor OpenCV."""

from typing import Any, Literal, get_args

#: How to fit an image to the model input.
Fit = Literal["crop", "squash", "pad", "native"]
FITS: tuple[Fit, ...] = get_args(Fit)

#: How patches are upsampled to pixels.
Interpolation = Literal["smooth", "linear", "nearest"]
INTERPOLATIONS: tuple[Interpolation, ...] = get_args(Interpolation)

#: Pixels per inch of the images in a figure, in every format; text and lines are vectors in PDF and SVG.
DPI = 200

#: Image under the colours of a map: unchanged, darkened grey, darkened with half its saturation, or transparent.
Background = Literal["photo", "grey", "dim", "none"]
BACKGROUNDS: tuple[Background, ...] = get_args(Background)

#: How the border of the part that the model saw is drawn.
Unseen = Literal["line", "off"]
UNSEEN: tuple[Unseen, ...] = get_args(Unseen)

#: Arguments of Pillow's `save` by file suffix. PNG of level 6, the default, takes up to 3 times as long; its files of
#: photographs with overlays are at most 3 % smaller.
WRITE_OPTIONS: dict[str, dict[str, Any]] = {
    ".png": {"format": "PNG", "compress_level": 4},
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

#: Formats of the overlays of a folder run.
OVERLAY_FORMATS = ("jpg", "png", "webp")

#: Formats of the manifest of a folder run; "parquet+grids" has the maps as columns.
MANIFEST_FORMATS = ("jsonl", "csv", "parquet", "parquet+grids")

#: Engines of a folder run: this process, or a Ray cluster.
ENGINES = ("local", "ray")
