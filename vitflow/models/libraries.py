"""Structure and metadata of Vision Transformers of transformers, torchvision and open_clip.

The libraries are not imported: models are recognised by their submodules and class names, also inside custom modules.
"""

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitflow.errors import ModelError, UnsupportedModelError
from vitflow.files import is_file
from vitflow.methods.tokens import TokenLayout
from vitflow.models.parts import modules_of
from vitflow.models.processors import from_processor

# Names of the patch embedding and of prefix tokens in transformers.
_PATCHES = ("patch_embeddings", "patch_embedding")
_PREFIX = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
#: Names of the first norm of a block.
FIRST_NORMS = ("layernorm_before", "layer_norm1", "ln_1", "norm1")
# Names of poolings.
PATCH_MEAN = "average over patches"
HALVES = "half class token, half average over patches"
BOTH_TOKENS = "class and distillation token"
# Poolings of classifiers of transformers, by class name; by default the class token.
_POOLINGS = {
    "DeiTForImageClassificationWithTeacher": BOTH_TOKENS,
    "Dinov2ForImageClassification": HALVES,
    "Dinov2WithRegistersForImageClassification": HALVES,
    "CLIPForImageClassification": PATCH_MEAN,
    "MetaClip2ForImageClassification": PATCH_MEAN,
    "SiglipForImageClassification": PATCH_MEAN,
    "IJepaForImageClassification": PATCH_MEAN,
    "SwinForImageClassification": PATCH_MEAN,
    "Swinv2ForImageClassification": PATCH_MEAN,
}
# Activation by problem type.
_READINGS: Mapping[Any, str] = {"multi_label_classification": "sigmoid", "regression": "value"}
# Names of the classification head.
_CLASSIFIERS = ("classifier", "cls_classifier")
# Attention implementations that call functions of torch and can be recorded.
_RECORDABLE = ("sdpa", "eager")


@dataclass(frozen=True, slots=True)
class Embedding:
    """Patch embedding of a non-timm model.

    Attributes:
        module: the embedding module.
        num_prefix_tokens: number of class, distillation and register tokens before the patches.
        patch_size: (height, width) in pixels.
        image_size: (height, width) that the model was built for.
        channels: number of image channels.
        dynamic: True if other sizes are supported.
        patchified: True if the input is a sequence of patches, of a length that depends on the image.
        num_suffix_tokens: number of detection tokens after the patches.
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
    """Return the patch embedding of a model of transformers, torchvision or open_clip; None for other models."""
    owner: Any = next(filter(_embeds, modules_of(model)), None)
    if owner is None:
        return None
    patches = _patches_of(owner)
    if patches is not None:
        return _of_transformers(owner, patches)
    return Embedding(owner, 1, _pair(owner.patch_size), _pair(owner.image_size), 3, dynamic=False)


def _embeds(module: nn.Module) -> bool:
    inside = module._modules
    of_torchvision = inside.get("conv_proj") is not None and hasattr(module, "class_token")
    of_open_clip = inside.get("conv1") is not None and hasattr(module, "class_embedding")
    return _patches_of(module) is not None or of_torchvision or of_open_clip


def _patches_of(module: nn.Module) -> nn.Module | None:
    """Return the patch projection inside an embedding module of transformers, or None."""
    return next((patches for name in _PATCHES if (patches := module._modules.get(name)) is not None), None)


def _of_transformers(module: nn.Module, patches: nn.Module) -> Embedding | None:
    if isinstance(patches, nn.Linear) and hasattr(module, "position_embedding_size"):
        owner: Any = module
        side, pixels = int(owner.position_embedding_size), int(owner.patch_size)
        channels = patches.in_features // pixels**2
        return Embedding(module, 0, _pair(pixels), _pair(side * pixels), channels, dynamic=True, patchified=True)
    convolution = next((part for part in patches.modules() if isinstance(part, nn.Conv2d)), None)
    sources = (module, patches, getattr(module, "config", None))
    size = next((size for source in sources if (size := getattr(source, "image_size", None))), None)
    if convolution is None or size is None:
        return None  # video, or an input of patches
    tokens = [token for name in _PREFIX if isinstance(token := getattr(module, name, None), Tensor)]
    prefix = sum(1 if token.ndim == 1 else token.shape[-2] for token in tokens)
    patch = (int(convolution.stride[0]), int(convolution.stride[1]))
    dynamic = hasattr(module, "interpolate_pos_encoding")
    detection = getattr(module, "detection_tokens", None)  # of YOLOS
    suffix = detection.shape[-2] if isinstance(detection, Tensor) else 0
    return Embedding(module, prefix, patch, _pair(size), convolution.in_channels, dynamic, num_suffix_tokens=suffix)


def _pair(size: Any) -> tuple[int, int]:
    """Return (height, width) of a size given as one number or a pair."""
    return (int(size[0]), int(size[1])) if isinstance(size, Sequence) else (int(size), int(size))


def library_layout(model: nn.Module, input_size: tuple[int, int]) -> TokenLayout | None:
    """Return the token layout for an input of (height, width); None for models of timm.

    Raises:
        UnsupportedModelError: the model shuffles its patches.
    """
    embedding = embedding_of(model)
    if embedding is None:
        return None
    if type(embedding.module).__name__ == "ViTMAEEmbeddings":
        raise UnsupportedModelError(
            f"{type(model).__name__} masks and shuffles its patches at random, so its tokens have no position in the "
            "image. Load the same weights as a ViTModel or ViTForImageClassification."
        )
    rows, cols = (side // patch for side, patch in zip(input_size, embedding.patch_size, strict=True))
    return TokenLayout(embedding.num_prefix_tokens, max(rows, 1), max(cols, 1), embedding.num_suffix_tokens)


def library_pooling(model: nn.Module) -> str | None:
    """Return the name of a classifier's pooling, as in `closed_readouts`; None if unknown."""
    pretrained, embedding = _pretrained(model), embedding_of(model)
    names = [kind.__name__ for kind in type(pretrained).__mro__]
    known = next((_POOLINGS[name] for name in names if name in _POOLINGS), None)
    averages = (
        getattr(_config(pretrained), "use_mean_pooling", False)  # BEiT and Data2Vec
        or (embedding is not None and getattr(embedding.module, "pool_type", None) == "avg")  # open_clip
    )
    return PATCH_MEAN if known is None and averages else known


def library_blocks(model: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    """Return the stacks of blocks with a first norm, by module path; empty for models of timm."""
    if embedding_of(model) is None:
        return {}
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module)
        and all(any(hasattr(block, norm) for norm in FIRST_NORMS) for block in module)
    }


def check_recordable(model: nn.Module) -> None:
    """Check that the attention of a transformers model can be recorded.

    Raises:
        UnsupportedModelError: the attention implementation is not "sdpa" or "eager", or there is also a text model.
    """
    for module in modules_of(model):
        implementation = getattr(vars(module).get("config"), "_attn_implementation", None)
        if isinstance(implementation, str) and implementation not in _RECORDABLE:
            raise UnsupportedModelError(
                f"{type(module).__name__} uses the attention implementation {implementation!r}, which cannot be "
                "recorded. Call model.set_attn_implementation('sdpa') first ('eager' also works)."
            )
    if isinstance(getattr(model, "text_model", None), nn.Module) and hasattr(model, "vision_model"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has a text and a vision model. Pass the vision model, model.vision_model."
        )


def forward_options(model: nn.Module, input_size: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments with which a transformers model accepts an input of (height, width)."""
    embedding = embedding_of(model) if _pretrained(model) is model else None
    if embedding is None or not embedding.dynamic or input_size == embedding.image_size:
        return {}
    option = "interpolate_pos_encoding"
    parameters = inspect.signature(model.forward).parameters
    accepted = option in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    used = option in inspect.signature(embedding.module.forward).parameters
    return {option: True} if used and accepted else {}


def class_count(model: nn.Module) -> int | None:
    """Return the number of classes of a model: 0 if its output is features, None if unknown."""
    pretrained = _pretrained(model)
    if pretrained is not None:
        if any(hasattr(pretrained, name) for name in _CLASSIFIERS):
            return int(_config(pretrained).num_labels)
        return 0 if pretrained is model else None  # the module around it may have a head
    count = getattr(model, "num_classes", None)
    return count if isinstance(count, int) else None


def headless(model: nn.Module) -> nn.Module:
    """Return the model without its head, as a copy that shares its weights; the model itself if it has no head.

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
        model = without(model, path)
    if paths and hasattr(model, "num_classes"):
        model.num_classes = 0  # type: ignore[assignment]
    return model


def without(model: nn.Module, path: str) -> nn.Module:
    """Return a shallow copy of a model with an identity in place of the module at `path`."""
    copied, (name, _, rest) = copy.copy(model), path.partition(".")
    children = dict(model._modules)
    child = children[name]
    children[name] = nn.Identity() if not rest or child is None else without(child, rest)
    vars(copied)["_modules"] = children
    return copied


def library_class_names(model: nn.Module) -> list[str] | None:
    """Return the class names in the configuration of a transformers model; None if they are LABEL_0, LABEL_1, …"""
    pretrained = _pretrained(model)
    names: Any = getattr(_config(pretrained), "id2label", None) or {}
    count = class_count(model)
    if not count or len(names) != count:
        return None
    ordered = [str(names[index]) for index in sorted(names, key=int)]
    default = all(name == f"LABEL_{index}" for index, name in enumerate(ordered))
    return None if default else ordered


def library_id(model: nn.Module) -> str | None:
    """Return the name by which a transformers model was loaded, or None."""
    name = getattr(_pretrained(model), "name_or_path", None)
    return name if isinstance(name, str) and name else None


def library_reading(model: nn.Module) -> str | None:
    """Return the activation of a transformers model by its problem type, or None."""
    return _READINGS.get(getattr(_config(_pretrained(model)), "problem_type", None))


def library_data_config(model: nn.Module) -> dict[str, Any]:
    """Return the known entries of timm's data config for a non-timm model.

    The size is read from the model; normalisation and crop from the image processor in its folder or the hub's cache.
    """
    embedding = embedding_of(model)
    if embedding is None:
        return {}
    config: dict[str, Any] = {"input_size": (embedding.channels, *embedding.image_size)}
    name = library_id(model)
    return config if name is None else config | from_processor(processor_settings(name), embedding.channels)


def processor_settings(name: str) -> Mapping[str, Any]:
    """Return the image processor's settings of a model by name or folder; empty if not available locally."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in ("preprocessor_config.json", "processor_config.json"):
        path: Any = Path(name) / file
        if not is_file(path):
            try:
                path = try_to_load_from_cache(name, file)
            except HFValidationError:  # not a valid hub id
                continue
        if isinstance(path, str | Path):
            try:
                settings: Any = json.loads(Path(path).read_text(encoding="utf-8"))
                return dict(settings.get("image_processor", settings))
            except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
                raise ModelError(f"Expected image processor settings as a JSON object in {path}: {error}.") from error
    return {}


def _pretrained(model: nn.Module) -> nn.Module | None:
    """Return the outermost transformers model in a module, or None."""
    kinds = ((module, type(module).__mro__) for module in modules_of(model))
    return next((module for module, mro in kinds if any(kind.__name__ == "PreTrainedModel" for kind in mro)), None)


def _config(pretrained: nn.Module | None) -> Any:
    return getattr(pretrained, "config", None)
