"""Image–text models (CLIP, SigLIP, SigLIP 2, and the detectors OWL-ViT and OWLv2) as models of images and prompts.

The texts are embedded once. The image tower with its projection is recorded.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from vitflow.errors import ModelError, OptionError, UnsupportedModelError, VitflowWarning
from vitflow.models.anatomy import embedding_of, height_width
from vitflow.models.blocks import without
from vitflow.models.data_configs import library_data_config
from vitflow.models.identity import state_sha256
from vitflow.models.names import model_id, model_note
from vitflow.models.outputs import Binding, Outputs, cosines
from vitflow.models.parts import library_id

# Resize modes of open_clip, as crop modes of timm.
_CROPS = {"shortest": "center", "squash": "squash", "longest": "border"}


@dataclass(frozen=True, slots=True, eq=False)
class ImageTextModel:
    """The parts of an image–text model: `tower` maps images to features [batch, width], `embed` texts [texts, width].

    The score of a text is cos · scale + bias, with a softmax over the prompts or a sigmoid for each.
    """

    tower: nn.Module
    embed: Callable[[list[str]], Tensor]
    scale: float
    bias: float
    activation: str
    data_config: Any
    name: str


class ImageTower(nn.Module):
    """Image tower of a transformers model, from images to projected features [batch, width]."""

    note: str = ""

    def __init__(self, vision_model: nn.Module, visual_projection: nn.Module | None) -> None:
        super().__init__()
        self.vision_model = vision_model
        self.visual_projection = visual_projection
        embedding = embedding_of(vision_model)
        if embedding is None:
            raise UnsupportedModelError(
                f"Expected an image encoder with a patch embedding, such as that of CLIPModel or SiglipModel, got "
                f"{type(vision_model).__name__}: load a CLIP, SigLIP or SigLIP 2 model."
            )
        self.image_size, self.patch_size = embedding.image_size, embedding.patch_size
        self.patchified, self.dynamic = embedding.patchified, embedding.dynamic

    def forward(self, pixels: Tensor) -> Tensor:
        """Map images [batch, channels, height, width] to features."""
        if self.patchified:  # all images have one size, so there is no padding
            height, width = self.patch_size
            rows, cols = pixels.shape[2] // height, pixels.shape[3] // width
            patches = pixels.unflatten(3, (cols, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 3, 5, 1)
            shapes = torch.tensor([[rows, cols]], device=pixels.device).expand(len(pixels), 2)
            output = self.vision_model(patches.flatten(3).flatten(1, 2), None, shapes)  # without a mask
        else:
            other = self.dynamic and tuple(pixels.shape[-2:]) != self.image_size
            output = self.vision_model(pixels, **({"interpolate_pos_encoding": True} if other else {}))
        pooled: Tensor = output.pooler_output
        return pooled if self.visual_projection is None else self.visual_projection(pooled)


def is_pair(model: nn.Module) -> bool:
    """Return True if a model compares texts with images."""
    texts = ("get_text_features", "vision_model") if hasattr(model, "vision_model") else ("encode_text", "visual")
    return hasattr(model, "logit_scale") and all(hasattr(model, name) for name in texts)


def is_prompted_detector(model: nn.Module) -> bool:
    """Return True for a detector whose classes are prompts: OWL-ViT and OWLv2 of transformers."""
    return all(hasattr(model, name) for name in ("image_embedder", "class_predictor", "box_predictor"))


def pair_of(model: nn.Module, processor: Any = None) -> ImageTextModel:
    """Return the parts of a CLIP, SigLIP or SigLIP 2 model of transformers, or of a model of open_clip."""
    if not is_pair(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no text encoder, which prompts require: load a CLIPModel, SiglipModel or "
            "Siglip2Model with its processor, or a model of open_clip; on the command line --model "
            "openai/clip-vit-base-patch16, for example, or --model demo-text."
        )
    owner: Any = model
    bias = getattr(owner, "logit_bias", None)
    numbers: dict[str, Any] = {
        "scale": float(owner.logit_scale.detach().double().exp()),
        "bias": 0.0 if bias is None else float(bias.detach()),
        "activation": "softmax" if bias is None else "sigmoid",
    }
    if hasattr(owner, "visual"):
        embed, data_config = _open_clip_texts(owner, processor), _open_clip_config(owner.visual)
        return ImageTextModel(owner.visual, embed, **numbers, data_config=data_config, name=model_id(model))
    if getattr(owner.vision_model, "use_head", True) is False:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no pooling head (vision_use_head=False), so there is no image embedding to "
            "compare with texts: load weights with a pooling head."
        )
    tower = ImageTower(owner.vision_model, getattr(owner, "visual_projection", None))
    tower.note = model_note(model)
    embed, data_config = text_encoder(owner, processor), library_data_config(model, processor)
    return ImageTextModel(tower, embed, **numbers, data_config=data_config, name=model_id(model))


def refuse_without_prompts(model: nn.Module) -> None:
    """Raise UnsupportedModelError for an image–text model without prompts."""
    if is_prompted_detector(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} detects what prompts name and requires them: vitflow.Explainer(model, "
            'outputs=vitflow.boxes(prompts=["a cat", "a remote"])), or --prompt "a cat" --prompt "a remote".'
        )
    if is_pair(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} compares images with texts and requires prompts: "
            'vitflow.Explainer(model, outputs=vitflow.prompts(["a dog", "a cat"])), or --prompt "a dog" --prompt '
            f'"a cat". Its image encoder is model.{"visual" if hasattr(model, "visual") else "vision_model"}.'
        )


# -- texts ------------------------------------------------------------------------------------------------------------


def text_encoder(model: Any, processor: Any) -> Callable[[list[str]], Tensor]:
    """Return the function that embeds texts with a model of transformers."""
    settings = getattr(model.config, "text_config", model.config)
    length = int(getattr(settings, "max_position_embeddings", 77))
    whole = getattr(model, "logit_bias", None) is not None  # SigLIP: always the full length, lower case, no mask

    def embed(texts: list[str]) -> Tensor:
        tokenizer = getattr(processor, "tokenizer", processor) or _tokenizer_of(model)
        texts = [text.lower() for text in texts] if whole else texts
        _warn_unknown_words(tokenizer, texts)
        padding = "max_length" if whole else True
        read = tokenizer(texts, padding=padding, truncation=True, max_length=length, return_tensors="pt")
        names = ("input_ids",) if whole else ("input_ids", "attention_mask")
        device = next(model.parameters()).device
        output = model.get_text_features(**{name: read[name].to(device) for name in names if name in read})
        features: Tensor = output.pooler_output
        return features

    return embed


def _warn_unknown_words(tokenizer: Any, texts: Sequence[str]) -> None:
    """Warn of words that the tokenizer maps to its unknown token."""
    none = getattr(tokenizer, "unk_token_id", None)
    if none is None or none in (tokenizer.eos_token_id, tokenizer.pad_token_id):  # CLIP's is in every text
        return
    words = dict.fromkeys(word for text in texts for word in text.split())
    unknown = [word for word in words if none in tokenizer(word, add_special_tokens=False).input_ids]
    if unknown:
        listed = ", ".join(map(repr, unknown[:8]))
        note = f"The model does not know the words {listed}: scores of prompts with them are meaningless."
        warnings.warn(note, VitflowWarning, stacklevel=2)


def _tokenizer_of(model: nn.Module) -> Any:
    from transformers import AutoTokenizer

    name = library_id(model)
    try:
        if name is None:
            raise OSError("the model was not loaded by name")
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ModelError(
            f"The tokenizer of {type(model).__name__} is not available ({str(error).splitlines()[0]}): pass "
            "processor=transformers.AutoProcessor.from_pretrained(…), or save it into the folder of the model."
        ) from error


def _open_clip_texts(model: Any, tokenizer: Any) -> Callable[[list[str]], Tensor]:
    """Return the function that embeds texts with a model of open_clip."""
    tokenizer = tokenizer or getattr(model, "_loaded_tokenizer", None)

    def embed(texts: list[str]) -> Tensor:
        if not callable(tokenizer):
            name = type(model).__name__
            raise ModelError(f"{name} of open_clip requires its tokenizer: processor=open_clip.get_tokenizer(name).")
        features: Tensor = model.encode_text(tokenizer(texts).to(next(model.parameters()).device))
        return features

    return embed


def _open_clip_config(tower: Any) -> dict[str, Any]:
    """Return the data config of an open_clip tower, as in timm."""
    cfg = dict(getattr(tower, "preprocess_cfg", None) or {})
    clip = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
    return {
        "input_size": (3, *height_width(cfg.get("size") or getattr(tower, "image_size", 224))),
        **{name: tuple(cfg.get(name) or clip[name]) for name in clip},
        "interpolation": cfg.get("interpolation", "bicubic"),
        "crop_pct": 1.0,
        "crop_mode": _CROPS.get(cfg.get("resize_mode", "shortest"), "center"),
    }


# -- outputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Prompts as the outputs of an image–text model; see `prompts`."""

    texts: tuple[str, ...]
    templates: tuple[str, ...]
    processor: Any
    raw: bool

    def bind(self, binding: Binding) -> Binding:
        """Bind the image tower of an image–text model to the scores of these prompts."""
        binding.refuse_class_names()
        pair = pair_of(binding.model, self.processor)
        return replace(bind_tower(binding, pair), outputs=prompt_outputs(pair, self))


def bind_tower(binding: Binding, pair: ImageTextModel) -> Binding:
    """Bind the image tower of an image–text model, with its preprocessing and the model's name."""
    config, name = binding.data_config or pair.data_config, binding.name or pair.name
    return replace(binding, model=pair.tower, data_config=config, name=name)


def prompts(
    texts: Sequence[str], *, templates: str | Sequence[str] | None = None, processor: Any = None, raw: bool = False
) -> Prompts:
    """Explain the scores of an image for prompts: `Explainer(model, outputs=prompts([...]))`.

    The model is CLIP, SigLIP or SigLIP 2 of transformers, or a model of open_clip. The score of a prompt is
    cos · scale + bias of the embeddings.

    Args:
        texts: the prompts, which are the names of the outputs.
        templates: templates in which {} is replaced by the prompt, such as "a photo of {}"; embeddings are averaged.
        processor: processor or tokenizer of the model; by default loaded from the model's name_or_path.
        raw: explain the score of a prompt; by default the score minus the mean score of the other prompts, or, for a
            single prompt, minus the score of an empty prompt.

    Raises:
        OptionError: no prompt, the same prompt twice, or a template without {}.

    >>> from vitflow import Explainer, prompts
    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo-text", outputs=prompts(["a purple ring", "a green triangle"]))
    >>> explainer.explain(sample_images()[1], target="a purple ring").target
    0
    """
    return Prompts(tuple(texts), _checked(texts, templates), processor, raw)


def prompt_outputs(pair: ImageTextModel, prompts: Prompts) -> Outputs:
    """Return the outputs of an image–text model for prompts: cos · scale + bias of unit vectors."""
    texts, frames, raw = prompts.texts, prompts.templates, prompts.raw
    with torch.inference_mode(False), torch.no_grad():
        vectors = embedded(pair.embed, [*texts, ""], frames)
    vectors, empty = vectors[:-1], vectors[-1:]

    def numbers(of: Tensor) -> Callable[[Any], Tensor]:
        return lambda features: cosines(features, of) * pair.scale + pair.bias

    one = len(texts) == 1
    return Outputs(
        numbers(vectors),
        texts,
        len(texts),
        # The softmax of a single prompt is 100 % for every image.
        "cosine" if one and pair.activation == "softmax" else pair.activation,
        scale=pair.scale if pair.activation == "softmax" else 1.0,
        description={
            "prompts": list(texts),
            "templates": list(frames),
            "raw": raw,
            "vectors_sha256": state_sha256(torch.cat([vectors, empty])),
        },
        reference=numbers(empty) if one else None,
        against="that of an empty prompt" if one else "the mean of the other prompts",
        minus_rest_by_default=not raw,
    )


def _checked(prompts: Sequence[str], templates: str | Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(prompts, str) or not prompts or not all(isinstance(text, str) and text.strip() for text in prompts):
        raise OptionError(f'Expected prompts as a list of texts, such as ["a dog", "a cat"], got {prompts!r:.80}.')
    if len(set(prompts)) != len(prompts):
        raise OptionError(f"Expected every prompt once, got {list(prompts)!r:.120}.")
    frames = ("{}",) if templates is None else (templates,) if isinstance(templates, str) else tuple(templates)
    for frame in frames:
        if not isinstance(frame, str) or frame.count("{}") != 1:
            raise OptionError(f"Expected templates with one {{}} each, such as 'a photo of {{}}', got {frame!r:.80}.")
    return frames


def embedded(embed: Callable[[list[str]], Tensor], texts: Sequence[str], frames: Sequence[str]) -> Tensor:
    """Return unit vectors of texts, [texts, width]: means over their templates."""
    sentences = [frame.replace("{}", text) for text in texts for frame in frames]
    vectors = embed(sentences)
    units = normalize(vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32)).cpu(), dim=-1)
    return normalize(units.unflatten(0, (len(texts), len(frames))).mean(dim=1), dim=-1)


class PromptedDetector(nn.Module):
    """OWL-ViT or OWLv2 of transformers with fixed prompts: maps images to logits and boxes in the format of DETR.

    There is a detection for each patch of the image, with a logit for each prompt. The text encoder is left out.
    """

    vectors: Tensor

    def __init__(self, model: nn.Module, prompts: Prompts) -> None:
        super().__init__()
        embedding = embedding_of(model)
        if not is_prompted_detector(model) or embedding is None:
            raise UnsupportedModelError(
                f"boxes(prompts=…) requires OWL-ViT or OWLv2 of transformers, got {type(model).__name__}: leave out "
                "prompts, and name a class of the model by target= (--class)."
            )
        owner: Any = model
        prefix = owner.base_model_prefix
        with torch.inference_mode(False), torch.no_grad():
            encoder = text_encoder(getattr(owner, prefix), prompts.processor)
            vectors = embedded(encoder, prompts.texts, prompts.templates)
        self.model: Any = without(model, f"{prefix}.text_model")
        self.register_buffer("vectors", vectors.to(next(model.parameters())))
        self._size = embedding.image_size

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return the logits [batch, patches, prompts] and pred_boxes [batch, patches, 4] of images."""
        other = {"interpolate_pos_encoding": True} if tuple(pixels.shape[-2:]) != self._size else {}
        grid, _ = self.model.image_embedder(pixel_values=pixels, **other)
        patches = grid.flatten(1, 2)
        logits, _ = self.model.class_predictor(patches, self.vectors.expand(len(pixels), -1, -1))
        return {"logits": logits, "pred_boxes": self.model.box_predictor(patches, grid, **other)}
