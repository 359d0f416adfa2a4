"""What a tokenizer's numbers stand for in a text."""

from collections.abc import Sequence
from typing import Any

from vitflow.methods.sequences import Words

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
