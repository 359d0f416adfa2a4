"""A text that a language model writes: what each of its tokens rests on."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import OptionError, UnsupportedModelError, printable
from vitflow.explaining.asking.method_table import Method
from vitflow.explaining.progress import tracking
from vitflow.explaining.text import views
from vitflow.explaining.text.method_table import TEXT_METHODS, for_kind, text_method
from vitflow.explaining.text.read_rows import read_rows
from vitflow.explaining.text.wording import words_of
from vitflow.methods.sequence.growing_rollout import GrowingRollout
from vitflow.methods.sequence.layout import Words
from vitflow.models.anatomy import unwrap
from vitflow.models.facts import check_name, model_id
from vitflow.models.languages import (
    check_text,
    decoder_of,
    generation_setting,
    load_language_model,
    mask_of,
    positions_of,
    reading,
    reads_text,
    refuse_generation,
    tokenizer_beside,
    tokenizer_of,
)
from vitflow.recording.causality import is_causal
from vitflow.recording.isolation import Hook, evaluating
from vitflow.recording.writing import follow_writing
from vitflow.words.labels import text_of
from vitflow.words.shaded import ShadedText
from vitflow.words.sheet import Sheet

# Tokens to make room for where it is not said how many are written at most.
_ROOM = 64
# Matrices are made for so many at first: the room of what is never written would be memory for nothing.
_MOST_ROOM = 1024
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
        return views.shade_generated(self, number, special=special, stop_words=stop_words)

    def sheet(
        self, layer: int = -1, *, generated: bool = False, special: bool = True, stop_words: Iterable[str] = ()
    ) -> Sheet:
        """A row for each generated token, a column for each token of the prompt.

        Args:
            layer: up to which layer, 1 for the first, −1 for the last.
            generated: a column for each generated token, too, instead of their sum.
            special, stop_words: as for `shaded`.
        """
        return views.sheet_of_generation(self, layer, generated=generated, special=special, stop_words=stop_words)

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the sheet as .png, .pdf or .svg; options as for `sheet`."""
        return self.sheet(**options).save(path)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: `values` [n, m, layers] and `among_generated` [n, n, layers] as nested lists."""
        prompt, written = views.one_prompt(self)
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
            "options": views.plain_options(self.options),
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
    _refuse_looking_ahead(model)
    arguments, tokenizer = _arguments(inputs, tokenizer, model, generate)
    started = time.perf_counter()
    start = arguments["input_ids"].shape[1]
    with evaluating(model), torch.no_grad():
        if method == "rollout":
            sequences, rows, own = _follow(model, arguments, used)
        else:
            sequences = _write(model, arguments)
    prompts, written = _split(sequences, arguments, tokenizer, model)
    n = sequences.shape[1] - start
    if method != "rollout":
        rows, own = _taught(model, prompts, written, (n, start), chosen, used)
    values = _array(rows.permute(0, 2, 3, 1))  # [batch, rows, tokens, layers]
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
        own=None if own is None else _array(own.permute(0, 2, 1)),
        seconds=time.perf_counter() - started,
    )
    return found[0] if len(found) == 1 else found


def _refuse_looking_ahead(model: nn.Module) -> None:
    """Raise UnsupportedModelError where a token moves what is made of those before it."""
    if not is_causal(decoder_of(model)):
        raise UnsupportedModelError(
            f"Expected a model whose tokens see only those before them, got {type(model).__name__}, in which a later "
            "token moves earlier ones: it writes no text from left to right. Use vitflow.explain_text to see what it "
            "reads."
        )


def _arguments(
    inputs: Any, tokenizer: Any, model: nn.Module, generate: Mapping[str, Any]
) -> tuple[dict[str, Any], Any]:
    """The arguments of `generate` for these prompts, and what tells their words."""
    several = isinstance(inputs, Sequence) and not isinstance(inputs, str)
    if isinstance(inputs, str) or (several and inputs and all(isinstance(one, str) for one in inputs)):
        tokenizer = tokenizer_of(model, tokenizer)
        given: Any = _padded([_numbers(tokenizer, text) for text in (inputs if several else [inputs])], tokenizer)
    else:
        given = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
        tokenizer = tokenizer_beside(model) if tokenizer is None else tokenizer_of(model, tokenizer)
    arguments = dict(given) if isinstance(given, Mapping) else {}
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise OptionError(
            "Expected a text, or what its tokenizer makes of it with return_tensors='pt' (input_ids [batch, tokens] "
            f"and attention_mask), got {type(inputs).__name__}."
        )
    device = next((parameter.device for parameter in model.parameters()), ids.device)
    arguments = {**arguments, **generate}
    if arguments.get("attention_mask") is None:
        arguments["attention_mask"] = mask_of(model, generate, ids)
    if generation_setting(model, generate, "stop_strings") is not None and "tokenizer" not in arguments:
        arguments["tokenizer"] = tokenizer_of(model, tokenizer)
    arguments = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in arguments.items()}
    _check_mask(arguments["attention_mask"], ids)
    _check_room(model, generate, ids)
    return arguments, tokenizer


def _numbers(tokenizer: Any, text: str) -> list[int]:
    check_text(text)
    numbers: list[int] = tokenizer(text)["input_ids"]
    if not numbers:
        raise OptionError(f"Expected prompts of at least one token each, got {text!r}.")
    return numbers


def _padded(texts: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, Tensor]:
    """Numbers of one length, padded on the left; of what makes no difference, as the mask leaves it out."""
    longest, pad = max(map(len, texts)), getattr(tokenizer, "pad_token_id", None)
    pad = getattr(tokenizer, "eos_token_id", None) if pad is None else pad
    return {
        "input_ids": torch.tensor([[pad or 0] * (longest - len(text)) + list(text) for text in texts]),
        "attention_mask": torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts]),
    }


def _check_mask(mask: Any, ids: Tensor) -> None:
    """Raise OptionError unless padding stands on the left of each prompt, and nowhere else."""
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise OptionError(f"Expected an attention_mask of the prompts' shape {tuple(ids.shape)}, got {shape}.")
    seen = mask.bool()
    if not bool(seen[:, -1].all()):
        raise OptionError(
            "Expected prompts that are padded on the left, as the next token follows their last, got padding on the "
            "right: pass padding_side='left' to the tokenizer."
        )
    if bool((seen[:, :-1] & ~seen[:, 1:]).any()):
        raise OptionError(
            "Expected an attention_mask whose zeros all stand on the left of a prompt, got zeros between its tokens: "
            "leave these tokens out of the prompt."
        )


def _check_room(model: nn.Module, generate: Mapping[str, Any], ids: Tensor) -> None:
    """Raise OptionError where more shall be written than the model has positions for."""
    limit, start = positions_of(model), ids.shape[1]
    steps, length = (generation_setting(model, generate, name) for name in ("max_new_tokens", "max_length"))
    steps = length - start if steps is None and isinstance(length, int) else steps
    if limit is None or not isinstance(steps, int) or start + steps - 1 <= limit:
        return
    most = limit - start + 1  # the last one is written, and never read
    raise OptionError(
        f"Expected {f'at most {most} tokens to write after' if most > 0 else 'a shorter text than'} a prompt of "
        f"{start}, as {type(model).__name__} has positions for {limit}, got {steps}: lower max_new_tokens."
    )


def _write(model: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
    """The prompts with what the model wrote after them: numbers [batch, tokens]."""
    ids = arguments["input_ids"]

    def check(args: Any, kwargs: Any) -> None:
        text = reads_text(args, kwargs)
        if arguments.get("past_key_values") is None and text is not None and text.shape[1] > most[0]:
            raise UnsupportedModelError(
                f"{type(model).__name__} reads {text.shape[1]} tokens where the text has {most[0]}: it adds its own to "
                "tell what comes next, and generation is followed only where the last token of the text tells it."
            )
        most[0] += 1

    most = [ids.shape[1]]
    hook = Hook(model, check, before=True)
    try:
        with reading(model, ids):
            output = model.generate(**arguments)  # type: ignore[operator]
    finally:
        hook.remove()
    sequences: Tensor = output if isinstance(output, Tensor) else output.sequences
    return sequences


def _follow(
    model: nn.Module, arguments: Mapping[str, Any], options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Write, with a rollout that grows: what was written, rows [batch, layers, rows, tokens], own shares."""
    start = arguments["input_ids"].shape[1]
    steps = int(generation_setting(model, arguments, "max_new_tokens") or _ROOM)
    of_rollout = {name: options[name] for name in ("discard_ratio", "residual", "start_layer", "causal")}
    grown = GrowingRollout(start + min(steps, _MOST_ROOM), **of_rollout)
    with tracking("generation", steps) as progress:
        follow = follow_writing(
            model,
            grown,
            head_fusion=options["head_fusion"],
            value_weighted=options["value_weighted"],
            visible=options["causal"] == "receptive_field" or bool(options["discard_ratio"]),
            progress=progress,
        )
        with follow:
            sequences = _write(model, arguments)
    read = sequences.shape[1] - 1  # a pass more may have run before it was seen that all texts have ended
    rows, own = grown.rows(start - 1, read)
    return sequences, rows[..., :read], own


def _split(
    sequences: Tensor, arguments: Mapping[str, Any], tokenizer: Any, model: nn.Module
) -> tuple[list[Words], list[Words]]:
    """The words of each prompt without its padding, and those written after it, up to the end of the text."""
    ids, mask = arguments["input_ids"], arguments["attention_mask"]
    ended = _ending(arguments, model)
    prompts, written = [], []
    for index, sequence in enumerate(sequences.tolist()):
        source = index * len(ids) // len(sequences)  # where several were asked for after each prompt
        start = ids.shape[1] - int(mask[source].sum())
        first, most = ids.shape[1] + 1, len(sequence)
        last = next((stop for stop in range(first, most) if ended(sequence[start:stop])), most)
        words = words_of(tokenizer, sequence[start:last])
        prompts.append(words[: ids.shape[1] - start])
        written.append(words[ids.shape[1] - start :])
    return prompts, written


def _ending(arguments: Mapping[str, Any], model: nn.Module) -> Callable[[list[int]], bool]:
    """Tells whether a text ends with its last token, as `generate` sees it."""
    ends, strings = (generation_setting(model, arguments, name) for name in ("eos_token_id", "stop_strings"))
    numbers = torch.as_tensor([] if ends is None else ends).flatten().tolist()
    if strings is None:
        return lambda text: text[-1] in numbers
    from transformers import StopStringCriteria

    criterion = StopStringCriteria(arguments["tokenizer"], strings)
    device = arguments["input_ids"].device
    return lambda text: text[-1] in numbers or bool(criterion(torch.tensor([text], device=device), None)[0])


def _taught(
    model: nn.Module,
    prompts: Sequence[Words],
    written: Sequence[Words],
    shape: tuple[int, int],
    method: Method,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Rows of a method by one pass over each finished text, as `_follow` gives those of rollout."""
    n, start = shape
    device = next((parameter.device for parameter in model.parameters()), None)
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


def _array(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return array
