"""A model writes: what it wrote after each prompt, with the rollout that grew meanwhile."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError
from vitflow.explaining.asked import tracking
from vitflow.methods.sequence.growing_rollout import GrowingRollout
from vitflow.methods.sequence.layout import Words
from vitflow.models.languages import decoder_of, generation_setting, reading, reads_text
from vitflow.recording.attention_kinds import refuse_other_layers
from vitflow.recording.causality import is_causal
from vitflow.recording.isolation import Hook, device_of
from vitflow.recording.writing import follow_writing
from vitflow.text.picture_tokens import image_token
from vitflow.text.wording import words_of

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
        "token moves earlier ones: it writes no text from left to right. Use vitflow.explain_text to see what it "
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
