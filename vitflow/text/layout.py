"""Layout of token sequences: text tokens, image patches and padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vitflow.errors import OptionError, ShapeError, check_known

Padding = Literal["left", "right"]


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
        joined = ""
        for end in range(start, self.length):
            joined += self.strings[end]
            if joined.strip() == word and word:
                continued = end + 1 < self.length and not self.special[end + 1] and self.strings[end + 1][:1].isalnum()
                inside = start > 0 and self.strings[start][:1].isalnum() and self.strings[start - 1][-1:].isalnum()
                inside = inside and not self.special[start - 1]
                return () if word.isalnum() and (continued or inside) else tuple(range(start, end + 1))
            if len(joined.strip()) >= len(word):
                break
        return ()


@dataclass(frozen=True, slots=True)
class Grid:
    """Image patches in raster order, rows × cols."""

    rows: int
    cols: int

    @property
    def length(self) -> int:
        """Number of patches."""
        return self.rows * self.cols


Part = Words | Grid


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Layout of a token sequence: its parts in order, and padding on one side.

    Attributes:
        parts: words and patch grids in sequence order.
        num_padding: number of padding tokens.
        padding: side of the padding, "left" or "right".

    >>> import torch
    >>> prompt = Words(("what", " is", " it"), (5, 6, 7), (False,) * 3)
    >>> layout = SequenceLayout((Grid(2, 2), prompt), num_padding=2, padding="left")
    >>> layout.num_tokens, layout.place(1)
    (9, slice(6, 9, None))
    >>> layout.to_words(torch.arange(9)), layout.to_grid(torch.arange(9))
    (tensor([6, 7, 8]), tensor([[2, 3],
            [4, 5]]))
    """

    parts: tuple[Part, ...]
    num_padding: int = 0
    padding: Padding = "right"

    def __post_init__(self) -> None:
        check_known("padding", self.padding, get_args(Padding))

    @property
    def num_tokens(self) -> int:
        """Number of tokens including padding."""
        return self.num_padding + sum(part.length for part in self.parts)

    @property
    def words(self) -> Words:
        """All words of the sequence, concatenated."""
        words = Words((), (), ())
        for part in self.parts:
            words = words + part if isinstance(part, Words) else words
        return words

    def place(self, number: int) -> slice:
        """Return the slice of the sequence taken by the part with this index."""
        start = sum(part.length for part in self.parts[:number]) + self.num_padding * (self.padding == "left")
        return slice(start, start + self.parts[number].length)

    def positions(self, kind: type[Part]) -> list[int]:
        """Return the positions of all tokens in parts of one kind."""
        indices = [index for index, part in enumerate(self.parts) if isinstance(part, kind)]
        return [position for index in indices for position in range(self.num_tokens)[self.place(index)]]

    def to_words(self, tokens: Any) -> Any:
        """Select the words of an array over tokens [..., tokens]: [..., words].

        Raises:
            ShapeError: the size of the last axis is not the number of tokens.
        """
        return self._checked(tokens)[..., self.positions(Words)]

    def to_grid(self, tokens: Any, number: int = 0) -> Any:
        """Select a patch grid of an array over tokens [..., tokens]: [..., rows, cols].

        Args:
            tokens: tensor or array.
            number: index of the grid among the patch grids.

        Raises:
            ShapeError: the size of the last axis is not the number of tokens.
            OptionError: grid index out of range.
        """
        grids = [(index, part) for index, part in enumerate(self.parts) if isinstance(part, Grid)]
        if not 0 <= number < len(grids):
            raise OptionError(f"Expected a grid index below {len(grids)}, the number of patch grids, got {number}.")
        index, grid = grids[number]
        patches = self._checked(tokens)[..., self.place(index)]
        return patches.reshape(*patches.shape[:-1], grid.rows, grid.cols)

    def _checked(self, tokens: Any) -> Any:
        shape: Sequence[int] = getattr(tokens, "shape", ())
        if not shape or shape[-1] != self.num_tokens:
            raise ShapeError(
                f"Expected {self.num_tokens} tokens on the last axis of a tensor or array, got "
                f"{f'shape {tuple(shape)}' if shape else type(tokens).__name__}."
            )
        return tokens
