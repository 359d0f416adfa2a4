"""Words and bars for a terminal: by colour where it can, by digits and bars where it cannot."""

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence

# Shades of blue and of orange among the 256 colours of terminals, palest first; from the fourth on, white letters.
_FOR, _AGAINST = (195, 153, 111, 68, 26), (230, 222, 215, 172, 130)
_DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_CONTROL = re.compile(r"\x1b\[[0-9;]*m")


def shaded(text: str, shade: float, *, own: bool = False, color: bool = False, plain: bool = False) -> str:
    """A word on its shade from −1 to 1, or with a digit that counts tenths of the largest weight.

    >>> shaded("key", 1.0), shaded("key", 0.31, plain=True), shaded("no", -0.5), shaded("is", 0, own=True)
    ('key⁹', 'key^3', 'no⁻⁵', '[is]')
    """
    if own:
        return f"\x1b[1;4m{text}\x1b[0m" if color else f"[{text}]"
    size = abs(shade)
    if color:
        step = min(int(size * 5.999), 5)  # below a sixth of the largest there is no shade
        if step == 0:
            return text
        back = (_FOR if shade > 0 else _AGAINST)[step - 1]
        return f"\x1b[48;5;{back}m\x1b[38;5;{15 if step > 3 else 16}m{text}\x1b[0m"
    tenth = min(int(size * 10 + 1e-9), 9)
    if tenth == 0:
        return text
    if plain:
        return f"{text}^{'-' if shade < 0 else ''}{tenth}"
    return f"{text}{'⁻' if shade < 0 else ''}{_DIGITS[tenth]}"


def bar(share: float, width: int = 24, *, plain: bool = False) -> str:
    """A bar of so many characters at most.

    >>> bar(0.5, 4), bar(0.5, 4, plain=True)
    ('██', '##')
    """
    eighths = round(share * width * 8)
    if plain:
        return "#" * round(eighths / 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def width_of(text: str) -> int:
    """How many columns of a terminal a text takes, without its colours.

    >>> width_of("a\\x1b[1mb\\x1b[0m"), width_of("日本")
    (2, 4)
    """
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in _CONTROL.sub("", text)
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


def wrapped(pieces: Sequence[tuple[bool, str]], width: int, breaks: Collection[int] = ()) -> Iterator[str]:
    """Lines of words, each with whether a space stands before it; lines end behind the words numbered in `breaks`.

    >>> list(wrapped([(False, "the"), (True, "cab"), (False, "inets")], 9))
    ['the', 'cabinets']
    """
    words: list[tuple[str, bool]] = []  # a word's pieces stay together
    for number, (space, text) in enumerate(pieces):
        if words and not space and not words[-1][1]:
            words[-1] = (words[-1][0] + text, number in breaks)
        else:
            words.append((text, number in breaks))
    line = ""
    for text, ends in words:
        if line and width_of(line) + 1 + width_of(text) > width:
            yield line
            line = text
        else:
            line = f"{line} {text}" if line else text
        if ends:
            yield line
            line = ""
    if line:
        yield line
