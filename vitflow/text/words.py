"""Tokens of a text: their strings, printable labels and words, decoding of token ids, and summaries of weights."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, ShapeError, printable

_STOP_WORDS = """
a an and are as at be been but by can could did do does for from had has have he her him his i if in into is it its me
my no nor not of on or our she should so than that the their them then there these they this those to too us was we were
will with would you your
"""
#: English stop words, to hide in views.
ENGLISH_STOP_WORDS = frozenset(_STOP_WORDS.split())

# Visible replacements of whitespace; other invisible characters are escaped.
_SHOWN = {"\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u200c": "⟨ZWNJ⟩", "\u200d": "⟨ZWJ⟩"}


@dataclass(frozen=True, slots=True)
class Words:
    """Tokens of a text.

    Attributes:
        strings: text of each token, including the space before it; for special tokens, their name.
        ids: token ids.
        special: True for the tokenizer's special tokens (`[CLS]`, `</s>`, …).

    Raises:
        ShapeError: different lengths.

    >>> words = Words(("[CLS]", " the", " keys"), (101, 1996, 6309), (True, False, False))
    >>> words.length, words.find("keys")
    (3, (2,))
    """

    strings: tuple[str, ...]
    ids: tuple[int, ...]
    special: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not len(self.strings) == len(self.ids) == len(self.special):
            raise ShapeError(
                f"Expected strings, ids and special of the same length, got {len(self.strings)}, {len(self.ids)} and "
                f"{len(self.special)}."
            )

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.strings)

    def __getitem__(self, index: slice) -> "Words":
        return Words(self.strings[index], self.ids[index], self.special[index])

    def __add__(self, other: "Words") -> "Words":
        return Words(self.strings + other.strings, self.ids + other.ids, self.special + other.special)

    def find(self, token: str | int) -> tuple[int, ...]:
        """Return the positions of a token by index (−1 is the last), or of the tokens of a word.

        Raises:
            OptionError: index out of range, unknown word, or several occurrences of the word.
        """
        if isinstance(token, int):
            if not -self.length <= token < self.length:
                raise OptionError(
                    f"Expected a token index from 0 to {self.length - 1}, or -1 for the last, got {token}."
                )
            return (token % self.length,)
        spans = [span for start in range(self.length) if (span := self._word_at(start, token.strip()))]
        if len(spans) == 1:
            return spans[0]
        if not spans:
            tokens = ", ".join(f"{index} {string.strip()!r}" for index, string in enumerate(self.strings))
            raise OptionError(f"{token!r} is not a word of the text: choose one of {tokens}.")
        starts = ", ".join(str(span[0]) for span in spans)
        raise OptionError(f"{token!r} is in the text more than once, at tokens {starts}: pass one of these indices.")

    def _word_at(self, start: int, word: str) -> tuple[int, ...]:
        """Return the tokens from `start` on that make up exactly the word, or an empty tuple."""
        stop = start + 1
        while stop < self.length and len("".join(self.strings[start:stop]).strip()) < len(word):
            stop += 1
        if not word or "".join(self.strings[start:stop]).strip() != word:
            return ()
        continued = stop < self.length and not self.special[stop] and self.strings[stop][:1].isalnum()
        inside = start > 0 and self.strings[start][:1].isalnum() and self.strings[start - 1][-1:].isalnum()
        inside = inside and not self.special[start - 1]
        return () if word.isalnum() and (continued or inside) else tuple(range(start, stop))


@dataclass(frozen=True, slots=True)
class Label:
    """Printable label of a token.

    Attributes:
        text: its characters, with invisible ones replaced.
        space: True if a space precedes it.
        newline: True if a line break follows it.
    """

    text: str
    space: bool = False
    newline: bool = False


def labels_of(words: Words) -> list[Label]:
    """Return the label of each token.

    >>> words = Words(("<s>", " key", "\\n", "  "), (0, 1, 2, 3), (True, False, False, False))
    >>> [label.text for label in labels_of(words)]
    ['<s>', 'key', '↵', '␣␣']
    """
    labels = []
    for position, (string, special) in enumerate(zip(words.strings, words.special, strict=True)):
        text = string.strip(" ")
        shown = text.replace(" ", "·") if text else "␣" * len(string) or "∅"
        separate = special or (position > 0 and words.special[position - 1])  # spaces around special tokens
        space = position > 0 and (separate or (string.startswith(" ") and bool(text)))
        visible = printable("".join(_SHOWN.get(character, character) for character in shown))
        labels.append(Label(visible, space, newline="\n" in string and not special))
    return labels


def text_of(words: Words) -> str:
    """Return the labels of all tokens as one string.

    >>> text_of(Words(("<s>", "the", " cab", "inet"), (0, 1, 2, 3), (True, False, False, False)))
    '<s> the cabinet'
    """
    return "".join(f"{' ' * label.space}{label.text}{chr(10) * label.newline}" for label in labels_of(words))


def hide(words: Words, *, special: bool = True, stop_words: Iterable[str] = ()) -> dict[int, str]:
    """Return the positions of special tokens and of single-token stop words, with the reason to hide them.

    >>> words = Words(("[CLS]", "the", " key", "[SEP]"), (1, 2, 3, 4), (True, False, False, True))
    >>> hide(words, stop_words=ENGLISH_STOP_WORDS)
    {0: 'special tokens', 1: 'stop words', 3: 'special tokens'}
    """
    stopped = {word.casefold() for word in stop_words}
    hidden = {position: "special tokens" for position in range(words.length) if special and words.special[position]}
    for word, positions in grouped_words(words):
        if len(positions) == 1 and word.casefold() in stopped:
            hidden[positions[0]] = "stop words"
    return dict(sorted(hidden.items()))


def grouped_words(words: Words) -> list[tuple[str, tuple[int, ...]]]:
    """Group tokens into words and punctuation without special tokens; return each with its token positions.

    >>> grouped_words(Words((" a", " he", "art", ".", "</s>"), (5, 6, 7, 8, 2), (False,) * 4 + (True,)))
    [('a', (0,)), ('heart', (1, 2)), ('.', (3,))]
    """
    groups: list[tuple[str, tuple[int, ...]]] = []
    for position, (string, special) in enumerate(zip(words.strings, words.special, strict=True)):
        text = string.strip()
        if special or not text:
            continue
        word, positions = groups[-1] if groups else ("", ())
        if positions[-1:] == (position - 1,) and not string[0].isspace() and text[0].isalnum() and word[-1].isalnum():
            groups[-1] = (word + text, (*positions, position))
        else:
            groups.append((text, (position,)))
    return groups


_CONTEXT = 6  # preceding tokens decoded together with each token
_PART = "\ufffd"  # decoded from an incomplete character; the token that completes it gets the character


def words_of(tokenizer: Any, ids: Sequence[int]) -> Words:
    """Decode token ids one by one; without a tokenizer, ids are shown as numbers.

    A token's string is what it adds to the decoded text of the preceding tokens, including spaces.
    """
    ids = tuple(int(token_id) for token_id in ids)
    if tokenizer is None:
        return Words(tuple(str(token_id) for token_id in ids), ids, (False,) * len(ids))
    special = set(tokenizer.all_special_ids)
    strings = []
    for position, token_id in enumerate(ids):
        if token_id in special:
            strings.append(str(tokenizer.convert_ids_to_tokens(token_id)))
            continue
        start = max((i + 1 for i in range(position) if ids[i] in special), default=0)
        start = max(start, position - _CONTEXT)
        before, after = _text(tokenizer, ids[start:position]), _text(tokenizer, ids[start : position + 1])
        before = before.rstrip(_PART)
        extends = after.startswith(before) and len(after) > len(before)
        strings.append(after[len(before) :].rstrip(_PART) if extends else _text(tokenizer, (token_id,)))
    return Words(tuple(strings), ids, tuple(token_id in special for token_id in ids))


def words_in(text: str, tokenizer: Any, ids: Sequence[int], offsets: Sequence[tuple[int, int]] | None) -> Words:
    """Return the tokens of a text, with the original characters of each token if the tokenizer gives offsets."""
    words = words_of(tokenizer, ids)
    if offsets is None:
        return words
    strings, last = [], 0
    for string, special, (start, end) in zip(words.strings, words.special, offsets, strict=True):
        inside = not special and end > start
        strings.append(text[last:end] if inside else string)  # empty for the rest of a character
        last = max(end, last) if inside else last
    return Words(tuple(strings), words.ids, words.special)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)) if ids else ""


# -- weights of tokens -------------------------------------------------------------------------------------------------

#: Reason to hide the image patches of a prompt.
PATCHES = "image patches"
#: Description of a row by its entropy relative to that of a uniform distribution: first one whose limit is exceeded.
VERDICTS = (
    (0.95, "nearly uniform: uninformative"),
    (0.8, "spread over many words"),
    (0.5, "some words stand out"),
    (0.0, "concentrated on few words"),
)


def percent(share: float) -> str:
    """Format a share in whole percent; shares that would round to 0 as "<1"."""
    if not np.isfinite(share):
        return "–"
    number = round(100 * share)
    return "<1" if number == 0 and share > 0 else f"{number}".replace("-", "−")


def check_weights(weights: Any, tokens: int) -> NDArray[np.float64]:
    """Return weights as float64; ShapeError unless there is one per token, finite and at least 0, or NaN (not seen)."""
    array = np.asarray(weights.detach().cpu() if hasattr(weights, "detach") else weights)
    if array.dtype.kind not in "fiub" or array.shape != (tokens,) or not tokens:
        got = f"{array.dtype} {list(array.shape)}"
        raise ShapeError(f"Expected {tokens} weights, one per token, NaN for unseen ones, got {got}.")
    if np.isinf(array).any() or (array < 0).any():
        raise ShapeError("Expected finite weights of at least 0, got some that are infinite or negative.")
    return array.astype(np.float64)


@dataclass(frozen=True, slots=True)
class RowSummary:
    """Summary of a row of weights, as shares of their sum.

    Attributes:
        special: share of special tokens; None if the text has none.
        first: share of the first token.
        self_share: share of the explained token; None if there is none.
        hidden: share of the hidden tokens by reason.
        entropy: entropy in bits, over the seen tokens without `left_out`.
        max_entropy: entropy of a uniform distribution over these tokens, in bits.

    >>> str(RowSummary.of([0.5, 0.25, 0.25], Words(("<s>", "key", " is"), (0, 1, 2), (True, False, False))))
    'special tokens 50 % · first token 50 % · spread over many words (entropy 1.50 of 1.58 bits)'
    """

    special: float | None
    first: float
    self_share: float | None
    hidden: Mapping[str, float]
    entropy: float
    max_entropy: float

    @classmethod
    def of(
        cls,
        weights: Any,
        words: Words,
        *,
        selected: Sequence[int] = (),
        self_share: float | None = None,
        hidden: Mapping[int, str] | None = None,
        left_out: Collection[int] = (),
    ) -> "RowSummary":
        """Summarise a row of weights [tokens], NaN for unseen tokens.

        Args:
            weights, words: the row and its tokens.
            selected, self_share: positions of the explained token, and its share if it is not among the weights.
            hidden: hidden positions with the reason.
            left_out: positions that the entropy does not count, such as image patches, which have a map of their own.
        """
        checked = check_weights(weights, words.length)
        shares = np.nan_to_num(checked)
        shares = shares / (shares.sum() or 1.0)
        if selected and self_share is None:
            self_share = float(shares[list(selected)].sum())
        reasons: dict[str, float] = {}
        for position, reason in (hidden or {}).items():
            reasons[reason] = reasons.get(reason, 0.0) + float(shares[position])
        special, counted = np.array(words.special, dtype=bool), ~np.isnan(checked)
        counted[list(left_out)] = False
        positive = shares[counted & (shares > 0)]
        positive = positive / (positive.sum() or 1.0)
        return cls(
            special=float(shares[special].sum()) if special.any() else None,
            first=float(shares[0]),
            self_share=self_share,
            hidden=reasons,
            entropy=float(-(positive * np.log2(positive)).sum()) + 0.0,
            max_entropy=float(np.log2(max(int(counted.sum()), 1))) if positive.size else 0.0,
        )

    @property
    def verdict(self) -> str:
        """Description of how uniform the row is; empty for fewer than two tokens, or without weight."""
        if not self.max_entropy:
            return ""
        return next(text for limit, text in VERDICTS if self.entropy > limit * self.max_entropy or not limit)

    def __str__(self) -> str:
        parts = [] if self.special is None else [f"special tokens {self.special:.0%}"]
        parts.append(f"first token {self.first:.0%}")
        if self.self_share is not None:
            parts.append(f"query token {self.self_share:.0%}")
        if self.verdict:
            parts.append(f"{self.verdict} (entropy {self.entropy:.2f} of {self.max_entropy:.2f} bits)")
        return " · ".join(parts).replace("%", " %").replace("-", "−")

    @property
    def hidden_shares(self) -> str:
        """Sentence on the hidden tokens and their share of the weight; empty if nothing is hidden."""
        parts = [f"{why} ({share:.0%} of the weight)".replace("%", " %") for why, share in self.hidden.items()]
        return f"Not shown: {', '.join(parts)}." if parts else ""
