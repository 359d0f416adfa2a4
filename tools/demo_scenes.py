"""Drawn scenes in memory, as the two scripts that train the image–text models see them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.scenes import COLOURS, SHAPES, SIDES, Phrase, Sentence, Thing, draw_scene

SIZE, PATCH = 64, 8
GRID = SIZE // PATCH
COVERED = 0.3  # of a patch: from here on it shows the thing


@dataclass
class Batch:
    """Some scenes as a step of training sees them.

    Attributes:
        pixels: float32 [count, 3, SIZE, SIZE] in -1 to 1.
        things: of each image.
        patches: [count, GRID²], 0 for ground, else 1 + the number of the thing there.
        covered: float32 [count, GRID², PATCH²], 1 where a pixel of a patch shows a thing.
    """

    pixels: Tensor
    things: list[tuple[Thing, ...]]
    patches: NDArray[np.int64]
    covered: Tensor


@dataclass
class Scenes:
    """Drawn scenes in memory.

    Attributes:
        images: uint8 [count, SIZE, SIZE, 3].
        kinds: int8 [count, 3], each thing's colour · 8 + shape, −1 where there are fewer.
        middles: float32 [count, 3, 2], x and y in 0 to 1.
        shown: uint8 [count, SIZE, SIZE]: what each pixel shows, 0 for ground, else 1 + the number of the thing.
    """

    images: NDArray[np.uint8]
    kinds: NDArray[np.int8]
    middles: NDArray[np.float32]
    shown: NDArray[np.uint8]

    @classmethod
    def drawn(cls, first_seed: int, count: int) -> "Scenes":
        """The scenes of so many seeds."""
        images = np.empty((count, SIZE, SIZE, 3), dtype=np.uint8)
        kinds = np.full((count, 3), -1, dtype=np.int8)
        middles = np.zeros((count, 3, 2), dtype=np.float32)
        shown = np.zeros((count, SIZE, SIZE), dtype=np.uint8)
        for number in range(count):
            scene = draw_scene(first_seed + number, SIZE)
            images[number] = scene.image
            for place, thing in enumerate(scene.things):
                kinds[number, place] = kind_of(thing)
                middles[number, place] = thing.middle
                shown[number][scene.masks[place]] = 1 + place
            if (number + 1) % 5000 == 0:
                print(f"{number + 1:>8} images drawn", flush=True)
        return cls(images, kinds, middles, shown)

    @classmethod
    def joined(cls, parts: Sequence["Scenes"]) -> "Scenes":
        """Several as one."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])})

    @classmethod
    def kept(cls, folder: Path | None, first_seed: int, count: int) -> "Scenes":
        """As `drawn`; kept in a folder, where one is given, and read from there the next time."""
        path = folder / f"scenes-{first_seed}-{count}.npz" if folder else None
        if path is None or not path.exists():
            scenes = cls.drawn(first_seed, count)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(f".{os.getpid()}.npz")
                np.savez(part, **vars(scenes))
                part.replace(path)
            return scenes
        with np.load(path) as file:
            return cls(**dict(file))

    def __len__(self) -> int:
        """Return the number of scenes."""
        return len(self.images)

    def batch(self, numbers: NDArray[np.int64], mirrored: int = 0) -> Batch:
        """Some scenes, the first so many of them mirrored; things then lie where they are seen: left is right."""
        images, shown, middles = self.images[numbers], self.shown[numbers], self.middles[numbers]
        images[:mirrored] = images[:mirrored, :, ::-1].copy()
        shown[:mirrored] = shown[:mirrored, :, ::-1].copy()
        middles[:mirrored, :, 0] = 1.0 - middles[:mirrored, :, 0]
        things = things_of(self.kinds[numbers], middles)
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1.0
        pieces = shown.reshape(-1, GRID, PATCH, GRID, PATCH).transpose(0, 1, 3, 2, 4).reshape(-1, GRID**2, PATCH**2)
        cover = np.stack([(pieces == 1 + place).mean(axis=2) for place in range(3)], axis=2)
        patches = np.where(cover.max(axis=2) >= COVERED, 1 + cover.argmax(axis=2), 0)
        return Batch(pixels, things, patches, torch.from_numpy(pieces > 0).float())


def things_of(kinds: NDArray[np.int8], middles: NDArray[np.float32]) -> list[tuple[Thing, ...]]:
    """The things of images, from what `Scenes` keeps of them."""
    return [
        tuple(
            Thing(phrase_of(kind), (float(x), float(y)))
            for kind, (x, y) in zip(entry, places, strict=True)
            if kind >= 0
        )
        for entry, places in zip(kinds, middles, strict=True)
    ]


def kind_of(thing: Thing) -> int:
    return COLOURS.index(str(thing.phrase.colour)) * len(SHAPES) + SHAPES.index(str(thing.phrase.shape))


def phrase_of(kind: int) -> Phrase:
    return Phrase(COLOURS[kind // len(SHAPES)], SHAPES[kind % len(SHAPES)])


def turned(sentence: Sentence) -> Sentence:
    """Rephrase a sentence about two objects from the other one: "A left of B" as "B right of A"."""
    if len(sentence.phrases) != 2 or sentence.relation == "and":
        return sentence
    opposite = SIDES[(SIDES.index(sentence.relation) + 2) % 4]
    return Sentence(sentence.phrases[::-1], opposite)


def falsified(sentence: Sentence, wrong: str, things: Sequence[Thing], random: np.random.Generator) -> Sentence | None:
    """Return a sentence that differs in one respect and is false of the image.

    Args:
        sentence: whose phrases name colour and shape.
        wrong: "colour" or "shape" (replaced, or exchanged between two phrases), or "side" (replaced, or the phrases
            exchanged).
        things: the things in the image.
        random: the random generator.

    Returns:
        None for "side" if the sentence names no side.
    """
    if wrong == "side" and (len(sentence.phrases) == 1 or sentence.relation == "and"):
        return None
    while True:
        other = _change_side(sentence, random) if wrong == "side" else _change_word(sentence, wrong, random)
        if not other.holds(things):
            return other


def _change_side(sentence: Sentence, random: np.random.Generator) -> Sentence:
    if random.random() < 0.3:
        first, second, *rest = sentence.phrases
        return Sentence((second, first, *rest), sentence.relation)
    return replace(sentence, relation=SIDES[random.integers(4)])


def _change_word(sentence: Sentence, wrong: str, random: np.random.Generator) -> Sentence:
    phrases = list(sentence.phrases)
    number = int(random.integers(len(phrases)))
    values = [getattr(phrase, wrong) for phrase in phrases]
    if len(set(values)) > 1 and random.random() < 0.5:
        other = int(random.choice([place for place, value in enumerate(values) if value != values[number]] or [number]))
        values[number], values[other] = values[other], values[number]
    else:
        values[number] = str(random.choice(COLOURS if wrong == "colour" else SHAPES))
    return replace(
        sentence,
        phrases=tuple(replace(phrase, **{wrong: value}) for phrase, value in zip(phrases, values, strict=True)),
    )
