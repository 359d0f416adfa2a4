"""A text that a language model reads: what one of its tokens rests on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vitflow.methods.sequences import Words


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What one token of a text, or the word that some make up, rests on: a weight for each token that was read.

    Attributes:
        tokens: the tokens of the text, special ones among them.
        weights: float32 [tokens], unscaled.
        layers: float32 [layers, tokens]: the same where the method ends at each layer, first layer first; its last row
            is `weights` where the method runs through all layers.
        matrices: float32 [layers, tokens, tokens], the fused attention of each layer, rows are queries; None for texts
            of more tokens than can be drawn as a graph.
        asked: positions of the tokens whose row it is.
        own: where the map is relative to the receptive field, the raw share of the asked token itself, which has weight
            0 there; else None.
        causal: whether each token sees only those before it.
        text: what was read.
        model: the model's id.
        method: the method's name.
        options: every option of the method with the value used.
        target: the token whose logit a class-specific method explains; else None.
        probability: the model's probability of it.
        facts: what else belongs beside the map.
        seconds: time of the forward pass and of the method.
    """

    tokens: Words
    weights: NDArray[np.float32]
    layers: NDArray[np.float32]
    matrices: NDArray[np.float32] | None
    asked: tuple[int, ...]
    own: float | None
    causal: bool
    text: str
    model: str
    method: str
    options: Mapping[str, Any]
    target: str | None = None
    probability: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def explain_text(
    text: str,
    *,
    model: str | Path | nn.Module,
    tokenizer: Any = None,
    token: str | int | None = None,
    method: str = "rollout",
    target: str | int | None = None,
    **options: Any,
) -> Reading:
    """Explain what one token of a text rests on, as an encoder or a decoder reads it.

    Args:
        text: what is read.
        model: a `transformers` id or folder, or a module of your own.
        tokenizer: its tokenizer; by default the one saved beside it.
        token: the word or the token's number whose row it is (−1 is the last); by default the masked word, if there is
            one, the last token of a decoder, and else the class token.
        method: "rollout", "attention", "flow" or "gae".
        target: for "gae" the word (one token) whose logit at that place is explained, by default the most probable.
        options: the method's own, such as head_fusion="max", and `causal` ("raw" or "receptive_field").

    Raises:
        VitflowError: the model or an option is wrong; the message says which and what to do.
    """
    raise NotImplementedError
