"""Which tokens of a sequence are words, which patches of an image, and which stand for neither."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vitflow.errors import OptionError, ShapeError, check_known
from vitflow.methods.tokens import TokenLayout

Padding = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens that stand for no part of an image or text, such as class and register tokens."""

    length: int


@dataclass(frozen=True, slots=True)
class Words:
    """Tokens of a text.

    Attributes:
        strings: what each token stands for in the text, with the space before it where there is one; special tokens by
            the tokenizer's own name.
        ids: the tokenizer's number of each token.
        special: whether each is one of the tokenizer's special tokens (`[CLS]`, `</s>`, …).

    Raises:
        ShapeError: the three differ in length.

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
                f"Expected strings, ids and special of one length, got {len(self.strings)}, {len(self.ids)} and "
                f"{len(self.special)}."
            )

    @property
    def length(self) -> int:
        """How many tokens they are."""
        return len(self.strings)

    def __getitem__(self, chosen: slice) -> "Words":
        return Words(self.strings[chosen], self.ids[chosen], self.special[chosen])

    def __add__(self, other: "Words") -> "Words":
        return Words(self.strings + other.strings, self.ids + other.ids, self.special + other.special)

    def find(self, token: str | int) -> tuple[int, ...]:
        """The positions of a token by its number (−1 is the last), or of the tokens that make up a word of the text.

        Raises:
            OptionError: there is no such token or word, or there are several such words.
        """
        if isinstance(token, int):
            if not -self.length <= token < self.length:
                raise OptionError(f"Expected a token from 0 to {self.length - 1}, or -1 for the last, got {token}.")
            return (token % self.length,)
        found = [span for start in range(self.length) if (span := self._word_at(start, token.strip()))]
        if len(found) == 1:
            return found[0]
        numbered = ", ".join(f"{number} {string.strip()!r}" for number, string in enumerate(self.strings))
        if not found:
            raise OptionError(f"Expected a word of the text as the token, got {token!r}: choose one of {numbered}.")
        places = ", ".join(str(span[0]) for span in found)
        raise OptionError(
            f"Expected a word that stands once in the text, got {token!r}, which stands at {places}: give its number."
        )

    def _word_at(self, start: int, word: str) -> tuple[int, ...]:
        """The tokens from `start` on that make up the word and nothing else; empty if they do not."""
        joined = ""
        for end in range(start, self.length):
            joined += self.strings[end]
            if joined.strip() == word and word:
                goes_on = end + 1 < self.length and not self.special[end + 1] and self.strings[end + 1][:1].isalnum()
                inside = start > 0 and self.strings[start][:1].isalnum() and self.strings[start - 1][-1:].isalnum()
                inside = inside and not self.special[start - 1]
                return () if word.isalnum() and (goes_on or inside) else tuple(range(start, end + 1))
            if len(joined.strip()) >= len(word):
                break
        return ()


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of an image in raster order, rows × cols."""

    rows: int
    cols: int

    @property
    def length(self) -> int:
        """How many patches they are."""
        return self.rows * self.cols


Part = Prefix | Words | Grid


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """How the tokens of one sequence are arranged: its parts, one after the other, and the padding beside them.

    Attributes:
        parts: prefix tokens, words and patch grids in their order.
        num_padding: tokens of padding, which stand for nothing.
        padding: where these stand, "left" or "right" of the parts.

    >>> import torch
    >>> asked = Words(("what", " is", " it"), (5, 6, 7), (False,) * 3)
    >>> layout = SequenceLayout((Prefix(1), Grid(2, 2), asked), num_padding=2, padding="left")
    >>> layout.num_tokens, layout.place(2)
    (10, slice(7, 10, None))
    >>> layout.to_words(torch.arange(10)), layout.to_grid(torch.arange(10))
    (tensor([7, 8, 9]), tensor([[3, 4],
            [5, 6]]))
    """

    parts: tuple[Part, ...]
    num_padding: int = 0
    padding: Padding = "right"

    def __post_init__(self) -> None:
        check_known("padding", self.padding, get_args(Padding))

    @classmethod
    def of(cls, layout: TokenLayout) -> "SequenceLayout":
        """The tokens of an image: prefix tokens, then patches."""
        prefix = (Prefix(layout.num_prefix_tokens),) if layout.num_prefix_tokens else ()
        return cls((*prefix, Grid(layout.rows, layout.cols)))

    @property
    def num_tokens(self) -> int:
        """Number of all tokens, with padding."""
        return self.num_padding + sum(part.length for part in self.parts)

    @property
    def words(self) -> Words:
        """All its words together, in their order."""
        found = Words((), (), ())
        for part in self.parts:
            found = found + part if isinstance(part, Words) else found
        return found

    def place(self, number: int) -> slice:
        """Where the part of that number lies in the sequence."""
        start = sum(part.length for part in self.parts[:number]) + self.num_padding * (self.padding == "left")
        return slice(start, start + self.parts[number].length)

    def positions(self, kind: type[Part]) -> list[int]:
        """The places in the sequence of all tokens of a kind of part, in their order."""
        numbers = [number for number, part in enumerate(self.parts) if isinstance(part, kind)]
        return [place for number in numbers for place in range(self.num_tokens)[self.place(number)]]

    def to_words(self, tokens: Any) -> Any:
        """The part of a vector over tokens [..., tokens] that lies on words, [..., words].

        Raises:
            ShapeError: the last axis does not have as many entries as there are tokens.
        """
        return self._checked(tokens)[..., self.positions(Words)]

    def to_grid(self, tokens: Any, number: int = 0) -> Any:
        """The part of a vector over tokens [..., tokens] that lies on a patch grid, [..., rows, cols].

        Args:
            tokens: a tensor or array.
            number: which of the grids, where there are several.

        Raises:
            ShapeError: the last axis does not have as many entries as there are tokens.
            OptionError: there is no such grid.
        """
        grids = [(index, part) for index, part in enumerate(self.parts) if isinstance(part, Grid)]
        if not 0 <= number < len(grids):
            raise OptionError(f"Expected one of {len(grids)} patch grids, counted from 0, got {number}.")
        index, grid = grids[number]
        found = self._checked(tokens)[..., self.place(index)]
        return found.reshape(*found.shape[:-1], grid.rows, grid.cols)

    def _checked(self, tokens: Any) -> Any:
        shape: Sequence[int] = getattr(tokens, "shape", ())
        if not shape or shape[-1] != self.num_tokens:
            raise ShapeError(
                f"Expected {self.num_tokens} tokens on the last axis of a tensor or array, got "
                f"{f'shape {tuple(shape)}' if shape else type(tokens).__name__}."
            )
        return tokens
