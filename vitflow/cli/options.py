"""Options shared by commands: models, methods, drawing and runs, and the values that the user gave."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial, reduce
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli.output import say
from vitflow.errors import OptionError, printable
from vitflow.files import is_folder, is_there
from vitflow.images import FIGURE_FORMATS, FITS
from vitflow.models import DTYPES
from vitflow.registry.method_table import Method, get_method, list_methods
from vitflow.registry.options import OPTIONS, Option, Scope, options_of
from vitflow.text.method_table import TEXT_METHODS

_Command = Callable[..., None]

# Trained on photographs, and small enough to download for a first try.
DEFAULT_MODEL = "vit_small_patch16_224.augreg_in21k_ft_in1k"
_OPTIONS_OF_METHODS = "The options of a method are listed by vitflow methods NAME."
_OF_METHODS: tuple[Scope, ...] = ("method", "refinement", "text")
#: Groups of options in the order of the help; "Options" is the group of those without another one.
PANELS = (
    *("Model", "Text", "Images", "Target", "Method", "Measurement", "Options", "Drawing", "Server", "Cluster"),
    *("Video", "Model details", "Measurement details"),
)

#: An existing file, an output file, an existing file or folder, and an existing and an output folder.
FILE, NEW_FILE = (click.Path(exists=there, dir_okay=False, path_type=Path) for there in (True, False))
PATH = click.Path(exists=True, path_type=Path)
FOLDER, NEW_FOLDER = (click.Path(exists=there, file_okay=False, path_type=Path) for there in (True, False))


class _Value(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """Value of an option, parsed as its row of the option table defines."""

    def __init__(self, option: Option) -> None:
        self._option, self.name = option, option.values

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            if self._option.name == "cmap":
                from vitflow.images.overlay import color_table

                color_table(value, two_sides=False)
            return self._option.read(value) if isinstance(value, str) else value
        except OptionError as error:
            self.fail(str(error).removeprefix(f"{self._option.name}: "), param, ctx)


def option(panel: str, flags: str, kind: Any, help: str, **more: Any) -> Callable[[_Command], _Command]:
    """Return an option of a command.

    `flags` are its flags and its parameter name, separated by spaces; `kind` is a type of click, the least whole
    number, the choices, bool for a flag, or the placeholder of a text; `more` goes to `click.option`.
    """
    shape: dict[str, Any] = {"type": kind}
    if isinstance(kind, str):
        shape = {"metavar": kind}
    elif kind is bool:
        shape = {"is_flag": True}
    elif isinstance(kind, int):
        shape = {"type": click.IntRange(min=kind), "metavar": f"N≥{kind}"}
    elif isinstance(kind, tuple):
        shape = {"type": click.Choice(kind)}
    return click.option(*flags.split(), panel=panel or None, help=help, **shape | more)


def together(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Combine several option decorators into one."""
    return lambda command: reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def method_options(command: Callable[..., None], methods: Iterable[Method] | None = None) -> Callable[..., None]:
    """Add every option of these methods to a command, without help; by default of all image methods."""
    table = list(list_methods() if methods is None else methods)
    command.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\n{_OPTIONS_OF_METHODS}"
    return together(
        *(
            table_option(row, "Method", hidden=True)
            for name, row in options_of(*_OF_METHODS).items()
            if any(method.accepts(name) for method in table) or (name == "peer_options" and methods is None)
        )
    )(command)


def table_option(row: Option, panel: str, default: str = "", **more: Any) -> Callable[[_Command], _Command]:
    """Return the command-line option of a row of the option table, with its default as text."""
    kind: Any = _Value(row)
    if row.kind is bool and row.scope == "drawing":
        kind = bool
    elif row.limits and row.kind is float:
        kind = click.FloatRange(*row.limits)
    more |= {} if kind is bool else {"metavar": row.values}
    help = f"{row.help}  [default: {default}]" if default else row.help
    return option(panel, f"{flag_of(row.name)} {row.name}", kind, help, default=None, **more)


def flag_of(name: str) -> str:
    """Return the command-line flag of an option."""
    return f"--{name.replace('_', '-')}"


name_option = option("Model details", "--name", "TEXT", "Name of the model in figures and rows.  [default: its id]")
#: Options of language models, in addition to --model.
language_model_options = together(
    name_option,
    option(
        "Model",
        "--trust-remote-code",
        bool,
        "Run Python code from the model's repository. Without this, such models are refused.",
    ),
)
#: Called with its default and its help: the single method of a command for texts.
text_method_option = partial(click.option, "--method", panel="Method", type=click.Choice(tuple(TEXT_METHODS)))
#: Options of methods for texts.
text_method_options = partial(method_options, methods=TEXT_METHODS.values())

#: Options for loading a model, and its device.
loading_options = together(
    option("Model", "--checkpoint", PATH, "Weights for the model: safetensors, a torch file or a folder of a run."),
    option("Model", "--class-names", FILE, "File with class names: one per line, or JSON."),
    option("Model", "--device", "cpu|cuda|cuda:1|…", "Device to run on.  [default: a GPU if available]"),
    option("Model", "--fit", FITS, "How to fit images to it; native keeps aspect ratio and size.", default="crop"),
    option("Model details", "--num-classes", 1, "Number of classes to build the model with."),
    option("Model details", "--global-pool", "NAME", "Pooling of the checkpoint, such as avg or token, as in timm."),
    name_option,
    option("Model details", "--data-config", FILE, "JSON file with input_size, mean and std, if the model has none."),
    option("Model details", "--dtype", DTYPES, "Floating-point precision.  [default: the model's]"),
)
#: Options for the model and its device.
model_options = together(
    option(
        "Model",
        "--model",
        "ID|demo|PATH",
        f"Model id, folder, weights file, or demo (bundled; knows drawn shapes only).  [default: {DEFAULT_MODEL}]",
    ),
    loading_options,
)

#: Options that explain other outputs than classes.
question_options = together(
    option("Target", "--prompt prompts", "TEXT", "Text to explain instead of a class; repeatable.", multiple=True),
    option("Target", "--template templates", "TEXT", "Template of prompts: 'a photo of {}'.", multiple=True),
    option("Target", "--like", FILE, "Explain the similarity to this image.", multiple=True, metavar="IMAGE"),
    option("Target", "--raw", bool, "Explain the score of a prompt itself, not minus the mean of the others."),
)


def drawing_option(name: str, default: str | None = None) -> Callable[[_Command], _Command]:
    """Return a single drawing option, for commands that do not have all of them."""
    return table_option(OPTIONS[name], "Drawing", OPTIONS[name].default_help if default is None else default)


#: Options for drawing maps.
drawing_options = together(*(drawing_option(name) for name in options_of("drawing")))

# Options of runs over many images.
limit_option = option("Images", "--limit", 1, "Use the first N images only.")
batch_size_option = option(
    "Model", "--batch-size", 1, "Images per forward pass.  [default: by device; halved if memory runs out]"
)
resume_option = option(
    "",
    "--resume/--overwrite",
    None,
    "Compute missing or changed images of an earlier run with the same options, or start over.",
    default=True,
)


def _existing(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Return the paths of images; OptionError if none exists."""
    paths = value if isinstance(value, tuple) else (value,)
    if not any(map(is_there, paths)):
        first = paths[0]
        files = [file.name for file in first.parent.iterdir()] if is_folder(first.parent) else []
        near = get_close_matches(first.name, files, 1)
        hint = f" Did you mean {printable(first.with_name(near[0]))}?" if near else ""
        raise OptionError(f"Expected an image, but {printable(first)} does not exist.{hint}")
    return value


_image: dict[str, Any] = {"required": True, "type": click.Path(path_type=Path), "callback": _existing}
#: One image or video, and several.
image_argument: Callable[[_Command], _Command] = click.argument("image", metavar="IMAGE", **_image)
images_argument: Callable[[_Command], _Command] = click.argument("images", nargs=-1, metavar="IMAGE…", **_image)
json_option = option("", "--json as_json", bool, "Print one JSON object per image.")
#: Called with its help: an output file or folder.
output_option = partial(click.option, "-o", "--output", type=click.Path(path_type=str))


def figure_option(what: str, kind: str) -> Callable[[_Command], _Command]:
    """Return the option for the only output file of a command, a figure or its numbers."""
    return output_option(
        help=f"File for the {what}: {', '.join(FIGURE_FORMATS)}; or .json for the numbers; or a folder.  "
        f"[default: IMAGE-{kind}.png in the current folder; for several images, IMAGE-and-N-more-{kind}.png]"
    )


def _only(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> str | None:
    """Return the only value of an option; a usage error if it is given twice."""
    if len(values) > 1:
        runs = ctx.info_name == "folder"
        advice = "run vitflow folder once for each" if runs else "vitflow compare takes several"
        raise click.UsageError(f"{param.opts[0]} was given {len(values)} times, expected once: {advice}.", ctx)
    return values[0] if values else None


METHOD_DEFAULT = "[default: gae with --class, --against, --prompt or --like; else rollout]"


def methods_option(help: str, kind: Any = "NAME") -> Callable[[_Command], _Command]:
    """Return the option for several methods."""
    return option("Method", "--method methods", kind, help, multiple=True)


def method_option(help: str) -> Callable[[_Command], _Command]:
    """Return the option for a single method."""
    return option("Method", "--method", "NAME", f"{help}  {METHOD_DEFAULT}", multiple=True, callback=_only)


#: Called with its metavar and help: the class of a command that explains one.
class_option = partial(click.option, "--class", "target", panel="Target", multiple=True, callback=_only)
#: Called with its help: the classes of a command that shows several.
classes_option = partial(click.option, "--class", "targets", panel="Target", metavar="NAME|INDEX|top5", multiple=True)
against_option = option(
    "Target", "--against", "NAME|INDEX|rest", "Class to subtract from the explained one; rest: the mean of all others."
)
same_scale_option = option(
    "Drawing", "--same-scale", bool, "Use the same colour limits for all maps of a method in a strip.", default=None
)


def target_of(target: Any, given: Mapping[str, Any]) -> Any:
    """Return the class to explain, or its contrast with --against."""
    if given["against"] is None:
        return target
    from vitflow.explaining.targets import Contrast

    return Contrast(target, against=given["against"])


def targets_of(given: Mapping[str, Any]) -> list[Any]:
    """Return the requested classes or their contrasts; else every prompt or reference, or the predicted class."""
    prompts: list[Any] = [prompt for prompt in given["prompts"] if prompt != given["against"]]
    targets = given["targets"] or prompts or range(len(given["like"])) or (None,)
    return [target_of(target, given) for target in targets]


def has_target(given: Mapping[str, Any]) -> bool:
    """Return True if a target other than the predicted class is given."""
    return is_about_box(given) or any(given.get(name) for name in ("target", "targets", "prompts", "like", "against"))


def say_default(method: str) -> None:
    """Print the default method, and how to request a map of one class if it is not class-specific."""
    advice = "" if get_method(method).class_specific else "; a map for one class: --class NAME"
    say(f"method: {method} (change with --method{advice})")


def method_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the method options given by the user."""
    values = given_options(given, options_of(*_OF_METHODS))
    if is_about_box(given):  # a question, not an option of the method
        del values["box"]
    return values


def is_about_box(given: Mapping[str, Any]) -> bool:
    """Return True if --box names a detection or a region to explain, not the patches that similarity compares with."""
    methods = [given.get("method"), *(given.get("methods") or ())]
    return given.get("box") is not None and "similarity" not in methods


def drawing_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the drawing options given by the user."""
    return given_options(given, options_of("drawing"))


def given_options(values: Mapping[str, Any], names: Any) -> dict[str, Any]:
    """Return those of the named options that the user gave."""
    return {name: values[name] for name in names if values.get(name) is not None}


def arguments_of(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values of the parameters of a function, without the options of the table."""
    return given_options(given, [name for name in inspect.signature(function).parameters if name not in OPTIONS])
