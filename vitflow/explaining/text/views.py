"""What was read or written, as views: shaded text, sheets of layers and of generated words, the attention graph."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitflow.errors import OptionError, whole_number
from vitflow.methods.attention import check_layer
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.rollout import attention_rollout
from vitflow.methods.sequence.layout import Words
from vitflow.words.graph import MOST_TOKENS, GraphView, Panel
from vitflow.words.labels import hide, labels_of, text_of
from vitflow.words.shaded import ShadedText
from vitflow.words.sheet import Sheet

if TYPE_CHECKING:
    from vitflow.explaining.text.generation import Generation
    from vitflow.explaining.text.reading import Reading

_GRAPHS = ("raw attention", "attention rollout", "attention flow")


def shade_reading(reading: "Reading", *, special: bool, stop_words: Iterable[str]) -> ShadedText:
    """The text that was read, each token shaded by its weight; what the asked token could not see is unseen."""
    return ShadedText(
        reading.tokens,
        _seen(reading, reading.weights),
        asked=reading.asked,
        own=reading.own,
        hidden=hide(reading.tokens, special=not special, stop_words=stop_words),
        title=_title(reading),
        caption=_caption(reading),
    )


def layers_of_reading(reading: "Reading", *, special: bool, stop_words: Iterable[str]) -> Sheet:
    """The asked token's row where the method ends at each layer, the last layer on top."""
    return Sheet(
        reading.tokens,
        _seen(reading, reading.layers),
        [f"layer {number}" for number in range(1, len(reading.layers) + 1)],
        asked=reading.asked,
        own=reading.own,
        hidden=hide(reading.tokens, special=not special, stop_words=stop_words),
        upwards=True,
        title=_title(reading),
        caption=_caption(reading),
    )


def graph_of_reading(reading: "Reading", *, special: bool, stop_words: Iterable[str]) -> GraphView:
    """Raw attention, rollout and flow side by side, as the paper draws them, with the asked token's paths.

    Raises:
        OptionError: the text is too long to be drawn so.
    """
    hidden = hide(reading.tokens, special=not special, stop_words=stop_words)
    count = reading.tokens.length - len(hidden)
    if reading.matrices is None or count > MOST_TOKENS:
        raise OptionError(
            f"Expected a text of at most {MOST_TOKENS} tokens for a graph, got {count}: take a part of it, leave stop "
            "words out, or draw the sheet of its layers."
        )
    options: dict[str, Any] = {
        "residual": reading.options.get("residual", 0.5),
        "causal": reading.options.get("causal") if reading.causal else None,
        "num_prefix_tokens": 0,
    }
    shared = {
        name: reading.options[name] for name in ("head_fusion", "value_weighted", "causal") if name in reading.options
    }
    layers = [torch.from_numpy(layer).unsqueeze(0) for layer in np.asarray(reading.matrices)]
    rolled = [attention_rollout(layers[:count], **options)[0].numpy() for count in range(1, len(layers) + 1)]
    flows = attention_flow(layers, all_sources=True, **options).normalized[0].numpy()
    notes = ("edges: each layer's attention", "edges: what is held of the input", "edges: flow from the input")
    found = (np.asarray(reading.matrices), np.stack(rolled), flows)
    paths = (_walked(found[0], reading.asked), *(_rows(matrices, reading.asked) for matrices in found[1:]))
    return GraphView(
        reading.tokens,
        [Panel(*one) for one in zip(_GRAPHS, found, paths, notes, strict=True)],
        asked=reading.asked,
        hidden=hidden,
        title=_title(reading),
        caption=" · ".join([_method_words("graphs", {**shared, "residual": options["residual"]}), reading.model]),
    )


def shade_generated(generation: "Generation", number: int, *, special: bool, stop_words: Iterable[str]) -> ShadedText:
    """What one generated token rests on, over the prompt and what was written before it."""
    prompt, written = one_prompt(generation)
    number = whole_number("the generated token", number, -written.length, written.length - 1) % written.length
    words, place = prompt + written, prompt.length + number
    weights = _whole_rows(generation)[number, :, -1]
    own = float(weights[place - 1]) if generation.own is None else float(generation.own[number, -1])
    return ShadedText(
        words,
        weights,
        asked=(place - 1, place),
        own=own,
        hidden=hide(words, special=not special, stop_words=stop_words),
        title=f"What “{labels_of(words)[place].text}” rests on",
        caption=_caption(generation),
    )


def sheet_of_generation(
    generation: "Generation", layer: int, *, generated: bool, special: bool, stop_words: Iterable[str]
) -> Sheet:
    """A row for each generated token, a column for each token of the prompt; with generated ones, if asked for."""
    prompt, written = one_prompt(generation)
    index = check_layer("layer", layer, generation.values.shape[2])
    words = prompt + written if generated else prompt
    names = [label.text for label in labels_of(written)]
    return Sheet(
        words,
        _whole_rows(generation)[:, : words.length, index],
        names,
        rest=None if generated else np.nansum(generation.among_generated[:, :, index], axis=1),
        rest_name="generated",
        own_tokens=list(range(prompt.length - 1, prompt.length - 1 + written.length)),
        own=None if generation.own is None else float(np.mean(generation.own[:, index])),
        hidden=hide(words, special=not special, stop_words=stop_words),
        title="What each generated token rests on",
        caption=_caption(generation),
    )


def one_prompt(generation: "Generation") -> tuple[Words, Words]:
    """The tokens of the prompt and the written ones; OptionError where there are several prompts."""
    if not isinstance(generation.prompt_tokens, Words) or not isinstance(generation.generated_tokens, Words):
        raise OptionError(f"Expected one prompt to draw, got {len(generation)}: take generation[0].")
    return generation.prompt_tokens, generation.generated_tokens


def _whole_rows(generation: "Generation") -> NDArray[np.float64]:
    """Rows over prompt and generated tokens, [n, m + n, layers]; NaN for what came later."""
    rows = np.concatenate([generation.values, generation.among_generated], axis=1, dtype=np.float64)
    later = np.arange(rows.shape[1]) >= generation.values.shape[1] + np.arange(len(rows))[:, None]
    rows[later] = np.nan
    return rows


def _seen(reading: "Reading", weights: NDArray[np.float32]) -> NDArray[np.float64]:
    found = np.array(weights, dtype=np.float64)
    if reading.causal:
        found[..., max(reading.asked) + 1 :] = np.nan
    return found


def _rows(matrices: NDArray[Any], asked: Iterable[int]) -> NDArray[np.float64]:
    """The asked tokens' rows alone, layer by layer."""
    kept = np.zeros(matrices.shape)
    kept[:, list(asked)] = matrices[:, list(asked)]
    return kept


def _walked(matrices: NDArray[Any], asked: tuple[int, ...]) -> NDArray[np.float64]:
    """Each edge times what of the asked tokens' top row arrives at it from above."""
    found, arrives = np.zeros(matrices.shape), np.zeros(matrices.shape[1])
    arrives[list(asked)] = 1 / len(asked)
    for layer in range(len(matrices) - 1, -1, -1):
        found[layer] = arrives[:, None] * matrices[layer]
        arrives = found[layer].sum(axis=0)
    return found


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON holds them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def joined(words: Words, places: Iterable[int]) -> str:
    """The word that the tokens at these places make up, as it is shown."""
    places = list(places)
    return text_of(words[min(places) : max(places) + 1])


def _title(reading: "Reading") -> str:
    return f"What “{joined(reading.tokens, reading.asked)}” rests on"


def _caption(result: "Reading | Generation") -> str:
    """The method with its options, what it explains, and the model."""
    return " · ".join(filter(None, [_method_words(result.method, result.options), _target_words(result), result.model]))


def _method_words(method: str, options: Mapping[str, Any]) -> str:
    told = ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in options.items())
    return f"{method} ({told})" if told else method


def _value(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value).replace("_", " ")


def _target_words(result: Any) -> str:
    target, probability = getattr(result, "target", None), getattr(result, "probability", None)
    if target is None:
        return ""
    return f"for “{target}”" + (f", probability {probability:.1%}" if probability is not None else "")
