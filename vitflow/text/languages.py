"""Language models of transformers: loading, tokenizers and processors, and checks of texts and of `generate`."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from vitflow.errors import ModelError, OptionError, UnsupportedModelError, VitflowError, load_extra, printable
from vitflow.files import is_file, is_folder
from vitflow.models.calls import reads_cache, refuse_static
from vitflow.models.devices import device_of
from vitflow.models.hub import from_pretrained, hub_for, loading
from vitflow.models.parts import decoder_of, library_id, text_config, word_embedding
from vitflow.text.visibility import is_causal

# Supported generation modes: one token is appended per step.
_MODES = ("greedy_search", "sample")
# Tokenizer files in a model's folder.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model")
# Remedy for models that do not generate text.
_READ = "Explain how it reads a text: vitflow read TEXT, in Python vitflow.text.explain_text."
# Auto classes of the parts saved with a model.
_PARTS = {"tokenizer": "AutoTokenizer", "processor": "AutoProcessor", "image processor": "AutoImageProcessor"}


def load_language_model(name: str | Path, *, trust_remote_code: bool = False) -> tuple[nn.Module, Any]:
    """Load a language model of transformers with its tokenizer, by id or folder, in eval mode, on the CPU."""
    with hub_for(name):
        model, _ = from_pretrained(name, trust_remote_code=trust_remote_code)
        return model, _load_part("tokenizer", name, trust_remote_code)


def load_processor(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the processor saved with a model, or else its image processor."""
    processor = _load_part("processor", name, trust_remote_code)
    has_images = hasattr(processor, "image_processor")
    return processor if has_images else _load_part("image processor", name, trust_remote_code)


def _load_part(part: str, name: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer, the processor or the image processor saved with a model."""
    kind = getattr(load_extra("transformers", "Reading texts", "transformers", ModelError), _PARTS[part])
    with hub_for(name), loading(name, trust_remote_code, part) as options:
        if part == "tokenizer" and is_folder(name) and not any(is_file(Path(name) / file) for file in _TOKENIZER_FILES):
            raise OSError(f"no {', '.join(_TOKENIZER_FILES)}")  # transformers would create an empty vocabulary
        return kind.from_pretrained(name, **options)


def part_of(part: str, model: nn.Module, given: Any = None, *, required: bool = True) -> Any:
    """Return the tokenizer or processor given as argument, else the one saved with the model; None if there is none."""
    if callable(given):
        return given
    name = library_id(model) if given is None else given
    try:
        if name is None:
            raise ModelError(f"{type(model).__name__} was not loaded by name: pass {part}=.")
        return load_processor(name) if part == "processor" else _load_part(part, name)
    except ModelError:
        if required or given is not None:
            raise
        return None


def default_prompt(name: str | Path) -> str | None:
    """Return the only prompt that a bundled model supports; None for any other model."""
    return "<image> here is" if str(name) == "demo-caption" else None


def refuse_images(name: str) -> None:
    """Raise ModelError for the name of an image model of timm, or of a bundled model."""
    if name in ("demo", "demo-text", "demo-caption") or timm.is_model(name):
        raise ModelError(
            f"Expected a language model of transformers, got the image model {printable(name)}. "
            f"Use vitflow {'caption' if name == 'demo-caption' else 'explain'} IMAGE --model {printable(name)}."
        )


def check_text(text: object) -> None:
    """Raise OptionError unless `text` is a string that UTF-8 can encode."""
    if not isinstance(text, str):
        raise OptionError(f"Expected one text as a string, got {text!r:.80}.")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise OptionError(f"Expected a text in UTF-8, got “{printable(text[:80])}” with invalid characters.")


def predicts_words(model: nn.Module) -> bool:
    """Return True if a model has logits over its vocabulary at each token."""
    try:
        return model.get_output_embeddings() is not None  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return False


def has_encoder(model: nn.Module) -> bool:
    """Return True for an encoder–decoder model."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def positions_of(model: nn.Module) -> int | None:
    """Return the maximum number of positions in a model's configuration, or None."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


@contextmanager
def reading(model: nn.Module, ids: Tensor | None = None) -> Iterator[None]:
    """Translate errors of a forward pass over token ids [batch, tokens]."""
    try:
        yield
    except VitflowError:
        raise
    except (IndexError, RuntimeError, ValueError) as error:
        kind, limit = type(model).__name__, positions_of(model)
        known = getattr(word_embedding(model), "num_embeddings", None)
        if isinstance(error, ValueError) and has_encoder(model) and "inputs_embeds" in str(error):
            raise UnsupportedModelError(
                f"{kind} has an encoder and a decoder. Generate text with it (explain_generation, or vitflow read "
                "--prompt TEXT), or pass its encoder, model.get_encoder(), in Python."
            ) from error
        if ids is not None and known is not None and int(ids.max()) >= known:
            raise OptionError(
                f"Expected token ids of {kind} below {known}, got {int(ids.max())}: the tokenizer is of another model."
            ) from error
        # The position ids of some models begin at 2.
        if ids is not None and limit is not None and ids.shape[1] > limit - 4:
            raise OptionError(
                f"Expected at most {limit} tokens, the positions of {kind}, got {ids.shape[1]}: shorten the text."
            ) from error
        if ids is None:
            raise
        reason = str(error).partition("\n")[0]
        raise UnsupportedModelError(f"{kind} fails on a text of {ids.shape[1]} tokens: {reason}") from error


def generation_setting(model: nn.Module, given: Mapping[str, Any], name: str) -> Any:
    """Return a setting as `generate` does: from its arguments, their generation_config, or the model's."""
    if name in given:
        return given[name]
    configs = given.get("generation_config"), model.generation_config
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def refuse_not_causal(model: nn.Module) -> None:
    """Raise UnsupportedModelError if the model is not causal, except in the prompt of vision-language models."""
    sees = getattr(getattr(model, "config", None), "image_token_id", None) is not None
    if not sees and not is_causal(decoder_of(model)):
        raise not_causal(model)


def not_causal(model: nn.Module) -> UnsupportedModelError:
    """Return the error for a model that is not causal."""
    return UnsupportedModelError(
        f"Generation requires a causal model; in {type(model).__name__}, later tokens change earlier ones. {_READ}"
    )


def refuse_generation(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Check that rollout supports a call of `generate` with these arguments."""
    if not (hasattr(model, "can_generate") and model.can_generate()):  # type: ignore[operator]
        raise UnsupportedModelError(
            f"Expected a generative model of transformers, such as from AutoModelForCausalLM, got "
            f"{type(model).__name__} without generate. {_READ}"
        )
    for name, reason in (("guidance_scale", "omit it"), ("num_return_sequences", "call it once for each sequence")):
        if (value := generation_setting(model, given, name)) not in (None, 1):
            raise OptionError(f"{name}={value} is not supported, as it requires several texts: {reason}.")
    config: Any = copy.deepcopy(given.get("generation_config") or model.generation_config)
    config.update(**given)
    mode = str(config.get_generation_mode(given.get("assistant_model")).value)
    if mode not in _MODES:
        raise OptionError(
            f"Expected the generation mode {' or '.join(_MODES)}, got {mode}: pass num_beams=1, and omit "
            "assistant_model, prompt_lookup_num_tokens, penalty_alpha and constraints."
        )
    implementation = str(getattr(config, "cache_implementation", None) or "")
    if "static" in implementation:
        raise OptionError(f"Expected a dynamic cache, got cache_implementation={implementation!r}: omit it.")
    cache = reads_cache(given)
    refuse_static(cache)
    if cache is not None and cache.get_seq_length():
        raise OptionError(
            f"Expected the whole prompt, got a cache with {cache.get_seq_length()} tokens, which were not recorded."
        )


def generate_arguments(inputs: Any, tokenizer: Any, model: nn.Module, generate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate` for a prompt without its padding, on the device of the model."""
    if isinstance(inputs, str):
        check_text(inputs)
        inputs = torch.tensor([tokenizer(inputs)["input_ids"]], dtype=torch.long)
    if isinstance(inputs, Tensor):
        inputs = {"pixel_values" if inputs.ndim == 4 else "input_ids": inputs}
    arguments = {**(inputs if isinstance(inputs, Mapping) else {}), **generate}
    sees = has_encoder(model) and "input_ids" not in arguments
    source = arguments.get("pixel_values" if sees else "input_ids")
    if not isinstance(source, Tensor) or source.is_floating_point() != sees or (source.ndim != 2 and not sees):
        raise OptionError(
            "Expected a text, or tokenizer output with return_tensors='pt' (input_ids [1, tokens] and "
            f"attention_mask), got {type(inputs).__name__}."
        )
    if len(source) != 1:
        raise OptionError(f"Expected one prompt, got {len(source)}: call it once for each.")
    if not sees:
        arguments = _unpadded(model, arguments)
    if generation_setting(model, generate, "stop_strings") is not None and "tokenizer" not in arguments:
        arguments["tokenizer"] = part_of("tokenizer", model, tokenizer)
    _check_length(model, arguments)
    device = device_of(model)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _unpadded(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate` without padding, by the attention mask or, as in `generate`, by its id."""
    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    if mask is None:
        pad, ends = (generation_setting(model, arguments, f"{name}_token_id") for name in ("pad", "eos"))
        ends = [ends] if isinstance(ends, int) else list(ends or ())
        infer = pad is not None and pad not in ends and not has_encoder(model)
        mask = ids.ne(pad) if infer else torch.ones_like(ids)
    elif not isinstance(mask, Tensor) or mask.shape != ids.shape:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise OptionError(f"Expected an attention_mask of the prompt's shape {tuple(ids.shape)}, got {got}.")
    kept = mask[0].bool()
    if not kept.any():
        raise OptionError("Expected a prompt of at least one token, got none.")
    of_tokens = {name: value[:, kept.to(value.device)] for name, value in arguments.items() if is_per_token(value, ids)}
    return {**arguments, **of_tokens, "attention_mask": torch.ones_like(of_tokens["input_ids"])}


def is_per_token(value: Any, ids: Tensor) -> bool:
    """Return True for an argument with an integer for each token of the prompt."""
    return isinstance(value, Tensor) and value.shape == ids.shape and not value.is_floating_point()


def _check_length(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise OptionError if the requested tokens exceed the model's positions."""
    start = arguments.get("decoder_input_ids" if has_encoder(model) else "input_ids")
    tokens = start.shape[1] if isinstance(start, Tensor) else 1
    limit = positions_of(model)
    steps, length = (generation_setting(model, arguments, name) for name in ("max_new_tokens", "max_length"))
    steps = length - tokens if steps is None and isinstance(length, int) else steps
    if limit is not None and isinstance(steps, int) and tokens + steps - 1 > limit:  # the last one is not an input
        raise OptionError(
            f"Expected at most {max(limit - tokens + 1, 0)} new tokens after {tokens}, as {type(model).__name__} has "
            f"positions for {limit}, got {steps}: lower max_new_tokens, or shorten the prompt."
        )
