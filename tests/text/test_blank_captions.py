"""The probability of generated words with the image, and with its mean colour instead."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.models.vision_language import family
from tools.scenes import draw_scene
from vitflow.demo import DEMO_CAPTION
from vitflow.text import explain_generation


def plain(image) -> Image.Image:
    """An image of the mean colour of another one."""
    pixels = np.asarray(image)
    return Image.new("RGB", pixels.shape[1::-1], tuple(pixels.mean(axis=(0, 1)).round().astype(int).tolist()))


def test_probabilities_with_and_without_the_image_equal_a_pass_for_each_token():
    model = AutoModelForImageTextToText.from_pretrained(DEMO_CAPTION).eval()
    processor = AutoProcessor.from_pretrained(DEMO_CAPTION)
    image, prompt = draw_scene(4).image, "<image> here is"
    generation = explain_generation(
        model, prompt, image=image, processor=processor, method="attention", blank=True, max_new_tokens=5
    )
    prepared = processor(text=prompt, images=image, return_tensors="pt")
    blank = processor(text=prompt, images=plain(image), return_tensors="pt")["pixel_values"]
    for column, pixels in enumerate((prepared["pixel_values"], blank)):
        ids = prepared["input_ids"]
        for number, token in enumerate(generation.generated_tokens.ids):
            with torch.no_grad():
                logits = model(input_ids=ids, pixel_values=pixels).logits[0, -1].double()
            expected = (logits - logits.logsumexp(0)).exp()[token]
            assert generation.probabilities[number, column] == pytest.approx(float(expected), abs=1e-4)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    word = next(iter(generation.words()[0]))
    indices = list(generation.words()[0][word])
    facts = generation.image(word).facts["blank"]
    assert facts["value"] == pytest.approx(float(np.prod(generation.probabilities[indices, 1])), abs=1e-5)
    assert explain_generation(model, prompt, image=image, processor=processor, method="attention").probabilities is None


@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_vl", "idefics3"])
def test_each_of_several_images_is_replaced_alone(name):
    one, random = family(name), np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 255, (40, 64, 3), dtype=np.uint8)) for _ in range(2)]
    prompt = f"{one.prompt} {one.prompt} what"
    inputs = dict(one.processor(text=prompt, images=images, return_tensors="pt"))
    alone = [one.processor(text=one.prompt, images=[image], return_tensors="pt")["pixel_values"] for image in images]
    axis = int(len(inputs["pixel_values"]) == 1)  # some have a batch axis before the images
    assert torch.equal(torch.cat(alone, dim=axis), inputs["pixel_values"])
    blank = map(plain, images)
    mean = [one.processor(text=one.prompt, images=[image], return_tensors="pt")["pixel_values"] for image in blank]
    generation = explain_generation(
        one.model, prompt, image=images, processor=one.processor, method="rollout", blank=True, max_new_tokens=3
    )
    token, shown = generation.generated_tokens.ids[0], (alone, [mean[0], alone[1]], [alone[0], mean[1]], mean)
    for column, pixels in enumerate(shown):
        with torch.no_grad():
            logits = one.model(**{**inputs, "pixel_values": torch.cat(pixels, dim=axis)}).logits[0, -1]
        expected = float(logits.double().softmax(0)[token])
        assert generation.probabilities[0, column] == pytest.approx(expected, rel=1e-4)
    assert len(set(generation.probabilities[0].tolist())) == 4 == generation.probabilities.shape[1]
    for image in range(2):
        value = generation.image(0, image=image).facts["blank"]["value"]
        assert value == pytest.approx(float(generation.probabilities[0, 1 + image]), abs=1e-6)
