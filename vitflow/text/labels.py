"""Words as they are shown: each leaves a mark, whatever it is made of; some may be left out, which is then said."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vitflow.errors import printable
from vitflow.methods.sequence.layout import Words

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
