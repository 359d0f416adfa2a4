"""Small models of images and texts with random weights, each of the kinds that prompts are asked of."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8}
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"vocab_size": 100, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PROMPTS = ["a dog", "a cat on a mat", "red"]
DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
KINDS = ("clip", "siglip", "siglip2", "open_clip")


class Words:
    """A tokenizer that numbers words by their letters; it notes what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], dict[str, Any]]] = []

    def __call__(self, texts, **options):
        self.calls.append((texts, options))
        length = options.get("max_length", 16)
        rows = [[1, *(3 + sum(map(ord, word)) % 90 for word in text.split()), 2][:length] for text in texts]
        width = length if options.get("padding", "max_length") == "max_length" else max(map(len, rows))
        numbers = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return {"input_ids": numbers, "attention_mask": (numbers > 0).long()} if options else numbers


@functools.cache
def pair(kind: str) -> torch.nn.Module:
    """A model of that kind, always the same."""
    torch.manual_seed(0)
    if kind == "open_clip":
        import open_clip

        vision = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 8}
        text = {"context_length": 16, "vocab_size": 100, "width": 32, "heads": 4, "layers": 2}
        model = open_clip.CLIP(24, vision, text)
    elif kind == "clip":
        config = transformers.CLIPConfig(
            vision_config={**VISION, "image_size": 32}, text_config=TEXT, projection_dim=24
        )
        model = transformers.CLIPModel(config)
    else:
        name, entry = ("Siglip", {"image_size": 32}) if kind == "siglip" else ("Siglip2", {"num_patches": 16})
        config = getattr(transformers, f"{name}Config")(
            vision_config=VISION | entry, text_config={**TEXT, "projection_size": 32}
        )
        model = getattr(transformers, f"{name}Model")(config)
    return model.eval()


def save_siglip(path: Path) -> Path:
    """Save SigLIP in a folder as transformers does, with a tokenizer of four words and its processor."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {word: number for number, word in enumerate(["?", "a", "dog", "cat", "red"])}
    words = Tokenizer(models.WordLevel(known, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    pair("siglip").save_pretrained(path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?", unk_token="?").save_pretrained(path)
    transformers.SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(path)
    return path


def photo(height: int = 40, width: int = 56) -> np.ndarray:
    """An image of random colours."""
    return np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
