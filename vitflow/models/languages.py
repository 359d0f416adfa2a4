"""Language models of transformers: what they say of themselves."""

import copy
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import ModelError, OptionError, UnsupportedModelError, VitflowError, load_extra, printable
from vitflow.files import is_file, is_folder
from vitflow.models.hub import hub_for, quietly, offline_hint
from vitflow.models.libraries import class_count, library_id

# What transformers calls texts among a model's arguments; the first one given tells how many there are.
_TEXTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
# Ways to write in which every token follows the one before, by its names.
_FOLLOWED = ("greedy_search", "sample")
# Where it keeps a tokenizer in a model's folder, one or the other.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model")
# What loads what lies beside a model's weights.
_PARTS = {"tokenizer": "AutoTokenizer", "processor": "AutoProcessor", "image processor": "AutoImageProcessor"}


def reads_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The text among the arguments of a forward pass, numbers [batch, tokens] or vectors; None if it has none."""
    found = next((kwargs[name] for name in _TEXTS if isinstance(kwargs.get(name), Tensor)), None)
    if found is None and args and isinstance(args[0], Tensor) and args[0].ndim == 2:
        found = None if args[0].is_floating_point() else args[0]
    return found


def word_embedding(model: nn.Module) -> nn.Module | None:
    """The module that makes vectors of a text's tokens; None where the model reads none, or does not say."""
    try:
        found = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return found if isinstance(found, nn.Embedding) else None


def check_text(text: object) -> None:
    """Raise OptionError unless it is a text that can be written as UTF-8."""
    if not isinstance(text, str):
        raise OptionError(f"Expected one text as a string, got {text!r:.80}.")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise OptionError(f"Expected a text in UTF-8, got “{printable(text[:80])}”, which has bytes that are none.")


def predicts_words(model: nn.Module) -> bool:
    """Whether a model ends in a logit for each word of its vocabulary, at each place of the text."""
    try:
        return model.get_output_embeddings() is not None  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return False


def has_head(model: nn.Module) -> bool:
    """Whether a model predicts words or classes, instead of ending in features."""
    return predicts_words(model) or bool(class_count(model))


def load_language_model(name: str | Path, *, trust_remote_code: bool = False) -> tuple[nn.Module, Any]:
    """Load a language model of transformers with its tokenizer, in eval mode, on the CPU.

    Args:
        name: an id of the hub, or a folder.
        trust_remote_code: run Python code that the model brings along; without it such a model is refused.

    Raises:
        ModelError: transformers is not installed, there is no such model, or it brings no tokenizer.
    """
    transformers = _transformers()
    with hub_for(name), quietly(transformers.utils.logging):
        model = _load_model(transformers, name, trust_remote_code)
        return model, _load_part("tokenizer", name, trust_remote_code)


def _load_model(transformers: Any, name: str | Path, trust_remote_code: bool) -> nn.Module:
    try:
        # Always told: where it is not, transformers asks on stdin, and a "y" that is piped in runs the code.
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        architecture = (config.architectures or [""])[0]
        own = getattr(config, "auto_map", {}).items()
        loader = next((auto for auto, place in own if str(place).endswith(f".{architecture}")), "AutoModel")
        kind = getattr(transformers, architecture, getattr(transformers, loader, transformers.AutoModel))
        model: nn.Module = kind.from_pretrained(name, trust_remote_code=trust_remote_code)
        model.eval()
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"The weights of {str(name)!r} are damaged, or a pickle that could run code when loaded, and are refused. "
            "Save them as safetensors: model.save_pretrained(FOLDER)."
        ) from error
    except Exception as error:  # a damaged or hostile folder makes transformers raise nearly anything
        _refuse_remote_code(name, error)
        raise _no_model(name, error) from error
    return model


def _no_model(name: str | Path, error: Exception) -> ModelError:
    return ModelError(
        f"Expected an id of the hub or a folder of transformers as the model, got {str(name)!r}: {_reason(name, error)}"
    )


def _refuse_remote_code(name: str | Path, error: Exception) -> None:
    """Raise ModelError where transformers refused to run code that nobody asked to run."""
    if "trust_remote_code" in str(error):
        raise ModelError(
            f"{printable(name)} brings Python code of its own, which would run on this machine with all your rights: "
            "read it, and take --trust-remote-code (trust_remote_code=True) if you trust it."
        ) from error


def load_processor(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    """What prepares images and texts for a model, or images alone, as it was saved beside it.

    Raises:
        ModelError: there is none, or no such model.
    """
    found = _load_part("processor", name, trust_remote_code)
    return found if hasattr(found, "image_processor") else _load_part("image processor", name, trust_remote_code)


def _load_part(what: str, name: str | Path, trust_remote_code: bool = False) -> Any:
    kind = getattr(_transformers(), _PARTS[what])
    wordless = is_folder(name) and not any(is_file(Path(name) / file) for file in _TOKENIZER_FILES)
    with hub_for(name):
        try:
            if what == "tokenizer" and wordless:  # transformers would make one that knows no words
                raise OSError(f"no {', '.join(_TOKENIZER_FILES)}")
            return kind.from_pretrained(name, trust_remote_code=trust_remote_code)
        except Exception as error:  # likewise
            _refuse_remote_code(name, error)
            if isinstance(error, OSError) and offline_hint(name):
                raise _no_model(name, error) from error
            raise ModelError(
                f"Expected a {what} beside the model {str(name)!r}, got none: save it there by its save_pretrained, or "
                f"in Python pass {what.split()[-1]}=. ({_reason(name, error)})"
            ) from error


def _reason(name: str | Path, error: Exception) -> str:
    """Why a model was not loaded, on one line: that it is not in the cache, or what transformers says."""
    absent = offline_hint(name) if isinstance(error, OSError) else None
    return absent or " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__


def _transformers() -> Any:
    return load_extra("transformers", "Reading texts", "transformers", ModelError)


def tokenizer_of(model: nn.Module, tokenizer: Any = None) -> Any:
    """The tokenizer that was given, or the one saved where the model was loaded from.

    Raises:
        ModelError: none was given, and the model was not loaded by name.
    """
    if tokenizer is not None:
        return tokenizer if callable(tokenizer) else _load_part("tokenizer", tokenizer)
    name = library_id(model)
    if name is None:
        raise ModelError(
            f"Expected a tokenizer for {type(model).__name__}, which was not loaded by name, got none: pass tokenizer=."
        )
    return _load_part("tokenizer", name)


def saved_tokenizer(model: nn.Module) -> Any:
    """The tokenizer saved where the model was loaded from; None where there is none, or the model was not loaded."""
    with suppress(ModelError):
        return tokenizer_of(model)
    return None


def plain_numbers(model: nn.Module, count: int) -> list[int]:
    """So many numbers of a model's tokens, spread over its vocabulary, none of which it names as special."""
    sizes = [one.num_embeddings for one in (word_embedding(model), *model.modules()) if isinstance(one, nn.Embedding)]
    size = sizes[0] if sizes else count
    configs = getattr(model, "config", None), text_config(model)
    named = [pair for one in configs if hasattr(one, "__dict__") for pair in vars(one).items()]
    special = {number for name, number in named if isinstance(number, int) and name.endswith(("_token_id", "_index"))}
    plain = [number for number in range(size) if number not in special] or [0]
    return [plain[place * max(len(plain) // count, 1) % len(plain)] for place in range(count)]


def text_config(model: nn.Module) -> Any:
    """What a model that reads says of itself, or of its part that reads, where it also sees or hears."""
    config: Any = getattr(model, "config", None)
    return config.gettext_config() if hasattr(config, "gettext_config") else config


def positions_of(model: nn.Module) -> int | None:
    """For how many tokens a model has positions, by its own word; None where it does not say."""
    found = getattr(text_config(model), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


@contextmanager
def reading(model: nn.Module, ids: Tensor | None = None) -> Iterator[None]:
    """Run a model on a text of these numbers [batch, tokens]; what it cannot read is told in words.

    Raises:
        OptionError: the text is longer than the model's positions, or has tokens that it does not know.
        UnsupportedModelError: it wants a text for its decoder, too.
    """
    try:
        yield
    except VitflowError:
        raise
    except (IndexError, RuntimeError, ValueError) as error:
        kind, limit = type(model).__name__, positions_of(model)
        known = getattr(word_embedding(model), "num_embeddings", None)
        if isinstance(error, ValueError) and has_encoder(model) and "inputs_embeds" in str(error):
            raise UnsupportedModelError(
                f"{kind} reads with an encoder and a decoder, expected one of them: pass the part that reads, "
                "model.get_encoder(), in Python."
            ) from error
        if ids is not None and known is not None and int(ids.max()) >= known:
            raise OptionError(
                f"Expected tokens that {kind} knows, numbered below {known}, got {int(ids.max())}: the tokenizer is "
                "that of another model."
            ) from error
        # Some models begin to count at 2.
        if ids is not None and limit is not None and ids.shape[1] > limit - 4:
            raise OptionError(
                f"Expected a text for which {kind} has positions, {limit} at most, got {ids.shape[1]} tokens: take a "
                "part of it."
            ) from error
        raise


def refuse_static(cache: Any) -> None:
    """Refuse a cache of keys that has its full length from the beginning, mostly empty.

    Raises:
        UnsupportedModelError: it is one.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    kinds = [type(cache).__name__, *(type(layer).__name__ for layer in getattr(cache, "layers", ()))]
    static = next((kind for kind in kinds if kind.startswith("Static")), None)
    if static is not None:
        raise UnsupportedModelError(
            f"Expected a cache that grows with the text, got a {static}, which has room for keys that do not exist: "
            "leave out cache_implementation and past_key_values, or pass a DynamicCache."
        )


def decoder_of(model: nn.Module) -> nn.Module:
    """The part of a model of transformers that writes."""
    of_theirs: Any = model
    decoder: nn.Module | None = of_theirs.get_decoder()
    if decoder is None:  # before transformers 5, of most models that have no other part
        decoder = of_theirs.base_model
    return decoder


def decoder_path(model: nn.Module) -> str:
    """The path of the part that writes, inside a model that may see or hear as well; empty where it is the model."""
    decoder = decoder_of(model)
    return next((path for path, module in model.named_modules() if module is decoder), "")


def has_encoder(model: nn.Module) -> bool:
    """Whether a model writes with a decoder that attends to an encoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def generation_setting(model: nn.Module, given: Mapping[str, Any], name: str) -> Any:
    """What `generate` makes of a setting with these arguments: theirs, their generation_config's, or the model's."""
    if name in given:
        return given[name]
    configs = given.get("generation_config"), model.generation_config
    return next((value for one in configs if (value := getattr(one, name, None)) is not None), None)


def mask_of(model: nn.Module, given: Mapping[str, Any], ids: Tensor) -> Tensor:
    """The attention mask that `generate` makes of numbers [batch, tokens] where none is given: 0 where padding stands.

    As there, nothing is padding where its number also ends texts, or where an encoder reads it.
    """
    pad, ends = (generation_setting(model, given, f"{name}_token_id") for name in ("pad", "eos"))
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    infer = pad is not None and pad not in ends and not has_encoder(model)
    return ids.ne(pad).long() if infer else torch.ones_like(ids)


def refuse_generation(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse what a rollout cannot be followed through, by name.

    Args:
        model: what shall write.
        given: the arguments of its `generate`.

    Raises:
        UnsupportedModelError: the model writes no text.
        OptionError: it shall write with beams or an assistant, or go on from a cache.
    """
    if not (hasattr(model, "can_generate") and model.can_generate()):  # type: ignore[operator]
        raise UnsupportedModelError(
            f"Expected a model of transformers that writes, such as AutoModelForCausalLM loads, got "
            f"{type(model).__name__}: it has no generate. Use vitflow.explain_text to see what it reads."
        )
    scale = generation_setting(model, given, "guidance_scale")
    if scale not in (None, 1, 1.0):
        raise OptionError(
            f"Expected words by the model's own logits, got guidance_scale={scale}, which mixes those of a second text "
            "that is read beside: leave it out."
        )
    config: Any = copy.deepcopy(given.get("generation_config") or model.generation_config)
    config.update(**given)
    mode = str(config.get_generation_mode(given.get("assistant_model")).value)
    if mode not in _FOLLOWED:
        raise OptionError(
            f"Expected {' or '.join(_FOLLOWED)}, where every token follows the one before, got {mode}: pass "
            "num_beams=1, and neither assistant_model, prompt_lookup_num_tokens, penalty_alpha nor constraints."
        )
    named = str(getattr(config, "cache_implementation", None) or "")
    if "static" in named:
        raise OptionError(
            f"Expected a cache that grows with the text, got cache_implementation={named!r}, which has room for keys "
            "that do not exist: leave it out."
        )
    cache = given.get("past_key_values")
    refuse_static(cache)
    if cache is not None and cache.get_seq_length():
        raise OptionError(
            f"Expected the whole prompt, got past_key_values with {cache.get_seq_length()} tokens, whose attention was "
            "not seen: leave them out."
        )
