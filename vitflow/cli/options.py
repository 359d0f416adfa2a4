"""The options that commands share: of models, methods, drawing and runs, and what is made of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli.saying import say
from vitflow.errors import OptionError
from vitflow.explaining.method import Method
from vitflow.explaining.method_table import list_methods
from vitflow.explaining.options import OPTIONS, Option, Scope, options_of, shown
from vitflow.files import is_remote
from vitflow.images import FITS
from vitflow.models import DTYPES
from vitflow.text.method_table import TEXT_METHODS

_Command = Callable[..., None]

# Knows photographs, and is small enough to fetch for a first look.
DEFAULT_MODEL = "vit_small_patch16_224.augreg_in21k_ft_in1k"
_OF_METHODS: tuple[Scope, ...] = ("method", "refinement", "text")


class _Value(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A value of an option of methods, read as its row of the table says."""

    def __init__(self, option: Option) -> None:
        self._option, self.name = option, option.values

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._option.read(value) if isinstance(value, str) else value
        except OptionError as error:
            self.fail(str(error).partition(": ")[2], param, ctx)


class _BatchSize(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or value == "auto":
            return None
        if not str(value).isdecimal() or int(value) < 1:
            self.fail(f"expected auto or a number of at least 1, got {value!r}.", param, ctx)
        return int(value)


#: A file that is there, one to be written, and a folder to be written.
FILE, NEW_FILE = (click.Path(exists=there, dir_okay=False, path_type=Path) for there in (True, False))
NEW_FOLDER = click.Path(file_okay=False, path_type=Path)


class PathOrURL(click.Path):
    """A path as a Path, a URL as text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value as what it is."""
        return value if is_remote(value) else super().convert(value, param, ctx)


def method_options(command: Callable[..., None], methods: Iterable[Method] | None = None) -> Callable[..., None]:
    """Give a command every option of these methods, by default of all methods for images.

    The help groups options by the methods that have them, those of the most methods first.
    """
    table = list(list_methods() if methods is None else methods)
    panels: dict[tuple[str, ...], list[Callable[[_Command], _Command]]] = {}
    for option in options_of(*_OF_METHODS).values():
        having = [method for method in table if method.accepts(option.name)]
        if not having:
            continue
        names = tuple(method.name for method in having)
        title = f"Options of {_in_words(names, [method.name for method in table])}"
        panels.setdefault(names, []).append(table_option(option, title, _defaults(having, option.name)))
    ordered = sorted(panels, key=len, reverse=True)
    return _together(*(option for names in ordered for option in panels[names]))(command)


def _in_words(having: Sequence[str], table: Sequence[str]) -> str:
    """The methods that have an option, such as "all methods but random"."""
    others = [name for name in table if name not in having]
    if len(others) <= 3 < len(having):
        return f"all methods but {', '.join(others)}" if others else "all methods"
    return ", ".join(having)


def table_option(option: Option, panel: str, default: str) -> Callable[[_Command], _Command]:
    """The command-line option of a row of the table, with its default in words."""
    kind: Any = option.kind
    if option.kind == "choice":
        kind = click.Choice(option.choices)
    elif option.limits and option.kind is float:
        kind = click.FloatRange(*option.limits)
    elif option.kind not in (int, float, str):  # click's own help and errors suit these
        kind = _Value(option)
    metavar = option.values if option.kind is bool else option.metavar
    shape: dict[str, Any] = {"type": kind, "metavar": metavar}
    if option.kind is bool and option.scope == "drawing":
        shape = {"is_flag": True}
    return click.option(
        flag_of(option.name),
        option.name,
        default=None,
        help=f"{option.help}  [default: {default}]" if default else option.help,
        panel=panel,
        **shape,
    )


def drawing_option(name: str, default: str | None = None) -> Callable[[_Command], _Command]:
    """One option of the drawing, if a command has not all of them."""
    option = OPTIONS[name]
    return table_option(option, "Drawing", option.default_help if default is None else default)


def flag_of(name: str) -> str:
    """How the command line writes an option."""
    return f"--{name.replace('_', '-')}"


def _defaults(methods: list[Method], name: str) -> str:
    """An option's default, such as "0.5"; by method if they differ, "gae: max; flow: mean"."""
    by_default: dict[str, list[str]] = {}
    for method in methods:
        default = method.defaults.get(name)
        by_model = default is None and (OPTIONS[name].kind is bool or OPTIONS[name].scope == "text")
        text = "depends on the model" if by_model else shown(default)
        by_default.setdefault(text, []).append(method.name)
    several = [f"{', '.join(names)}: {default}" for default, names in by_default.items()]
    return "; ".join(several if len(several) > 1 else by_default)


def _together(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """What gives a command several options at once."""
    return lambda command: reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


name_option = click.option(
    "--name",
    panel="Model",
    metavar="TEXT",
    help="What to call the model in figures and rows.  [default: its id, as far as known]",
)
#: The options of a model that reads or writes, beside --model.
language_model_options = _together(
    name_option,
    click.option(
        "--trust-remote-code",
        panel="Model",
        is_flag=True,
        help="Run Python code that the model brings along; without it, it is refused.",
    ),
)
#: Called with its default and its help: the one method of a command for texts.
text_method_option = partial(click.option, "--method", panel="Method", type=click.Choice(tuple(TEXT_METHODS)))
#: The options that methods for texts have.
text_method_options = partial(method_options, methods=TEXT_METHODS.values())

#: The options that choose a model and where it runs.
model_options = _together(
    click.option(
        "--model",
        panel="Model",
        metavar="ID|demo|PATH",
        help="Id of timm or transformers, hf-hub:…, a folder, a weights file, or demo. Also local-dir:…; the bundled "
        "demo knows eight drawn shapes only; prompts are also asked of demo-text, bundled as well, and of "
        f"open_clip:MODEL/WEIGHTS.  [default: {DEFAULT_MODEL}]",
    ),
    click.option("--checkpoint", panel="Model", type=FILE, help="Weights for the model: safetensors or a torch file."),
    click.option(
        "--num-classes",
        panel="Model",
        type=click.IntRange(min=1),
        metavar="N≥1",
        help="Build the model with that many classes.",
    ),
    click.option(
        "--class-names", panel="Model", type=FILE, help="File with the names of the classes: one per line, or JSON."
    ),
    name_option,
    click.option(
        "--device", panel="Model", metavar="cpu|cuda|mps|…", help="Where to run.  [default: a GPU if there is one]"
    ),
    click.option(
        "--dtype", panel="Model", type=click.Choice(DTYPES), help="Precision to run in.  [default: the model's own]"
    ),
    click.option(
        "--fit",
        panel="Images",
        type=click.Choice(FITS),
        default="crop",
        help="How the image becomes the model's input: the model's own crop, or the whole image squashed, "
        "padded, or in its own aspect ratio.",
    ),
)

#: The options that ask a model for something else than its classes.
question_options = _together(
    click.option(
        "--prompt",
        "prompts",
        panel="Question",
        metavar="TEXT",
        multiple=True,
        help="Ask for this instead of a class; repeatable. For models of images and texts: CLIP, SigLIP, "
        "SigLIP 2, open_clip, or demo-text, the bundled pair.",
    ),
    click.option(
        "--template",
        "templates",
        panel="Question",
        metavar="TEXT",
        multiple=True,
        help="A sentence that each prompt is put into in the place of {}, such as 'a photo of {}'; repeat it for more.",
    ),
    click.option(
        "--like",
        panel="Question",
        type=FILE,
        multiple=True,
        metavar="IMAGE",
        help="Ask what makes an image like this one; repeatable. For any model: the cosine of its pooled features.",
    ),
    click.option(
        "--raw",
        panel="Question",
        is_flag=True,
        help="Explain the score of a prompt, not its difference from the mean of the other prompts.",
    ),
)

#: The options that say how a map is drawn.
drawing_options = _together(*(drawing_option(name) for name in options_of("drawing")))

# What runs over many images have in common.
limit_option = click.option(
    "--limit", panel="Images", type=click.IntRange(min=1), metavar="N", help="Take the first N images only."
)
batch_size_option = click.option(
    "--batch-size", panel="Model", type=_BatchSize(), default="auto", help="Images that the model works on at once."
)
resume_option = click.option(
    "--resume/--overwrite",
    default=True,
    help="Do what is missing or changed since an earlier run with the same options, or do all of it anew.",
)

images_argument = click.argument("images", nargs=-1, required=True, metavar="IMAGE…", type=click.Path(path_type=Path))
#: Called with its help: a file, or a folder that need not be there yet.
output_option = partial(click.option, "-o", "--output", type=click.Path(path_type=str))


def _only(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> str | None:
    """The one value of an option that is read as if it could be repeated, so that a second one is not dropped."""
    if len(values) > 1:
        if ctx.info_name == "folder":
            advice = "run vitflow folder once for each, with an output folder of its own"
        else:
            advice = "vitflow compare takes several, and shows them side by side"
        raise click.UsageError(f"Expected {param.opts[0]} once, got it {len(values)} times: {advice}.", ctx)
    return values[0] if values else None


def method_option(help: str) -> Callable[[_Command], _Command]:
    """The one method of a command."""
    help += "  [default: gae with --class, --against, --prompt or --like; else rollout]"
    return click.option("--method", panel="Method", metavar="NAME", multiple=True, callback=_only, help=help)


class_option = click.option(
    "--class",
    "target",
    panel="Method",
    metavar="NAME|INDEX",
    help="Class to explain and report.  [default: the predicted class]",
    multiple=True,
    callback=_only,
)
#: Called with its help: the classes of a command that shows several.
classes_option = partial(click.option, "--class", "targets", panel="Method", metavar="NAME|INDEX|top5", multiple=True)
against_option = click.option(
    "--against",
    panel="Method",
    metavar="NAME|INDEX|rest",
    help="Show what speaks for the class less what speaks for this one; class-specific methods only. rest: less the "
    "mean of all others.",
)


same_scale_option = click.option(
    "--same-scale",
    panel="Drawing",
    is_flag=True,
    default=None,
    help="Give all maps of one method, of every class and image of a strip, the limits of their colours in common.  "
    "[default: each map has its own]",
)


def target_of(target: Any, given: Mapping[str, Any]) -> Any:
    """The class to explain, or a contrast of it and the one that was set against it."""
    if given["against"] is None:
        return target
    from vitflow.explaining.targets import Contrast

    return Contrast(target, against=given["against"])


def targets_of(given: Mapping[str, Any]) -> list[Any]:
    """The classes that were asked for, or contrasts of each; else every prompt or reference, or the predicted class.

    What stands against a prompt is no row of its own.
    """
    prompts: list[Any] = [one for one in given["prompts"] if one != given["against"]]
    asked = given["targets"] or prompts or range(len(given["like"])) or (None,)
    return [target_of(target, given) for target in asked]


def asks(given: Mapping[str, Any]) -> bool:
    """Whether anything but the predicted class is asked."""
    return any(given.get(name) for name in ("target", "targets", "prompts", "like", "against"))


def say_default(method: str) -> None:
    """Say which method was taken where none was named."""
    say(f"method: {method} (--method takes another)")


def method_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of methods that the user gave."""
    return given_options(given, options_of(*_OF_METHODS))


def drawing_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The drawing options that the user gave."""
    return given_options(given, options_of("drawing"))


def given_options(values: Mapping[str, Any], names: Any) -> dict[str, Any]:
    """The options that the user gave."""
    return {name: values[name] for name in names if values.get(name) is not None}


def make_explainer(given: Mapping[str, Any]) -> Any:
    """The explainer that the options of `model_options` ask for."""
    from vitflow.explaining.explainer import Explainer
    from vitflow.models.loading import load_model
    from vitflow.recording.isolation import default_device

    if given["model"] is None:
        say(f"model: {DEFAULT_MODEL} (--model takes another)")
    model = load_model(
        given["model"] or DEFAULT_MODEL,
        checkpoint=given["checkpoint"],
        num_classes=given["num_classes"],
        class_names=given["class_names"],
        dynamic_img_size=given["fit"] == "native",
    )
    device = given["device"] or default_device()
    settings = {name: given[name] for name in ("dtype", "fit", "name")}
    return Explainer(model, device=device, outputs=_outputs(given), **settings)


def _outputs(given: Mapping[str, Any]) -> Any:
    """The outputs that the options request; None for the model's classes."""
    from vitflow.explaining.image_model import similarity_to
    from vitflow.models.pairs import prompts

    if given.get("prompts") and given.get("like"):
        raise OptionError("--prompt and --like cannot be used together.")
    if given.get("prompts"):
        return prompts(given["prompts"], templates=given["templates"] or None, raw=given["raw"])
    if given.get("templates") or given.get("raw"):
        raise OptionError("--template and --raw require --prompt.")
    return similarity_to(given["like"]) if given.get("like") else None
