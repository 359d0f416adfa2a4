"""A text that a language model writes: what each of its tokens rests on."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import OptionError, printable, whole_number
from vitflow.explaining.asking.captions import departures_from_paper
from vitflow.explaining.asking.method import Method
from vitflow.explaining.asking.method_options import plain_options
from vitflow.explaining.text.captions import caption
from vitflow.explaining.text.method_table import TEXT_METHODS, for_kind, text_method
from vitflow.explaining.text.prompts import arguments_of
from vitflow.explaining.text.read_rows import array_of, read_rows
from vitflow.explaining.text.writing import follow, refuse_looking_ahead, split, write
from vitflow.methods.attention import check_layer
from vitflow.methods.sequence.layout import Words
from vitflow.models.anatomy import unwrap
from vitflow.models.facts import check_name, model_id
from vitflow.models.languages import load_language_model, refuse_generation
from vitflow.recording.isolation import device_of, evaluating
from vitflow.words.labels import hide, labels_of, text_of
from vitflow.words.shaded import ShadedText
from vitflow.words.sheet import Sheet

# So many characters of a text tell it from others.
_SHOWN = 60


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What each generated token rests on: a weight for each token of the prompt, layer by layer.

    Of one prompt the axes are as below; of several there is a leading batch axis, `prompt_tokens` and
    `generated_tokens` are tuples with one entry for each prompt, prompts are padded on the left with weight 0 and
    `generation[i]` gives the i-th without padding. With n generated and m prompt tokens:

    Attributes:
        values: float32 [n, m, layers], M of the definitions: `values[i, :, l]` is the row, up to layer l + 1, at the
            position whose output *is* generated token i, over the prompt.
        among_generated: float32 [n, n, layers], the rest of these rows, which lies on generated tokens:
            `among_generated[i, k, l]` is the share of generated token k.
        prompt_tokens: the tokens of the prompt.
        generated_tokens: the tokens that were written.
        model: the model's id.
        method: the method's name.
        options: every option of the method with the value used.
        own: where the rows are relative to the receptive field, the raw share of each row's own token, float32
            [n, layers]; else None.
        facts: what else belongs beside it.
        seconds: time of the generation with the method.
    """

    values: NDArray[np.float32]
    among_generated: NDArray[np.float32]
    prompt_tokens: Words | tuple[Words, ...]
    generated_tokens: Words | tuple[Words, ...]
    model: str
    method: str
    options: Mapping[str, Any]
    own: NDArray[np.float32] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __repr__(self) -> str:
        if not isinstance(self.prompt_tokens, Words) or not isinstance(self.generated_tokens, Words):
            told = f"{len(self)} prompts of at most {self.values.shape[2]} tokens"
        else:
            text = text_of(self.prompt_tokens + self.generated_tokens)
            written, prompt = self.generated_tokens.length, self.prompt_tokens.length
            told = f"{text[:_SHOWN]!r}, {written} tokens after a prompt of {prompt}"
        return f"Generation({told}, {self.method}, {self.values.shape[-1]} layers, {printable(self.model)})"

    def __len__(self) -> int:
        return len(self.prompt_tokens) if isinstance(self.prompt_tokens, tuple) else 1

    def __getitem__(self, number: int) -> "Generation":
        """The generation of one prompt of several, without padding."""
        if isinstance(self.prompt_tokens, Words) or isinstance(self.generated_tokens, Words):
            if number not in (0, -1):
                raise OptionError(f"Expected 0, as there is one prompt, got {number}.")
            return self
        prompt, written = self.prompt_tokens[number], self.generated_tokens[number]
        n, m = written.length, prompt.length
        start = self.values.shape[2] - m
        return replace(
            self,
            values=self.values[number, :n, start:],
            among_generated=self.among_generated[number, :n, :n],
            prompt_tokens=prompt,
            generated_tokens=written,
            own=None if self.own is None else self.own[number, :n],
        )

    def shaded(self, number: int, *, special: bool = True, stop_words: Iterable[str] = ()) -> ShadedText:
        """What one generated token rests on, over the prompt and what was written before it.

        Args:
            number: which generated token, 0 for the first, −1 for the last.
            special: show special tokens.
            stop_words: words to show without a shade; what is not shown is said below, with its share of the weight.

        Raises:
            OptionError: no such token, or several prompts: take `generation[0]`.
        """
        prompt, written = self._one_prompt()
        number = whole_number("the generated token", number, -written.length, written.length - 1) % written.length
        words, place = prompt + written, prompt.length + number
        weights = self._whole_rows()[number, :, -1]
        return ShadedText(
            words,
            weights,
            asked=(place - 1, place),
            own=float(weights[place - 1] if self.own is None else self.own[number, -1]),
            hidden=hide(words, special=not special, stop_words=stop_words),
            title=f"What “{labels_of(words)[place].text}” rests on",
            caption=caption(self.method, self.options, self.model),
        )

    def sheet(
        self, layer: int = -1, *, generated: bool = False, special: bool = True, stop_words: Iterable[str] = ()
    ) -> Sheet:
        """A row for each generated token, a column for each token of the prompt.

        Args:
            layer: up to which layer, 1 for the first, −1 for the last.
            generated: a column for each generated token, too, instead of their sum.
            special, stop_words: as for `shaded`.
        """
        prompt, written = self._one_prompt()
        index = check_layer("layer", layer, self.values.shape[2])
        words = prompt + written if generated else prompt
        return Sheet(
            words,
            self._whole_rows()[:, : words.length, index],
            [label.text for label in labels_of(written)],
            rest=None if generated else np.nansum(self.among_generated[:, :, index], axis=1),
            rest_name="generated",
            own_tokens=list(range(prompt.length - 1, prompt.length - 1 + written.length)),
            own=None if self.own is None else float(np.mean(self.own[:, index])),
            hidden=hide(words, special=not special, stop_words=stop_words),
            title="What each generated token rests on",
            caption=caption(self.method, self.options, self.model),
        )

    def _one_prompt(self) -> tuple[Words, Words]:
        """The tokens of the prompt and the written ones; OptionError where there are several prompts."""
        if not isinstance(self.prompt_tokens, Words) or not isinstance(self.generated_tokens, Words):
            raise OptionError(f"Expected one prompt to draw, got {len(self)}: take generation[0].")
        return self.prompt_tokens, self.generated_tokens

    def _whole_rows(self) -> NDArray[np.float64]:
        """Rows over prompt and generated tokens, [n, m + n, layers]; NaN for what came later."""
        rows = np.concatenate([self.values, self.among_generated], axis=1, dtype=np.float64)
        later = np.arange(rows.shape[1]) >= self.values.shape[1] + np.arange(len(rows))[:, None]
        rows[later] = np.nan
        return rows

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the sheet as .png, .pdf or .svg; options as for `sheet`."""
        return self.sheet(**options).save(path)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: `values` [n, m, layers] and `among_generated` [n, n, layers] as nested lists."""
        prompt, written = self._one_prompt()
        return {
            "prompt_tokens": list(prompt.strings),
            "prompt_ids": list(prompt.ids),
            "generated_tokens": list(written.strings),
            "generated_ids": list(written.ids),
            "values": self.values.tolist(),
            "among_generated": self.among_generated.tolist(),
            "own": None if self.own is None else self.own.tolist(),
            "model": self.model,
            "method": self.method,
            "options": plain_options(self.options),
            "departures_from_paper": departures_from_paper(TEXT_METHODS[self.method], self.options),
            "facts": dict(self.facts),
            "seconds": round(self.seconds, 4),
        }

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        found = [self[number].sheet()._repr_mimebundle_(include, exclude) for number in range(len(self))]
        return {kind: "\n".join(one[kind] for one in found) for kind in found[0]}


def explain_generation(
    model: str | Path | nn.Module,
    inputs: Any,
    *,
    tokenizer: Any = None,
    method: str = "rollout",
    name: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Generation:
    """Let a model write, and tell what each token that it writes rests on.

    Args:
        model: a causal language model of `transformers`, its id or folder.
        inputs: the prompt, as the tokenizer makes it (input_ids, attention_mask), ids [batch, tokens], or a text.
        tokenizer: its tokenizer; by default the one saved beside it. Without one, tokens are told by their numbers.
        method: "rollout", "attention", "flow" or "gae".
        name: what to call the model; by default the id that it was loaded by.
        trust_remote_code: run Python code that a model by name brings along; without it such a model is refused.
        options: as `model.generate` takes them, such as max_new_tokens=20 or do_sample=True; and the method's own, such
            as causal="raw" (by default "receptive_field"), head_fusion="max", or preset="paper".

    Raises:
        VitflowError: the model or an option is wrong; the message says which and what to do.
    """
    asked = {name: options[name] for name in options if any(one.accepts(name) for one in TEXT_METHODS.values())}
    generate = {name: value for name, value in options.items() if name not in asked}
    chosen, used = text_method(method, asked)
    used = for_kind(used, decoder=True)
    if isinstance(model, nn.Module):
        model = unwrap(model)
    else:
        model, own_tokenizer = load_language_model(model, trust_remote_code=trust_remote_code)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    refuse_generation(model, generate)
    refuse_looking_ahead(model)
    arguments, tokenizer = arguments_of(inputs, tokenizer, model, generate)
    started = time.perf_counter()
    start = arguments["input_ids"].shape[1]
    with evaluating(model), torch.no_grad():
        if method == "rollout":
            sequences, rows, own = follow(model, arguments, used)
        else:
            sequences = write(model, arguments)
    prompts, written = split(sequences, arguments, tokenizer, model)
    n = sequences.shape[1] - start
    if method != "rollout":
        rows, own = _taught(model, prompts, written, (n, start), chosen, used)
    values = array_of(rows.permute(0, 2, 3, 1))  # [batch, rows, tokens, layers]
    beside = np.zeros((len(values), n, n, values.shape[-1]), np.float32)
    beside[:, :, : n - 1] = values[:, :, start:]  # the last token is written, and never read
    found = Generation(
        values=values[:, :, :start],
        among_generated=beside,
        prompt_tokens=tuple(prompts),
        generated_tokens=tuple(written),
        model=model_id(model) if name is None else check_name(name),
        method=method,
        options=used,
        own=None if own is None else array_of(own.permute(0, 2, 1)),
        seconds=time.perf_counter() - started,
    )
    return found[0] if len(found) == 1 else found


def _taught(
    model: nn.Module,
    prompts: Sequence[Words],
    written: Sequence[Words],
    shape: tuple[int, int],
    method: Method,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Rows of a method by one pass over each finished text, as `follow` gives those of rollout."""
    n, start = shape
    device = device_of(model)
    rows, shares = [], []
    for prompt, new in zip(prompts, written, strict=True):
        text = torch.tensor([(prompt + new).ids[:-1]], device=device)
        places = range(prompt.length - 1, text.shape[1])
        readout = torch.eye(text.shape[1], device=device)[list(places)]
        targets = list(zip(places, new.ids, strict=True))
        inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
        read = read_rows(model, inputs, readout, method, options, targets=targets)
        left, below = start - prompt.length, n - new.length
        rows.append(torch.nn.functional.pad(read.rows.float(), (left, below, 0, below)))
        shares.append(None if read.own is None else torch.nn.functional.pad(read.own.float(), (0, below)))
    told = [one for one in shares if one is not None]
    return torch.stack(rows), torch.stack(told) if told else None
