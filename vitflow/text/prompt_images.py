"""Images of a prompt with the positions of their tokens, and the maps of generated words over them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitflow.errors import OptionError, unknown_name
from vitflow.images.geometry import Placement
from vitflow.images.upsampling import merge_maps
from vitflow.methods.tokens import relative_to
from vitflow.text.image_tokens import ImageTokens
from vitflow.text.text_page import ShownImage


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images or the video of one prompt, and the positions of their patch tokens.

    Attributes:
        images: images, uint8 RGB [height, width, 3]; for a video, the first frame of each position along time.
        sources: file name or description of each image.
        parts: patch tokens of each part, in the order of the prompt; an image may have several parts, such as tiles.
        neutral: for each part, the row at the end of the neutral prompt over its patches, float32 [patches, layers];
            None without a neutral prompt.
        tower: for each part, the rollout through the vision tower, float32 [patches, tower patches]; None if the tower
            was not recorded.
        video: file name or description of the video; None for images.
        span: the number of frames of each position along time.
    """

    images: tuple[NDArray[np.uint8], ...]
    sources: tuple[str, ...]
    parts: tuple[ImageTokens, ...]
    neutral: tuple[NDArray[np.float32], ...] | None = None
    tower: tuple[NDArray[np.float32], ...] | None = None
    video: str | None = None
    span: int = 1

    def to_list(self) -> list[dict[str, Any]]:
        """Return the parts as JSON-serializable dicts: image, role, grid, positions and covered box."""
        names = ("left", "top", "right", "bottom")
        return [
            {
                "image": part.image,
                "source": self.sources[part.image],
                "role": part.role,
                "rows": part.rows,
                "columns": part.cols,
                "positions": list(part.positions),
                "covers": dict(zip(names, self._placement(index).window, strict=True)),
            }
            for index, part in enumerate(self.parts)
        ]

    def chosen(self, image: int | None, role: str | None) -> list[int]:
        """Return the indices of the parts of an image, optionally of one role.

        Raises:
            OptionError: unknown image or role, or no image index for several images.
        """
        count = len(self.images)
        if image is None and self.video is not None:
            raise OptionError("The prompt has a video: use generation.clip(word), or pass image=0 for its first frame.")
        if image is None and count > 1:
            raise OptionError(f"The prompt has {count} images: pass image=0 for the first.")
        image = 0 if image is None else image
        if not 0 <= image < count:
            raise OptionError(f"Expected an image index from 0 to {count - 1}, got {image}.")
        indices = [index for index, part in enumerate(self.parts) if part.image == image]
        roles = {self.parts[index].role: None for index in indices}
        if role is not None and role not in roles:
            raise OptionError(unknown_name("role", role, roles))
        return [index for index in indices if role in (None, self.parts[index].role)]

    def map_of(
        self,
        row: NDArray[Any],
        total: float,
        indices: Sequence[int],
        *,
        layer: int,
        relative: bool,
        through_tower: bool,
    ) -> tuple[NDArray[np.float32], Placement, dict[str, Any]]:
        """Return the map of a row on parts of an image, combined by area, its placement, and facts about it.

        Args:
            row: weights of the tokens of the prompt, [tokens].
            total: sum of the row including earlier generated tokens.
            indices: indices of the parts.
            layer: layer index of the row.
            relative: divide by the row of the neutral prompt.
            through_tower: propagate to the patches of the vision tower.
        """
        grids, share = self._grids(row, total, indices, layer=layer, relative=relative)
        facts: dict[str, Any] = {"on_image": share}
        placements = [self._placement(index) for index in indices]
        first, (grid, placement) = float(grids[0].flat[0]), _combine(grids, placements)
        total = float(grid.sum())
        facts["on_first_patch"] = first / total if total else 0.0
        facts["on_edges"] = 1 - float(grid[1:-1, 1:-1].sum()) / total if total else 0.0
        if through_tower:
            grids = [self._through(grid, index) for grid, index in zip(grids, indices, strict=True)]
            grid, placement = _combine(grids, placements)
        return grid.astype(np.float32), placement, facts

    def frame_maps(
        self, row: NDArray[Any], total: float, *, layer: int, relative: bool
    ) -> tuple[list[NDArray[np.float32]], list[Placement], float]:
        """Return the map of each position along the time of a video, their placements, and the share on the video.

        Args:
            row, total, layer, relative: as for `map_of`.

        Raises:
            OptionError: the prompt has no video.
        """
        if self.video is None:
            raise OptionError("Expected a video in the prompt, got images: use generation.image(word, image=0).")
        indices = range(len(self.parts))
        grids, share = self._grids(row, total, indices, layer=layer, relative=relative)
        return [grid.astype(np.float32) for grid in grids], [self._placement(index) for index in indices], share

    def _grids(
        self, row: NDArray[Any], total: float, indices: Sequence[int], *, layer: int, relative: bool
    ) -> tuple[list[NDArray[np.float64]], float]:
        """Return the weights of parts as grids, and their share of the row."""
        weights = [np.asarray(row, np.float64)[list(self.parts[index].positions)] for index in indices]
        share = float(sum(part.sum() for part in weights)) / total if total else 0.0
        if relative:
            weights = self._relative(weights, indices, layer)
        shapes = [(self.parts[index].rows, self.parts[index].cols) for index in indices]
        return [part.reshape(shape) for part, shape in zip(weights, shapes, strict=True)], share

    def shown(
        self, rows: NDArray[Any], totals: NDArray[Any], *, relative: bool, through_tower: bool
    ) -> list[ShownImage]:
        """Return each image with the maps of all rows and layers; each map sums to the share of its row on the image.

        Args:
            rows: weights of the tokens of the prompt, [rows, tokens, layers].
            totals: sums of the rows including earlier generated tokens, [rows, layers].
            relative, through_tower: as for `map_of`.
        """
        shown = []
        for index, image in enumerate(self.images):
            indices, maps = self.chosen(index, None), []
            for row, sums in zip(rows, totals, strict=True):
                for layer in range(rows.shape[2]):
                    grid, placement, facts = self.map_of(
                        row[:, layer],
                        float(sums[layer]),
                        indices,
                        layer=layer,
                        relative=relative,
                        through_tower=through_tower,
                    )
                    total = float(grid.sum())
                    maps.append(grid * (facts["on_image"] / total if total else 0.0))
            shape = (len(rows), rows.shape[2], *maps[0].shape)
            shown.append(ShownImage(self.sources[index], image, placement.window, np.reshape(maps, shape)))
        return shown

    def _relative(self, weights: list[NDArray[Any]], indices: Sequence[int], layer: int) -> list[NDArray[Any]]:
        if self.neutral is None:
            raise OptionError(
                "relative=True requires a neutral prompt: pass neutral='Describe the image.' to explain_generation."
            )
        neutral = np.concatenate([self.neutral[index][:, layer] for index in indices])
        quotients = relative_to(torch.from_numpy(np.concatenate(weights)), torch.from_numpy(neutral)).numpy()
        return np.split(quotients, np.cumsum([len(part) for part in weights])[:-1])

    def _through(self, grid: NDArray[Any], index: int) -> NDArray[Any]:
        if self.tower is None:
            raise OptionError("The vision tower was not recorded: pass through_tower=True to explain_generation.")
        matrix = self.tower[index]
        scale = round((matrix.shape[1] / grid.size) ** 0.5)
        return (grid.reshape(-1) @ matrix).reshape(grid.shape[0] * scale, grid.shape[1] * scale)

    def _placement(self, index: int) -> Placement:
        part = self.parts[index]
        if part.placement is not None:
            return part.placement
        height, width = self.images[part.image].shape[:2]
        return Placement((height, width), (height, width), (0, 0), (height, width))


def _combine(grids: Sequence[NDArray[Any]], placements: Sequence[Placement]) -> tuple[NDArray[Any], Placement]:
    return (grids[0], placements[0]) if len(grids) == 1 else merge_maps(grids, placements)


def subtract_earlier(row: NDArray[Any], earlier: NDArray[Any], weights: NDArray[Any]) -> NDArray[np.float64]:
    """Subtract the weighted sum of earlier rows times its least-squares factor; negative values become 0.

    >>> subtract_earlier(np.array([0.5, 0.5]), np.array([[0.0, 1.0]]), np.array([1.0]))
    array([0.5, 0. ])
    """
    common = np.asarray(weights, np.float64) @ earlier
    square = float(common @ common)
    rest: NDArray[np.float64] = np.clip(row - (float(row @ common) / square if square else 0.0) * common, 0.0, None)
    return rest


def with_neutral(images: PromptImages, neutral: PromptImages, rows: NDArray[np.float32]) -> PromptImages:
    """Return the images with the rows [tokens, layers] of a neutral prompt with the same images."""
    shapes = [[(part.rows, part.cols) for part in prompt.parts] for prompt in (images, neutral)]
    if shapes[0] != shapes[1]:
        raise OptionError("Expected a neutral prompt with the same images, got different patch grids.")
    return replace(images, neutral=tuple(rows[list(part.positions)] for part in neutral.parts))
