"""Reach of convolutions and pooling: from how many patches away a token may have been computed."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vitflow.methods.tokens import TokenLayout

_CONVOLUTIONS = ("conv2d", "conv3d", "conv_transpose2d")
_POOLING = ("avg_pool2d", "max_pool2d", "max_pool2d_with_indices", "lp_pool2d", "unfold", "fold")
_ADAPTIVE = ("adaptive_avg_pool2d", "adaptive_max_pool2d", "interpolate", "upsample")
# Further arguments of these functions by position: dilation.
_DILATION_AT = {"conv2d": 5, "conv3d": 5, "conv_transpose2d": 7, "unfold": 2, "max_pool2d": 4}


def reach_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], layout: TokenLayout
) -> tuple[float, float] | None:
    """Return how far a call of a torch function reaches, in patches of a layout down and across; None if it does not.

    >>> import torch
    >>> reach_of("conv2d", (torch.ones(1, 2, 7, 7), torch.ones(2, 2, 3, 3)), {}, TokenLayout(0, 14, 14))
    (2.0, 2.0)
    """
    source = args[0] if args else kwargs.get("input")
    if not isinstance(source, Tensor) or source.ndim not in (4, 5):
        return None
    sides = source.shape[-2:]
    if name in _CONVOLUTIONS:
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        kernel = weight.shape[-2:]
    elif name in _POOLING:
        first = 2 if name == "fold" else 1
        kernel = _sides(args[first] if len(args) > first else kwargs["kernel_size"])
    elif name in _ADAPTIVE:
        size = args[1] if len(args) > 1 else kwargs.get("output_size", kwargs.get("size"))
        output = sides if size is None else [each or side for each, side in zip(_sides(size), sides, strict=True)]
        kernel = [2 * -(-side // each) + 1 for each, side in zip(output, sides, strict=True)]
    else:
        return None
    at = _DILATION_AT.get(name, len(args))
    dilation = _sides(args[at] if len(args) > at else kwargs.get("dilation", 1))
    grid = (layout.rows, layout.cols)
    down, across = (
        float((size // 2) * step * max(1.0, count / side))
        for size, step, count, side in zip(kernel, dilation, grid, sides, strict=True)
    )
    return (down, across) if down or across else None


def is_finer(name: str) -> bool:
    """Return True if a torch function may return a finer grid, whose tokens are then computed from merged ones."""
    return name in ("conv_transpose2d", "fold", "interpolate", "upsample", "pixel_shuffle")


def is_coarser(output: Any, source: Any, layout: TokenLayout) -> bool:
    """Return True if a feature map is coarser than a layout and than what it is computed from, which may be padded."""
    both = isinstance(output, Tensor) and isinstance(source, Tensor) and output.ndim == source.ndim == 4
    return both and output.shape[-2:].numel() < min(source.shape[-2:].numel(), layout.num_patches)


def _sides(size: Any) -> Sequence[int]:
    """Return the last two of a size that is given as a number or a sequence."""
    return (size, size) if isinstance(size, int) else tuple(size)[-2:] if len(size) > 1 else (size[0], size[0])
