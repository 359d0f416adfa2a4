"""Scenes: images in which colour, shape and side are free, their exact masks, and the sentences about them."""

from itertools import permutations

import numpy as np
import pytest

from tools.scenes import COLOURS, Phrase, Sentence, Thing, caption, draw_scenes
from vitflow.demo import draw_ground

SIZES = [64, (64, 97)]


def centre(mask: np.ndarray, short: int) -> tuple[float, float]:
    rows, columns = np.nonzero(mask)
    return float(columns.mean() + 0.5) / short, float(rows.mean() + 0.5) / short


def lies(first: tuple[float, float], second: tuple[float, float]) -> str:
    """The side by the centres, written out."""
    right, down = first[0] - second[0], first[1] - second[1]
    if right < 0 and -right > abs(down):
        return "left of"
    if right > 0 and right > abs(down):
        return "right of"
    return "above" if down < 0 else "below"


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_masks_are_exact_and_lie_where_the_things_are(size: int | tuple[int, int]) -> None:
    height, width = (size, size) if isinstance(size, int) else size
    for seed, scene in enumerate(draw_scenes(25, seed=100, size=size), start=100):
        assert scene.image.shape == (height, width, 3) and scene.image.dtype == np.uint8
        assert scene.masks.shape == (len(scene.things), height, width) and scene.masks.sum(axis=0).max() == 1
        changed = (scene.image != draw_ground(seed, size)).any(axis=-1)  # the ground is that of the seed
        assert not (changed & ~scene.masks.any(axis=0)).any()
        for thing, mask in zip(scene.things, scene.masks, strict=True):
            assert changed[mask].mean() > 0.85
            np.testing.assert_allclose(centre(mask, min(height, width)), thing.middle, atol=0.75 / min(height, width))


def test_mask_of_a_sentence_is_that_of_all_things_that_it_names() -> None:
    scene = next(scene for scene in draw_scenes(50) if len(scene.things) == 3)
    for thing, mask in zip(scene.things, scene.masks, strict=True):
        np.testing.assert_array_equal(scene.mask_of(str(thing.phrase)), mask)
        same = [other.phrase.shape == thing.phrase.shape for other in scene.things]
        alone = str(Phrase(shape=thing.phrase.shape))
        np.testing.assert_array_equal(scene.mask_of(alone), scene.masks[same].any(axis=0))
    np.testing.assert_array_equal(scene.mask_of(scene.caption), scene.masks.any(axis=0))
    absent = next(colour for colour in COLOURS if colour not in {thing.phrase.colour for thing in scene.things})
    assert not scene.mask_of(f"something {absent}").any()


def test_captions_are_true_of_the_masks_clear_and_say_all() -> None:
    for scene in draw_scenes(50, seed=600):
        sentence = Sentence.parse(scene.caption)
        assert scene.holds(scene.caption) and len(sentence.phrases) == len(scene.things)
        centres = {thing.phrase: centre(mask, 64) for thing, mask in zip(scene.things, scene.masks, strict=True)}
        first, *others = (centres[phrase] for phrase in sentence.phrases)
        for other in others:
            assert lies(first, other) == sentence.relation
        for one, other in permutations(centres.values(), 2):  # far enough from the diagonal
            near, far = sorted((abs(one[0] - other[0]), abs(one[1] - other[1])))
            assert near < 0.8 * far
        if len(others) == 2:
            assert lies(*others) in ("left of", "above")


HEART, STAR, RING = (
    Thing(Phrase("red", "heart"), (0.2, 0.5)),
    Thing(Phrase("blue", "star"), (0.7, 0.3)),
    Thing(Phrase("red", "ring"), (0.6, 0.8)),
)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("a red heart", True),
        ("something red", True),
        ("a blue heart", False),
        ("a red heart left of a blue star", True),
        ("a blue star right of a red heart", True),
        ("a blue star left of a red heart", False),
        ("a blue heart left of a red star", False),
        ("a red heart left of a red ring and a blue star", True),
        ("a blue star above a red ring and a red heart", False),
        ("something red left of something red", True),
        ("a red heart and a blue star and a red ring", True),
        ("something blue and something blue", False),
    ],
)
def test_what_sentences_mean(text: str, holds: bool) -> None:
    assert str(Sentence.parse(text)) == text
    assert Sentence.parse(text).holds((HEART, STAR, RING)) is holds
    assert str(caption((STAR, RING, HEART))) == "a red heart left of a blue star and a red ring"
