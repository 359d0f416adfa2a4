"""The probability of generated words with the image, and with its mean colour instead."""

import numpy as np
import pytest
import torch
from scenes import draw_scene
from transformers import AutoModelForImageTextToText, AutoProcessor

from vitflow.demo import DEMO_CAPTION
from vitflow.text import explain_generation


def test_probabilities_with_and_without_the_image_equal_a_pass_for_each_token():
    model = AutoModelForImageTextToText.from_pretrained(DEMO_CAPTION).eval()
    processor = AutoProcessor.from_pretrained(DEMO_CAPTION)
    image, prompt = draw_scene(4).image, "<image> here is"
    generation = explain_generation(
        model, prompt, image=image, processor=processor, method="attention", blank=True, max_new_tokens=5
    )
    prepared = processor(text=prompt, images=image, return_tensors="pt")
    blank = prepared["pixel_values"].clone()
    for channel in range(3):
        blank[0, channel] = blank[0, channel].mean()
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
