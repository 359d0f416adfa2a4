"""Words as they are shown: each leaves a mark, whatever it is made of; some may be left out, which is then said."""

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import ShapeError, printable
from vitflow.explaining.captions import method_in_words
from vitflow.text.layout import Grid, Part, SequenceLayout, Words
from vitflow.text.method_table import TEXT_METHODS

# Words of English that say little by themselves.
_STOP_WORDS = """
a an and are as at be been but by can could did do does for from had has have he her him his i if in into is it its me
my no nor not of on or our she should so than that the their them then there these they this those to too us was we were
will with would you your
"""
#: For views that leave them out.
ENGLISH_STOP_WORDS = frozenset(_STOP_WORDS.split())

# Characters that would leave no mark, or would break the line that they stand in.
_SHOWN = {
    "\n": "↵",
    "\r": "␍",
    "\t": "⇥",
    "\u00a0": "⍽",
    "\u200b": "⟨ZWSP⟩",
    "\u200c": "⟨ZWNJ⟩",
    "\u200d": "⟨ZWJ⟩",
    "\ufeff": "⟨BOM⟩",
}


@dataclass(frozen=True, slots=True)
class Label:
    """One token as it is shown.

    Attributes:
        text: its characters; what leaves no mark is made visible.
        space: whether a space stands before it.
        newline: whether a line ends with it.
    """

    text: str
    space: bool = False
    newline: bool = False


def labels_of(words: Words) -> list[Label]:
    """Each token as it is shown.

    >>> words = Words(("<s>", " key", "\\n", "  "), (0, 1, 2, 3), (True, False, False, False))
    >>> [label.text for label in labels_of(words)]
    ['<s>', 'key', '↵', '␣␣']
    """
    found = []
    for position, (string, special) in enumerate(zip(words.strings, words.special, strict=True)):
        text = string.strip(" ")
        shown = text.replace(" ", "·") if text else "␣" * len(string) or "∅"
        # Special tokens stand apart from what is before and behind them.
        apart = special or (position > 0 and words.special[position - 1])
        space = position > 0 and (apart or (string.startswith(" ") and bool(text)))
        visible = printable("".join(_SHOWN.get(character, character) for character in shown))
        found.append(Label(visible, space, newline="\n" in string and not special))
    return found


def text_of(words: Words) -> str:
    """All tokens as they are shown, with the spaces before them.

    >>> text_of(Words(("<s>", "the", " cab", "inet"), (0, 1, 2, 3), (True, False, False, False)))
    '<s> the cabinet'
    """
    return "".join(f"{' ' * label.space}{label.text}{chr(10) * label.newline}" for label in labels_of(words))


def hide(words: Words, *, special: bool = True, stop_words: Iterable[str] = ()) -> dict[int, str]:
    """What to leave out of a view: special tokens, and tokens that are stop words by themselves; why, by position.

    >>> words = Words(("[CLS]", "the", " key", "[SEP]"), (1, 2, 3, 4), (True, False, False, True))
    >>> hide(words, stop_words=ENGLISH_STOP_WORDS)
    {0: 'special tokens', 1: 'stop words', 3: 'special tokens'}
    """
    stopped = {word.casefold() for word in stop_words}
    labels, hidden = labels_of(words), dict[int, str]()
    for position, label in enumerate(labels):
        if words.special[position]:
            if special:
                hidden[position] = "special tokens"
        elif label.text.casefold() in stopped:
            before, behind = labels[position - 1 : position], labels[position + 1 : position + 2]
            inside = bool(before) and not label.space and before[0].text[-1:].isalnum()
            goes_on = bool(behind) and not behind[0].space and behind[0].text[:1].isalnum()
            if not inside and not goes_on:
                hidden[position] = "stop words"
    return hidden


def spoken_words(words: Words) -> list[tuple[str, tuple[int, ...]]]:
    """The words and marks that tokens make up, special tokens left out: each with the positions of its tokens.

    >>> spoken_words(Words((" a", " he", "art", ".", "</s>"), (5, 6, 7, 8, 2), (False,) * 4 + (True,)))
    [('a', (0,)), ('heart', (1, 2)), ('.', (3,))]
    """
    found: list[tuple[str, tuple[int, ...]]] = []
    for position, (string, special) in enumerate(zip(words.strings, words.special, strict=True)):
        text = string.strip()
        if special or not text:
            continue
        word, places = found[-1] if found else ("", ())
        if places[-1:] == (position - 1,) and not string[0].isspace() and text[0].isalnum() and word[-1].isalnum():
            found[-1] = (word + text, (*places, position))
        else:
            found.append((text, (position,)))
    return found


def shown_positions(words: Words, hidden: Mapping[int, str]) -> list[int]:
    """Positions that a view shows."""
    return [position for position in range(words.length) if position not in hidden]


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
        image_token: the number that stands for every patch of an image, as in models that see and read.
        grid: rows and columns of each image's patches; by default a square.

    Raises:
        ShapeError: padding stands on both sides or inside, or an image has not as many patches as the grid.

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
    for is_image, run in groupby(ids[start:end], lambda number: number == image_token):
        numbers = list(run)
        parts.append(_grid(len(numbers), grid) if is_image else words_of(tokenizer, numbers))
    return SequenceLayout(tuple(parts), len(ids) - len(places), "left" if start else "right")


def _grid(patches: int, grid: tuple[int, int] | None) -> Grid:
    rows, cols = grid or (math.isqrt(patches), math.isqrt(patches))
    if rows * cols != patches:
        raise ShapeError(
            f"Expected an image of {rows} × {cols} patches, got {patches} in a row: give the grid's rows and columns."
        )
    return Grid(rows, cols)


def caption(
    method: str,
    options: Mapping[str, Any],
    model: str,
    *,
    what: str | None = None,
    target: str | None = None,
    probability: float | None = None,
) -> str:
    """One line of words; a class-specific method is told with its target and the model's probability of that.

    Args:
        method: a method for texts.
        options: its options.
        model: the model's id.
        what: what is shown, instead of the method's title.
        target: what a class-specific method explains.
        probability: the model's probability of it.

    >>> options = {"head_fusion": "max", "value_weighted": False}
    >>> caption("gae", options, "bert", target="table", probability=0.25)
    'GAE (max over heads) · for “table”, probability 25.0% · bert'
    """
    chosen = TEXT_METHODS[method]
    likely = "" if probability is None else f", probability {probability:.1%}"
    explained = "" if target is None else f"for “{target}”{likely}"
    shown = method_in_words(replace(chosen, title=what or chosen.title), options)
    return " · ".join(filter(None, [shown, explained, model]))


def width_of(text: str) -> int:
    """Return the columns of a terminal that a text takes.

    >>> width_of("ab"), width_of("日本")
    (2, 4)
    """
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def padded(text: str, width: int) -> str:
    """A text with spaces behind it up to a width; a longer one is cut with an ellipsis.

    >>> padded("日本", 5), padded("abcdef", 4)
    ('日本 ', 'abc…')
    """
    if width_of(text) > width:
        while width_of(text) > width - 1:
            text = text[:-1]
        text += "…"
    return text + " " * (width - width_of(text))
