"""Vision–language models of transformers, small and with random weights, each with its family's own processor."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import transformers
from torch import nn

WORDS = ["a", "the", "red", "blue", "heart", "square", "what", "is", "on", "left", "of", ".", "user", "assistant"]
_READS = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 1400,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
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


#: A tower for images of 24 pixels, and how a processor resizes and crops to them.
_CROP = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
_PINPOINTS = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]
_TILES = {"patch_size": 4, "num_additional_image_tokens": 1}


def _clip() -> Any:
    return transformers.CLIPVisionConfig(**_SEES, image_size=24)


def _siglip(size: int = 24) -> Any:
    return transformers.SiglipVisionConfig(**_SEES, image_size=size, vision_use_head=False)


def llava(strategy: str = "default", **options: Any) -> Family:
    """LLaVA; with the strategy "full", the class token is among the image's tokens."""
    config = transformers.LlavaConfig(
        vision_config=_clip(),
        text_config=_text(),
        image_token_index=4,
        image_seq_length=36,
        vision_feature_select_strategy=strategy,
    )
    images, words = transformers.LlavaImageProcessor(**{**_CROP, **options}), tokenizer(image_token="<image>")
    processor = transformers.LlavaProcessor(images, words, vision_feature_select_strategy=strategy, **_TILES)
    return Family(_made("LlavaForConditionalGeneration", config), processor, "user <image>")


def llava_next() -> Family:
    config = transformers.LlavaNextConfig(
        vision_config=_clip(), text_config=_text(), image_token_index=4, image_grid_pinpoints=_PINPOINTS
    )
    images = transformers.LlavaNextImageProcessor(**_CROP, image_grid_pinpoints=_PINPOINTS)
    words = tokenizer(image_token="<image>")
    processor = transformers.LlavaNextProcessor(images, words, vision_feature_select_strategy="default", **_TILES)
    return Family(_made("LlavaNextForConditionalGeneration", config), processor, "user <image>")


def llava_next_video() -> Family:
    config = transformers.LlavaNextVideoConfig(
        vision_config=_clip(),
        text_config=_text(),
        image_token_index=4,
        video_token_index=5,
        image_grid_pinpoints=_PINPOINTS,
    )
    processor = transformers.LlavaNextVideoProcessor(
        transformers.LlavaNextVideoVideoProcessor(**_CROP),
        transformers.LlavaNextImageProcessor(**_CROP, image_grid_pinpoints=_PINPOINTS),
        tokenizer(image_token="<image>", video_token="<video>"),
        vision_feature_select_strategy="default",
        **_TILES,
    )
    return Family(_made("LlavaNextVideoForConditionalGeneration", config), processor, "user <image>", "user <video>")


def llava_onevision() -> Family:
    # As in its checkpoints, a side of the tower is no multiple of a patch.
    words = tokenizer(image_token="<image>", video_token="<video>")
    pinpoints = [[26 * rows, 26 * cols] for rows in range(1, 5) for cols in range(1, 5)]
    config = transformers.LlavaOnevisionConfig(
        vision_config=_siglip(26),
        text_config=_text("Qwen2"),
        image_token_index=4,
        video_token_index=5,
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio="anyres_max_4",
    )
    images = transformers.LlavaOnevisionImageProcessor(size={"height": 26, "width": 26}, image_grid_pinpoints=pinpoints)
    processor = transformers.LlavaOnevisionProcessor(
        images,
        words,
        transformers.LlavaOnevisionVideoProcessor(size={"height": 26, "width": 26}),
        num_image_tokens=36,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_4",
    )
    return Family(_made("LlavaOnevisionForConditionalGeneration", config), processor, "user <image>", "user <video>")


def _qwen(name: str, sees: dict[str, Any], reads: str, images: Any) -> Family:
    words = tokenizer(**_QWEN_NAMES, vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>")
    config_kind = getattr(transformers, f"{name}Config")
    config = config_kind(
        text_config={**_READS, "rope_parameters": _ROPE, "rope_scaling": _ROPE},
        vision_config={**_QWEN_SEES, **sees},
        image_token_id=4,
        video_token_id=5,
        vision_start_token_id=6,
        vision_end_token_id=7,
    )
    kind = getattr(transformers, f"{reads}Processor")
    videos = getattr(transformers, f"{'Qwen3VL' if reads == 'Qwen3VL' else 'Qwen2VL'}VideoProcessor")(
        patch_size=4,
        merge_size=2,
        size={"shortest_edge": 8 * 8, "longest_edge": 48 * 64 * 4},
        cap_pixels_per_frame=False,
    )
    return Family(
        _made(f"{name}ForConditionalGeneration", config),
        kind(images, words, videos),
        "user <|vision_start|><|image_pad|><|vision_end|>",
        "user <|vision_start|><|video_pad|><|vision_end|>",
    )


def _qwen_images() -> Any:
    return transformers.Qwen2VLImageProcessor(
        patch_size=4, merge_size=2, size={"shortest_edge": 8 * 8, "longest_edge": 48 * 64}
    )


def qwen2_vl() -> Family:
    return _qwen("Qwen2VL", {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, "Qwen2VL", _qwen_images())


def qwen2_5_vl() -> Family:
    sees = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    return _qwen("Qwen2_5_VL", sees, "Qwen2_5_VL", _qwen_images())


def qwen3_vl() -> Family:
    sees = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    return _qwen("Qwen3VL", sees, "Qwen3VL", _qwen_images())


def _idefics3(name: str) -> Family:
    tags = {f"row_{row}_col_{col}": f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)}
    words = tokenizer(
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
        **tags,
    )
    config = getattr(transformers, f"{name}Config")(
        vision_config={**_SEES, "image_size": 24}, text_config=_text(), image_token_id=4, scale_factor=2, pad_token_id=0
    )
    images = getattr(transformers, f"{name}ImageProcessor")(
        size={"longest_edge": 72}, max_image_size={"longest_edge": 24}
    )
    # SmolVLM's own processor asks for a package that only its videos need, and does the same with images.
    processor = transformers.Idefics3Processor(images, words, image_seq_len=9)
    return Family(_made(f"{name}ForConditionalGeneration", config), processor, "user <image>")


def internvl() -> Family:
    words = tokenizer(
        context_image_token="<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>", video_token="<video>"
    )
    config = transformers.InternVLConfig(
        vision_config={**_SEES, "image_size": [24, 24], "patch_size": [4, 4]},
        text_config=_text("Qwen2"),
        image_token_id=4,
        downsample_ratio=0.5,
    )
    images = transformers.GotOcr2ImageProcessor(size={"height": 24, "width": 24}, max_patches=6)
    processor = transformers.InternVLProcessor(images, words, transformers.InternVLVideoProcessor(), image_seq_length=9)
    return Family(_made("InternVLForConditionalGeneration", config), processor, "user <IMG_CONTEXT>")


def paligemma() -> Family:
    words = tokenizer(image_token="<image>")
    config = transformers.PaliGemmaConfig(
        vision_config=_siglip(), text_config=_text("Gemma"), image_token_index=4, projection_dim=32
    )
    images = transformers.SiglipImageProcessor(size={"height": 24, "width": 24})
    images.image_seq_length = 36
    return Family(
        _made("PaliGemmaForConditionalGeneration", config), transformers.PaliGemmaProcessor(images, words), "<image>"
    )


def gemma3() -> Family:
    words = tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    config = transformers.Gemma3Config(
        text_config=_text("Gemma3Text", sliding_window=64, layer_types=["sliding_attention", "full_attention"]),
        vision_config=_siglip(),
        mm_tokens_per_image=9,
        image_token_index=4,
        boi_token_index=5,
        eoi_token_index=6,
    )
    images = transformers.Gemma3ImageProcessor(size={"height": 24, "width": 24})
    return Family(
        _made("Gemma3ForConditionalGeneration", config),
        transformers.Gemma3Processor(images, words, image_seq_length=9),
        "user <start_of_image>",
    )


_FAMILIES: dict[str, Callable[[], Family]] = {
    "llava": llava,
    "llava_full": partial(llava, "full"),
    "llava_padded": partial(llava, do_pad=True),
    "llava_squashed": partial(llava, size={"height": 24, "width": 24}, do_center_crop=False),
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "llava_next_video": llava_next_video,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
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
