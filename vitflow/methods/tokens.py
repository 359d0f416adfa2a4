"""Token layout: which tokens are patches, which precede or follow them, and the place of each patch on the grid."""

from dataclasses import dataclass
from typing import Any

from vitflow.errors import OptionError, OutsideGridError, ShapeError, whole_number


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The order of the tokens of one forward pass: prefix tokens, rows × cols patches, trailing tokens.

    Attributes:
        num_prefix_tokens: class, distillation and register tokens that precede the patches (P).
        rows: patches from top to bottom.
        cols: patches from left to right; patch tokens are in raster order.
        num_suffix_tokens: tokens that follow the patches, such as the detection tokens of YOLOS.

    >>> TokenLayout(1, 14, 14).num_tokens, TokenLayout(1, 14, 14, num_suffix_tokens=100).num_tokens
    (197, 297)
    """

    num_prefix_tokens: int
    rows: int
    cols: int
    num_suffix_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prefix_tokens", "rows", "cols", "num_suffix_tokens"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if min(self.num_prefix_tokens, self.num_suffix_tokens) < 0 or self.rows < 1 or self.cols < 1:
            raise ShapeError(
                "Expected num_prefix_tokens >= 0, num_suffix_tokens >= 0 and a grid of at least 1 × 1 patches, got "
                f"{self.num_prefix_tokens} prefix tokens, {self.num_suffix_tokens} suffix tokens and a grid of "
                f"{self.rows} × {self.cols}."
            )

    @property
    def num_patches(self) -> int:
        """Number of patch tokens, n = rows · cols."""
        return self.rows * self.cols

    @property
    def num_tokens(self) -> int:
        """Number of all tokens, N: prefix, patches and trailing ones."""
        return self.num_prefix_tokens + self.num_patches + self.num_suffix_tokens

    @property
    def patches(self) -> slice:
        """The patch tokens among all tokens."""
        return slice(self.num_prefix_tokens, self.num_prefix_tokens + self.num_patches)

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
        """Reshape a vector over tokens [..., N] to the patch grid [..., rows, cols]; other tokens are dropped.

        Raises:
            ShapeError: the last axis does not have N entries.
        """
        shape = getattr(tokens, "shape", None)
        if not shape or shape[-1] != self.num_tokens:
            got = type(tokens).__name__ if shape is None else f"shape {tuple(shape)}"
            more = f" + {self.num_suffix_tokens} suffix" if self.num_suffix_tokens else ""
            raise ShapeError(
                f"Expected {self.num_tokens} tokens ({self.num_prefix_tokens} prefix + {self.rows} × {self.cols} "
                f"patches{more}) on the last axis of a tensor or array, got {got}."
            )
        return tokens[..., self.patches].reshape(*tokens.shape[:-1], self.rows, self.cols)


def check_layout(layout: object) -> None:
    """Raise OptionError unless it is a TokenLayout or None."""
    if not (layout is None or isinstance(layout, TokenLayout)):
        raise OptionError(f"Expected layout=TokenLayout(num_prefix_tokens, rows, cols), got {layout!r}.")
