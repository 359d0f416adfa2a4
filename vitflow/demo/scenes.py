"""Drawn pictures in which colour, shape and side are free of each other, with the sentence that says what they show."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from vitflow.demo.ground import check
from vitflow.demo.objects import choose_count, paint, place_objects
from vitflow.demo.sentences import COLOURS, SHAPES, Phrase, Sentence, Thing, caption

_LEAN = 20.0  # degrees that a shape leans from upright at most
_CLEAR = 0.7  # a thing lies at most so much above or below another, for each step that it lies left or right of it


@dataclass(frozen=True)
class Scene:
    """A drawn picture and the truth about it.

    Attributes:
        image: RGB uint8 [height, width, 3].
        things: colour, shape and place of each object; no two share both colour and shape.
        masks: bool [things, height, width], the pixels that each object touches; masks do not overlap.
    """

    image: NDArray[np.uint8]
    things: tuple[Thing, ...]
    masks: NDArray[np.bool_]

    @property
    def caption(self) -> str:
        """The one sentence that says all of the picture."""
        return str(caption(self.things))

    def holds(self, sentence: str) -> bool:
        """Whether a sentence is true of the picture.

        Raises:
            OptionError: the text is no sentence of the grammar.
        """
        return Sentence.parse(sentence).holds(self.things)

    def mask_of(self, sentence: str) -> NDArray[np.bool_]:
        """The pixels of all things that a sentence names, bool [height, width]; all False where it names none.

        Raises:
            OptionError: the text is no sentence of the grammar.
        """
        phrases = Sentence.parse(sentence).phrases
        named = [any(phrase.names(thing) for phrase in phrases) for thing in self.things]
        return np.asarray(self.masks[named].any(axis=0), dtype=np.bool_)


def draw_scene(seed: int, size: int | tuple[int, int] = 64) -> Scene:
    """Draw the scene of a seed: one to three upright objects of any colour and any shape on a muted, textured ground.

    The same seed gives the same scene at every size, and the same pixels at the same size. It is always clear on
    which side of each other two things lie, and there is always a caption.

    Args:
        seed: at least 0; seeds from FIRST_TRAINING_SEED on are those that the demo models were trained on.
        size: side of a square picture, or (height, width), in pixels; at least 16.

    Raises:
        OptionError: the seed is negative or the size too small.

    >>> scene = draw_scene(4)
    >>> scene.image.shape, scene.caption
    ((64, 64, 3), 'an orange triangle below a blue cross and an orange disc')
    """
    height, width = check(seed, size)
    random = np.random.default_rng((seed, 2))  # neither the ground's stream nor that of the pictures of classes
    numbers = random.permutation(len(COLOURS) * len(SHAPES))[: choose_count(random)]
    kinds = [(int(number) // len(SHAPES), int(number) % len(SHAPES)) for number in numbers]
    while True:
        objects = place_objects(random, kinds, height, width, _LEAN)
        things = tuple(
            Thing(Phrase(COLOURS[colour], SHAPES[shape]), placed.middle)
            for (colour, shape), placed in zip(kinds, objects, strict=True)
        )
        if _are_clear(things):
            break
    image, masks = paint(seed, objects, height, width)
    return Scene(image, things, masks)


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
