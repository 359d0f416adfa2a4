"""Interactive HTML page of a text: select a word for its attribution by layer, or for the words attributed to it."""

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray

from vitflow.errors import printable
from vitflow.images.overlay import ROBUST_PERCENTILES
from vitflow.methods.fusion import check_layer
from vitflow.text.labels import ENGLISH_STOP_WORDS, caption, hide, labels_of
from vitflow.text.layer_rows import attention_rows, rollout_rows
from vitflow.text.layout import Words
from vitflow.viewer.pages import Page, drawing_of, make_html, one_table, pack_half, thumbnail

_IMAGE_SIZE = 768  # longer side of an image on the page, in pixels


@dataclass(frozen=True, slots=True, eq=False)
class TextRow:
    """Attribution of one word.

    Attributes:
        name: the word.
        positions: positions of its tokens.
        seen: the number of tokens that it can attend to, from the first on.
        weights: unsigned weights [layers, tokens], if the method ends at each layer.
        at: position of the query token whose output is the word; None for a word that was read.
        self_share: raw share of the query token, [layers], if the weights are relative to the receptive field, which
            sets its weight to 0; else None.
    """

    name: str
    positions: tuple[int, ...]
    seen: int
    weights: NDArray[Any]
    at: int | None = None
    self_share: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ShownImage:
    """An image of the prompt with the maps of all rows.

    Attributes:
        name: file name or description.
        image: uint8 RGB [height, width, 3].
        window: region covered by the maps, (left, top, right, bottom) in pixels of the image.
        maps: [rows, layers, grid rows, grid columns]; each map sums to the share of its row on the image.
    """

    name: str
    image: NDArray[np.uint8]
    window: tuple[float, float, float, float]
    maps: NDArray[Any]


def make_text_page(
    tokens: Sequence[Mapping[str, Any]],
    rows: Sequence[TextRow],
    *,
    first: int,
    layer: int,
    cumulative: bool,
    model: str,
    method: str,
    written: int | None = None,
    hidden: Sequence[str] = (),
    graph: str = "",
    images: Sequence[ShownImage] = (),
) -> Page:
    """Make the page.

    Args:
        tokens: all tokens: printable "text", "space" before it, "newline" after it, and "kind": "special", "stop" or
            "punctuation", which can be hidden, "patch" for image patches, else "word".
        rows: attributions of the words that can be selected.
        first: index of the row shown first.
        layer: index of the layer of the method's result.
        cumulative: True if row l covers all layers up to l, False if it covers layer l only.
        model: model id; for a path, its last component is displayed.
        method: description of the method and its options.
        written: position of the first generated token; None if the text was read.
        hidden: kinds of tokens hidden at first.
        graph: HTML fragment shown below the table, already escaped.
        images: images of the prompt with their maps.
    """
    shares = np.stack([_shares(row.weights) for row in rows])
    data = {
        "tokens": [{**token, "text": printable(token["text"])} for token in tokens],
        "rows": [
            {
                "name": printable(row.name),
                "positions": row.positions,
                "seen": row.seen,
                "at": row.at,
                "self_share": _rounded(row.self_share),
            }
            for row in rows
        ],
        "shares": pack_half(shares),
        "first": first,
        "layer": layer,
        "layers": shares.shape[1],
        "cumulative": cumulative,
        "written": written,
        "hidden": list(hidden),
        "images": [_image_record(image) for image in images],
        "tables": {"one_side": one_table(None, False)},
        "percentiles": ROBUST_PERCENTILES,
        "drawing": drawing_of(),
    }
    page = make_html(
        "text",
        *("attention", "text"),
        title="Attribution of each word",
        model=PurePath(model.replace("\\", "/")).name or model,
        method=method,
        written=written is not None,
        graph=Markup(graph),
        images=len(images),
        data=data,
    )
    return Page(page)


def _rounded(self_share: NDArray[Any] | None) -> list[float | None] | None:
    return None if self_share is None else [None if np.isnan(share) else round(float(share), 6) for share in self_share]


def _image_record(image: ShownImage) -> dict[str, Any]:
    """Return an image and its packed maps for JSON."""
    return {
        "name": printable(PurePath(image.name).name, lines=True),
        "image": f"data:image/jpeg;base64,{base64.b64encode(thumbnail(image.image, _IMAGE_SIZE)).decode()}",
        "size": [image.image.shape[1], image.image.shape[0]],
        "window": image.window,
        "grid": image.maps.shape[2:],
        "maps": pack_half(image.maps),
    }


def _shares(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Return the absolute weights of each layer divided by their sum; 0 for unseen tokens."""
    sizes = np.abs(np.nan_to_num(np.asarray(weights, np.float64)))
    totals = sizes.sum(axis=-1, keepdims=True)
    shares: NDArray[np.float64] = sizes / np.where(totals > 0, totals, 1.0)
    return shares


_ROUNDING = 1e-5  # tolerance for rows recomputed from the fused attention


def page_of(
    words: Words,
    rows: Sequence[TextRow],
    *,
    method: str,
    options: Mapping[str, Any],
    special: bool,
    stop_words: Iterable[str],
    patches: Collection[int] = (),
    target: str | None = None,
    probability: float | None = None,
    **page: Any,
) -> Page:
    """Make the page of a text; further arguments as for `make_text_page`.

    Args:
        words: all tokens.
        rows: attributions of the words that can be selected.
        method, options: a method for texts and its options.
        special, stop_words: as for the views; without stop words, the page offers to hide English ones.
        patches: positions of image patches.
        target, probability: target of a class-specific method and its probability, for the caption.
    """
    stopped = list(stop_words)
    reasons = hide(words, stop_words=stopped or ENGLISH_STOP_WORDS)
    kinds = {"special tokens": "special", "stop words": "stop"}
    tokens = []
    for position, label in enumerate(labels_of(words)):
        plain = "word" if any(character.isalnum() for character in label.text) else "punctuation"
        kind = "patch" if position in patches else kinds.get(reasons.get(position, ""), plain)
        tokens.append({"text": label.text, "space": label.space, "newline": label.newline, "kind": kind})
    return make_text_page(
        tokens,
        rows,
        layer=check_layer("layer", options.get("layer", -1), len(rows[0].weights)),
        cumulative="layer" not in options,
        method=caption(method, options, "", target=target, probability=probability),
        hidden=[*([] if special else ["special"]), *(["stop"] if stopped else [])],
        **page,
    )


def rows_of_reading(
    words: Words,
    selected: Sequence[int],
    layers: NDArray[Any],
    *,
    self_share: float | None,
    causal: bool,
    method: str,
    options: Mapping[str, Any],
    matrices: NDArray[Any] | None,
) -> tuple[list[TextRow], int]:
    """Return the rows of a text that was read, and the index of the selected word's row.

    Rows of the other words are recomputed from `matrices`, if that reproduces the selected word's row; otherwise only
    the selected word has a row.

    Args:
        words: all tokens.
        selected: positions of the selected word.
        layers: row of the selected word, [layers, tokens].
        self_share: raw share of the selected word if relative to the receptive field, else None.
        causal: True if no token attends to later ones.
        method, options: the method of `layers` and its options.
        matrices: fused attention [layers, tokens, tokens].
    """
    labels, count = labels_of(words), words.length
    seen = max(selected) + 1 if causal else count
    name = "".join(" " * (labels[i].space and i > selected[0]) + labels[i].text for i in selected)
    shares = None
    if self_share is not None:
        shares = np.full(len(layers), np.nan)
        shares[check_layer("layer", options.get("layer", -1), len(layers))] = self_share
    computed = _all_rows(matrices, selected, causal, method, options)
    if computed is None or not np.allclose(computed[0][:, -1], layers, atol=_ROUNDING):
        return [TextRow(name, tuple(selected), seen, layers, self_share=shares)], 0
    weights, shares = computed
    self_shares = [None] * (count + 1) if shares is None else shares.T
    rows = [
        TextRow(label.text, (i,), i + 1 if causal else count, weights[:, i], self_share=self_shares[i])
        for i, label in enumerate(labels)
        if i not in selected
    ]
    rows.insert(selected[0], TextRow(name, tuple(selected), seen, weights[:, count], self_share=self_shares[count]))
    return rows, selected[0]


def _all_rows(
    matrices: NDArray[Any] | None, selected: Sequence[int], causal: bool, method: str, options: Mapping[str, Any]
) -> tuple[NDArray[Any], NDArray[Any] | None] | None:
    """Return the rows of all tokens and the selected word, [layers, tokens + 1, tokens], and their raw self-shares."""
    if matrices is None or method not in ("rollout", "attention"):
        return None
    layers = [torch.from_numpy(layer) for layer in matrices]
    tokens = len(layers[0])
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    visible = [seen.tril() if causal else seen] * len(layers)
    readout = torch.cat([torch.eye(tokens), torch.zeros(1, tokens)])
    readout[-1, list(selected)] = 1 / len(selected)
    if method == "attention":
        return attention_rows(layers, visible, readout, discard_ratio=options["discard_ratio"]).numpy(), None
    used = {name: options[name] for name in ("discard_ratio", "residual", "start_layer", "causal")}
    rows, self_share = rollout_rows(layers, visible, readout, **used)
    return rows.numpy(), None if self_share is None else self_share.numpy()
