"""Token layout: which tokens are patches, which stand before them, and where each patch lies on the grid."""

from dataclasses import dataclass
from typing import Any

from vitflow.errors import OptionError, OutsideGridError, ShapeError, whole_number


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """How the N = P + n tokens of one forward pass are arranged: P prefix tokens, then rows × cols patches.

    Attributes:
        num_prefix_tokens: class, distillation and register tokens that precede the patches (P).
        rows: patches from top to bottom.
        cols: patches from left to right; patch tokens are in raster order.

    >>> TokenLayout(1, 14, 14).num_tokens
    197
    """

    num_prefix_tokens: int
    rows: int
    cols: int

    def __post_init__(self) -> None:
        for name in ("num_prefix_tokens", "rows", "cols"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.num_prefix_tokens < 0 or self.rows < 1 or self.cols < 1:
            raise ShapeError(
                f"Expected num_prefix_tokens >= 0 and a grid of at least 1 × 1 patches, got {self.num_prefix_tokens} "
                f"prefix tokens and a grid of {self.rows} × {self.cols}."
            )

    @property
    def num_patches(self) -> int:
        """Number of patch tokens, n = rows · cols."""
        return self.rows * self.cols

    @property
    def num_tokens(self) -> int:
        """Number of all tokens, N = P + n."""
        return self.num_prefix_tokens + self.num_patches

    def token_of_patch(self, row: int, col: int) -> int:
        """Index of the token that stands for the patch at (row, col), counted from the top left.

        Raises:
            OutsideGridError: the patch lies outside the grid.
        """
        row, col = whole_number("the patch's row", row), whole_number("the patch's column", col)
        if not (0 <= row < self.rows and 0 <= col < self.cols):
            raise OutsideGridError(
                f"Patch ({row}, {col}) lies outside the grid of {self.rows} × {self.cols} patches: "
                f"give a row from 0 to {self.rows - 1} and a column from 0 to {self.cols - 1}."
            )
        return self.num_prefix_tokens + row * self.cols + col

    def to_grid(self, tokens: Any) -> Any:
        """Reshape a vector over tokens [..., N] to the patch grid [..., rows, cols]; prefix tokens are dropped.

        Raises:
            ShapeError: the last axis does not have N entries.
        """
        shape = getattr(tokens, "shape", None)
        if not shape or shape[-1] != self.num_tokens:
            got = type(tokens).__name__ if shape is None else f"shape {tuple(shape)}"
            raise ShapeError(
                f"Expected {self.num_tokens} tokens ({self.num_prefix_tokens} prefix + {self.rows} × {self.cols} "
                f"patches) on the last axis of a tensor or array, got {got}."
            )
        return tokens[..., self.num_prefix_tokens :].reshape(*tokens.shape[:-1], self.rows, self.cols)


def check_layout(layout: object) -> None:
    """Raise OptionError unless it is a TokenLayout or None."""
    if not (layout is None or isinstance(layout, TokenLayout)):
        raise OptionError(f"Expected layout=TokenLayout(num_prefix_tokens, rows, cols), got {layout!r}.")
