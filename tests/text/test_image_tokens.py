"""Positions of image patches among the tokens: determined by changing one patch and comparing tokens."""

import copy
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.models.vision_language import NAMES, Family, family
from tests.references import patch_box
from vitflow.models.parts import decoder_of
from vitflow.text.image_tokens import ImageTokens, image_tokens

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")

# Calls of processors that make other layouts of the same family.
CALLS = {
    "gemma3": {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 3},
    "idefics3": {"do_image_splitting": False},
    "internvl": {"crop_to_patches": False},
}
CASES = [*((name, {}) for name in NAMES), *CALLS.items()]
# Width and height: landscape, portrait and long.
SIZES = [(96, 64), (60, 100), (40, 140)]


@lru_cache
def silenced(name: str) -> Family:
    """A family whose tower attends to nothing, so that a place of the image moves the patches that see it, alone."""
    one = family(name)
    model = copy.deepcopy(one.model)
    of_decoder = {id(parameter) for parameter in decoder_of(model).parameters()}
    for path, parameter in model.named_parameters():
        joins = any(part in path for part in ("out_proj", "attn.proj", "attention.output", "projection_layer"))
        if joins and id(parameter) not in of_decoder:
            parameter.data.zero_()
    return replace(one, model=model)


def embedded(one: Family, image: np.ndarray, **options: object) -> tuple[dict[str, Tensor], Tensor]:
    """Return the processor's inputs for an image and a question, and the embeddings of the decoder."""
    return embedded_of(one, Image.fromarray(image), f"{one.prompt} what is on", **options)


def embedded_of(one: Family, images: object, text: str, **options: object) -> tuple[dict[str, Tensor], Tensor]:
    inputs = dict(one.processor(images=images, text=text, return_tensors="pt", **options))
    return inputs, decoder_inputs(one, inputs)


def decoder_inputs(one: Family, inputs: dict[str, Tensor]) -> Tensor:
    """Run a model and return the embeddings that its decoder gets, [tokens, width]."""
    kept: list[Tensor] = []
    hook = decoder_of(one.model).register_forward_pre_hook(
        lambda _module, args, kwargs: kept.append(kwargs["inputs_embeds"].clone()), with_kwargs=True
    )
    with torch.no_grad():
        one.model(**inputs)
    hook.remove()
    return kept[0][0]


def box_of(part: ImageTokens, row: int, col: int) -> tuple[float, float, float, float]:
    """The box of a patch, (left, top, right, bottom) in pixels of the image; it may exceed the image."""
    return patch_box(part.placement, row, col, part.rows, part.cols)


def centre_of(part: ImageTokens, row: int, col: int) -> tuple[float, float]:
    left, top, right, bottom = box_of(part, row, col)
    return (left + right) / 2, (top + bottom) / 2


def holding(part: ImageTokens, square: tuple[int, int, int]) -> int | None:
    """The token of the patch that holds a square of the image, (left, top, side), whole."""
    x, y, side = square
    for number, place in enumerate(part.positions):
        left, top, right, bottom = box_of(part, *divmod(number, part.cols))
        if left <= x and x + side <= right and top <= y and y + side <= bottom:
            return place
    return None


def adjacent(part: ImageTokens, square: tuple[int, int, int]) -> bool:
    """Return True if a square is outside of a part by more than the size of a filter."""
    (left, top, _, _), (_, _, right, bottom) = box_of(part, 0, 0), box_of(part, part.rows - 1, part.cols - 1)
    x, y, side = square
    reach = 3 * max((right - left) / part.cols, (bottom - top) / part.rows)
    return x + side < left - reach or x > right + reach or y + side < top - reach or y > bottom + reach


@pytest.mark.parametrize("size", SIZES, ids=["landscape", "portrait", "long"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=[name + " called otherwise" * bool(o) for name, o in CASES])
def test_the_token_that_moves_is_the_one_whose_box_holds_what_was_lit(name, options, size):
    one = silenced(name)
    width, height = size
    dark = np.full((height, width, 3), 96, np.uint8)
    inputs, before = embedded(one, dark, **options)
    parts = image_tokens(one.model.config, one.processor, inputs, [(height, width)])
    token = getattr(one.model.config, "image_token_id", None)
    placed = [place for part in parts for place in part.positions]
    assert len(set(placed)) == len(placed) and (inputs["input_ids"][0, placed] == token).all()
    generator, tried = np.random.default_rng(0), 0
    while tried < 3:
        part = parts[generator.integers(len(parts))]
        x, y = centre_of(part, generator.integers(part.rows), generator.integers(part.cols))
        left, top = int(x) - 1, int(y) - 1
        if not (0 <= left < width - 3 and 0 <= top < height - 3):
            continue
        lit = dark.copy()
        lit[top : top + 3, left : left + 3] = 255
        tried += 1
        _, after = embedded(one, lit, **options)
        moved = (after - before).norm(dim=-1)
        assert moved[[place for place in range(len(moved)) if place not in placed]].max() < 1e-5
        for other in parts:
            expected = holding(other, (left, top, 3))
            entry = moved[list(other.positions)]
            assert not adjacent(other, (left, top, 3)) or entry.max() < 1e-5
            if expected is not None:
                assert other.positions[int(entry.argmax())] == expected, (x, y)


@pytest.mark.parametrize("name", NAMES)
def test_of_two_images_each_has_its_tokens(name):
    one = silenced(name)
    text, sizes = f"{one.prompt} {one.prompt} what is on", [(48, 70), (64, 50)]
    pair = [Image.fromarray(np.full((*size, 3), 96, np.uint8)) for size in sizes]
    nested = one.processor.__class__.__name__.startswith("Idefics3")
    inputs, before = embedded_of(one, [pair] if nested else pair, text)
    parts = image_tokens(one.model.config, one.processor, inputs, sizes)
    assert {part.image for part in parts} == {0, 1}
    part = parts[-1]
    x, y = (int(place) - 1 for place in centre_of(part, part.rows // 2, part.cols // 2))
    pair[1].paste((255, 255, 255), (x, y, x + 3, y + 3))
    moved = (embedded_of(one, [pair] if nested else pair, text)[1] - before).norm(dim=-1)
    assert int(moved.argmax()) in {holding(other, (x, y, 3)) for other in parts if other.image}
    assert part.positions[int(moved[list(part.positions)].argmax())] == holding(part, (x, y, 3))
    assert all(moved[list(other.positions)].max() < 1e-5 for other in parts if not other.image)
