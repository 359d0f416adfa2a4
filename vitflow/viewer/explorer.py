"""The explorer: a page that contains recorded attention and computes maps from it in the browser."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import printable
from vitflow.images.overlay import ROBUST_PERCENTILES, SEQUENTIAL
from vitflow.methods.gradients import ValueWeighting
from vitflow.viewer.pages import (
    Floats,
    Packed,
    Page,
    color_tables,
    data_uri,
    drawing_of,
    make_html,
    pack_half,
    thumbnail,
)

# Head fusion, and the value weighting before it.
Fused = tuple[str, ValueWeighting]

#: Fused attention in a page, the indispensable one first.
FUSED: tuple[Fused, ...] = (
    *(("max", "output"), ("mean", False), ("max", False)),
    *(("mean", "output"), ("min", False), ("min", "output")),
)
# Colour maps to choose from, the default first.
COLOUR_MAPS = (SEQUENTIAL, "viridis", "inferno", "gray")
# Longer side of the images, in pixels.
_PHOTOGRAPH = 1024
_MEGABYTE = 10**6


@dataclass(slots=True, eq=False)
class ExploredImage:
    """Data of an image for the page: its `record` for JSON, and arrays that `make_explorer` packs into it."""

    record: dict[str, Any]
    attention: dict[Fused, Floats] = field(default_factory=dict)  # [layers, tokens, tokens]
    heads: Floats | None = None  # [layers, heads, tokens, tokens]; None if they do not fit
    affinities: dict[str, list[Floats]] = field(default_factory=dict)  # by kind, from each layer on, [patches, patches]
    features: tuple[Floats, tuple[int, int]] | None = None  # [patches, width], with their (rows, cols)

    @classmethod
    def of(cls, name: str, path: str | None, image: NDArray[np.uint8]) -> "ExploredImage":
        """Begin with a photograph."""
        nothing: dict[str, Any] = {"grid": None, "prefix": 0, "readout": [], "pooling": "", "start_layer": 1}
        nothing |= {"affinities": {}, "attention": {}, "heads": None, "features": None, "uniform": False}
        nothing |= {"maps": [], "deletion": [], "answers": [], "refused": {}}  # of "live", "refine", … with the reason
        photograph = {"image": data_uri(thumbnail(image, _PHOTOGRAPH)), "size": [image.shape[1], image.shape[0]]}
        return cls({"name": printable(Path(name).name, lines=True), "path": path, **photograph, **nothing})


@dataclass(frozen=True, slots=True)
class ModelCall:
    """Command and Python call that load the model of a page.

    Attributes:
        arguments: on the command line; None if only Python can load it.
        python: Python expression of an explainer.
    """

    arguments: Sequence[str] | None
    python: str


@dataclass(frozen=True, slots=True, repr=False)
class ExplorerPage(Page):
    """Self-contained page that shows the attention of image patches in a browser.

    Attributes:
        html: the page.
        notes: its contents with their accuracy, and what was left out.
    """

    notes: tuple[str, ...]


def make_explorer(
    images: Sequence[ExploredImage],
    *,
    model: str,
    model_note: str = "",
    call: ModelCall,
    methods: Mapping[str, Mapping[str, Any]],
    max_size: float,
) -> ExplorerPage:
    """Make the page, with the "title", whether it is "signed", "defaults" and "published" options of each method.

    Data that does not fit into max_size megabytes is left out with a note: first single heads, then all fusions but
    one.
    """
    for image in images:
        for name, matrices in image.affinities.items():  # row by row, with the diagonal
            halves = [symmetric[np.triu_indices(len(symmetric))] for symmetric in matrices]
            image.record["affinities"][name] = [pack_half(half) for half in halves]
        if image.features is not None:
            image.record["features"] = {**pack_half(image.features[0]), "grid": image.features[1]}
    records, live = [image.record for image in images], [image for image in images if image.attention]
    notes = _pack_attention(live, max_size * _MEGABYTE - len(str(records)) - 2**17) if live else []
    if reason := next((one["refused"]["deletion"] for one in records if "deletion" in one["refused"]), None):
        notes.append(f"“Does it matter?” is left out, as patches cannot be removed: {reason}")
    title = records[0]["name"] if len(images) == 1 else f"{len(images)} images"
    heads = max((image.heads.shape[1] for image in live if image.heads is not None), default=0)
    data = {
        "images": records,
        "model": model,
        "call": {"arguments": call.arguments, "python": call.python},
        "methods": methods,
        "layers": max((len(next(iter(image.attention.values()))) for image in live), default=0),
        "heads": heads,
        "tables": {name: color_tables(None if name == SEQUENTIAL else name) for name in COLOUR_MAPS},
        "drawing": drawing_of(),
        "cmaps": list(COLOUR_MAPS),
        "percentiles": ROBUST_PERCENTILES,
    }
    scripts = ("attention", "calls", "deletion", "explorer")
    page = make_html("explorer", *scripts, title=title, model=model, model_note=model_note, notes=notes, data=data)
    size = f"The page has {len(page) / _MEGABYTE:.1f} MB."
    if len(page) > max_size * _MEGABYTE:
        size += f" It cannot be made as small as {max_size:g} MB: take fewer images, or a higher --max-size."
    return ExplorerPage(page, (*notes, size))


def _pack_attention(live: Sequence[ExploredImage], room: float) -> list[str]:
    """Put as much attention as fits into the rest of the page, `room` bytes; return notes."""
    names = {key: f"{key[0]} {'weighted' if key[1] else 'plain'}" for key in FUSED}
    left_out = []
    for number, key in enumerate(key for key in FUSED if all(key in image.attention for image in live)):
        packed = _fitting([image.attention[key] for image in live], room if number else np.inf)
        room -= sum(len(one["data"]) for one in packed)
        left_out += [] if packed else [names[key]]
        for image, one in zip(live, packed, strict=False):
            image.record["attention"][names[key]] = one
    heads = [image.heads.reshape(-1, *image.heads.shape[2:]) for image in live if image.heads is not None]
    packed = _fitting(heads, room) if len(heads) == len(live) else []
    left_out += [] if packed else ["single heads"]
    for image, one in zip(live, packed, strict=False):
        image.record["heads"] = one
    notes = ["Attention is stored in half precision: each number within 2⁻¹¹ of its value."]
    return notes + ([f"Left out, for a smaller page: {', '.join(left_out)}."] if left_out else [])


def _fitting(values: Sequence[Floats], room: float) -> list[Packed]:
    """Pack an array of each image; return nothing if they do not fit."""
    if 0.8 * sum(array.size for array in values) > room:  # better compression does not occur
        return []
    packed = [pack_half(array) for array in values]
    return packed if sum(len(one["data"]) for one in packed) <= room else []
