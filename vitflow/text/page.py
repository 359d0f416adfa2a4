"""The page of a text that was read or written: its words, the rows that can be asked, and what a reader may hide."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitflow.methods.attention import check_layer
from vitflow.methods.sequence.layer_rows import attention_rows, rollout_rows
from vitflow.methods.sequence.layout import Words
from vitflow.text.captions import caption
from vitflow.text.labels import ENGLISH_STOP_WORDS, hide, labels_of
from vitflow.text.textpage import TextRow, make_text_page
from vitflow.viewer.pages import Page

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
        patches: positions that stand for parts of a picture.
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
    asked: Sequence[int],
    layers: NDArray[Any],
    *,
    own: float | None,
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
        asked: the tokens of the asked word.
        layers: its row, [layers, tokens].
        own: relative to the receptive field, the raw share of the asked word itself.
        causal: whether no token sees a later one.
        method, options: those that gave it.
        matrices: fused attention, [layers, tokens, tokens].
    """
    labels, count = labels_of(words), words.length
    seen = max(asked) + 1 if causal else count
    name = "".join(" " * (labels[place].space and place > asked[0]) + labels[place].text for place in asked)
    apart = None
    if own is not None:
        apart = np.full(len(layers), np.nan)
        apart[check_layer("layer", options.get("layer", -1), len(layers))] = own
    found = _every_row(matrices, asked, causal, method, options)
    if found is None or not np.allclose(found[0][:, -1], layers, atol=_ROUNDING):
        return [TextRow(name, tuple(asked), seen, layers, own=apart)], 0
    weights, shares = found
    own_shares = [None] * (count + 1) if shares is None else shares.T
    rows = [
        TextRow(label.text, (place,), place + 1 if causal else count, weights[:, place], own=own_shares[place])
        for place, label in enumerate(labels)
        if place not in asked
    ]
    rows.insert(asked[0], TextRow(name, tuple(asked), seen, weights[:, count], own=own_shares[count]))
    return rows, asked[0]


def _every_row(
    matrices: NDArray[Any] | None, asked: Sequence[int], causal: bool, method: str, options: Mapping[str, Any]
) -> tuple[NDArray[Any], NDArray[Any] | None] | None:
    """The rows of all tokens and then of the asked word, [layers, tokens + 1, tokens], and their own raw shares."""
    if matrices is None or method not in ("rollout", "attention"):
        return None
    given = [torch.from_numpy(layer) for layer in matrices]
    tokens = len(given[0])
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    visible = [seen.tril() if causal else seen] * len(given)
    readout = torch.cat([torch.eye(tokens), torch.zeros(1, tokens)])
    readout[-1, list(asked)] = 1 / len(asked)
    if method == "attention":
        return attention_rows(given, visible, readout, discard_ratio=options["discard_ratio"]).numpy(), None
    used = {name: options[name] for name in ("discard_ratio", "residual", "start_layer", "causal")}
    rows, own = rollout_rows(given, visible, readout, **used)
    return rows.numpy(), None if own is None else own.numpy()
