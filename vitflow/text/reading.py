"""A text that a language model reads: what one of its tokens rests on."""

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import OptionError, printable, whole_number
from vitflow.explaining.captions import method_record
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.rollout import attention_rollout
from vitflow.models.anatomy import unwrap
from vitflow.models.facts import check_name, model_id
from vitflow.models.languages import check_text, load_language_model, predicts_words, reading, tokenizer_of
from vitflow.models.libraries import class_count
from vitflow.recording.isolation import device_of
from vitflow.recording.probing import is_causal
from vitflow.text.graph import MOST_TOKENS, GraphView, Panel, only_rows, attention_paths
from vitflow.text.labels import caption, hide, text_of, words_in, words_of
from vitflow.text.layout import Words
from vitflow.text.method_table import TEXT_METHODS, for_kind, text_method
from vitflow.text.read_rows import array_of, read_rows
from vitflow.text.shaded import ShadedText
from vitflow.text.sheet import Sheet
from vitflow.text.textpage import page_of, rows_read
from vitflow.viewer.pages import Page

# The matrices of longer texts are not kept: nobody draws them as a graph, and they take memory.
LONGEST_GRAPH = 256
# So many characters of a text tell it from others.
_SHOWN = 60


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
        selected: positions of the tokens whose row it is.
        self_share: raw share of the selected token itself if the map is relative to the receptive field, where it has
            weight 0; else None.
        causal: whether each token sees only those before it.
        text: what was read.
        model: the model's id.
        method: the method's name.
        options: every option of the method with the value used.
        target: the token whose logit a class-specific method explains; else None.
        probability: the model's probability of it.
        seconds: time of the forward pass and of the method.
    """

    tokens: Words
    weights: NDArray[np.float32]
    layers: NDArray[np.float32]
    matrices: NDArray[np.float32] | None
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

    def __repr__(self) -> str:
        size = f"{self.tokens.length} tokens, {len(self.layers)} layers"
        return f"Reading({self.text[:_SHOWN]!r}, {self.method}, token={self._word!r}, {size}, {printable(self.model)})"

    def shaded(self, *, special: bool = True, stop_words: Iterable[str] = ()) -> ShadedText:
        """The text with each token on the shade of its weight.

        Args:
            special: show special tokens.
            stop_words: words to show without a shade, such as `vitflow.text.labels.ENGLISH_STOP_WORDS`. What is not
                shown is said below the view, with its share of the weight.
        """
        return ShadedText(
            self.tokens, self._seen(self.weights), self_share=self.self_share, **self._shown(special, stop_words)
        )

    def sheet(self, *, special: bool = True, stop_words: Iterable[str] = ()) -> Sheet:
        """The weights where the method ends at each layer, the last layer on top; options as for `shaded`."""
        return Sheet(
            self.tokens,
            self._seen(self.layers),
            [f"layer {number}" for number in range(1, len(self.layers) + 1)],
            self_share=self.self_share,
            upwards=True,
            **self._shown(special, stop_words),
        )

    def graph(self, *, special: bool = True, stop_words: Iterable[str] = ()) -> GraphView:
        """Raw attention, rollout and flow as graphs side by side, as the paper draws them; options as for `shaded`.

        Raises:
            OptionError: the text is too long for a graph.
        """
        shown = self._shown(special, stop_words)
        count = self.tokens.length - len(shown["hidden"])
        if self.matrices is None or count > MOST_TOKENS:
            raise OptionError(
                f"Expected a text of at most {MOST_TOKENS} tokens for a graph, got {count}: take a part of it, leave "
                "stop words out, or draw the sheet of its layers."
            )
        options: dict[str, Any] = {
            "residual": self.options.get("residual", 0.5),
            "causal": self.options.get("causal") if self.causal else None,
            "num_prefix_tokens": 0,
        }
        layers = [torch.from_numpy(layer).unsqueeze(0) for layer in np.asarray(self.matrices)]
        rolled = [attention_rollout(layers[:count], **options)[0].numpy() for count in range(1, len(layers) + 1)]
        flows = attention_flow(layers, all_sources=True, **options).normalized[0].numpy()
        raw, rollout = np.asarray(self.matrices), np.stack(rolled)
        panels = [
            Panel("raw attention", raw, attention_paths(raw, self.selected), "edges: each layer's attention"),
            Panel("attention rollout", rollout, only_rows(rollout, self.selected), "edges: what is held of the input"),
            Panel("attention flow", flows, only_rows(flows, self.selected), "edges: flow from the input"),
        ]
        told = {
            name: self.options[name] for name in ("head_fusion", "value_weighted", "causal") if name in self.options
        }
        below = caption("rollout", {**told, "residual": options["residual"]}, self.model, what="graphs")
        return GraphView(self.tokens, panels, **{**shown, "caption": below})

    def page(self, *, special: bool = True, stop_words: Iterable[str] = ()) -> Page:
        """One page for a browser: click a word for what it rests on, layer by layer, or for who rests on it.

        Rollout and raw attention answer for each word of a text of up to 256 tokens, other methods for the asked one.
        Options as for `shaded`: what they hide can be shown again there. `reading.page().save("reading.html")` writes
        the page.
        """
        told: dict[str, Any] = {"method": self.method, "options": self.options}
        seen: dict[str, Any] = {"own": self.self_share, "causal": self.causal, "matrices": self.matrices}
        rows, first = rows_read(self.tokens, self.selected, self.layers, **seen, **told)
        hiding: dict[str, Any] = {"special": special, "stop_words": list(stop_words)}
        graph = ""
        with suppress(OptionError):  # too long for one
            view = self.graph(**hiding)
            below = view.caption.removesuffix(f" · {printable(self.model)}")  # which stands above
            graph = replace(view, title="", caption=below).html()
        explained: dict[str, Any] = {"target": self.target, "probability": self.probability, "graph": graph}
        return page_of(self.tokens, rows, first=first, model=self.model, **told, **hiding, **explained)

    @property
    def _word(self) -> str:
        """The word that the asked tokens make up, as it is shown."""
        return text_of(self.tokens[min(self.selected) : max(self.selected) + 1])

    def _seen(self, weights: NDArray[np.float32]) -> NDArray[np.float64]:
        """Weights [..., tokens], NaN for what the asked token could not see."""
        seen = np.array(weights, dtype=np.float64)
        if self.causal:
            seen[..., max(self.selected) + 1 :] = np.nan
        return seen

    def _shown(self, special: bool, stop_words: Iterable[str]) -> dict[str, Any]:
        """What all views have: what is asked about, what is hidden, and the lines above and below."""
        return {
            "asked": self.selected,
            "hidden": hide(self.tokens, special=not special, stop_words=stop_words),
            "title": f"What “{self._word}” rests on",
            "caption": caption(self.method, self.options, self.model, target=self.target, probability=self.probability),
        }

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the shaded text as .png, .pdf or .svg; options as for `shaded`."""
        return self.shaded(**options).save(path)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the matrices, ready for JSON."""
        return {
            "text": self.text,
            "tokens": list(self.tokens.strings),
            "ids": list(self.tokens.ids),
            "special": list(self.tokens.special),
            "weights": self.weights.tolist(),
            "layers": self.layers.tolist(),
            "asked": list(self.selected),
            "own": self.self_share,
            "causal": self.causal,
            "trust": asdict(self.shaded().trust),
            "model": self.model,
            **method_record(TEXT_METHODS[self.method], self.options),
            "target": self.target,
            "probability": self.probability,
            "seconds": round(self.seconds, 4),
        }

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return self.shaded()._repr_mimebundle_(include, exclude)


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
        name: what to call the model; by default the id that it was loaded by.
        trust_remote_code: run Python code that a model by name brings along; without it such a model is refused.
        options: the method's own, such as head_fusion="max". Of decoders the defaults are value_weighted=False and
            causal="receptive_field", of encoders value_weighted="output" and causal="raw".

    Raises:
        VitflowError: the model or an option is wrong; the message says which and what to do.
    """
    chosen, used = text_method(method, options)
    if isinstance(model, nn.Module):
        model = unwrap(model)
        tokenizer = tokenizer_of(model, tokenizer)
    else:
        model, own = load_language_model(model, trust_remote_code=trust_remote_code)
        tokenizer = own if tokenizer is None else tokenizer_of(model, tokenizer)
    inputs, words = _encode(text, tokenizer, model)
    with reading(model):
        causal = is_causal(model)
    used = for_kind(used, decoder=causal)
    started = time.perf_counter()
    asked = _asked(words, token, tokenizer, causal)
    readout = torch.zeros(1, words.length)
    readout[0, list(asked)] = 1 / len(asked)
    wanted = _target(target, tokenizer, model) if chosen.class_specific else None
    readout = readout.to(inputs["input_ids"].device)
    read = read_rows(model, inputs, readout, chosen, used, targets=[(asked[-1], wanted)])
    told: dict[str, Any] = {}
    if chosen.class_specific and read.logits is not None:
        told = _told(read.logits, asked[-1], wanted, tokenizer, model)
    return Reading(
        tokens=words,
        weights=array_of(read.rows[read.chosen, 0]),
        layers=array_of(read.rows[:, 0]),
        matrices=array_of(read.matrices) if words.length <= LONGEST_GRAPH else None,
        selected=asked,
        self_share=None if read.self_share is None else float(read.self_share[read.chosen, 0]),
        causal=causal,
        text=text,
        model=model_id(model) if name is None else check_name(name),
        method=method,
        options=used,
        seconds=time.perf_counter() - started,
        **told,
    )


def _encode(text: str, tokenizer: Any, model: nn.Module) -> tuple[dict[str, Tensor], Words]:
    """The arguments of the model for one text, and its tokens."""
    check_text(text)
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = dict(tokenizer(text, return_tensors="pt", **({"return_offsets_mapping": True} if fast else {})))
    offsets = encoded.pop("offset_mapping")[0].tolist() if fast else None
    ids = encoded["input_ids"]
    if not ids.numel():
        raise OptionError(f"Expected a text of at least one token, got {text!r}.")
    device = device_of(model)
    inputs = {name: encoded[name].to(device) for name in ("input_ids", "attention_mask") if name in encoded}
    return inputs, words_in(text, tokenizer, ids[0].tolist(), offsets)


def _asked(words: Words, token: str | int | None, tokenizer: Any, causal: bool) -> tuple[int, ...]:
    """Where the tokens stand whose row it is."""
    if token is not None:
        return words.find(token)
    masked = [place for place, number in enumerate(words.ids) if number == getattr(tokenizer, "mask_token_id", None)]
    if len(masked) == 1:
        return (masked[0],)
    return (words.length - 1,) if causal else (0,)


def _target(target: str | int | None, tokenizer: Any, model: nn.Module) -> int | None:
    """The number of the token or class whose logit is explained."""
    if isinstance(target, str):
        check_text(target)
        if not predicts_words(model):
            raise OptionError(f"Expected the number of a class as the target, got {target!r}.")
        for written in (f" {target.strip()}", target.strip()):  # as it stands inside a text, and at its beginning
            ids = tokenizer(written, add_special_tokens=False)["input_ids"]
            if len(ids) == 1:
                return int(ids[0])
        pieces = ", ".join(repr(string) for string in words_of(tokenizer, ids).strings)
        raise OptionError(f"Expected a target that is one token for the model, got {target!r}, which is {pieces}.")
    if target is not None:
        words = predicts_words(model)
        config: Any = getattr(model, "config", None)
        count = getattr(config, "vocab_size", None) if words else class_count(model)
        most = None if count is None else count - 1
        whole_number(f"the target, a {'token' if words else 'class'} by its number,", target, 0, most)
    return target


def _told(logits: Tensor, position: int, wanted: int | None, tokenizer: Any, model: nn.Module) -> dict[str, Any]:
    """The target's name, and the model's probability of it."""
    scores = logits[0] if logits.ndim == 2 else logits[0, position]
    number = int(scores.argmax()) if wanted is None else wanted
    name = words_of(tokenizer, [number]).strings[0].strip() if predicts_words(model) else f"class {number}"
    return {"target": name, "probability": float(scores.double().softmax(dim=-1)[number])}
