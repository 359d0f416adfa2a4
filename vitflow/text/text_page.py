"""Interactive HTML page of a text: select a word for its attribution by layer, or for the words attributed to it."""

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import printable
from vitflow.images.figures import figure_bytes
from vitflow.images.overlay import ROBUST_PERCENTILES
from vitflow.methods.fusion import check_layer
from vitflow.text.summary import VERDICTS
from vitflow.text.view import View
from vitflow.text.words import ENGLISH_STOP_WORDS, Words, hide, labels_of
from vitflow.viewer.pages import Page, color_tables, drawing_of, make_html, pack_half


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextPage:
    """Content of the page of a text.

    Attributes:
        words: all tokens.
        rows: attributions of the words that can be selected.
        first: index of the row shown first.
        model: model id; for a path, its last component is displayed.
        caption: method, its options and its target.
        options: options of the method.
        written: position of the first generated token; None if the text was read.
        graph: figure shown below the table.
        patches: positions of image patches.
        images: images of the prompt with their maps, as records for the page.
    """

    words: Words
    rows: Sequence[TextRow]
    first: int
    model: str
    caption: str
    options: Mapping[str, Any]
    written: int | None = None
    graph: View | None = None
    patches: Collection[int] = ()
    images: Sequence[Mapping[str, Any]] = ()

    def page(self, *, special: bool, stop_words: Iterable[str]) -> Page:
        """Make the page; options as for the views. Without stop words, it offers to hide English ones."""
        stopped = list(stop_words)
        shares = np.stack([_shares(row.weights) for row in self.rows])
        data = {
            "tokens": _token_records(self.words, stopped or ENGLISH_STOP_WORDS, self.patches),
            "rows": [_row_record(row) for row in self.rows],
            "shares": pack_half(shares),
            "first": self.first,
            "layer": check_layer("layer", self.options.get("layer", -1), shares.shape[1]),
            "layers": shares.shape[1],
            "cumulative": "layer" not in self.options,  # row l covers all layers up to l
            "written": self.written,
            "hidden": [*([] if special else ["special"]), *(["stop"] if stopped else [])],
            "images": list(self.images),
            "verdicts": VERDICTS,
            "tables": color_tables(None),
            "percentiles": ROBUST_PERCENTILES,
            "drawing": drawing_of(),
        }
        page = make_html(
            "text",
            *("attention", "text"),
            title="Attribution of each word",
            model=PurePath(self.model.replace("\\", "/")).name or self.model,
            method=self.caption,
            written=self.written is not None,
            graph=None if self.graph is None else _graph_record(self.graph),
            images=len(self.images),
            data=data,
        )
        return Page(page)


def _row_record(row: TextRow) -> dict[str, Any]:
    """Return a row without its weights for JSON."""
    share = None if row.self_share is None else np.round(row.self_share.astype(float), 6).tolist()
    return {
        "name": printable(row.name),
        "positions": row.positions,
        "seen": row.seen,
        "at": row.at,
        "self_share": share,
    }


def _token_records(words: Words, stop_words: Iterable[str], patches: Collection[int]) -> list[dict[str, Any]]:
    """Return the tokens for JSON.

    Each has its text, "space" before it, "newline" after it, and "kind": "special", "stop" or "punctuation", which can
    be hidden, "patch" for image patches, else "word".
    """
    reasons = hide(words, stop_words=stop_words)
    kinds = {"special tokens": "special", "stop words": "stop"}
    records = []
    for position, label in enumerate(labels_of(words)):
        plain = "word" if any(character.isalnum() for character in label.text) else "punctuation"
        kind = "patch" if position in patches else kinds.get(reasons.get(position, ""), plain)
        records.append({"text": printable(label.text), "space": label.space, "newline": label.newline, "kind": kind})
    return records


def _graph_record(view: View) -> dict[str, Any]:
    """Return a figure for the template: its image, its width in pixels, and its description."""
    figure = view.figure()
    image = f"data:image/png;base64,{base64.b64encode(figure_bytes(figure, '.png')).decode()}"
    return {"image": image, "width": round(96 * figure.get_size_inches()[0]), "text": view.text()}


def _shares(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Return the absolute weights of each layer divided by their sum; 0 for unseen tokens."""
    sizes = np.abs(np.nan_to_num(np.asarray(weights, np.float64)))
    totals = sizes.sum(axis=-1, keepdims=True)
    shares: NDArray[np.float64] = sizes / np.where(totals > 0, totals, 1.0)
    return shares
