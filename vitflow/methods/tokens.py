"""Token layout: prefix tokens, patch tokens with their grid, and suffix tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vitflow.errors import OptionError, OutsideGridError, ShapeError, check_known, whole_number
from vitflow.images.geometry import Extent

#: The argument that says how tokens are arranged, for messages.
LAYOUT = "layout=TokenLayout(num_prefix_tokens, rows, cols, num_suffix_tokens)"


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The order of the tokens of one forward pass: prefix tokens, rows × cols patches, trailing tokens.

    Attributes:
        num_prefix_tokens: class, distillation and register tokens that precede the patches (P).
        rows: patches from top to bottom.
        cols: patches from left to right; patch tokens are in raster order.
        num_suffix_tokens: tokens that follow the patches, such as the detection tokens of YOLOS.
        extent: the pixels of the model input that the patches cover, if measured; it is not compared.

    >>> TokenLayout(1, 14, 14).num_tokens, TokenLayout(1, 14, 14, num_suffix_tokens=100).num_tokens
    (197, 297)
    """

    num_prefix_tokens: int
    rows: int
    cols: int
    num_suffix_tokens: int = 0
    extent: Extent | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_prefix_tokens", "rows", "cols", "num_suffix_tokens"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if min(self.num_prefix_tokens, self.num_suffix_tokens) < 0 or self.rows < 1 or self.cols < 1:
            raise ShapeError(f"Expected no negative number of tokens, and at least 1 × 1 patches, got {self}.")

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
        """Return the index of the token of the patch at (row, col), counted from the top left.

        Raises:
            OutsideGridError: the patch is outside the grid.
        """
        row, col = whole_number("the patch's row", row), whole_number("the patch's column", col)
        if not (0 <= row < self.rows and 0 <= col < self.cols):
            raise OutsideGridError(
                f"Patch ({row}, {col}) is outside the grid of {self.rows} × {self.cols} patches, counted from 0."
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
        raise OptionError(f"Expected {LAYOUT}, got {layout!r}.")


Causal = Literal["raw", "receptive_field"]


def visible_keys(
    layers: Sequence[Tensor],
    causal: Causal | None = None,
    attention_mask: Tensor | None = None,
    visible: Sequence[Tensor] | Tensor | None = None,
) -> list[Tensor] | None:
    """Return the visible keys of each query of each layer, bool [batch, queries, keys]; None if all are.

    Arguments are as for `attention_rollout`.

    >>> layer = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    >>> visible_keys([layer], "raw")[0].int()
    tensor([[[1, 0],
             [1, 1]]], dtype=torch.int32)
    """
    if causal is not None:
        check_known("causal", causal, get_args(Causal))
    if causal is None and attention_mask is None and visible is None:
        return None
    batch, (queries, keys) = layers[0].shape[0], layers[0].shape[-2:]
    if visible is None:
        masks = [(layer.amax(dim=1) if layer.ndim == 4 else layer) > 0 for layer in layers]
    else:
        given = [visible] * len(layers) if isinstance(visible, Tensor) else list(visible)
        if len(given) != len(layers) or any(one.shape[-2:] != (queries, keys) for one in given):
            expected, shapes = f"[batch, {queries}, {keys}]", [tuple(one.shape) for one in given]
            raise ShapeError(f"Expected visible as {len(layers)} layers of {expected} or one for all, got {shapes}.")
        masks = [one.bool().to(layers[0].device).expand(batch, queries, keys) for one in given]
    if attention_mask is None:
        return masks
    if attention_mask.shape != (batch, keys):
        raise ShapeError(f"Expected an attention_mask [{batch}, {keys}], got {tuple(attention_mask.shape)}.")
    tokens = attention_mask.bool().to(layers[0].device)
    among = tokens.unsqueeze(1) & tokens[:, -queries:].unsqueeze(2)
    return [one & among for one in masks]


def uniform_attention(visible: Tensor) -> Tensor:
    """Return uniform attention over the visible keys of each query: float64, of the same shape.

    >>> uniform_attention(torch.tensor([[True, False], [True, True]]))
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    seen = visible.double()
    return seen / seen.sum(dim=-1, keepdim=True).clamp_min(1.0)


def relative_to(weights: Tensor, reference: Tensor, is_self: Tensor | None = None) -> Tensor:
    """Divide weights [..., tokens] by those of uniform attention, each row normalised to sum 1, float64.

    Where the reference is 0, the quotient is 0. A row's own token, in the mask `is_self`, gets 0: in deep models its
    share of the reference is so small that it would dominate the quotient.

    >>> relative_to(torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.6, 0.1, 0.1]))
    tensor([0.2000, 0.6000, 0.2000], dtype=torch.float64)
    """
    reference = reference.double()
    quotient = torch.where(reference > 0, weights.double() / torch.where(reference > 0, reference, 1.0), 0.0)
    if is_self is not None:
        quotient = quotient.masked_fill(is_self, 0.0)
    total = quotient.sum(dim=-1, keepdim=True)
    return quotient / torch.where(total > 0, total, 1.0)


def self_token(readout: Tensor) -> Tensor:
    """Return a mask of the token of a readout [batch, tokens] with a single token; empty for several tokens."""
    nonzero = readout != 0
    return nonzero & (nonzero.sum(dim=-1, keepdim=True) == 1)
