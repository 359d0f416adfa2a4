"""Models by name, of timm, transformers and open_clip: errors name the remedy; a hub that is away costs seconds."""

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import constants
from huggingface_hub.utils import get_session  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitflow.demo import DEMO_CAPTION, DEMO_TEXT
from vitflow.errors import ModelError, load_extra, printable
from vitflow.files import is_file, is_folder

# What files of weights end in.
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".npz", ".json")
# Seconds within which the hub must answer; else what its cache holds is used alone.
_PATIENCE = 4.0
# Whether it has answered already, for what is being loaded now.
_ANSWERED: ContextVar[bool] = ContextVar("answered", default=False)


def create_model(name: str, *, pretrained: bool, **options: Any) -> Any:
    """`timm.create_model`, with errors that name the remedy.

    Raises:
        ModelError: no such model, it cannot be built so, or its weights are neither on the hub nor in its cache.
    """
    local, online = name.startswith("local-dir:"), name.startswith(("hf-hub:", "hf_hub:"))
    if not local and not online and not timm.is_model(name):
        close = get_close_matches(name.split(".")[0], timm.list_models(), n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ModelError(f"Unknown model {name!r}.{hint} `vitflow models PATTERN` lists the known ones.")
    config = _config_of(Path(name.removeprefix("local-dir:"))) if local else {}
    try:
        with quiet_hub(requested=online or (pretrained and not local)):
            if local and not hasattr(timm.models._hub, "load_model_config_from_path"):
                name, options = _of_folder(Path(name.removeprefix("local-dir:")), config, options)
            return timm.create_model(name, pretrained=pretrained, **options)
    except RuntimeError as error:
        if "pretrained tag" in str(error):
            tags = ", ".join(sorted(timm.list_pretrained(f"{name.split('.')[0]}.*"))) or "none"
            raise ModelError(f"No pretrained weights are known for {name!r}. Known: {tags}.") from error
        raise ModelError(f"{name!r} cannot be loaded: {error}") from error
    except TypeError as error:
        raise ModelError(f"{name!r} cannot be built with these options: {error}.") from error
    except (KeyError, AttributeError, AssertionError, IndexError, ArithmeticError) as error:  # of a hostile config.json
        raise ModelError(f"{name!r} cannot be built: {type(error).__name__}: {error}.") from error
    except (OSError, ValueError) as error:  # every network and file error of the hub client is an OSError
        if local:
            raise ModelError(
                f"{name!r} cannot be loaded: {error}. Expected a folder with config.json and model.safetensors."
            ) from error
        raise ModelError(
            f"The weights of {name!r} cannot be fetched from the Hugging Face hub ({type(error).__name__}) and are not "
            "in its cache. Remedies: a weights file (--checkpoint FILE, checkpoint=…), a folder (local-dir:FOLDER), or "
            "the bundled model, which knows eight drawn shapes only (--model demo)."
        ) from error


def _of_folder(folder: Path, config: dict[str, Any], options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Architecture and options of a folder as timm saves it, for releases of timm that do not read one themselves."""
    own = {**config.get("pretrained_cfg", config), **config}
    known = {field.name for field in fields(timm.models.PretrainedCfg)}
    told = {key: value for key, value in own.items() if key in known}
    told |= {"architecture": config["architecture"], "file": str(folder / "model.safetensors"), "source": "local-dir"}
    return config["architecture"], {**config.get("model_args", {}), **options, "pretrained_cfg": told}


# What fills tensors in place, which without values is nothing to do, and takes torch milliseconds each.
_FILLING = frozenset({Tensor.uniform_, Tensor.normal_, Tensor.erfinv_, Tensor.clamp_, Tensor.zero_, Tensor.fill_})


class _NumbersAsTheyAre(TorchFunctionMode):
    """Keeps rates that are spread evenly over a model's blocks on the CPU: older releases of timm read them back."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLING and args[0].is_meta:
            return args[0]
        if func is torch.linspace and not kwargs:
            kwargs = {"device": "cpu"}
        return func(*args, **(kwargs or {}))


@contextmanager
def without_values() -> Iterator[None]:
    """Models that are built inside have shapes and take no memory."""
    with torch.device("meta"), _NumbersAsTheyAre():
        yield


def _config_of(folder: Path) -> dict[str, Any]:
    """What a folder's config.json says, in the way of timm; ModelError where it does not say which model it is of."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"Expected a folder with config.json and model.safetensors, got {printable(folder)}: "
            f"{error.strerror or error}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"Expected JSON in {printable(path)}, got something else: {error}.") from error
    told: dict[str, Any] = config if isinstance(config, dict) else {}
    if not isinstance(told.get("architecture"), str):
        theirs = "model_type" in told
        raise ModelError(
            f"Expected {printable(path)} to be a JSON object that names a model of timm as its architecture, got "
            f"{str(told.get('architecture', config))[:60]!r}."
            f"{' It is of transformers: load it there, and pass the model in Python.' if theirs else ''}"
        )
    for part in ("pretrained_cfg", "model_args"):
        value = told.get(part, {})
        if not isinstance(value, dict):
            raise ModelError(f"Expected {part} in {printable(path)} to be a JSON object, got {str(value)[:60]!r}.")
    return told


@contextmanager
def quiet_hub(*, requested: bool) -> Iterator[None]:
    """Keep the hub client from minutes of retries where the hub is away: its cache is then used alone.

    Within another such block the hub is not asked again.
    """
    logger, offline = logging.getLogger("huggingface_hub"), constants.HF_HUB_OFFLINE
    level = logger.level
    logger.setLevel(logging.ERROR)
    constants.HF_HUB_OFFLINE = offline or (requested and not (_ANSWERED.get() or hub_answers()))
    answered = _ANSWERED.set(_ANSWERED.get() or (requested and not constants.HF_HUB_OFFLINE))
    try:
        yield
    finally:
        _ANSWERED.reset(answered)
        constants.HF_HUB_OFFLINE = offline
        logger.setLevel(level)


def hub_for(name: str | Path) -> AbstractContextManager[None]:
    """The hub as it is asked for this name of a model: not at all for a folder, and for seconds where it is away."""
    return quiet_hub(requested=not is_folder(name))


def bundled(name: str | Path) -> str | Path:
    """The folder of a model of images and words that vitflow ships; any other name as it is."""
    return {"demo-caption": DEMO_CAPTION, "demo-text": DEMO_TEXT}.get(str(name), name)


def called(name: str | Path) -> str:
    """What people call a model that is given by an id or a folder: a folder by its own name, whatever it lies in."""
    return (Path(name).resolve().name or str(name)) if is_folder(name) else str(name)


def default_prompt(name: str | Path) -> str | None:
    """What a model that vitflow ships is asked, as it knows no other words; None for any other."""
    return "<image> here is" if str(name) == "demo-caption" else None


def why_absent(name: str | Path) -> str | None:
    """What to do where a model was looked for in the cache of the hub alone, and is not there; else None."""
    if is_folder(name) or not constants.HF_HUB_OFFLINE:
        return None
    return (
        "it is not in this machine's cache of the Hugging Face hub, which does not answer or was switched off "
        "(HF_HUB_OFFLINE). Fetch it by its name where there is a network, or give the folder that it lies in."
    )


def hub_answers(seconds: float = _PATIENCE) -> bool:
    """Whether the hub answers in time, whatever it says; names that nobody resolves cost no more than this."""
    heard: list[object] = []

    def ask() -> None:
        with suppress(Exception):  # any error of the client, a proxy or a resolver is no answer
            heard.append(get_session().head(constants.ENDPOINT, timeout=seconds))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return bool(heard)


def refuse_images(name: str) -> None:
    """Raise ModelError where a name is that of a model for images alone: one of timm, or a folder that says so."""
    config: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError, RecursionError):
        config = dict(json.loads((Path(name) / "config.json").read_text(encoding="utf-8")))
    of_timm = name == "demo" or name.startswith(("local-dir:", "hf-hub:")) or "architecture" in config
    if of_timm or {"patch_size", "image_size"} <= config.keys() or timm.is_model(name):
        raise ModelError(
            f"Expected a language model of transformers, got {printable(name)}, which reads images: "
            f"vitflow explain IMAGE --model {printable(name)} explains it."
        )


def is_of_transformers(name: str) -> bool:
    """Whether a name is that of a model of transformers: a folder whose config.json says so, or an id on the hub.

    >>> is_of_transformers("openai/clip-vit-base-patch16"), is_of_transformers("vit_tiny_patch16_224")
    (True, False)
    """
    folder = Path(bundled(name.removeprefix("local-dir:")))
    if is_folder(folder):
        with suppress(OSError, ValueError, RecursionError):
            config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            return isinstance(config, dict) and "model_type" in config and "architecture" not in config
        return False
    owner, _, repository = name.partition("/")
    an_id = owner and repository and not set(name) & set("\\:*~ ") and "/" not in repository and owner[0] != "."
    return bool(an_id) and folder.suffix not in _WEIGHTS and not is_file(folder)


def load_transformers(name: str) -> nn.Module:
    """A model of transformers that sees, by the id or the folder of its weights, in eval mode; no foreign code is run.

    Raises:
        ModelError: transformers is not installed, the weights are neither on the hub nor in its cache, or the model
            does not read images.
    """
    transformers = load_extra("transformers", printable(name), "transformers", ModelError)
    where = str(bundled(name.removeprefix("local-dir:")))
    local = is_folder(Path(where))
    try:
        with quiet_hub(requested=not local), quietly(transformers.utils.logging):
            options = {"local_files_only": local or constants.HF_HUB_OFFLINE}
            config = transformers.AutoConfig.from_pretrained(where, **options)
            kind = _kind_of(config, transformers, name)
            model, found = kind.from_pretrained(where, config=config, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:  # any error of the hub client, too
        if local:
            raise ModelError(f"The model in {printable(where)} cannot be loaded: {_first(error)}") from error
        raise ModelError(
            f"{printable(name)!r} is no model of timm, and as one of transformers it cannot be fetched from the "
            f"Hugging Face hub ({type(error).__name__}) and is not in its cache. Remedies: its folder, fetched where "
            f"there is a network (hf download {printable(name)} --local-dir FOLDER; --model FOLDER), `vitflow models "
            "PATTERN` for the names of timm, or a bundled model (--model demo-text for prompts, --model demo)."
        ) from error
    if missing := sorted(key for key in found["missing_keys"] if not key.endswith("position_ids")):
        raise ModelError(
            f"The weights of {printable(name)} do not fit {type(model).__name__}, which its config.json names: "
            f"{len(missing)} are missing ({', '.join(missing[:3])})."
        )
    model._loaded_name = name
    return model.float().eval()  # type: ignore[no-any-return]


@contextmanager
def quietly(logging: Any) -> Iterator[None]:
    """Keep transformers from bars and remarks while a model is loaded: what is wrong is told by its errors."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _kind_of(config: Any, transformers: Any, name: str) -> Any:
    """The class of transformers that a configuration names, if it reads images."""
    named = [str(one) for one in getattr(config, "architectures", None) or ()]
    kind = next((found for one in named if (found := getattr(transformers, one, None)) is not None), None)
    kind = transformers.AutoModel if kind is None else kind
    if (
        not hasattr(config, "vision_config")
        and not {"image_size", "patch_size", "num_channels"} & config.to_dict().keys()
    ):
        raise ModelError(
            f"Expected a model that reads images, got {printable(name)}, a {config.model_type}: vitflow read "
            "explains what a text rests on."
        )
    return kind


def load_open_clip(name: str) -> nn.Module:
    """A model of open_clip with its tokenizer, as "open_clip:ViT-B-32/openai", in eval mode.

    Raises:
        ModelError: open_clip is not installed, it knows no such model, or the weights are not at hand.
    """
    open_clip = load_extra("open_clip", printable(name), "clip", ModelError)
    architecture, _, tag = name.removeprefix("open_clip:").partition("/")
    known = sorted({one for one, _ in open_clip.list_pretrained()})
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if not tag or tag not in tags:
        listed = f"its weights are {', '.join(tags)}" if tags else f"the models are {', '.join(known)}"
        raise ModelError(
            f"Expected open_clip:MODEL/WEIGHTS, such as open_clip:ViT-B-32/openai, got {name!r}: {listed}."
        )
    try:
        with quiet_hub(requested=True):
            model: Any = open_clip.create_model(architecture, pretrained=tag)
            model._loaded_tokenizer, model._loaded_name = open_clip.get_tokenizer(architecture), f"{architecture}.{tag}"
    except Exception as error:  # what its downloads raise is of many kinds
        raise ModelError(
            f"The weights of {name!r} cannot be fetched and are not in the cache ({_first(error)}). Remedy: load the "
            "model in Python, and pass it with processor=open_clip.get_tokenizer(name)."
        ) from error
    return model.eval()  # type: ignore[no-any-return]


def _first(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
