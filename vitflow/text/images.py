"""Images of a prompt with the positions of their tokens, and the maps of generated words over them."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, printable, unknown_name
from vitflow.images.geometry import Placement
from vitflow.images.upsampling import merge_maps
from vitflow.text.image_tokens import ImageTokens
from vitflow.viewer.pages import pack_half, thumbnail

_PAGE_SIZE = 768  # longer side of an image on a page, in pixels


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images or the video of one prompt, and the positions of their patch tokens.

    Attributes:
        images: images, uint8 RGB [height, width, 3]; for a video, the first frame of each position along time.
        sources: file name or description of each image.
        parts: patch tokens of each part, in the order of the prompt; an image may have several parts, such as tiles.
        tower: for each part, the rollout through the vision tower, float32 [patches, tower patches]; None if the tower
            was not recorded.
        video: file name or description of the video; None for images.
        span: the number of frames of each position along time.
    """

    images: tuple[NDArray[np.uint8], ...]
    sources: tuple[str, ...]
    parts: tuple[ImageTokens, ...]
    tower: tuple[NDArray[np.float32], ...] | None = None
    video: str | None = None
    span: int = 1

    @property
    def placements(self) -> list[Placement]:
        """The rectangle of its image that each part covers."""
        sizes = [self.images[part.image].shape[:2] for part in self.parts]
        return [
            part.placement or Placement(size, size, (0, 0), size) for part, size in zip(self.parts, sizes, strict=True)
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

    def grids(self, row: NDArray[Any], indices: Sequence[int]) -> list[NDArray[np.float64]]:
        """Return the weights of parts as grids.

        Args:
            row: weights of the tokens of the prompt, [tokens].
            indices: indices of the parts.
        """
        parts = [self.parts[index] for index in indices]
        return [np.asarray(row, np.float64)[list(part.positions)].reshape(part.rows, part.cols) for part in parts]

    def map_of(
        self, row: NDArray[Any], total: float, indices: Sequence[int]
    ) -> tuple[NDArray[np.float32], Placement, dict[str, Any]]:
        """Return the map of a row on parts of an image, combined by area, its placement, and facts about it.

        If the vision tower was recorded, the map is propagated to its patches.

        Args:
            row, indices: as for `grids`.
            total: sum of the row including earlier generated tokens.
        """
        grids = self.grids(row, indices)
        share = sum(float(grid.sum()) for grid in grids)
        first, (grid, placement) = float(grids[0].flat[0]), self._combined(grids, indices)
        on_grid = float(grid.sum())
        facts = {
            "on_image": share / total if total else 0.0,
            "on_first_patch": first / on_grid if on_grid else 0.0,
            "on_edges": 1 - float(grid[1:-1, 1:-1].sum()) / on_grid if on_grid else 0.0,
        }
        if self.tower is not None:
            rows = [part.reshape(-1) @ self.tower[index] for part, index in zip(grids, indices, strict=True)]
            scales = [round((len(fine) / part.size) ** 0.5) for fine, part in zip(rows, grids, strict=True)]
            shapes = [(part.shape[0] * scale, part.shape[1] * scale) for part, scale in zip(grids, scales, strict=True)]
            finer = [fine.reshape(shape) for fine, shape in zip(rows, shapes, strict=True)]
            grid, placement = self._combined(finer, indices)
        return grid.astype(np.float32), placement, facts

    def _combined(self, grids: Sequence[NDArray[Any]], indices: Sequence[int]) -> tuple[NDArray[Any], Placement]:
        placements = [self.placements[index] for index in indices]
        return (grids[0], placements[0]) if len(grids) == 1 else merge_maps(grids, placements)

    def records(self, rows: NDArray[Any], totals: NDArray[Any]) -> list[dict[str, Any]]:
        """Return each image with the maps of all rows and layers, for a page.

        Each map sums to the share of its row on the image.

        Args:
            rows: weights of the tokens of the prompt, [rows, tokens, layers].
            totals: sums of the rows including earlier generated tokens, [rows, layers].
        """
        records = []
        for index, image in enumerate(self.images):
            indices, maps = self.chosen(index, None), []
            for row, layer in np.ndindex(totals.shape):
                total = float(totals[row, layer])
                grid, placement, facts = self.map_of(rows[row, :, layer], total, indices)
                on_grid = float(grid.sum())
                maps.append(grid * (facts["on_image"] / on_grid if on_grid else 0.0))
            encoded = base64.b64encode(thumbnail(image, _PAGE_SIZE)).decode()
            records.append(
                {
                    "name": printable(PurePath(self.sources[index]).name, lines=True),
                    "image": f"data:image/jpeg;base64,{encoded}",
                    "size": [image.shape[1], image.shape[0]],
                    "window": placement.window,
                    "grid": maps[0].shape,
                    "maps": pack_half(np.reshape(maps, (*totals.shape, *maps[0].shape))),
                }
            )
        return records
