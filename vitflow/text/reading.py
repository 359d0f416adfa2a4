"""Attribution of a token of a text that a language model reads."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import OptionError, printable
from vitflow.explaining.captions import method_record
from vitflow.methods.fusion import check_layer
from vitflow.models.devices import device_of
from vitflow.models.names import check_name, class_activation, model_id
from vitflow.models.outputs import activate
from vitflow.models.parts import unwrap
from vitflow.registry.option_types import TextOptions
from vitflow.text.languages import check_text, load_language_model, part_of, predicts_words, reading
from vitflow.text.method_table import TEXT_METHODS, for_kind, text_method
from vitflow.text.methods import caption
from vitflow.text.page import TextPage, TextRow
from vitflow.text.rows import TextResult, array_of, explain_rows
from vitflow.text.view import ShadedText
from vitflow.text.visibility import is_causal
from vitflow.text.words import Words, hide, text_of, words_in, words_of
from vitflow.viewer.pages import Page

# Of longer texts, the row of the explained word alone is computed.
_LONGEST = 256
_SHOWN = 60  # characters of the text in a repr


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Attribution of a token or word of a text: a weight for each token of the text.

    Attributes:
        tokens: tokens of the text, including special tokens.
        weights: float32 [tokens], unscaled.
        layers: float32 [layers, tokens], the weights if the method ends at each layer, first layer first. The last row
            is `weights` for methods that use all layers.
        selected: positions of the explained token, or of the tokens of the explained word.
        self_share: raw share of the selected token itself if the weights are relative to the receptive field, which
            sets its weight to 0; else None.
        causal: True if each token attends only to itself and earlier tokens.
        text: the text.
        model: model id.
        method: method name.
        options: all options of the method.
        target: token whose logit a class-specific method explains; else None.
        probability: the model's probability of the target; None for a regression.
        seconds: time of the forward pass and the method.
        rows: the attributions of all words that the page shows: for rollout and raw attention of texts of up to 256
            tokens all words, else the explained word.
    """

    tokens: Words
    weights: NDArray[np.float32]
    layers: NDArray[np.float32]
    selected: tuple[int, ...]
    self_share: float | None
    causal: bool
    text: str
    model: str
    method: str
    options: Mapping[str, Any]
    target: str | None = None
    probability: float | None = None
    seconds: float = 0.0
    rows: Sequence[TextRow] = ()

    def __repr__(self) -> str:
        size = f"{self.tokens.length} tokens, {len(self.layers)} layers"
        return f"Reading({self.text[:_SHOWN]!r}, {self.method}, token={self._word!r}, {size}, {printable(self.model)})"

    def shaded(self, *, special: bool = True, stop_words: Iterable[str] = ()) -> ShadedText:
        """Return the text with each token shaded by its weight.

        Args:
            special: show special tokens.
            stop_words: words to draw without a shade, such as `vitflow.text.words.ENGLISH_STOP_WORDS`. The caption
                reports the share of the weight of hidden tokens.
        """
        weights = self.weights.astype(np.float64)
        if self.causal:
            weights[max(self.selected) + 1 :] = np.nan  # unseen
        return ShadedText(
            self.tokens,
            weights,
            self_share=self.self_share,
            selected=self.selected,
            hidden=hide(self.tokens, special=not special, stop_words=stop_words),
            title=f"Attribution of “{self._word}”",
            caption=self._caption(self.model),
        )

    def page(self, *, special: bool = True, stop_words: Iterable[str] = ()) -> Page:
        """Return an interactive HTML page: click a word for its attribution by layer, or for the attribution to it.

        The words of `rows` can be selected. Options as for `shaded`; hidden tokens can be shown on the page. Write the
        page with `reading.page().save("reading.html")`.
        """
        content = TextPage(
            words=self.tokens,
            rows=self.rows,
            first=[row.positions for row in self.rows].index(self.selected),
            model=self.model,
            caption=self._caption(""),
            options=self.options,
        )
        return content.page(special=special, stop_words=stop_words)

    @property
    def _word(self) -> str:
        """Text of the selected tokens."""
        return text_of(self.tokens[min(self.selected) : max(self.selected) + 1])

    def _caption(self, model: str) -> str:
        return caption(self.method, self.options, model, target=self.target, probability=self.probability)

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the shaded text as .png, .pdf or .svg; options as for `shaded`."""
        return self.shaded(**options).save(path)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {
            "text": self.text,
            "tokens": list(self.tokens.strings),
            "ids": list(self.tokens.ids),
            "special": list(self.tokens.special),
            "weights": self.weights.tolist(),
            "layers": self.layers.tolist(),
            "selected": list(self.selected),
            "self_share": self.self_share,
            "causal": self.causal,
            "summary": asdict(self.shaded().summary),
            "model": self.model,
            **method_record(TEXT_METHODS[self.method], self.options),
            "target": self.target,
            "probability": self.probability,
            "seconds": round(self.seconds, 4),
        }

    def _repr_mimebundle_(self, **_: Any) -> Any:
        return self.shaded()._repr_mimebundle_()


def explain_text(
    text: str,
    *,
    model: str | Path | nn.Module,
    tokenizer: Any = None,
    token: str | int | None = None,
    method: str = "rollout",
    target: str | int | None = None,
    name: str | None = None,
    trust_remote_code: bool = False,
    **options: Unpack[TextOptions],
) -> Reading:
    """Compute the attribution of one token of a text in an encoder or decoder.

    Args:
        text: the text.
        model: transformers id, folder or module.
        tokenizer: tokenizer; by default the one saved with the model.
        token: word or token index to explain (−1 is the last); by default the mask token if there is one, else the
            last token of a decoder or the class token of an encoder.
        method: "rollout", "attention", "flow", "gae" or "logit_lens".
        target: for "gae", the word (one token) or token or class id whose logit at that position is explained; by
            default the most probable.
        name: display name of the model; by default its id.
        trust_remote_code: allow models whose repository contains Python code, and run it.
        options: options of the method, such as head_fusion="max". Decoders default to value_weighted=False and
            causal="receptive_field", encoders to value_weighted="output" and causal="raw".

    Raises:
        VitflowError: invalid model or option; the message names it and the remedy.
    """
    definition, used = text_method(method, options)
    if isinstance(model, nn.Module):
        model = unwrap(model)
        tokenizer = part_of("tokenizer", model, tokenizer)
    else:
        model, default = load_language_model(model, trust_remote_code=trust_remote_code)
        tokenizer = default if tokenizer is None else part_of("tokenizer", model, tokenizer)
    inputs, words = _encode(text, tokenizer, model)
    with reading(model):
        causal = is_causal(model)
    used = for_kind(used, decoder=causal)
    started = time.perf_counter()
    selected = _selected(words, token, tokenizer, causal)
    readout = torch.zeros(1, words.length)
    readout[0, list(selected)] = 1 / len(selected)
    if words.length <= _LONGEST and method in ("rollout", "attention"):  # for the page
        readout = torch.cat([readout, torch.eye(words.length)])
    target_id = _target(target, tokenizer, model) if definition.class_specific else None
    result = explain_rows(model, inputs, readout, definition, used, targets=[(selected[-1], target_id)])
    chosen = check_layer("layer", used.get("layer", -1), len(result.rows))
    explained, logits = {}, result.text.trace.logits
    if definition.class_specific and logits is not None:
        explained = _describe_target(logits.detach(), selected[-1], target_id, tokenizer, model)
    return Reading(
        tokens=words,
        weights=array_of(result.rows[chosen, 0]),
        layers=array_of(result.rows[:, 0]),
        selected=selected,
        self_share=None if result.self_share is None else float(result.self_share[chosen, 0]),
        causal=causal,
        text=text,
        model=model_id(model) if name is None else check_name(name),
        method=method,
        options=used,
        seconds=time.perf_counter() - started,
        rows=_rows_of_words(words, selected, result, causal),
        **explained,
    )


def _encode(text: str, tokenizer: Any, model: nn.Module) -> tuple[dict[str, Tensor], Words]:
    """Tokenize a text: return the model's arguments and the tokens."""
    check_text(text)
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = dict(tokenizer(text, return_tensors="pt", **({"return_offsets_mapping": True} if fast else {})))
    offsets = encoded.pop("offset_mapping")[0].tolist() if fast else None
    ids = encoded["input_ids"]
    if not (text.strip() and ids.numel()):
        raise OptionError(f"Expected a text of at least one token, got {text!r}.")
    device = device_of(model)
    inputs = {name: encoded[name].to(device) for name in ("input_ids", "attention_mask") if name in encoded}
    return inputs, words_in(text, tokenizer, ids[0].tolist(), offsets)


def _rows_of_words(words: Words, selected: tuple[int, ...], result: TextResult, causal: bool) -> tuple[TextRow, ...]:
    """Return the row of the selected word, which is the first, at its place among the rows of all other tokens."""
    weights, shares = array_of(result.rows), None if result.self_share is None else array_of(result.self_share)
    spans = [selected, *((position,) for position in range(weights.shape[1] - 1))]  # of none, or all
    rows = []
    for number, span in enumerate(spans):
        if number == 0 or span[0] not in selected:
            name, seen = text_of(words[span[0] : span[-1] + 1]).strip(), span[-1] + 1 if causal else words.length
            share = None if shares is None else shares[:, number]
            rows.append(TextRow(name, span, seen, weights[:, number], self_share=share))
    return tuple(sorted(rows, key=lambda row: row.positions))


def _selected(words: Words, token: str | int | None, tokenizer: Any, causal: bool) -> tuple[int, ...]:
    """Return the positions of the token or word to explain."""
    if token is not None:
        return words.find(token)
    mask_id = getattr(tokenizer, "mask_token_id", None)
    masked = [position for position, token_id in enumerate(words.ids) if token_id == mask_id]
    if len(masked) > 1:
        raise OptionError(f"The text has {len(masked)} mask tokens: pass token= with the index of one, {masked}.")
    if masked:
        return (masked[0],)
    return (words.length - 1,) if causal else (0,)


def _target(target: str | int | None, tokenizer: Any, model: nn.Module) -> int | None:
    """Return the id of the token or class whose logit is explained."""
    if not isinstance(target, str):
        return target
    check_text(target)
    if not predicts_words(model):
        raise OptionError(f"Expected a class index as the target, got {target!r}.")
    for variant in (f" {target.strip()}", target.strip()):  # inside a text and at its beginning
        ids = tokenizer(variant, add_special_tokens=False)["input_ids"]
        if len(ids) == 1:
            return int(ids[0])
    pieces = ", ".join(repr(string) for string in words_of(tokenizer, ids).strings)
    raise OptionError(f"Expected a target that is a single token, got {target!r}, tokenized as {pieces}.")


def _describe_target(
    logits: Tensor, position: int, target: int | None, tokenizer: Any, model: nn.Module
) -> dict[str, Any]:
    """Return the name of the target and the model's probability of it, None for a regression."""
    scores = logits[0] if logits.ndim == 2 else logits[0, position]
    index, activation = int(scores.argmax()) if target is None else target, "softmax"
    if predicts_words(model):
        name = words_of(tokenizer, [index]).strings[0].strip()
    else:
        name, activation = f"class {index}", class_activation(model)
    probability = None if activation == "value" else float(activate(scores, activation)[index])
    return {"target": name, "probability": probability}
