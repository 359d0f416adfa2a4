"""Vision Transformers of transformers and torchvision: what they say of themselves, where timm's say it otherwise.

Neither library is imported. Models are recognised by the parts that they are made of, and by the class names of
transformers; a module of your own around one of them is looked into.
"""

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import ModelError, UnsupportedModelError
from vitflow.files import is_file
from vitflow.methods.tokens import TokenLayout
from vitflow.models.parts import those_that
from vitflow.models.processors import from_processor

# What transformers calls the layer that makes tokens of patches, and the tokens that stand before them.
_PATCHES = ("patch_embeddings", "patch_embedding")
_PREFIX = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
# What both libraries call the norm that a block begins with, where it is not norm1.
_FIRST_NORMS = ("layernorm_before", "layer_norm1", "ln_1", "norm1")
# What the classifiers of transformers read, where it is not the class token: words that `_weights` knows.
_PATCH_MEAN = "average over patches"
_HALVES = "half class token, half average over patches"
_READOUTS = {
    "DeiTForImageClassificationWithTeacher": "class and distillation token",
    "Dinov2ForImageClassification": _HALVES,
    "Dinov2WithRegistersForImageClassification": _HALVES,
    "CLIPForImageClassification": _PATCH_MEAN,
    "MetaClip2ForImageClassification": _PATCH_MEAN,
    "SiglipForImageClassification": _PATCH_MEAN,
    "IJepaForImageClassification": _PATCH_MEAN,
    "SwinForImageClassification": _PATCH_MEAN,
    "Swinv2ForImageClassification": _PATCH_MEAN,
}
# How to read the outputs of a model that was trained for a problem of this type.
_READINGS: Mapping[Any, str] = {"multi_label_classification": "sigmoid", "regression": "value"}
# What it calls the last layer of a model with classes.
_CLASSIFIERS = ("classifier", "cls_classifier")
# Ways to compute attention that call torch's functions, where it can be seen.
_SEEN = ("sdpa", "eager")


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a model of another library makes tokens of an image.

    Attributes:
        module: what makes them.
        num_prefix_tokens: class, distillation and register tokens that precede the patches.
        patch_size: (height, width) in pixels.
        image_size: (height, width) that the model was built for.
        channels: of the image.
        dynamic: whether other sizes are taken.
        patchified: whether images are cut into patches beforehand, as many of them as each image needs.
        num_suffix_tokens: detection tokens that follow the patches.
    """

    module: nn.Module
    num_prefix_tokens: int
    patch_size: tuple[int, int]
    image_size: tuple[int, int]
    channels: int
    dynamic: bool
    patchified: bool = False
    num_suffix_tokens: int = 0


def embedding_of(model: nn.Module) -> Embedding | None:
    """How a Vision Transformer of transformers or torchvision makes tokens; None for any other model."""
    owner: Any = next(iter(_embeds(model)), None)
    if owner is None:
        return None
    patches = _patches_of(owner)
    if patches is not None:
        return _of_transformers(owner, patches)
    return Embedding(owner, 1, _pair(owner.patch_size), _pair(owner.image_size), 3, dynamic=False)


@those_that
def _embeds(module: nn.Module) -> bool:
    inside = module._modules
    of_torchvision = inside.get("conv_proj") is not None and hasattr(module, "class_token")
    of_open_clip = inside.get("conv1") is not None and hasattr(module, "class_embedding")
    return _patches_of(module) is not None or of_torchvision or of_open_clip


def _patches_of(module: nn.Module) -> nn.Module | None:
    """What makes tokens of patches inside a module of transformers, if it is one that does."""
    return next((found for name in _PATCHES if (found := module._modules.get(name)) is not None), None)


def _of_transformers(module: nn.Module, patches: nn.Module) -> Embedding | None:
    if isinstance(patches, nn.Linear) and hasattr(module, "position_embedding_size"):
        owner: Any = module
        side, pixels = int(owner.position_embedding_size), int(owner.patch_size)
        channels = patches.in_features // pixels**2
        return Embedding(module, 0, _pair(pixels), _pair(side * pixels), channels, dynamic=True, patchified=True)
    convolution = next((part for part in patches.modules() if isinstance(part, nn.Conv2d)), None)
    size = next((found for part in (module, patches) if (found := getattr(part, "image_size", None))), None)
    size = size or getattr(getattr(module, "config", None), "image_size", None)
    if convolution is None or size is None:
        return None  # tokens of another kind: of video, or of patches that were cut beforehand
    tokens = [found for name in _PREFIX if isinstance(found := getattr(module, name, None), Tensor)]
    prefix = sum(1 if token.ndim == 1 else token.shape[-2] for token in tokens)
    patch = (int(convolution.stride[0]), int(convolution.stride[1]))
    dynamic = hasattr(module, "interpolate_pos_encoding")
    detection = getattr(module, "detection_tokens", None)  # of YOLOS
    suffix = detection.shape[-2] if isinstance(detection, Tensor) else 0
    return Embedding(module, prefix, patch, _pair(size), convolution.in_channels, dynamic, num_suffix_tokens=suffix)


def _pair(size: Any) -> tuple[int, int]:
    """(height, width) of a size that is one number for both, or two."""
    return (int(size[0]), int(size[1])) if isinstance(size, Sequence) else (int(size), int(size))


def library_layout(model: nn.Module, input_size: tuple[int, int]) -> TokenLayout | None:
    """Prefix tokens and patch grid for an image of input_size = (height, width); None for models of timm.

    Raises:
        UnsupportedModelError: the model shuffles its patches.
    """
    embedding = embedding_of(model)
    if embedding is None:
        return None
    if type(embedding.module).__name__ == "ViTMAEEmbeddings":
        raise UnsupportedModelError(
            f"{type(model).__name__} shuffles its patches at random and hides some of them, so that its tokens have no "
            "place on the image. Load the same weights as a ViTModel or ViTForImageClassification."
        )
    rows, cols = (side // patch for side, patch in zip(input_size, embedding.patch_size, strict=True))
    return TokenLayout(embedding.num_prefix_tokens, max(rows, 1), max(cols, 1), embedding.num_suffix_tokens)


def library_readout(model: nn.Module, layout: TokenLayout) -> tuple[Tensor, str] | None:
    """Which tokens the head of a model of transformers reads, [1, tokens], and in words; None where it does not say."""
    pretrained = _pretrained(model)
    embedding = embedding_of(model)
    pooled = None if embedding is None else getattr(embedding.module, "pool_type", None)  # of open_clip
    if pretrained is None and pooled != "avg":
        return None
    names = [kind.__name__ for kind in type(pretrained).__mro__]
    words = next((_READOUTS[name] for name in names if name in _READOUTS), None)
    if words is None and (pooled == "avg" or getattr(_config(pretrained), "use_mean_pooling", False)):
        words = _PATCH_MEAN  # BEiT and Data2Vec
    weights = torch.zeros(1, layout.num_tokens)
    if words is None:
        return None
    if words == "class and distillation token":
        weights[0, :2] = 0.5
    else:
        weights[0, layout.patches] = (0.5 if words == _HALVES else 1.0) / layout.num_patches
        weights[0, 0] += 0.5 if words == _HALVES else 0.0
    return weights, words


def library_norms(model: nn.Module) -> list[str]:
    """Module path of each block's first norm, first block first; empty for models of timm."""
    return [
        f"{path}.{name}.{next(norm for norm in _FIRST_NORMS if hasattr(block, norm))}"
        for path, blocks in library_blocks(model).items()
        for name, block in blocks.named_children()
    ]


def library_blocks(model: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    """The stacks of blocks that begin with a norm, by module path; empty for models of timm."""
    if embedding_of(model) is None:
        return {}
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module)
        and all(any(hasattr(block, norm) for norm in _FIRST_NORMS) for block in module)
    }


def refuse_unseen(model: nn.Module) -> None:
    """Refuse a model of transformers whose attention runs where no function of torch is called.

    Raises:
        UnsupportedModelError: another attention implementation than "sdpa" or "eager"; or a text model beside the
            image's.
    """
    for module in _is_configured(model):
        implementation = getattr(vars(module).get("config"), "_attn_implementation", None)
        if isinstance(implementation, str) and implementation not in _SEEN:
            raise UnsupportedModelError(
                f"{type(module).__name__} computes its attention by {implementation!r}, which never shows its "
                "probabilities. Call model.set_attn_implementation('sdpa') first; 'eager' is seen as well."
            )
    if isinstance(getattr(model, "text_model", None), nn.Module) and hasattr(model, "vision_model"):
        raise UnsupportedModelError(
            f"{type(model).__name__} reads texts as well as images. Pass the part that sees, model.vision_model."
        )


def forward_options(model: nn.Module, input_size: tuple[int, int]) -> dict[str, Any]:
    """What a model of transformers must be told with an image of input_size = (height, width), if it has another."""
    embedding = embedding_of(model) if _pretrained(model) is model else None
    if embedding is None or not embedding.dynamic or input_size == embedding.image_size:
        return {}
    option = "interpolate_pos_encoding"
    own = inspect.signature(model.forward).parameters
    taken = option in own or any(kind.kind is inspect.Parameter.VAR_KEYWORD for kind in own.values())
    asked = option in inspect.signature(embedding.module.forward).parameters
    return {option: True} if asked and taken else {}


def class_count(model: nn.Module) -> int | None:
    """How many classes a model has: 0 for one that ends in features, None where it does not say."""
    pretrained = _pretrained(model)
    if pretrained is not None:
        if any(hasattr(pretrained, name) for name in _CLASSIFIERS):
            return int(_config(pretrained).num_labels)
        return 0 if pretrained is model else None  # a module around it may have a head of its own
    count = getattr(model, "num_classes", None)
    return count if isinstance(count, int) else None


def headless(model: nn.Module) -> nn.Module:
    """A model that ends in its pooled features: itself, or a copy of it with its own weights, but without its head.

    >>> head = nn.Sequential(nn.Linear(3, 2))
    >>> headless(head) is head
    True
    """
    owner: Any = model
    heads: Any = ()
    if getattr(model, "num_classes", 0) and hasattr(model, "get_classifier"):  # of timm
        heads = owner.get_classifier()
    elif _pretrained(model) is model:
        heads = tuple(getattr(model, name, None) for name in _CLASSIFIERS)
    elif type(model).__module__.startswith("torchvision."):
        heads = getattr(model, "heads", None)
    heads = heads if isinstance(heads, tuple) else (heads,)
    paths = [path for path, module in model.named_modules() if path and any(module is head for head in heads)]
    for path in paths:
        model = _without(model, path)
    if paths and hasattr(model, "num_classes"):
        model.num_classes = 0  # type: ignore[assignment]
    return model


def _without(model: nn.Module, path: str) -> nn.Module:
    """A shallow copy of a model, in which the module at a path hands on what it is given."""
    copied, (name, _, rest) = copy.copy(model), path.partition(".")
    inside = dict(model._modules)
    found = inside[name]
    inside[name] = nn.Identity() if not rest or found is None else _without(found, rest)
    vars(copied)["_modules"] = inside
    return copied


def library_class_names(model: nn.Module) -> list[str] | None:
    """The names in a transformers model's configuration, unless it only numbers its classes."""
    pretrained = _pretrained(model)
    names: Any = getattr(_config(pretrained), "id2label", None) or {}
    count = class_count(model)
    if not count or len(names) != count:
        return None
    ordered = [str(names[number]) for number in sorted(names, key=int)]
    numbered = all(name == f"LABEL_{number}" for number, name in enumerate(ordered))
    return None if numbered else ordered


def library_id(model: nn.Module) -> str | None:
    """The name that a model of transformers was loaded by, if it was."""
    name = getattr(_pretrained(model), "name_or_path", None)
    return name if isinstance(name, str) and name else None


def library_reading(model: nn.Module) -> str | None:
    """How the outputs of a model of transformers are read, by its problem type; None if it does not say."""
    return _READINGS.get(getattr(_config(_pretrained(model)), "problem_type", None))


def library_data_config(model: nn.Module) -> dict[str, Any]:
    """What a model of another library wants to see, as far as it says so, in timm's words.

    The size is the model's own. Normalisation and crop come from the image processor's configuration that was saved
    beside the weights, where those were loaded from a folder or lie in the hub's cache.
    """
    embedding = embedding_of(model)
    if embedding is None:
        return {}
    found: dict[str, Any] = {"input_size": (embedding.channels, *embedding.image_size)}
    name = library_id(model)
    return found if name is None else found | from_processor(_processor_settings(name), embedding.channels)


def _processor_settings(name: str) -> Mapping[str, Any]:
    """The image processor's settings of a model by name or folder; empty where they are not at hand."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in ("preprocessor_config.json", "processor_config.json"):
        path: Any = Path(name) / file
        if not is_file(path):
            try:
                path = try_to_load_from_cache(name, file)
            except HFValidationError:  # no such name can be on the hub
                continue
        if isinstance(path, str | Path):
            try:
                settings: Any = json.loads(Path(path).read_text(encoding="utf-8"))
                return dict(settings.get("image_processor", settings))
            except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
                raise ModelError(f"Expected a JSON object in {path}, the image processor's: {error}.") from error
    return {}


def _pretrained(model: nn.Module) -> nn.Module | None:
    """The outermost model of transformers in a model, or None."""
    return next(iter(_is_pretrained(model)), None)


@those_that
def _is_pretrained(module: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)


@those_that
def _is_configured(module: nn.Module) -> bool:
    return "config" in vars(module)


def _config(pretrained: nn.Module | None) -> Any:
    return getattr(pretrained, "config", None)
