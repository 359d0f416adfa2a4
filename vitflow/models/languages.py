"""Language models of transformers: what they say of themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

# What transformers calls texts among a model's arguments; the first one given tells how many there are.
_TEXTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
# What it calls attention from one stream of tokens to another, in small letters.
_CROSSING = ("cross", "encdec", "encoder_attn")


def reads_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The text among the arguments of a forward pass, numbers [batch, tokens] or vectors; None if it has none."""
    found = next((kwargs[name] for name in _TEXTS if isinstance(kwargs.get(name), Tensor)), None)
    if found is None and args and isinstance(args[0], Tensor) and args[0].ndim == 2:
        found = None if args[0].is_floating_point() else args[0]
    return found


def word_embedding(model: nn.Module) -> nn.Module | None:
    """The module that makes vectors of a text's tokens; None where the model reads none, or does not say."""
    try:
        found = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return found if isinstance(found, nn.Embedding) else None


def stream_of(path: str) -> str:
    """The name of the stream of tokens that an attention module works on, by its path in the model.

    >>> stream_of("decoder.block.3.layer.0.SelfAttention"), stream_of("decoder.block.3.layer.1.EncDecAttention")
    ('decoder', 'decoder.cross_attention')
    >>> stream_of("h.0.attn"), stream_of("model.vision_tower.encoder.layers.1.self_attn")
    ('h', 'model.vision_tower.encoder')
    """
    parts = path.split(".")
    stack = next((number for number, part in enumerate(parts) if part.isdigit()), len(parts))
    name = ".".join(parts[: max(stack - 1, 1)])  # without the list of blocks, where it is not all there is
    crosses = any(word in part.lower() for part in parts[stack:] for word in _CROSSING)
    return f"{name}.cross_attention" if crosses else name
