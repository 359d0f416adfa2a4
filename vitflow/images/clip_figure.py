"""The figure of a clip: key frames with their maps, above a curve of the share of each frame."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from numpy.typing import NDArray

from vitflow.images.charts import LIGHT, framed, new_chart, style_axes
from vitflow.images.typesetting import BODY, TITLE

_FRAME = 1.25  # inches
_CURVE = 1.1


def draw_clip(
    images: Mapping[int, NDArray[np.uint8]],
    shares: NDArray[np.float64],
    *,
    title: str,
    notes: Sequence[str],
    span: int = 1,
) -> Figure:
    """Draw key frames above a curve of the shares of all frames.

    Args:
        images: overlays by the index of their frame, uint8 RGB [height, width, 3].
        shares: share of each frame, [frames].
        title: title of the figure.
        notes: lines below it.
        span: number of frames that each map and each share covers.
    """
    height, width = next(iter(images.values())).shape[:2]
    frame = _FRAME * height / width
    size = (max(len(images), 3) * _FRAME + 0.4, frame + _CURVE + 0.3)
    figure = new_chart(size)
    grid = GridSpec(2, len(images), figure=figure, height_ratios=[frame, _CURVE])
    for column, (index, image) in enumerate(images.items()):
        axes: Any = figure.add_subplot(grid[0, column])
        axes.imshow(image, interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(f"frame {index * span + 1}", fontsize=BODY, color=LIGHT.soft)
    curve = figure.add_subplot(grid[1, :])
    style_axes(curve, "")
    places = np.arange(len(shares)) * span + 1
    curve.plot(places, 100 * shares, color=LIGHT.bar, marker="o", markersize=2.5, linewidth=1.2)
    marked = [index * span + 1 for index in images]
    curve.plot(marked, 100 * shares[list(images)], "o", color=LIGHT.lines[1], markersize=4)
    curve.axhline(100 / len(shares), color=LIGHT.rule, linewidth=0.6, zorder=0)
    curve.set_ylim(0, 112 * max(shares.max(), 1 / len(shares)))
    curve.set_xticks(marked)
    curve.set_xlabel("frame", fontsize=TITLE, color=LIGHT.soft)
    curve.set_ylabel("share, %", fontsize=TITLE, color=LIGHT.soft)
    return framed(figure, title, notes)
