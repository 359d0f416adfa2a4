"""Text generation: arguments of `generate`, generated sequences, and arguments of a pass over a finished text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import OptionError, UnsupportedModelError
from vitflow.models.calls import reads_cache, reads_text
from vitflow.models.parts import decoder_of
from vitflow.progress import tracking
from vitflow.recording.isolation import Hook, device_of
from vitflow.recording.probing import is_causal
from vitflow.text import languages
from vitflow.text.image_tokens import image_token
from vitflow.text.languages import generation_setting, reading
from vitflow.text.words import Words, words_of

_DEFAULT_STEPS = 20  # max_new_tokens of transformers, for the display of progress


def refuse_not_causal(model: nn.Module) -> None:
    """Raise UnsupportedModelError if the model is not causal.

    Vision-language models are accepted: their prompt may use bidirectional attention, but generation is causal.
    """
    if image_token(getattr(model, "config", None)) is None and not is_causal(decoder_of(model)):
        raise not_causal(model)


def not_causal(model: nn.Module) -> UnsupportedModelError:
    """Return the error for a model that is not causal."""
    return UnsupportedModelError(
        f"Generation requires a causal model; in {type(model).__name__}, later tokens change earlier ones. Use "
        "vitflow.text.explain_text to explain how it reads a text."
    )


def call_generate(model: nn.Module, arguments: Mapping[str, Any], before: Callable[[Any, Any], None]) -> Tensor:
    """Return the sequences of `model.generate`, ids [batch, tokens]; call `before` before each forward pass."""
    hook = Hook(model, before, before=True)
    try:
        with reading(model, arguments.get("input_ids")):
            output = model.generate(**arguments)  # type: ignore[operator]
    finally:
        hook.remove()
    sequences: Tensor = output if isinstance(output, Tensor) else output.sequences
    return sequences


def generate_tokens(model: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
    """Generate text; return prompts and generated tokens, ids [batch, tokens]."""
    most = arguments["input_ids"].shape[1]
    steps = generation_setting(model, arguments, "max_new_tokens")

    def check(args: Any, kwargs: Any) -> None:
        nonlocal most
        text = reads_text(args, kwargs)
        if reads_cache(arguments) is None and text is not None and text.shape[1] > most:
            raise UnsupportedModelError(
                f"{type(model).__name__} reads {text.shape[1]} tokens, but the text has {most}: models that insert "
                "further tokens to predict the next one are not supported."
            )
        most += 1
        progress(1)

    with tracking("generation", int(steps or _DEFAULT_STEPS)) as progress:
        return call_generate(model, arguments, check)


def split(
    sequences: Tensor, arguments: Mapping[str, Any], tokenizer: Any, model: nn.Module
) -> tuple[list[Words], list[Words]]:
    """Split sequences into the words of each prompt without padding, and the generated words up to the end of text."""
    ids, mask = arguments["input_ids"], arguments["attention_mask"]
    length_of = text_length(arguments, model)
    prompts, generated = [], []
    for index, sequence in enumerate(sequences.tolist()):
        source = index * len(ids) // len(sequences)  # num_return_sequences may be above 1
        prompt = int(mask[source].sum())
        text = sequence[ids.shape[1] - prompt :]
        words = words_of(tokenizer, text[: length_of(text, prompt)])
        prompts.append(words[:prompt])
        generated.append(words[prompt:])
    return prompts, generated


def text_length(arguments: Mapping[str, Any], model: nn.Module) -> Callable[[list[int], int], int]:
    """Return a function of a text and the length of its prompt: the number of tokens up to the end of text.

    The end of text is found by the stopping criteria of `generate`.
    """
    eos, strings = (generation_setting(model, arguments, name) for name in ("eos_token_id", "stop_strings"))
    eos_ids = torch.as_tensor([] if eos is None else eos).flatten().tolist()
    criterion, device = None, device_of(model)
    if strings is not None:
        from transformers import StopStringCriteria

        criterion = StopStringCriteria(arguments["tokenizer"], strings)

    def length_of(text: list[int], prompt: int) -> int:
        for length in range(prompt + 1, len(text)):
            if text[length - 1] in eos_ids:
                return length
            if criterion is not None and bool(criterion(torch.tensor([text[:length]], device=device), None)[0]):
                return length
        return len(text)

    return length_of


# arguments that describe the text
_OF_THE_TEXT = ("input_ids", "attention_mask", "position_ids", "inputs_embeds")


def arguments_of(
    inputs: Any, tokenizer: Any, model: nn.Module, generate: Mapping[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Return the arguments of `generate` for prompts, and the tokenizer."""
    encoded = languages.has_encoder(model)
    several = isinstance(inputs, Sequence) and not isinstance(inputs, str)
    if isinstance(inputs, str) or (several and inputs and all(isinstance(text, str) for text in inputs)):
        tokenizer = languages.tokenizer_of(model, tokenizer)
        texts = [_ids(tokenizer, text) for text in (inputs if several else [inputs])]
        given: Any = _padded(texts, tokenizer, left=not encoded)
    else:
        is_image = isinstance(inputs, Tensor) and inputs.ndim == 4
        given = {"pixel_values" if is_image else "input_ids": inputs} if isinstance(inputs, Tensor) else inputs
        tokenizer = languages.saved_tokenizer(model) if tokenizer is None else languages.tokenizer_of(model, tokenizer)
    arguments = dict(given) if isinstance(given, Mapping) else {}
    device = device_of(model)
    if encoded and "input_ids" not in arguments and isinstance(arguments.get("pixel_values"), Tensor):
        _check_length(model, generate, _initial_length(generate), "a beginning")
        return _on(device, {**arguments, **generate}), tokenizer
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise OptionError(
            "Expected a text, or tokenizer output with return_tensors='pt' (input_ids [batch, tokens] and "
            f"attention_mask), got {type(inputs).__name__}."
        )
    arguments = {**arguments, **generate}
    if arguments.get("attention_mask") is None:
        arguments["attention_mask"] = languages.mask_of(model, generate, ids)
    if languages.generation_setting(model, generate, "stop_strings") is not None and "tokenizer" not in arguments:
        arguments["tokenizer"] = languages.tokenizer_of(model, tokenizer)
    arguments = _on(device, arguments)
    _check_mask(arguments["attention_mask"], ids, left=not encoded)
    if encoded:
        _check_length(model, generate, _initial_length(generate), "a beginning")
    else:
        _check_length(model, generate, ids.shape[1], "a prompt")
    return arguments, tokenizer


def extra_inputs(
    model: nn.Module, arguments: Mapping[str, Any], prompt: int, length: int, generated: int
) -> dict[str, Tensor]:
    """Return the arguments of a forward pass over a generated text besides its ids: pixels, sizes, token types.

    Args:
        model: vision-language or language model.
        arguments: arguments of `generate`.
        prompt: index of the prompt.
        length: number of tokens of the prompt without padding.
        generated: number of generated tokens; for PaliGemma they have the token type of the suffix.
    """
    shape = arguments["input_ids"].shape
    tensors = {name: arguments[name] for name in arguments if name not in _OF_THE_TEXT}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    of_tokens = [name for name, value in tensors.items() if value.shape == shape and not value.is_floating_point()]
    others = {name: value for name, value in tensors.items() if name not in of_tokens}
    if others and shape[0] > 1:
        raise OptionError(f"{', '.join(others)} require a single prompt, got {shape[0]}.")
    token_type = 1 if getattr(getattr(model, "config", None), "model_type", "") == "paligemma" else 0
    for name in of_tokens:
        types = tensors[name][prompt : prompt + 1, shape[1] - length :]
        others[name] = torch.nn.functional.pad(types, (0, generated), value=token_type)
    return others


def _on(device: torch.device, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _initial_length(generate: Mapping[str, Any]) -> int:
    """Return the number of initial tokens of the decoder of an encoder-decoder model."""
    ids = generate.get("decoder_input_ids")
    return ids.shape[1] if isinstance(ids, Tensor) else 1


def _ids(tokenizer: Any, text: str) -> list[int]:
    languages.check_text(text)
    ids: list[int] = tokenizer(text)["input_ids"]
    if not ids:
        raise OptionError(f"Expected prompts of at least one token each, got {text!r}.")
    return ids


def _padded(texts: Sequence[Sequence[int]], tokenizer: Any, *, left: bool) -> dict[str, Tensor]:
    """Pad token ids to the same length on one side; without a padding token, any id is used and masked."""
    longest, pad = max(map(len, texts)), getattr(tokenizer, "pad_token_id", None)
    pad = getattr(tokenizer, "eos_token_id", None) if pad is None else pad

    def filled(text: Sequence[int], filling: int) -> list[int]:
        rest = [filling] * (longest - len(text))
        return [*rest, *text] if left else [*text, *rest]

    return {
        "input_ids": torch.tensor([filled(text, pad or 0) for text in texts]),
        "attention_mask": torch.tensor([filled([1] * len(text), 0) for text in texts]),
    }


def _check_mask(mask: Any, ids: Tensor, *, left: bool) -> None:
    """Raise OptionError unless the mask has the shape of the ids and, if `left`, padding is on the left only."""
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise OptionError(f"Expected an attention_mask of the prompts' shape {tuple(ids.shape)}, got {shape}.")
    seen = mask.bool()
    if not left:
        return
    if not bool(seen[:, -1].all()):
        raise OptionError(
            "Expected prompts padded on the left, got padding on the right: pass padding_side='left' to the tokenizer."
        )
    if bool((seen[:, :-1] & ~seen[:, 1:]).any()):
        raise OptionError(
            "Expected an attention_mask with zeros only on the left of a prompt, got zeros between its tokens: remove "
            "these tokens from the prompt."
        )


def _check_length(model: nn.Module, generate: Mapping[str, Any], start: int, what: str) -> None:
    """Raise OptionError if the requested tokens after `start` tokens exceed the model's positions."""
    limit = languages.positions_of(model)
    steps, length = (languages.generation_setting(model, generate, name) for name in ("max_new_tokens", "max_length"))
    steps = length - start if steps is None and isinstance(length, int) else steps
    if limit is None or not isinstance(steps, int) or start + steps - 1 <= limit:
        return
    most = limit - start + 1  # the last generated token is not an input
    raise OptionError(
        f"Expected {f'at most {most} new tokens after' if most > 0 else 'a shorter text than'} {what} of "
        f"{start}, as {type(model).__name__} has positions for {limit}, got {steps}: lower max_new_tokens."
    )
