"""Card of a method for the page of a model: three photographs with their maps, deletion, and localisation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec

from vitflow.errors import OptionError, printable
from vitflow.evaluation.metrics import METRICS
from vitflow.evaluation.results import draw_panel
from vitflow.evaluation.statistics import MIN_CLEAR
from vitflow.evaluation.tables import Tables
from vitflow.evaluation.verdict import counted, method_title, verdict
from vitflow.explaining.saliency import Saliency
from vitflow.images.typesetting import BAR, BASELINE, BODY, GREY, TITLE, framed, new_chart, plain, style_axes

# Width of the card, and heights of its photographs and charts, in inches.
_WIDTH, _PHOTOGRAPH, _CHART = 7.2, 1.5, 1.7
_NOT_SHOWN = (
    "Not shown: that the map of a single image is right, that these images are like yours, or which features of a "
    "patch the model uses."
)


def check_count(images: int) -> None:
    """Raise OptionError if there are too few images for a card."""
    if images < MIN_CLEAR:
        raise OptionError(f"A card requires at least {MIN_CLEAR} images, got {images}: on fewer, no number is clear.")


def card_method(tables: Tables) -> str:
    """Return the method of the card: the only one, else that of the first answer of the verdict, else the first."""
    answered = [answer.best for answer in verdict(tables) if answer.best]
    return tables.main_methods[0] if len(tables.main_methods) == 1 or not answered else answered[0]


def median_images(tables: Tables, method: str) -> list[str]:
    """Return the three images in the middle of the order by the method's values of `Tables.lead`."""
    values = np.full(len(tables.images), np.nan)
    if tables.lead is not None:
        values = tables.values[tables.lead.name][:, tables.methods.index(method)]
    order = np.argsort(values)[: max(int(np.isfinite(values).sum()), 3)]
    middle = (len(order) - 3) // 2
    return [tables.images[index]["input"] for index in order[middle : middle + 3].tolist()]


def draw_card(tables: Tables, method: str, maps: Sequence[Saliency]) -> Figure:
    """Draw the card of a method with its maps of three images, which `median_images` names."""
    figure = new_chart((_WIDTH, _PHOTOGRAPH + _CHART))
    grid = GridSpec(2, 1, figure=figure, height_ratios=[_PHOTOGRAPH, _CHART])
    photographs, charts = grid[0].subgridspec(1, 3), grid[1].subgridspec(1, 2)
    for place, saliency in enumerate(maps):
        axes: Any = figure.add_subplot(photographs[place])
        gap = np.full((len(saliency.image), saliency.image.shape[1] // 25, 3), 255, np.uint8)
        axes.imshow(np.hstack([saliency.image, gap, saliency.overlay()]))
        axes.set_axis_off()
        axes.set_title(printable(saliency.label), loc="left", **plain(BODY))
    _draw_deletion(figure.add_subplot(charts[0]), tables, method)
    _draw_localisation(figure.add_subplot(charts[1]), tables, method)
    count = counted(len(tables.images), "image")
    data = count if tables.data == count else f"{count} of {tables.data}"  # a list of images has no other name
    title = f"{method_title(method)}: saliency of {tables.model} on {data}"
    lead = "" if tables.lead is None else f"Photographs: the middle three by {tables.lead.title}. "
    shown = f"{lead}Bars: ROC-AUC of the map on the object, mean with 95 % interval."
    return framed(figure, title, [shown, _NOT_SHOWN])


def _draw_deletion(axes: Axes, tables: Tables, method: str) -> None:
    style_axes(axes, "probability while the highest patches are removed ↓")
    lines = tables.mean_lines("deletion") if tables.fractions else {}
    if not any(value is not None for value in lines.get(method, ())):
        _write(axes, "deletion was not measured")
        return
    for name, color in (("random", BASELINE), (method, BAR)):
        values = np.array(lines[name], dtype=np.float64)
        axes.plot(tables.fractions, values, color=color, linewidth=1.6)
        at = len(values) // 2
        place: dict[str, Any] = {"xytext": (3, 3), "textcoords": "offset points"}
        axes.annotate(method_title(name), (tables.fractions[at], values[at]), **place, **plain(BODY))
    axes.set_ylim(0.0, 1.1 * axes.get_ylim()[1])
    axes.set_xlabel("share of patches removed", fontsize=BODY, color=GREY)


def _draw_localisation(axes: Axes, tables: Tables, method: str) -> None:
    rows = [row for row in tables.table("roc_auc") if row.method == method] if "roc_auc" in tables.values else []
    if not rows or rows[0].estimate.mean is None:
        _write(axes, "ROC-AUC of the map: no boxes or masks")
        return
    rows += [row for row in tables.table("roc_auc") if row.baseline and row.method != method]
    draw_panel(axes, METRICS["roc_auc"], rows)
    labels = [f"{method_title(row.method)}\n{row.estimate}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, **plain(BODY))
    axes.set_xlim(0.0, 1.0)
    axes.invert_yaxis()


def _write(axes: Axes, text: str) -> None:
    """Write the reason why a chart is empty."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes, **plain(TITLE) | {"color": GREY})
