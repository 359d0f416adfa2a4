"""Sentences about drawn images: a small grammar in which every sentence is true or false for every image.

    sentence = phrase | phrase relation phrase | phrase relation phrase "and" phrase
    phrase   = "a red heart" | "a heart" | "something red"
    relation = "left of" | "above" | "right of" | "below" | "and"

"A left of B and C" means that A is left of B and left of C. A thing is left of another if its centre is further to the
left of the other's than above or below it; so exactly one of the four relations is true of two things.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np
from numpy.typing import NDArray

from vitflow.demo.drawing import CLASS_NAMES, Placed, check, choose_count, paint, place_objects
from vitflow.errors import OptionError

COLOURS: tuple[str, ...] = tuple(name.split()[0] for name in CLASS_NAMES)
SHAPES: tuple[str, ...] = tuple(name.split()[1] for name in CLASS_NAMES)
SIDES: tuple[str, ...] = ("left of", "above", "right of", "below")  # a step of two is the opposite side
_AND = "and"


@dataclass(frozen=True)
class Phrase:
    """A reference to a thing in a sentence: its colour, its shape, or both."""

    colour: str | None = None
    shape: str | None = None

    def __str__(self) -> str:
        words = [word for word in (self.colour, self.shape) if word]
        if self.shape is None:
            return f"something {words[0]}"
        return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"

    def names(self, thing: "Thing") -> bool:
        """Return True if the phrase is true of an object."""
        return self.colour in (None, thing.phrase.colour) and self.shape in (None, thing.phrase.shape)


@dataclass(frozen=True)
class Thing:
    """An object of an image: its colour and shape, and its centre (x to the right, y down)."""

    phrase: Phrase
    middle: tuple[float, float]

    def side_of(self, other: "Thing") -> str:
        """Return its side of another thing: "left of", "above", "right of" or "below"."""
        right, down = self.middle[0] - other.middle[0], self.middle[1] - other.middle[1]
        if abs(right) > abs(down):
            return "right of" if right > 0.0 else "left of"
        return "below" if down > 0.0 else "above"


@dataclass(frozen=True)
class Sentence:
    """One to three phrases and the relation of the first to the others ("and": all are in the image).

    >>> sentence = Sentence.parse("a red heart left of a blue square and something yellow")
    >>> sentence.relation, str(sentence.phrases[2]), str(sentence)
    ('left of', 'something yellow', 'a red heart left of a blue square and something yellow')
    """

    phrases: tuple[Phrase, ...]
    relation: str = _AND

    def __str__(self) -> str:
        first, *others = map(str, self.phrases)
        return f"{first} {self.relation} {f' {_AND} '.join(others)}" if others else first

    @classmethod
    def parse(cls, text: str) -> "Sentence":
        """Read a sentence.

        Raises:
            OptionError: the text is not a sentence of the grammar.
        """
        relation, parts = _AND, [text]
        for side in SIDES:
            if f" {side} " in text:
                relation, parts = side, text.split(f" {side} ", 1)
                break
        phrases = [_parse_phrase(part, text) for half in parts for part in half.split(f" {_AND} ")]
        sentence = cls(tuple(phrases), relation)
        if str(sentence) != text or len(phrases) > 3:
            raise _no_sentence(text)
        return sentence

    def holds(self, things: Sequence[Thing]) -> bool:
        """Return True if the sentence is true of an image of these objects; each phrase names a different object."""
        if not all(any(phrase.names(thing) for thing in things) for phrase in self.phrases):
            return False
        return any(
            all(phrase.names(thing) for phrase, thing in zip(self.phrases, chosen, strict=True))
            and (self.relation == _AND or all(chosen[0].side_of(other) == self.relation for other in chosen[1:]))
            for chosen in permutations(things, len(self.phrases))
        )


def _parse_phrase(words: str, text: str) -> Phrase:
    match words.split():
        case ["something", colour] if colour in COLOURS:
            return Phrase(colour=colour)
        case ["a" | "an", shape] if shape in SHAPES:
            return Phrase(shape=shape)
        case ["a" | "an", colour, shape] if colour in COLOURS and shape in SHAPES:
            return Phrase(colour, shape)
    raise _no_sentence(text)


def _no_sentence(text: str) -> OptionError:
    return OptionError(
        f"Expected a sentence such as 'a red heart left of a blue square', 'a heart' or 'something red', got {text!r}. "
        f"Colours: {', '.join(COLOURS)}. Shapes: {', '.join(SHAPES)}."
    )


def caption(things: Sequence[Thing]) -> Sentence | None:
    """Return the sentence that describes all things in an image, or None.

    It begins with the thing that is on one side of all others; among several, with the first side in SIDES. Of two
    others, the left or upper one is named first.

    >>> heart, square = Thing(Phrase("red", "heart"), (0.2, 0.5)), Thing(Phrase("blue", "square"), (0.7, 0.6))
    >>> str(caption([square, heart]))
    'a red heart left of a blue square'
    """
    if len(things) == 1:
        return Sentence((things[0].phrase,))
    for side in SIDES:
        for first in things:
            others = [thing for thing in things if thing is not first]
            if all(first.side_of(other) == side for other in others):
                if len(others) == 2 and others[0].side_of(others[1]) in SIDES[2:]:
                    others.reverse()
                return Sentence((first.phrase, *(other.phrase for other in others)), side)
    return None


_LEAN = 20.0  # largest rotation from upright, in degrees
_CLEAR = 0.7  # largest ratio of the smaller to the larger distance between two centres, along x and y


@dataclass(frozen=True)
class Scene:
    """A drawn image with its things and masks.

    Attributes:
        image: RGB uint8 [height, width, 3].
        things: colour, shape and centre of each object; no two have the same colour and shape.
        masks: bool [things, height, width], the pixels that each object touches; masks do not overlap.
    """

    image: NDArray[np.uint8]
    things: tuple[Thing, ...]
    masks: NDArray[np.bool_]

    @property
    def caption(self) -> str:
        """The sentence that describes all of the image."""
        return str(caption(self.things))

    def holds(self, sentence: str) -> bool:
        """Return True if a sentence is true of the image.

        Raises:
            OptionError: the text is not a sentence of the grammar.
        """
        return Sentence.parse(sentence).holds(self.things)

    def mask_of(self, sentence: str) -> NDArray[np.bool_]:
        """Return the mask of all objects that a sentence names, bool [height, width]; all False if it names none.

        Raises:
            OptionError: the text is not a sentence of the grammar.
        """
        phrases = Sentence.parse(sentence).phrases
        named = [any(phrase.names(thing) for phrase in phrases) for thing in self.things]
        return np.asarray(self.masks[named].any(axis=0), dtype=np.bool_)


def draw_scene(seed: int, size: int | tuple[int, int] = 64) -> Scene:
    """Draw the scene of a seed: one to three upright objects of any colour and any shape on a muted, textured
    background.

    The same seed gives the same scene at every size, and the same pixels at the same size. The side of
    one thing of another is never ambiguous, and there is always a caption.

    Args:
        seed: at least 0; seeds from FIRST_TRAINING_SEED on are those that the demo models were trained on.
        size: side of a square image, or (height, width), in pixels; at least 16.

    Raises:
        OptionError: the seed is negative or the size too small.

    >>> scene = draw_scene(4)
    >>> scene.image.shape, scene.caption
    ((64, 64, 3), 'an orange triangle below a blue cross and an orange disc')
    """
    height, width = check(seed, size)
    random = np.random.default_rng((seed, 2))  # a stream of its own, unlike those of the background and of `draw_image`
    numbers = random.permutation(len(COLOURS) * len(SHAPES))[: choose_count(random)]
    kinds = [(int(number) // len(SHAPES), int(number) % len(SHAPES)) for number in numbers]
    while True:
        objects = place_objects(random, kinds, height, width, _LEAN)
        things = tuple(
            Thing(Phrase(COLOURS[colour], SHAPES[shape]), _middle(placed))
            for (colour, shape), placed in zip(kinds, objects, strict=True)
        )
        if _are_clear(things):
            break
    image, masks = paint(seed, objects, height, width)
    return Scene(image, things, masks)


def _middle(placed: Placed) -> tuple[float, float]:
    """Return the centre of area (x, y) of an object, which for a crescent is not that of its circle."""
    x, y = placed.contours[0].T
    wedge = x * np.roll(y, -1) - np.roll(x, -1) * y  # twice the area between two corners and the centre
    shift_x = ((x + np.roll(x, -1)) * wedge).sum() / (3.0 * wedge.sum())
    shift_y = ((y + np.roll(y, -1)) * wedge).sum() / (3.0 * wedge.sum())
    return placed.centre[0] + float(shift_x), placed.centre[1] + float(shift_y)


def draw_scenes(count: int, seed: int = 0, size: int | tuple[int, int] = 64) -> Iterator[Scene]:
    """Draw the scenes of the seeds `seed`, `seed + 1`, …, one after the other.

    >>> [scene.image.shape for scene in draw_scenes(2, size=(32, 48))]
    [(32, 48, 3), (32, 48, 3)]
    """
    return (draw_scene(seed + number, size) for number in range(count))


def _are_clear(things: Sequence[Thing]) -> bool:
    for first, second in combinations(things, 2):
        away = sorted(abs(a - b) for a, b in zip(first.middle, second.middle, strict=True))
        if away[0] > _CLEAR * away[1]:
            return False
    return caption(things) is not None
