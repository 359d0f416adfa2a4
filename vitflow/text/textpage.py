"""The page of a text: click a word, and see what it rests on, layer by layer, or who rests on it."""

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

# Longer side of a photograph on the page, in pixels.
_PHOTOGRAPH = 768


@dataclass(frozen=True, slots=True, eq=False)
class TextRow:
    """What one word rests on.

    Attributes:
        name: the word.
        positions: the tokens that it is made of.
        seen: how many tokens it could see, from the first on.
        weights: [layers, tokens], where the method ends at each layer; without signs.
        at: the position that it was written at, whose output it is; None of a word that was read.
        self_share: what stands apart of each row for its own token, which has no weight there, [layers]; None where the
            weights hold it.
    """

    name: str
    positions: tuple[int, ...]
    seen: int
    weights: NDArray[Any]
    at: int | None = None
    self_share: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ShownImage:
    """An image of the prompt, with the maps of all rows on it.

    Attributes:
        name: what it is called.
        image: uint8 RGB [height, width, 3].
        window: the part that the maps cover, (left, top, right, bottom) in pixels of the image.
        maps: [rows, layers, patches down, patches across]; each sums to the share of its row that lies on the image.
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
        tokens: all of the text: its characters, "text", each of which leaves a mark; whether a "space" stands before it
            and a "newline" behind it; and its "kind": "special", "stop" or "punctuation", what a reader may hide;
            "patch", what stands for a part of an image and is no word; else "word".
        rows: of the words that can be asked what they rest on.
        first: the number of the row that the page begins with.
        layer: the index of the layer that the method's own answer is of.
        cumulative: whether a row of layer l is of all layers up to l, and not of that layer alone.
        model: its id; of a path the last part is shown.
        method: the method and how it departs from its publication, in words.
        written: from which token on the text was written; None where all of it was read.
        hidden: the kinds of tokens that are hidden at first.
        graph: a fragment of HTML to show below, escaped where it was made.
        images: those of the prompt, which show the map of the word that is asked.
    """
    shares = np.stack([_shares(row.weights) for row in rows])
    self_share = [
        None if row.self_share is None else [None if np.isnan(one) else round(float(one), 6) for one in row.self_share]
        for row in rows
    ]
    data = {
        "tokens": [{**one, "text": printable(one["text"])} for one in tokens],
        "rows": [
            {"name": printable(row.name), "positions": row.positions, "seen": row.seen, "at": row.at, "own": share}
            for row, share in zip(rows, self_share, strict=True)
        ],
        "shares": pack_half(shares).record,
        "first": first,
        "layer": layer,
        "layers": shares.shape[1],
        "cumulative": cumulative,
        "written": written,
        "hidden": list(hidden),
        "images": [_told(image) for image in images],
        "tables": {"one_side": one_table(None, False)},
        "percentiles": ROBUST_PERCENTILES,
        "drawing": drawing_of(),
    }
    page = make_html(
        "text",
        *("attention", "text"),
        title="What each word rests on",
        model=PurePath(model.replace("\\", "/")).name or model,
        method=method,
        written=written is not None,
        graph=Markup(graph),
        images=len(images),
        data=data,
    )
    return Page(page)


def _told(image: ShownImage) -> dict[str, Any]:
    """An image for JSON, its maps packed."""
    return {
        "name": printable(PurePath(image.name).name, lines=True),
        "image": f"data:image/jpeg;base64,{base64.b64encode(thumbnail(image.image, _PHOTOGRAPH)).decode()}",
        "size": [image.image.shape[1], image.image.shape[0]],
        "window": image.window,
        "grid": image.maps.shape[2:],
        "maps": pack_half(image.maps).record,
    }


def _shares(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Each layer's weights as shares of their sum, 0 for what is not seen."""
    sizes = np.abs(np.nan_to_num(np.asarray(weights, np.float64)))
    totals = sizes.sum(axis=-1, keepdims=True)
    shares: NDArray[np.float64] = sizes / np.where(totals > 0, totals, 1.0)
    return shares


# Rows that are computed again must be those that the method gave, but for rounding.
_ROUNDING = 1e-5


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
    """The page; what differs from `make_text_page`, which takes the rest, is as below.

    Args:
        words: all tokens.
        rows: of the words that can be asked what they rest on.
        method, options: of the table of methods for texts.
        special, stop_words: as for the views; where no stop words are given, those of English can be hidden.
        patches: positions that stand for parts of an image.
        target, probability: what the caption says besides.
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


def rows_read(
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
    """The rows of a text that was read, and the number of the asked word's.

    The other words have theirs where the matrices give them: that is tried with the asked word's, which must come out
    as it is.

    Args:
        words: all tokens.
        selected: the tokens of the asked word.
        layers: its row, [layers, tokens].
        self_share: relative to the receptive field, the raw share of the asked word itself.
        causal: whether no token sees a later one.
        method, options: those that gave it.
        matrices: fused attention, [layers, tokens, tokens].
    """
    labels, count = labels_of(words), words.length
    seen = max(selected) + 1 if causal else count
    name = "".join(" " * (labels[place].space and place > selected[0]) + labels[place].text for place in selected)
    apart = None
    if self_share is not None:
        apart = np.full(len(layers), np.nan)
        apart[check_layer("layer", options.get("layer", -1), len(layers))] = self_share
    found = _every_row(matrices, selected, causal, method, options)
    if found is None or not np.allclose(found[0][:, -1], layers, atol=_ROUNDING):
        return [TextRow(name, tuple(selected), seen, layers, self_share=apart)], 0
    weights, shares = found
    self_shares = [None] * (count + 1) if shares is None else shares.T
    rows = [
        TextRow(label.text, (place,), place + 1 if causal else count, weights[:, place], self_share=self_shares[place])
        for place, label in enumerate(labels)
        if place not in selected
    ]
    rows.insert(selected[0], TextRow(name, tuple(selected), seen, weights[:, count], self_share=self_shares[count]))
    return rows, selected[0]


def _every_row(
    matrices: NDArray[Any] | None, selected: Sequence[int], causal: bool, method: str, options: Mapping[str, Any]
) -> tuple[NDArray[Any], NDArray[Any] | None] | None:
    """The rows of all tokens and then of the asked word, [layers, tokens + 1, tokens], and their own raw shares."""
    if matrices is None or method not in ("rollout", "attention"):
        return None
    given = [torch.from_numpy(layer) for layer in matrices]
    tokens = len(given[0])
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    visible = [seen.tril() if causal else seen] * len(given)
    readout = torch.cat([torch.eye(tokens), torch.zeros(1, tokens)])
    readout[-1, list(selected)] = 1 / len(selected)
    if method == "attention":
        return attention_rows(given, visible, readout, discard_ratio=options["discard_ratio"]).numpy(), None
    used = {name: options[name] for name in ("discard_ratio", "residual", "start_layer", "causal")}
    rows, self_share = rollout_rows(given, visible, readout, **used)
    return rows.numpy(), None if self_share is None else self_share.numpy()
