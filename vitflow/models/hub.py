"""Load models of timm, transformers and open_clip by name.

If the hub is unreachable, loading falls back to its cache after a few seconds.
"""

import json
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
from vitflow.errors import ModelError, VitflowWarning, load_extra, printable
from vitflow.files import is_file, is_folder
from vitflow.models.checkpoints import weights_for
from vitflow.models.names import remember_name
from vitflow.models.parts import CLASSIFIERS

# File extensions of weights and configurations.
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".npz", ".json")
# Remedy for weights that are missing or do not fit.
_FILE = "a weights file (--checkpoint FILE, load_model(…, checkpoint=FILE))"
# Seconds within which the hub must respond; otherwise only its cache is used.
_TIMEOUT = 4.0


def create_model(name: str, *, pretrained: bool, **options: Any) -> Any:
    """Call `timm.create_model`, with errors that name the remedy; parameters have no values unless `pretrained`."""
    local, online = name.startswith("local-dir:"), name.startswith(("hf-hub:", "hf_hub:"))
    if not local and not online:
        check_timm_name(name)
    try:
        initial = nullcontext() if pretrained else SkippedInitialisers()
        with quiet_hub(requested=online or (pretrained and not local)), initial:
            return timm.create_model(name, pretrained=pretrained, **options)
    except Exception as error:  # options and configurations that timm does not expect raise almost any exception
        if "pretrained tag" in str(error):
            tags = ", ".join(sorted(timm.list_pretrained(f"{name.split('.')[0]}.*"))) or "none"
            raise ModelError(f"No pretrained weights are known for {name!r}. Known tags: {tags}.") from error
        reason = f"{type(error).__name__}: {_first_line(error)}"
        if local:
            raise ModelError(
                f"{printable(name)!r} cannot be loaded ({reason}). Expected a folder with model.safetensors and a "
                "config.json as written by timm.models.save_for_hf, and options of timm.create_model for this model."
            ) from error
        if isinstance(error, OSError | ValueError):  # network and file errors of the hub client are OSErrors
            raise ModelError(
                f"The weights of {name!r} cannot be fetched from the Hugging Face hub ({type(error).__name__}) and are "
                f"not in its cache. Remedies: {_FILE}, a folder (local-dir:FOLDER), or the bundled model, which knows "
                "eight drawn shapes only (--model demo)."
            ) from error
        raise ModelError(
            f"{name!r} cannot be built with these options ({reason}). Expected options of timm.create_model that fit "
            f"its weights: leave out the others, or pass {_FILE}."
        ) from error


def check_timm_name(name: str) -> None:
    """Raise ModelError for the name of a model that timm does not have."""
    if not timm.is_model(name):
        if name.endswith(_WEIGHTS) or name.startswith((".", "/", "~")):
            raise ModelError(f"Expected a weights file or a folder at {name!r}, but there is no such file.")
        raise ModelError(f"Unknown model {name!r}.{_similar(name)}")


def _similar(name: str) -> str:
    """Return the names of timm that contain a name, or else the closest ones, as a sentence."""
    architecture, known = name.split(".")[0].lower().replace("-", "_"), timm.list_models()
    inside = [each for each in known if architecture in each]
    if len(architecture) > 2 and inside:
        more = f" and {len(inside) - 8} more" if len(inside) > 8 else ""
        return f" Names that contain it: {', '.join(inside[:8])}{more}."
    close = get_close_matches(architecture, known, n=3)
    return f" Did you mean {' or '.join(close)}?" if close else " The names are those of timm.list_models()."


# Functions that fill a tensor with initial values, which takes most of the time of building a model.
_INITIALISERS = frozenset({Tensor.uniform_, Tensor.normal_, Tensor.erfinv_, Tensor.clamp_, Tensor.zero_, Tensor.fill_})
_INITIALISERS |= {nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.kaiming_uniform_}


class SkippedInitialisers(TorchFunctionMode):
    """Build models without the initial values of their parameters, which a file of weights replaces."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _INITIALISERS:
            tensor = args[0] if args else kwargs["tensor"]
            if isinstance(tensor, nn.Parameter):
                return tensor
        return func(*args, **kwargs)


@contextmanager
def quiet_hub(*, requested: bool) -> Iterator[None]:
    """Use only the hub's cache if the hub does not respond, instead of minutes of retries."""
    logger, offline = logging.getLogger("huggingface_hub"), constants.HF_HUB_OFFLINE
    level = logger.level
    logger.setLevel(logging.ERROR)
    constants.HF_HUB_OFFLINE = offline or (requested and not hub_responds())
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logger.setLevel(level)


def bundled(name: str | Path) -> str | Path:
    """Return the folder of a bundled vision–language model; any other name unchanged."""
    return {"demo-caption": DEMO_CAPTION, "demo-text": DEMO_TEXT}.get(str(name), name)


def hub_responds(seconds: float = _TIMEOUT) -> bool:
    """Return True if the hub responds within `seconds`, with any status."""
    with suppress(Exception):  # of the client, a proxy or a resolver
        get_session().head(constants.ENDPOINT, timeout=seconds)
        return True
    return False


def is_of_transformers(name: str) -> bool:
    """Return True for the name of a transformers model: a folder with such a config.json, or a hub id.

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


def load_transformers(name: str, checkpoint: str | Path | None = None) -> nn.Module:
    """Load a vision model of transformers by id or folder, in eval mode, without running remote code.

    With a checkpoint, its configuration is that of the name, and its weights those of the file.
    """
    folder = bundled(name.removeprefix("local-dir:"))
    if checkpoint is not None:
        return _with_checkpoint(folder, Path(checkpoint))
    model, missing = from_pretrained(folder, check=_check_images)
    if missing:
        raise ModelError(
            f"The weights of {printable(name)} do not fit {type(model).__name__}, the class in its config.json: "
            f"{len(missing)} are missing ({', '.join(missing[:3])})."
        )
    remember_name(model, name.removeprefix("local-dir:"))
    return model.float()


def from_pretrained(
    name: str | Path, *, trust_remote_code: bool = False, check: Callable[[Any], None] | None = None
) -> tuple[nn.Module, list[str]]:
    """Load a model of transformers with the class in its configuration, in eval mode; return the missing weights, too.

    `check` is called with the configuration before the weights are read.
    """
    with _configured(name, trust_remote_code, check) as (kind, config, options):
        model, info = kind.from_pretrained(name, config=config, output_loading_info=True, **options)
    return model.eval(), sorted(key for key in info["missing_keys"] if not key.endswith("position_ids"))


@contextmanager
def _configured(
    name: str | Path, trust_remote_code: bool, check: Callable[[Any], None] | None
) -> Iterator[tuple[Any, Any, dict[str, bool]]]:
    """Read the configuration of a model of transformers; yield its class, itself, and options of `from_pretrained`."""
    transformers = load_extra("transformers", printable(name), "transformers", ModelError)
    with hub_for(name), quietly(transformers.utils.logging), loading(name, trust_remote_code) as options:
        config = transformers.AutoConfig.from_pretrained(name, **options)
        if check is not None:
            check(config)
        architectures = config.architectures or [""]
        custom = getattr(config, "auto_map", {}).items()
        loader = next((auto for auto, path in custom if str(path).endswith(f".{architectures[0]}")), "AutoModel")
        kinds = (getattr(transformers, architecture, None) for architecture in [*architectures, loader])
        yield next((kind for kind in kinds if kind is not None), transformers.AutoModel), config, options


def _with_checkpoint(name: str | Path, path: Path) -> nn.Module:
    """Build a model of transformers by its configuration, with the file's class count, and load the file's weights."""
    with _configured(name, False, _check_images) as (kind, config, _):
        build = kind.from_config if hasattr(kind, "from_config") else kind._from_config
        with torch.device("meta"):
            draft = build(config).state_dict()
        weights, notes = weights_for(draft.keys(), path)
        weights = {key: weight for key, weight in weights.items() if not key.endswith("position_ids")}
        heads = [f"{head}.weight" for head in CLASSIFIERS if f"{head}.weight" in weights.keys() & draft.keys()]
        if heads and len(weights[heads[0]]) != len(draft[heads[0]]):
            config.num_labels = len(weights[heads[0]])
            notes.append(
                f"{path.name}: built {kind.__name__} with num_labels={config.num_labels}, as its tensors require."
            )
        model: nn.Module = build(config).float()
    state = model.state_dict()
    other = [key for key, weight in state.items() if key not in weights or weights[key].shape != weight.shape]
    other += [key for key in weights if key not in state]
    if other:
        raise ModelError(
            f"The weights in {path} do not fit {type(model).__name__}, the class in the configuration of "
            f"{printable(name)}: {len(other)} tensors differ, are missing or unknown ({', '.join(other[:3])})."
        )
    model.load_state_dict(weights)
    for note in notes:
        warnings.warn(note, VitflowWarning, stacklevel=4)
    return model.eval()


@contextmanager
def loading(name: str | Path, trust_remote_code: bool, part: str = "") -> Iterator[dict[str, bool]]:
    """Translate the errors of transformers about a model or a part of it; yield the arguments of `from_pretrained`.

    trust_remote_code is always passed: otherwise transformers asks on stdin, and a piped "y" would run the code.
    """
    try:
        yield {"trust_remote_code": trust_remote_code, "local_files_only": is_folder(name) or constants.HF_HUB_OFFLINE}
    except ModelError:
        raise
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"The weights of {str(name)!r} are damaged, or a pickle that could run code when loaded. Save them as "
            "safetensors: model.save_pretrained(FOLDER)."
        ) from error
    except Exception as error:  # transformers raises many kinds of errors for invalid folders
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{printable(name)} requires custom Python code, which would run on this machine with all your rights. "
                "Review it, and pass --trust-remote-code (trust_remote_code=True) if you trust it."
            ) from error
        hint = _offline_hint(name) if isinstance(error, OSError) else None
        reason = hint or " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
        if part and not hint:
            raise ModelError(
                f"Expected a {part} saved with the model {str(name)!r}, got none: save it there with save_pretrained, "
                f"or pass {part.split()[-1]}= in Python. ({reason})"
            ) from error
        raise ModelError(
            f"Expected a hub id or a transformers folder as the model, got {str(name)!r}: {reason}"
        ) from error


def _offline_hint(name: str | Path) -> str | None:
    """Return the remedy for a model that is missing from the hub's cache while offline; otherwise None."""
    if is_folder(name) or not constants.HF_HUB_OFFLINE:
        return None
    return (
        "it is not in the Hugging Face cache, and the hub is unreachable or switched off (HF_HUB_OFFLINE). Fetch it "
        f"with a network connection (hf download {printable(name)} --local-dir FOLDER), and pass its folder."
    )


def hub_for(name: str | Path) -> AbstractContextManager[None]:
    """Return `quiet_hub` for a model name; a folder does not use the hub."""
    return quiet_hub(requested=not is_folder(name))


@contextmanager
def quietly(logging: Any) -> Iterator[None]:
    """Silence transformers' warnings and progress bars while a model is loaded."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _check_images(config: Any) -> None:
    """Raise ModelError if a model of this configuration does not read images."""
    sizes = {"image_size", "patch_size", "num_channels"}
    if not hasattr(config, "vision_config") and not sizes & config.to_dict().keys():
        raise ModelError(
            f"Expected a model that reads images, got {printable(config.name_or_path)} ({config.model_type}). Use "
            "vitflow read for text models."
        )


def load_open_clip(name: str) -> nn.Module:
    """Load a model of open_clip with its tokenizer, such as "open_clip:ViT-B-32/openai", in eval mode."""
    open_clip = load_extra("open_clip", printable(name), "clip", ModelError)
    architecture, _, tag = name.removeprefix("open_clip:").partition("/")
    known = sorted({model_name for model_name, _ in open_clip.list_pretrained()})
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if not tag or tag not in tags:
        listed = f"its weights are {', '.join(tags)}" if tags else f"the models are {', '.join(known)}"
        raise ModelError(
            f"Expected open_clip:MODEL/WEIGHTS, such as open_clip:ViT-B-32/openai, got {name!r}: {listed}."
        )
    try:
        with quiet_hub(requested=True):
            model: Any = open_clip.create_model(architecture, pretrained=tag)
            model._loaded_tokenizer = open_clip.get_tokenizer(architecture)
    except Exception as error:  # downloads raise many kinds of errors
        raise ModelError(
            f"The weights of {name!r} cannot be fetched and are not in the cache ({_first_line(error)}): load the "
            "model in Python, and pass it with processor=open_clip.get_tokenizer(name)."
        ) from error
    remember_name(model, f"{architecture}.{tag}")
    return model.eval()  # type: ignore[no-any-return]


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
