"""Vision–language models of transformers, small and with random weights, each with its family's own processor."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import transformers
from torch import nn

WORDS = ["a", "the", "red", "blue", "heart", "square", "what", "is", "on", "left", "of", ".", "user", "assistant"]
_READS = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_READS |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 1400, "max_position_embeddings": 1024}
_READS |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
_SEES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
_QWEN_SEES = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN_NAMES = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


@dataclass(frozen=True)
class Family:
    """A family: its model, its processor, and what stands before a question about an image or a video."""

    model: nn.Module
    processor: Any
    prompt: str
    video_prompt: str = ""


def tokenizer(**named: str) -> Any:
    """A tokenizer of a few words, with the family's own special tokens by their names."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = ["<pad>", "<unk>", "<s>", "</s>", *named.values(), *WORDS]
    raw = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, padding_side="left", extra_special_tokens=named, **names
    )


def _made(kind: str, config: Any, attention: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    options = {} if attention is None else {"attn_implementation": attention}
    model: nn.Module = getattr(transformers, kind)._from_config(config, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    return model


def _text(name: str = "Llama", **changes: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**{**_READS, **changes})


def _family(kind: str, processor: Any, prompt: str, video_prompt: str = "", **config: Any) -> Family:
    """A family by the name of its classes, with the options of its configuration."""
    made = _made(f"{kind}ForConditionalGeneration", getattr(transformers, f"{kind}Config")(**config))
    return Family(made, processor, prompt, video_prompt)


#: A tower for images of 24 pixels, and how a processor resizes and crops to them.
_SQUARE = {"height": 24, "width": 24}
_CROP = {"size": {"shortest_edge": 24}, "crop_size": _SQUARE}
_PINPOINTS = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]
_TILES = {"patch_size": 4, "num_additional_image_tokens": 1}


def _clip() -> Any:
    return transformers.CLIPVisionConfig(**_SEES, image_size=24)


def _siglip(size: int = 24) -> Any:
    return transformers.SiglipVisionConfig(**_SEES, image_size=size, vision_use_head=False)


def llava(strategy: str = "default", **options: Any) -> Family:
    """LLaVA; with the strategy "full", the class token is among the image's tokens."""
    config = {"vision_config": _clip(), "text_config": _text(), "image_token_index": 4, "image_seq_length": 36}
    images, words = transformers.LlavaImageProcessor(**{**_CROP, **options}), tokenizer(image_token="<image>")
    processor = transformers.LlavaProcessor(images, words, vision_feature_select_strategy=strategy, **_TILES)
    return _family("Llava", processor, "user <image>", vision_feature_select_strategy=strategy, **config)


def llava_next() -> Family:
    images = transformers.LlavaNextImageProcessor(**_CROP, image_grid_pinpoints=_PINPOINTS)
    words = tokenizer(image_token="<image>")
    processor = transformers.LlavaNextProcessor(images, words, vision_feature_select_strategy="default", **_TILES)
    config = {"vision_config": _clip(), "text_config": _text(), "image_token_index": 4}
    return _family("LlavaNext", processor, "user <image>", **config, image_grid_pinpoints=_PINPOINTS)


def llava_next_video() -> Family:
    processor = transformers.LlavaNextVideoProcessor(
        transformers.LlavaNextVideoVideoProcessor(**_CROP),
        transformers.LlavaNextImageProcessor(**_CROP, image_grid_pinpoints=_PINPOINTS),
        tokenizer(image_token="<image>", video_token="<video>"),
        vision_feature_select_strategy="default",
        **_TILES,
    )
    config = {"vision_config": _clip(), "text_config": _text(), "image_token_index": 4, "video_token_index": 5}
    config["image_grid_pinpoints"] = _PINPOINTS
    return _family("LlavaNextVideo", processor, "user <image>", "user <video>", **config)


def llava_onevision() -> Family:
    # As in its checkpoints, a side of the tower is no multiple of a patch.
    pinpoints = [[26 * rows, 26 * cols] for rows in range(1, 5) for cols in range(1, 5)]
    size, ratio = {"height": 26, "width": 26}, {"vision_aspect_ratio": "anyres_max_4"}
    processor = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints),
        tokenizer(image_token="<image>", video_token="<video>"),
        transformers.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=36,
        vision_feature_select_strategy="full",
        **ratio,
    )
    config = {"vision_config": _siglip(26), "text_config": _text("Qwen2"), "image_token_index": 4}
    config |= {"video_token_index": 5, "image_grid_pinpoints": pinpoints, **ratio}
    return _family("LlavaOnevision", processor, "user <image>", "user <video>", **config)


def _qwen(name: str, **sees: Any) -> Family:
    sizes = {"patch_size": 4, "merge_size": 2}
    words = tokenizer(**_QWEN_NAMES, vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>")
    images = transformers.Qwen2VLImageProcessor(**sizes, size={"shortest_edge": 8 * 8, "longest_edge": 48 * 64})
    kind = getattr(transformers, f"{'Qwen3VL' if name == 'Qwen3VL' else 'Qwen2VL'}VideoProcessor")
    videos = kind(**sizes, size={"shortest_edge": 8 * 8, "longest_edge": 48 * 64 * 4}, cap_pixels_per_frame=False)
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return _family(
        name,
        getattr(transformers, f"{name}Processor")(images, words, videos),
        *(f"user <|vision_start|><|{pad}_pad|><|vision_end|>" for pad in ("image", "video")),
        text_config={**_READS, "rope_parameters": _ROPE, "rope_scaling": _ROPE},
        vision_config={**_QWEN_SEES, **sees},
        **dict(zip(ids, range(4, 8), strict=True)),
    )


_WIDTHS = {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32}


def _idefics3(name: str) -> Family:
    tags = {f"row_{row}_col_{col}": f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)}
    tags |= {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
    words = tokenizer(image_token="<image>", end_of_utterance_token="<end_of_utterance>", **tags)
    kind, sizes = getattr(transformers, f"{name}ImageProcessor"), {"size": 72, "max_image_size": 24}
    images = kind(**{name: {"longest_edge": edge} for name, edge in sizes.items()})
    # SmolVLM's own processor asks for a package that only its videos need, and does the same with images.
    processor = transformers.Idefics3Processor(images, words, image_seq_len=9)
    config = {"vision_config": {**_SEES, "image_size": 24}, "text_config": _text(), "image_token_id": 4}
    return _family(name, processor, "user <image>", **config, scale_factor=2, pad_token_id=0)


def internvl() -> Family:
    words = tokenizer(
        context_image_token="<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>", video_token="<video>"
    )
    images = transformers.GotOcr2ImageProcessor(size=_SQUARE, max_patches=6)
    processor = transformers.InternVLProcessor(images, words, transformers.InternVLVideoProcessor(), image_seq_length=9)
    config = {"vision_config": {**_SEES, "image_size": [24, 24], "patch_size": [4, 4]}, "text_config": _text("Qwen2")}
    return _family("InternVL", processor, "user <IMG_CONTEXT>", **config, image_token_id=4, downsample_ratio=0.5)


def paligemma() -> Family:
    images = transformers.SiglipImageProcessor(size=_SQUARE)
    images.image_seq_length = 36
    processor = transformers.PaliGemmaProcessor(images, tokenizer(image_token="<image>"))
    config = {"vision_config": _siglip(), "text_config": _text("Gemma"), "image_token_index": 4}
    return _family("PaliGemma", processor, "<image>", **config, projection_dim=32)


def gemma3() -> Family:
    words = tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    images = transformers.Gemma3ImageProcessor(size=_SQUARE)
    processor = transformers.Gemma3Processor(images, words, image_seq_length=9)
    text = _text("Gemma3Text", sliding_window=64, layer_types=["sliding_attention", "full_attention"])
    config = {"text_config": text, "vision_config": _siglip(), "mm_tokens_per_image": 9}
    config |= {"image_token_index": 4, "boi_token_index": 5, "eoi_token_index": 6}
    return _family("Gemma3", processor, "user <start_of_image>", **config)


_FAMILIES: dict[str, Callable[[], Family]] = {
    "llava": llava,
    "llava_full": partial(llava, "full"),
    "llava_padded": partial(llava, do_pad=True),
    "llava_squashed": partial(llava, size=_SQUARE, do_center_crop=False),
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "llava_next_video": llava_next_video,
    "qwen2_vl": partial(_qwen, "Qwen2VL", embed_dim=16, hidden_size=32, mlp_ratio=2),
    "qwen2_5_vl": partial(_qwen, "Qwen2_5_VL", **_WIDTHS, window_size=16, fullatt_block_indexes=[1]),
    "qwen3_vl": partial(_qwen, "Qwen3VL", **_WIDTHS, num_position_embeddings=64, deepstack_visual_indexes=[0]),
    "idefics3": partial(_idefics3, "Idefics3"),
    "smolvlm": partial(_idefics3, "SmolVLM"),
    "internvl": internvl,
    "paligemma": paligemma,
    "gemma3": gemma3,
}
NAMES = tuple(_FAMILIES)


@lru_cache
def family(name: str) -> Family:
    """A family by its name, made once."""
    return _FAMILIES[name]()
