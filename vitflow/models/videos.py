"""Video models of transformers: VideoMAE, ViViT, V-JEPA 2 and TimeSformer, as models of one tall image."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import height_width
from vitflow.models.data_configs import saved_config
from vitflow.models.parts import modules_of

# Model types of transformers and the number of tokens before the tubelets.
_PREFIX = {"videomae": 0, "vivit": 1, "vjepa2": 0, "timesformer": 1}


@dataclass(frozen=True, slots=True)
class ClipShape:
    """The input of a video model: frames of (height, width) pixels, and tubelets of (frames, height, width)."""

    frames: int
    size: tuple[int, int]
    tubelet: tuple[int, int, int]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Number of tubelets along time, height and width."""
        return self.frames // self.tubelet[0], self.size[0] // self.tubelet[1], self.size[1] // self.tubelet[2]


class StackedFrames(nn.Module):
    """A video model whose input is one tall image: the frames of a clip, in the order of the rows of its tubelets.

    Each row of tubelets is a band of the tall image, with its rows of pixels of the first frame, then of the second. So
    the tubelets are the patches of that image, and every method for images applies. `divided` is True if attention over
    time and over space is in separate layers (TimeSformer): then only methods without attention apply.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.shape = _shape_of(model)
        config: Any = _video_config(model)
        self.divided = config.model_type == "timesformer"
        times, rows, cols = self.shape.grid
        self.layout = TokenLayout(_PREFIX[config.model_type], times * rows, cols)

    def forward(self, pixels: Tensor) -> Any:
        """Run the model on tall images [batch, channels, frames · height, width]."""
        return self.model(self.unstack(pixels))

    def stack(self, frames: Tensor) -> Tensor:
        """Return clips [batch, frames, channels, height, width] as tall images."""
        (times, rows, _), (length, height, _) = self.shape.grid, self.shape.tubelet
        parts: Tensor = frames.unflatten(1, (times, length)).unflatten(4, (rows, height))
        return parts.permute(0, 3, 1, 4, 2, 5, 6).flatten(2, 5)  # channels, times, rows, length, height, width

    def unstack(self, pixels: Tensor) -> Tensor:
        """Return tall images as clips; the inverse of `stack`."""
        (times, rows, _), (length, height, _) = self.shape.grid, self.shape.tubelet
        parts: Tensor = pixels.unflatten(2, (times, rows, length, height))
        return parts.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(1, 2)

    def data_config(self) -> dict[str, Any]:
        """Return the known entries of timm's data config for one frame: the size, and mean and std if known."""
        return {"input_size": (3, *self.shape.size)} | saved_config(self.model)


def is_video_model(model: nn.Module) -> bool:
    """Return True for a video model of transformers."""
    return _video_config(model) is not None


def _shape_of(model: nn.Module) -> ClipShape:
    """Read the clip of a video model from its configuration."""
    config: Any = _video_config(model)
    frames = getattr(config, "num_frames", None) or config.frames_per_clip
    size = height_width(getattr(config, "image_size", None) or config.crop_size)
    tubelet, patch = getattr(config, "tubelet_size", 1), getattr(config, "patch_size", None)
    if isinstance(tubelet, int):
        tubelet = (tubelet, *height_width(patch))
    length, height, width = (int(side) for side in tubelet)
    return ClipShape(int(frames), size, (length, height, width))


def _video_config(model: nn.Module) -> Any:
    """Return the configuration of the video model in a module, or None."""
    configs = (vars(module).get("config") for module in modules_of(model))
    return next((config for config in configs if getattr(config, "model_type", None) in _PREFIX), None)
