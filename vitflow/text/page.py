"""The interactive page of a text: its tokens, and the attributions of the words that can be selected."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import printable
from vitflow.images.overlay import ROBUST_PERCENTILES
from vitflow.methods.fusion import check_layer
from vitflow.text.words import ENGLISH_STOP_WORDS, VERDICTS, Words, hide, labels_of
from vitflow.viewer.pages import Page, color_tables, drawing_of, make_html, pack_half


@dataclass(frozen=True, slots=True, eq=False)
class TextRow:
    """Attribution of one word: its weights [layers, tokens], if the method ends at each layer.

    The word attends to the first `seen` tokens. `at` is the position of the query token whose output it is, None for
    a word that was read; `self_share` its raw share [layers], if the rows are relative to the receptive field.
    """

    name: str
    positions: tuple[int, ...]
    seen: int
    weights: NDArray[Any]
    at: int | None = None
    self_share: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextPage:
    """Content of the page of a text: its tokens, the rows of the words that can be selected, and which is shown first.

    `written` is the position of the first generated token, None if the text was read; `patches` are positions of image
    patches, `images` records of the prompt's images with their maps.
    """

    words: Words
    rows: Sequence[TextRow]
    first: int
    model: str
    caption: str
    options: Mapping[str, Any]
    written: int | None = None
    patches: Collection[int] = ()
    images: Sequence[Mapping[str, Any]] = ()

    def page(self, *, special: bool, stop_words: Iterable[str]) -> Page:
        """Make the page; options as for the views. Without stop words, it offers to hide English ones."""
        stopped = list(stop_words)
        shares = np.abs(np.nan_to_num(np.stack([row.weights for row in self.rows]).astype(np.float64)))
        totals = shares.sum(axis=-1, keepdims=True)
        shares = shares / np.where(totals > 0, totals, 1.0)
        data = {
            "tokens": _token_records(self.words, stopped or ENGLISH_STOP_WORDS, self.patches),
            "rows": [
                {
                    "name": printable(row.name),
                    "positions": row.positions,
                    "seen": row.seen,
                    "at": row.at,
                    "self_share": None if row.self_share is None else row.self_share.astype(float).round(6).tolist(),
                }
                for row in self.rows
            ],
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
            images=len(self.images),
            data=data,
        )
        return Page(page)


def _token_records(words: Words, stop_words: Iterable[str], patches: Collection[int]) -> list[dict[str, Any]]:
    """Return each token for JSON; its kind is "special", "stop" or "punctuation" (can be hidden), "patch" or "word"."""
    reasons = hide(words, stop_words=stop_words)
    kinds = {"special tokens": "special", "stop words": "stop"}
    records = []
    for position, label in enumerate(labels_of(words)):
        plain = "word" if any(character.isalnum() for character in label.text) else "punctuation"
        kind = "patch" if position in patches else kinds.get(reasons.get(position, ""), plain)
        records.append({"text": printable(label.text), "space": label.space, "newline": label.newline, "kind": kind})
    return records
