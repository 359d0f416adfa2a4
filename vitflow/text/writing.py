"""A model writes: what it wrote after each prompt, with the rollout that grew meanwhile."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import OptionError, UnsupportedModelError
from vitflow.explaining.progress import tracking
from vitflow.methods.growing_rollout import GrowingRollout
from vitflow.models import languages
from vitflow.models.languages import decoder_of, generation_setting, reading, reads_text
from vitflow.recording.attention_kinds import refuse_other_layers
from vitflow.recording.isolation import Hook, device_of
from vitflow.recording.probing import is_causal
from vitflow.recording.writing import follow_writing
from vitflow.text.image_tokens import image_token
from vitflow.text.labels import words_of
from vitflow.text.layout import Words

# Tokens to make room for where it is not said how many are written at most.
_ROOM = 64
# Matrices are made for so many at first: the room of what is never written would be memory for nothing.
_MOST_ROOM = 1024


def refuse_looking_ahead(model: nn.Module) -> None:
    """Raise UnsupportedModelError where a token moves what is made of those before it.

    Of a model that sees, the prompt's own tokens may see both ways; what it writes follows them all the same.
    """
    if image_token(getattr(model, "config", None)) is None and not is_causal(decoder_of(model)):
        raise looking_ahead(model)


def looking_ahead(model: nn.Module) -> UnsupportedModelError:
    """What is raised where a token sees later ones."""
    return UnsupportedModelError(
        f"Expected a model whose tokens see only those before them, got {type(model).__name__}, in which a later "
        "token moves earlier ones: it writes no text from left to right. Use vitflow.text.explain_text to see what it "
        "reads."
    )


def generated(model: nn.Module, arguments: Mapping[str, Any], look: Callable[[Any, Any], None]) -> Tensor:
    """What `model.generate` gives, numbers [batch, tokens]; `look` is called before each forward pass."""
    hook = Hook(model, look, before=True)
    try:
        with reading(model, arguments.get("input_ids")):
            output = model.generate(**arguments)  # type: ignore[operator]
    finally:
        hook.remove()
    sequences: Tensor = output if isinstance(output, Tensor) else output.sequences
    return sequences


def write(model: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
    """The prompts with what the model wrote after them: numbers [batch, tokens]."""
    most = arguments["input_ids"].shape[1]

    def check(args: Any, kwargs: Any) -> None:
        nonlocal most
        text = reads_text(args, kwargs)
        if arguments.get("past_key_values") is None and text is not None and text.shape[1] > most:
            raise UnsupportedModelError(
                f"{type(model).__name__} reads {text.shape[1]} tokens where the text has {most}: it adds its own to "
                "tell what comes next, and generation is followed only where the last token of the text tells it."
            )
        most += 1

    return generated(model, arguments, check)


def follow(
    model: nn.Module, arguments: Mapping[str, Any], options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Write, with a rollout that grows: what was written, rows [batch, layers, rows, tokens], own shares."""
    refuse_other_layers(model, "rollout")
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
            sequences = write(model, arguments)
    read = sequences.shape[1] - 1  # a pass more may have run before it was seen that all texts have ended
    rows, own = grown.rows(start - 1, read)
    return sequences, rows[..., :read], own


def split(
    sequences: Tensor, arguments: Mapping[str, Any], tokenizer: Any, model: nn.Module
) -> tuple[list[Words], list[Words]]:
    """The words of each prompt without its padding, and those written after it, up to the end of the text."""
    ids, mask = arguments["input_ids"], arguments["attention_mask"]
    ended = ending(arguments, model)
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


def ending(arguments: Mapping[str, Any], model: nn.Module) -> Callable[[list[int]], bool]:
    """Tells whether a text ends with its last token, as `generate` sees it."""
    ends, strings = (generation_setting(model, arguments, name) for name in ("eos_token_id", "stop_strings"))
    numbers = torch.as_tensor([] if ends is None else ends).flatten().tolist()
    if strings is None:
        return lambda text: text[-1] in numbers
    from transformers import StopStringCriteria

    criterion = StopStringCriteria(arguments["tokenizer"], strings)
    device = device_of(model)
    return lambda text: text[-1] in numbers or bool(criterion(torch.tensor([text], device=device), None)[0])


# Arguments that tell of the text itself.
_OF_THE_TEXT = ("input_ids", "attention_mask", "position_ids", "inputs_embeds")


def arguments_of(
    inputs: Any, tokenizer: Any, model: nn.Module, generate: Mapping[str, Any]
) -> tuple[dict[str, Any], Any]:
    """The arguments of `generate` for these prompts, and what tells their words."""
    encoded = languages.has_encoder(model)
    several = isinstance(inputs, Sequence) and not isinstance(inputs, str)
    if isinstance(inputs, str) or (several and inputs and all(isinstance(one, str) for one in inputs)):
        tokenizer = languages.tokenizer_of(model, tokenizer)
        texts = [_numbers(tokenizer, text) for text in (inputs if several else [inputs])]
        given: Any = _padded(texts, tokenizer, left=not encoded)
    else:
        seen = isinstance(inputs, Tensor) and inputs.ndim == 4
        given = {"pixel_values" if seen else "input_ids": inputs} if isinstance(inputs, Tensor) else inputs
        tokenizer = languages.saved_tokenizer(model) if tokenizer is None else languages.tokenizer_of(model, tokenizer)
    arguments = dict(given) if isinstance(given, Mapping) else {}
    device = device_of(model)
    if encoded and "input_ids" not in arguments and isinstance(arguments.get("pixel_values"), Tensor):
        _check_room(model, generate, _began(generate), "a beginning")
        return _on(device, {**arguments, **generate}), tokenizer
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise OptionError(
            "Expected a text, or what its tokenizer makes of it with return_tensors='pt' (input_ids [batch, tokens] "
            f"and attention_mask), got {type(inputs).__name__}."
        )
    arguments = {**arguments, **generate}
    if arguments.get("attention_mask") is None:
        arguments["attention_mask"] = languages.mask_of(model, generate, ids)
    if languages.generation_setting(model, generate, "stop_strings") is not None and "tokenizer" not in arguments:
        arguments["tokenizer"] = languages.tokenizer_of(model, tokenizer)
    arguments = _on(device, arguments)
    _check_mask(arguments["attention_mask"], ids, left=not encoded)
    if encoded:
        _check_room(model, generate, _began(generate), "a beginning")
    else:
        _check_room(model, generate, ids.shape[1], "a prompt")
    return arguments, tokenizer


def extra_inputs(model: nn.Module, arguments: Mapping[str, Any], length: int, written: int) -> dict[str, Tensor]:
    """What a forward pass over a finished text is given beside its numbers: pixels, their sizes, and kinds of tokens.

    Args:
        model: what reads.
        arguments: those of its `generate`, of one prompt.
        length: tokens of the prompt without its padding.
        written: tokens that follow it; of PaliGemma these are the suffix, of others plain text.
    """
    shape = arguments["input_ids"].shape
    tensors = {name: one for name, one in arguments.items() if isinstance(one, Tensor) and name not in _OF_THE_TEXT}
    if tensors and shape[0] > 1:
        raise OptionError(f"Expected one prompt where {', '.join(tensors)} are given, got {shape[0]}.")
    kind = 1 if getattr(getattr(model, "config", None), "model_type", "") == "paligemma" else 0
    return {
        name: torch.nn.functional.pad(one[:, shape[1] - length :], (0, written), value=kind)
        if one.shape == shape and not one.is_floating_point()
        else one
        for name, one in tensors.items()
    }


def _on(device: torch.device, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one.to(device) if isinstance(one, Tensor) else one for name, one in arguments.items()}


def _began(generate: Mapping[str, Any]) -> int:
    """With how many tokens a decoder beside an encoder begins."""
    given = generate.get("decoder_input_ids")
    return given.shape[1] if isinstance(given, Tensor) else 1


def _numbers(tokenizer: Any, text: str) -> list[int]:
    languages.check_text(text)
    numbers: list[int] = tokenizer(text)["input_ids"]
    if not numbers:
        raise OptionError(f"Expected prompts of at least one token each, got {text!r}.")
    return numbers


def _padded(texts: Sequence[Sequence[int]], tokenizer: Any, *, left: bool) -> dict[str, Tensor]:
    """Numbers of one length, padded on one side; of what makes no difference, as the mask leaves it out."""
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
    """Raise OptionError unless it fits the prompts; and if so asked, padding stands on their left and nowhere else."""
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise OptionError(f"Expected an attention_mask of the prompts' shape {tuple(ids.shape)}, got {shape}.")
    seen = mask.bool()
    if not left:
        return
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


def _check_room(model: nn.Module, generate: Mapping[str, Any], start: int, what: str) -> None:
    """Raise OptionError where more shall be written after so many tokens than the model has positions for."""
    limit = languages.positions_of(model)
    steps, length = (languages.generation_setting(model, generate, name) for name in ("max_new_tokens", "max_length"))
    steps = length - start if steps is None and isinstance(length, int) else steps
    if limit is None or not isinstance(steps, int) or start + steps - 1 <= limit:
        return
    most = limit - start + 1  # the last one is written, and never read
    raise OptionError(
        f"Expected {f'at most {most} tokens to write after' if most > 0 else 'a shorter text than'} {what} of "
        f"{start}, as {type(model).__name__} has positions for {limit}, got {steps}: lower max_new_tokens."
    )
