"""Run of a model with moved tokens: whether each is computed from itself, and all stay in order.

It can only confirm this; `coded_tokens` follows tokens that are replaced, next to convolutions, and in another layout.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitflow.methods.staged_rollout import LayerTokens
from vitflow.methods.tokens import TokenLayout
from vitflow.recording.followed_tokens import Block, FollowedRun
from vitflow.recording.token_codes import Reading, follows_order, order_of_cells, random_order, window_reading


class Undecided(Exception):
    """Ends a permuted run whose tokens are not those of the other image, which need not be a fault."""


class PermutedRun(FollowedRun):
    """Run of two images, for layers with the same tokens; or raises Undecided.

    If patches are merged to those of a next stage, their cells are moved, and a third image has the tokens of the
    current stage in any order.
    """

    def run(self) -> None:
        """Run the model on noise; its exceptions are raised."""
        layouts = {layout for tokens in self._located.values() for layout in (tokens.queries, tokens.keys)}
        self._stages = sorted(layouts, key=lambda layout: -layout.num_tokens)
        self.images = min(3, 1 + len(layouts))
        self._random = torch.Generator().manual_seed(1)
        self._stage: TokenLayout | None = None
        self._orders: list[tuple[TokenLayout, Tensor]] = []  # moved cells, and their order, of images 1 …
        super().run()
        if self.unchecked:
            raise Undecided

    def layouts_before(self, block: str) -> Sequence[TokenLayout]:
        """Return the layouts that tokens may have after the first block began."""
        return self._stages if self._stage else ()

    def _begin_stage(self, tensor: Tensor, reading: Reading) -> Tensor:
        """Return the tokens in new orders: of the cells of the next stage, and of all tokens."""
        self._stage = reading.layout
        coarser = [each for each in self._stages if each.num_tokens < reading.layout.num_tokens]
        moved = [*coarser[:1], reading.layout, reading.layout][: self.images - 1]
        self._orders = [(cells, random_order(cells.num_tokens, self._random)) for cells in moved]
        tokens = reading.arrange(tensor).clone()
        for image, order in enumerate(self._origins(reading.layout), start=1):
            tokens[image] = tokens[0, order.to(tokens.device)]
        return reading.restore(tokens)

    def _origins(self, layout: TokenLayout) -> list[Tensor]:
        """Return the origins of the tokens of images 1 …, if they are known for a layout."""
        known = self._orders if layout == self._stage else self._orders[:1]
        origins = [order_of_cells(order, cells, layout) for cells, order in known]
        if any(each is None for each in origins):
            raise Undecided
        return [each for each in origins if each is not None]

    def _check(self, tensor: Tensor, reading: Reading) -> None:
        tokens = reading.arrange(tensor)
        if reading.index is not None:
            places = torch.full((reading.layout.num_tokens,), -1, device="cpu")
            places[reading.index[reading.index >= 0]] = (reading.index >= 0).nonzero().flatten()
            tokens = tokens[:, places.to(tokens.device)]
        for image, order in enumerate(self._origins(reading.layout), start=1):
            if not follows_order(tokens[[0, image]], order, rough=self._rough):
                raise Undecided

    def read_input(self, block: Block, fitting: Sequence[tuple[Tensor, Reading]]) -> Tensor | None:
        """Check the order of the tokens of the other images; give them another one at the first block of a stage."""
        tensor, reading = fitting[0]
        if len(fitting) > 1 or not (reading.layout == self._stage or reading.index is None):
            raise Undecided
        if self._stage is not None:
            self._check(tensor, reading)
        return None if reading.layout == self._stage else self._begin_stage(tensor, reading)

    def read_output(self, path: str, tensors: Sequence[Tensor]) -> None:
        """Check the output of a block."""
        if not (fitting := self.found(tensors, path, self.layouts_before(path))):
            raise Undecided
        self._check(*fitting[0])

    def read_inside(self, path: str, output: Any) -> None:
        """Check the output of a module inside a block, if it has all tokens."""
        for fitting in self.found(output, self._blocks[-1].path, windowed=False)[:1]:
            self._check(*fitting)

    def read_values(self, name: str, values: Tensor, tokens: LayerTokens) -> None:
        """Check the values that a module attends to."""
        if (reading := window_reading(values, tokens, self.images, heads=True)) is None:
            raise Undecided
        self._check(values, reading)
