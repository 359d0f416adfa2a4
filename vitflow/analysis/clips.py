"""Explain clips with video models, or with image models that run on each frame."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, UnsupportedModelError
from vitflow.explaining import captions
from vitflow.explaining.applying import probabilities_of
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.inputs import PlacedImage
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Score, Target
from vitflow.files import write_atomically
from vitflow.images import CLIP_FORMATS, FIGURE_FORMATS, overlay
from vitflow.images.geometry import Placement
from vitflow.images.reading import ImageSource, image_name, read_image
from vitflow.images.videos import read_video, write_video
from vitflow.models.classes import class_index, is_several, top_count
from vitflow.models.videos import StackedFrames
from vitflow.registry.choices import ChosenMethod, choose_methods, is_signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Default number of frames that are explained.
FRAMES = 8

_SHOWN = 6  # frames of a figure
_RATE = 4  # frames per second of written clips

#: A video file; or frames: images, an array [frames, height, width, 3], or inputs [frames, channels, height, width].
ClipSource = str | os.PathLike[str] | Sequence[ImageSource] | NDArray[Any] | Tensor


@dataclass(frozen=True, eq=False)
class Clip:
    """Maps of the frames of a clip, with a common scale.

    Attributes:
        frames: the map of each frame. With an image model, its score is the score of this frame alone; with a video
            model or a vision–language model, there is one for each position along time, drawn on its first frame.
        score: score of the explained output; with an image model that of the frame with the highest one, `best`.
        shares: share of each frame, [frames]: with an image model its logit above the lowest one, as a share of their
            sum, of which the explained mean consists; else its share of the map, see `joint_shares`.
        source: name of the clip.
        span: number of frames that each map covers.
        joint: whether the model sees all frames together.
        best: index of the frame with the highest score; 0 if the model sees all frames together.

    >>> from vitflow.demo import draw_image
    >>> clip = explain_clip([draw_image(seed).image for seed in range(3)], model="demo", target=2)
    >>> clip.grid.shape, clip.shares.shape
    ((3, 12, 12), (3,))
    """

    frames: tuple[Saliency, ...]
    score: Score
    shares: NDArray[np.float64]
    source: str
    span: int = 1
    joint: bool = False
    best: int = 0

    @cached_property
    def grid(self) -> NDArray[np.float32]:
        """The maps of all frames with a common scale, [frames, rows, cols]; their absolute values sum to 1.

        With an image model, the absolute values of a frame sum to its share: the unscaled maps of frames are not
        comparable, as a frame without the class can have the larger gradients.
        """
        maps = np.stack([frame.grid for frame in self.frames]).astype(np.float64)
        sums = np.abs(maps).sum(axis=(1, 2), keepdims=True)
        if self.joint:
            scaled: NDArray[np.float64] = maps / max(sums.sum(), np.finfo(np.float64).tiny)
        else:
            scaled = maps * self.shares[:, None, None] / np.where(sums > 0, sums, 1.0)
        return scaled.astype(np.float32)

    @property
    def key_frames(self) -> list[int]:
        """Indices of the maps that figures show: evenly spaced, and the frame that the title names."""
        indices = {round(index) for index in np.linspace(0, len(self.frames) - 1, _SHOWN).tolist()}
        return sorted(indices | {self.best})

    def overlays(self, **options: Any) -> list[NDArray[np.uint8]]:
        """Draw `grid` over the frames with the same colours for the same values: uint8 RGB per frame."""
        low, high = overlay.scale_range(self.grid, signed=is_signed(self.frames[0].method))
        return [
            replace(frame, grid=grid).overlay(**{"vmin": low, "vmax": high, **options})
            for frame, grid in zip(self.frames, self.grid, strict=True)
        ]

    def figure(self, path: str | os.PathLike[str] | None = None, **options: Any) -> "Figure":
        """Draw key frames in their order, and the share of each frame below them.

        Args:
            path: also write the figure here: .png, .pdf or .svg.
            options: options of `Saliency.overlay`.
        """
        from vitflow.images.figures import written
        from vitflow.images.typesetting import draw_clip

        images, first = self.overlays(**options), self.frames[0]
        lines = [line for line in captions.class_lines(self.score, first.class_specific) if line]
        method = captions.method_title(first.definition, first.options, class_specific=first.class_specific)
        title = ": ".join(filter(None, (method, ", ".join(lines))))
        title += "" if self.joint else f" in frame {self.best + 1}"
        shown = {number: images[number] for number in self.key_frames}
        return written(draw_clip(shown, self.shares, title=title, notes=list(self.notes()), span=self.span), path)

    def notes(self) -> list[str]:
        """Return the notes of the caption."""
        above = f"logit of {self.score.name}" if self.score.name else "output"
        if self.joint:
            part = "the frame's fraction" if self.span == 1 else f"the fraction of the {self.span} frames"
            level = "0" if (self.grid < 0).any() else "the lowest value of the clip"
            notes = [f"Share: {part} of the sum of all maps above {level}."]
        else:
            notes = [
                f"Share of a frame: its {above} above the lowest one of the clip; the map of a frame is scaled to it. "
                "The model sees each frame alone, so their order does not matter."
            ]
        first = self.frames[0]
        if (self.grid < 0).any():
            below, above = captions.ends(self.score, first.class_specific)
            notes.append(f"Colours diverge from 0, which is transparent: below 0 {below}, above 0 {above}.")
        if not first.placement.sees_everything:
            notes.append("The line in a frame marks the region that the model saw.")
        notes.append("The grey line in the curve marks equal shares.")
        method = captions.method_in_words(first.definition, first.options)
        notes.append(f"{method} · {image_name(self.source)} · {self.span * len(self.frames)} frames · {first.model}")
        return notes

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the overlays as .gif or .mp4, the figure (.png, .pdf, .svg), or the maps (.npz); return the path.

        Raises:
            OptionError: another suffix, or drawing options with .npz.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix in FIGURE_FORMATS:
            self.figure(path, **options)
        elif suffix == ".gif":
            first, *others = [Image.fromarray(image) for image in self.overlays(**options)]
            with write_atomically(path) as file:
                first.save(file, "GIF", save_all=True, append_images=others, duration=1000 // _RATE, loop=0)
        elif suffix == ".mp4":
            write_video(path, self.overlays(**options), _RATE)
        elif suffix == ".npz" and not options:
            with write_atomically(path) as file:
                np.savez_compressed(file, grid=self.grid, shares=self.shares)
        else:
            raise OptionError(f"Expected a file with one of the suffixes {', '.join(CLIP_FORMATS)}, got {path.name!r}.")
        return path

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the arrays, for JSON."""
        record = replace(self.frames[self.best], score=self.score, source=self.source).to_dict()
        return {
            **record,
            "seconds": round(sum(frame.seconds for frame in self.frames), 4),
            "frames": self.span * len(self.frames),
            "frame_scores": [frame.score.value for frame in self.frames],
            "best_frame": None if self.joint else self.best + 1,
            "frame_shares": [round(float(share), 4) for share in self.shares],
            "frames_per_share": self.span,
        }

    def _repr_mimebundle_(self, **_: Any) -> Any:
        """Return the figure for notebooks."""
        from vitflow.images.figures import bundle

        return bundle(repr(self), self.figure())

    def __repr__(self) -> str:
        first = self.frames[0]
        method = captions.method_label(first.method, first.options, class_specific=first.class_specific)
        return f"Clip({self.source}, {len(self.frames)} frames, {method}, {self.score.name})"


def joint_shares(maps: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return the share of each map of a clip [frames, rows, cols]: its sum above the lowest value of all, at least 0.

    >>> joint_shares(np.array([[[1.0, 2.0]], [[1.0, 4.0]]]))
    array([0.25, 0.75])
    """
    return shares_of(np.maximum(maps.astype(np.float64) - max(maps.min(), 0.0), 0.0).sum(axis=(1, 2)))


def shares_of(above: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each number's share of their sum; equal shares if all are 0."""
    return above / above.sum() if above.sum() > 0 else np.full(len(above), 1 / len(above))


def explain_clip(
    clip: ClipSource,
    model: Any,
    *,
    method: str | None = None,
    target: Target = None,
    frames: int | None = None,
    **options: Any,
) -> Clip:
    """Explain a clip with a video model, or with an image model that runs on each frame.

    The explained output of an image model is the mean of the frames' logits.

    Args:
        clip: a video file (of which evenly spaced frames are taken); or frames: a list of images, an array
            [frames, height, width, 3], or normalised model inputs [frames, channels, height, width].
        model: an `Explainer`, a model id, or a module: an image model, or VideoMAE, ViViT, V-JEPA 2 or
            TimeSformer of transformers.
        method: a name from `list_methods()`; by default gae.
        target: class index or name; by default the class with the largest mean logit.
        frames: the number of frames of a video file; by default 8, or as many as the video model reads.
        options: options of the method.

    Raises:
        ImageError: the video cannot be read.
        ShapeError: there are no frames, they differ in size, or the video model reads another number of frames.
        OptionError: an option is invalid.
    """
    explainer = Explainer.of(model)
    if is_several(target):
        raise OptionError(f"Expected one class for a clip, got {target!r}.")
    stacked = explainer.model if isinstance(explainer.model, StackedFrames) else None
    count = FRAMES if stacked is None else stacked.shape.frames
    images = frames_of(clip, count if frames is None else frames)
    [chosen] = choose_methods(["gae" if method is None else method], options)
    source = str(clip) if isinstance(clip, str | os.PathLike) else "clip"
    if stacked is not None:
        return _explain_joint(explainer, stacked, images, chosen, target, source)
    names = [f"{image_name(source)}, frame {number}" for number in range(1, len(images) + 1)]
    pixels = torch.cat([each if isinstance(each, Tensor) else explainer.pixels(each) for each in images])
    with torch.inference_mode(False), torch.no_grad():
        logits = torch.cat([explainer.logits(one.to(explainer.device)).cpu() for one in pixels.split(1)])
    mean = logits.double().mean(dim=0, keepdim=True)
    probabilities = probabilities_of(mean, explainer.model_info)
    if probabilities is None:
        raise OptionError("A clip requires a model with classes; pass outputs= to explain other values.")
    index = int(probabilities.argmax())
    if top_count(target) is None:  # a class
        index = class_index(target, probabilities.shape[1], explainer.outputs.names)
    explained = explainer.explain_batch(images, methods=[chosen], targets=np.full(len(images), index), names=names)
    best = max(range(len(explained)), key=lambda frame: explained[frame].score.value or 0.0)
    values = logits[:, index].double().numpy()
    shares = shares_of(values - values.min())
    return Clip(tuple(explained), explained[best].score, shares, source, best=best)


def _explain_joint(
    explainer: Explainer,
    stacked: StackedFrames,
    images: list[Any],
    chosen: ChosenMethod,
    target: Target,
    source: str,
) -> Clip:
    if stacked.divided and chosen.method.needs & {"attention", "heads", "features", "tokens"}:
        raise UnsupportedModelError(
            f"{explainer.model_id} attends over time and space in separate layers, so there is no attention matrix "
            f"over the tubelets of a clip: {chosen.name} is not supported. Use occlusion, sampling or input_gradient, "
            "or VideoMAE or ViViT."
        )
    (times, rows, _), span = stacked.shape.grid, stacked.shape.tubelet[0]
    if len(images) != stacked.shape.frames:
        raise ShapeError(f"Expected {stacked.shape.frames} frames, as {explainer.model_id} reads, got {len(images)}.")
    if isinstance(images[0], Tensor):
        raise OptionError("A video model requires frames as images, got a tensor: pass uint8 frames or a video file.")
    preparing = replace(explainer.preprocessing, spec=replace(explainer.spec, size=stacked.shape.size))
    placement = preparing.place(images[0].shape[:2])
    pixels = torch.stack([torch.from_numpy(preparing.prepare(image, placement)) for image in images])
    tall = stacked.stack(pixels[None])[0]
    size = (tall.shape[1], tall.shape[2])
    image = PlacedImage(source, np.zeros((*size, 3), np.uint8), Placement(size, size, (0, 0), size), pixels=tall)
    [whole] = explainer.explain_batch([image], methods=[chosen], targets=[target], names=[source])
    maps = whole.grid.reshape(times, rows, -1)
    each = replace(whole, placement=placement, seconds=whole.seconds / times)
    parts = tuple(
        replace(each, grid=grid, image=images[start], source=f"{image_name(source)}, frame {start + 1}")
        for grid, start in zip(maps, range(0, times * span, span), strict=True)
    )
    return Clip(parts, whole.score, joint_shares(maps), source, span=span, joint=True)


def frames_of(clip: ClipSource, count: int) -> list[Any]:
    """Return the frames of a clip, `count` of a video file: RGB arrays or model inputs [1, channels, height, width]."""
    if isinstance(clip, str | os.PathLike):
        return list(read_video(clip, count))
    if isinstance(clip, Tensor):
        if clip.ndim != 4 or not len(clip):
            raise ShapeError(f"Expected a clip [frames, channels, height, width], got shape {tuple(clip.shape)}.")
        return list(clip.split(1))
    if isinstance(clip, np.ndarray) and clip.ndim != 4:
        raise ShapeError(f"Expected a clip [frames, height, width, 3], got shape {clip.shape}.")
    images = [read_image(frame) for frame in clip]
    sizes = {image.shape[:2] for image in images}
    if len(sizes) != 1:
        given = "no frames" if not sizes else f"frames of {len(sizes)} sizes"
        raise ShapeError(f"Expected a clip with at least one frame, all of one size, got {given}.")
    return images
