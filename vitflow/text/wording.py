"""What a tokenizer's numbers stand for in a text."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import ShapeError
from vitflow.methods.sequence.layout import Grid, Part, SequenceLayout, Words

# So many tokens before one are read again to see what it adds to their text.
_CONTEXT = 6
# What stands for a part of a character: the token that completes it has the character itself, those before it nothing.
_PART = "\ufffd"


def words_of(tokenizer: Any, ids: Sequence[int]) -> Words:
    """The tokens of these numbers; without a tokenizer, their numbers stand for themselves.

    A token's string is what it adds to the text of those before it, so that spaces stand where the text has them.
    """
    ids = tuple(int(number) for number in ids)
    if tokenizer is None:
        return Words(tuple(str(number) for number in ids), ids, (False,) * len(ids))
    special = set(tokenizer.all_special_ids)
    strings = []
    for place, number in enumerate(ids):
        if number in special:
            strings.append(str(tokenizer.convert_ids_to_tokens(number)))
            continue
        start = max((at + 1 for at in range(place) if ids[at] in special), default=0)
        start = max(start, place - _CONTEXT)
        before, after = _text(tokenizer, ids[start:place]), _text(tokenizer, ids[start : place + 1])
        before = before.rstrip(_PART)
        joins = after.startswith(before) and len(after) > len(before)
        strings.append(after[len(before) :].rstrip(_PART) if joins else _text(tokenizer, (number,)))
    return Words(tuple(strings), ids, tuple(number in special for number in ids))


def words_in(text: str, tokenizer: Any, ids: Sequence[int], offsets: Sequence[tuple[int, int]] | None) -> Words:
    """The tokens of a text that was read, as they stand in it where the tokenizer tells where each lies."""
    found = words_of(tokenizer, ids)
    if offsets is None:
        return found
    strings, last = [], 0
    for string, special, (start, end) in zip(found.strings, found.special, offsets, strict=True):
        inside = not special and end > start
        strings.append(text[last:end] if inside else string)  # nothing, where it is the rest of a character
        last = max(end, last) if inside else last
    return Words(tuple(strings), found.ids, found.special)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)) if ids else ""


def layouts_of(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    tokenizer: Any = None,
    image_token: int | None = None,
    grid: tuple[int, int] | None = None,
) -> tuple[SequenceLayout, ...]:
    """How the tokens of each sequence of a batch are arranged: padding, words, and patch grids among them.

    Args:
        input_ids: numbers [batch, tokens].
        attention_mask: [batch, tokens], 0 for padding, which stands on one side.
        tokenizer: tells what the numbers stand for.
        image_token: the number that stands for every patch of a picture, as in models that see and read.
        grid: rows and columns of each picture's patches; by default a square.

    Raises:
        ShapeError: padding stands on both sides or inside, or a picture has not as many patches as the grid.

    >>> layouts_of(torch.tensor([[0, 0, 5, 9, 9, 9, 9, 6]]), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]), image_token=9)[0]
    SequenceLayout(parts=(Words(strings=('5',), ids=(5,), special=(False,)), Grid(rows=2, cols=2), \
Words(strings=('6',), ids=(6,), special=(False,))), num_padding=2, padding='left')
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return tuple(
        _layout(ids.tolist(), seen.bool(), tokenizer, image_token, grid)
        for ids, seen in zip(input_ids, mask, strict=True)
    )


def _layout(
    ids: list[int], seen: Tensor, tokenizer: Any, image_token: int | None, grid: tuple[int, int] | None
) -> SequenceLayout:
    places = seen.nonzero().flatten().tolist()
    start, end = (places[0], places[-1] + 1) if places else (0, 0)
    if len(places) != end - start or (start and end < len(ids)):
        raise ShapeError(f"Expected padding on one side of each text, got attention_mask {seen.int().tolist()}.")
    parts: list[Part] = []
    for is_picture, run in groupby(ids[start:end], lambda number: number == image_token):
        numbers = list(run)
        parts.append(_grid(len(numbers), grid) if is_picture else words_of(tokenizer, numbers))
    return SequenceLayout(tuple(parts), len(ids) - len(places), "left" if start else "right")


def _grid(patches: int, grid: tuple[int, int] | None) -> Grid:
    rows, cols = grid or (math.isqrt(patches), math.isqrt(patches))
    if rows * cols != patches:
        raise ShapeError(
            f"Expected a picture of {rows} × {cols} patches, got {patches} in a row: give the grid's rows and columns."
        )
    return Grid(rows, cols)
