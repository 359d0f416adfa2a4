"""Forward passes of language models of transformers: their text, cache, embedding and decoder."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError

# Text arguments of a forward pass, in order of preference.
_TEXTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


def reads_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the text among the arguments of a forward pass, token ids [batch, tokens] or embeddings; else None."""
    text = next((kwargs[name] for name in _TEXTS if isinstance(kwargs.get(name), Tensor)), None)
    if text is None and args and isinstance(args[0], Tensor) and args[0].ndim == 2:
        text = None if args[0].is_floating_point() else args[0]
    return text


def reads_cache(kwargs: Mapping[str, Any]) -> Any:
    """Return the key–value cache among the arguments of a forward pass, or None.

    transformers calls it `cache` since 5.24, and `past_key_values` before.
    """
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def refuse_static(cache: Any) -> None:
    """Check that a key–value cache is not static (preallocated at full length).

    Raises:
        UnsupportedModelError: the cache is static.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    kinds = [type(cache).__name__, *(type(layer).__name__ for layer in getattr(cache, "layers", ()))]
    static = next((kind for kind in kinds if kind.startswith("Static")), None)
    if static is not None:
        raise UnsupportedModelError(
            f"Expected a dynamic cache, got {static}, which includes empty keys: omit cache_implementation and "
            "the cache, or pass a DynamicCache."
        )


def word_embedding(model: nn.Module) -> nn.Module | None:
    """Return the token embedding of a model, or None if it has none."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None


def plain_token_ids(model: nn.Module, count: int) -> list[int]:
    """Return `count` token ids spread over a model's vocabulary, without special tokens."""
    modules = (word_embedding(model), *model.modules())
    size = next((module.num_embeddings for module in modules if isinstance(module, nn.Embedding)), count)
    configs = getattr(model, "config", None), text_config(model)
    entries = [entry for config in configs if hasattr(config, "__dict__") for entry in vars(config).items()]
    special = {id for name, id in entries if isinstance(id, int) and name.endswith(("_token_id", "_index"))}
    plain = [id for id in range(size) if id not in special] or [0]
    return [plain[index * max(len(plain) // count, 1) % len(plain)] for index in range(count)]


def text_config(model: nn.Module) -> Any:
    """Return the configuration of a model, or of the text part of a multimodal model."""
    config: Any = getattr(model, "config", None)
    return config.gettext_config() if hasattr(config, "gettext_config") else config


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the decoder of a transformers model."""
    pretrained: Any = model
    decoder: nn.Module | None = pretrained.get_decoder()
    if decoder is None:  # most decoder-only models before transformers 5
        decoder = pretrained.base_model
    return decoder


def decoder_path(model: nn.Module) -> str:
    """Return the module path of the decoder in a model; empty if it is the model itself."""
    decoder = decoder_of(model)
    return next((path for path, module in model.named_modules() if module is decoder), "")
