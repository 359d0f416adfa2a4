"""What the commands share: the options of models, methods and drawing, and how errors are told."""

import os
import re
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import click

from vitflow.cli.saying import say
from vitflow.errors import ModelError, OptionError, VitflowError, VitflowWarning, printable
from vitflow.explaining.asking.method_options import OPTIONS
from vitflow.explaining.asking.method_table import Method, list_methods
from vitflow.explaining.progress import shown_by
from vitflow.models.precisions import DTYPES
from vitflow.pictures.files import is_folder, is_remote
from vitflow.pictures.options import BACKGROUNDS, FITS, INTERPOLATIONS

# Knows photographs, and is small enough to fetch for a first look.
DEFAULT_MODEL = "vit_small_patch16_224.augreg_in21k_ft_in1k"
DRAWING = ("cmap", "alpha", "vmin", "vmax", "interpolation", "background", "contours")


class _Patch(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    name = "ROW,COL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            row, col = (int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"expected ROW,COL counted from 0, such as 3,7, got {value!r}.", param, ctx)
        return row, col


class PathOrURL(click.Path):
    """A path as a Path, a URL as text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value as what it is."""
        return value if is_remote(value) else super().convert(value, param, ctx)


def method_options(command: Callable[..., None], methods: Iterable[Method] | None = None) -> Callable[..., None]:
    """Give a command every option of these methods, by default of all options in the table."""
    table = list(list_methods() if methods is None else methods)
    for option in reversed(OPTIONS.values()):
        having = [method for method in table if method.accepts(option.name)]
        if methods is not None and not having:
            continue
        kind: Any = {"choice": click.Choice(option.choices), "patch": _Patch(), "text": str}.get(
            str(option.kind), option.kind
        )
        flag = f"--{option.name.replace('_', '-')}"
        text = f"{option.help}  [{_defaults(having, option.name)}]"
        if option.kind is bool:
            command = click.option(f"{flag}/--no-{flag[2:]}", option.name, default=None, help=text)(command)
        else:
            command = click.option(flag, option.name, type=kind, default=None, metavar=option.metavar, help=text)(
                command
            )
    return command


def shown(value: Any) -> str:
    """A default value in words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else "none" if value is None else str(value)


def _defaults(methods: list[Method], name: str) -> str:
    """An option's default, such as "default: 0.5"; by method where they differ, "default: gae: max; flow: mean"."""
    by_default: dict[str, list[str]] = {}
    for method in methods:
        default = method.defaults.get(name)
        text = "by the kind of model" if default is None and OPTIONS[name].kind is bool else shown(default)
        by_default.setdefault(text, []).append(method.name)
    told = [f"{', '.join(names)}: {default}" for default, names in by_default.items()]
    return f"default: {'; '.join(told if len(told) > 1 else by_default)}"


@contextmanager
def _progress_bar(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on stderr for what takes longer than a moment, on terminals only."""
    from tqdm import tqdm

    with tqdm(total=total, desc=label, delay=2, leave=False, disable=None) as bar:
        yield bar.update


@contextmanager
def talking() -> Iterator[None]:
    """Turn errors into one line and an exit code, and warnings into lines on stderr."""

    told: Counter[str] = Counter()
    first: dict[str, str] = {}

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        line = f"{'note' if issubclass(category, VitflowWarning) else 'warning'}: {message}"
        kind = re.sub(r"\d+(\.\d+)?", "0", line)  # the same of other pictures, whatever its numbers are
        if not told[kind]:
            say(line)
            first[kind] = line
        told[kind] += 1

    def tell_counts() -> None:
        for kind, count in told.items():
            if count > 1:
                start = first[kind] if len(first[kind]) < 60 else f"{first[kind][:57]}…"
                say(f"{start} (told once, it came up {count} times)")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", VitflowWarning)
        warnings.showwarning = show
        try:
            with shown_by(_progress_bar):
                yield
                tell_counts()
        except (OptionError, ModelError) as error:
            say(f"error: {error}")
            sys.exit(2)
        except VitflowError as error:
            say(f"error: {error}")
            sys.exit(1)


def name_option(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option that says what to call its model."""
    return click.option(
        "--name", metavar="TEXT", help="What to call the model in figures and rows.  [default: its id, as far as known]"
    )(command)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that choose a model and where it runs."""
    options = (
        click.option(
            "--model",
            metavar="ID|demo|PATH",
            help="timm id, hf-hub:…, local-dir:…, a folder, a weights file, or demo, the bundled model, which knows "
            f"eight drawn shapes only.  [default: {DEFAULT_MODEL}]",
        ),
        click.option(
            "--checkpoint",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Weights for the model: safetensors or a torch file.",
        ),
        click.option("--num-classes", type=click.IntRange(min=1), help="Build the model with that many classes."),
        click.option(
            "--class-names",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="File with the names of the classes: one per line, or JSON.",
        ),
        name_option,
        click.option("--device", metavar="cpu|cuda|mps|…", help="Where to run.  [default: a GPU if there is one]"),
        click.option("--dtype", type=click.Choice(DTYPES), help="Precision to run in.  [default: the model's own]"),
        click.option(
            "--fit",
            type=click.Choice(FITS),
            default="crop",
            show_default=True,
            help="How the picture becomes the model's input: the model's own crop, or the whole picture squashed, "
            "padded, or in its own aspect ratio.",
        ),
    )
    return reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def drawing_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say how a map is drawn."""
    options = (
        click.option(
            "--cmap",
            metavar="NAME",
            help="Colour map of matplotlib.  [default: plasma; red above and blue below 0 where a map has both]",
        ),
        click.option("--alpha", type=click.FloatRange(0, 1), help="Strength of the colours.  [default: 0.6]"),
        click.option(
            "--vmin",
            type=float,
            help="Value of the first colour.  [default: 2nd percentile of the map; -vmax where it has negative values]",
        ),
        click.option(
            "--vmax",
            type=float,
            help="Value of the last colour.  [default: 98th percentile of the map, without its signs]",
        ),
        click.option(
            "--interpolation",
            type=click.Choice(INTERPOLATIONS),
            help="How patches become pixels.  [default: smooth]",
        ),
        click.option(
            "--background",
            type=click.Choice(BACKGROUNDS),
            help="What stands under the colours: the photograph as it is, in darkened grey, or darkened with half its "
            "colour.  [default: grey]",
        ),
        click.option(
            "--contours",
            is_flag=True,
            default=None,
            help="Draw lines around the highest values that make up 10, 25 and 50 % of the map's mass.",
        ),
    )
    return reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


class Once(click.Option):
    """An option that is taken once, and read as if it could be repeated, so that a second one is not dropped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "multiple": True})

    def only(self, ctx: click.Context, values: Sequence[str]) -> str | None:
        """Its one value; a usage error that says how to ask for several, now that all of the command line is read."""
        if len(values) > 1:
            flag = self.opts[0]
            several = " ".join(f"{flag} {shlex.quote(printable(value))}" for value in values)
            if ctx.info_name == "folder":
                advice = "run vitflow folder once for each, with an output folder of its own"
            else:
                pictures = ctx.params.get("images") or [ctx.params.get("image") or "IMAGE"]
                advice = f"vitflow compare {shlex.join(map(printable, pictures))} {several} shows them side by side"
            raise click.UsageError(f"Expected {flag} once, got it {len(values)} times: {advice}.", ctx)
        return values[0] if values else None


def class_option(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option that names one class."""
    return click.option(
        "--class",
        "target",
        metavar="NAME|INDEX",
        help="Class to explain and report.  [default: the predicted class]",
        cls=Once,
    )(command)


def against_option(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option that sets another class against the one to explain."""
    return click.option(
        "--against",
        metavar="NAME|INDEX",
        help="Show what speaks for the class less what speaks for this one; class-specific methods only.",
    )(command)


def target_of(target: Any, given: Mapping[str, Any]) -> Any:
    """The class to explain, or a contrast of it and the one that was set against it."""
    if given["against"] is None:
        return target
    from vitflow.explaining.asking.targets import Contrast

    return Contrast(target, against=given["against"])


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
    return Explainer(model, device=device, dtype=given["dtype"], fit=given["fit"], name=given["name"])


def tell_limits(explainer: Any) -> None:
    """Say on stderr what a reader must know of the model before any of its maps, whatever the user calls it."""
    from vitflow.demo import limits_of
    from vitflow.models.facts import model_id

    if limits := limits_of(model_id(explainer.model)):
        say(f"model: {explainer.model_id} {limits}: of other pictures its maps tell nothing")


def check_pictures(images: Iterable[Path], command: str) -> None:
    """Raise OptionError for a folder among the pictures: another command is made for it."""
    for image in images:
        if is_folder(image):
            raise OptionError(
                f"Expected pictures, got the folder {printable(image)}: vitflow folder {printable(image)} -o OUTPUT "
                f"explains every picture of a folder, vitflow {command} the ones that you name."
            )


def output_file(output: str | None, name: str, suffixes: Sequence[str]) -> Path:
    """Where a command writes its one file: under this name here, or in a folder, which need not be there yet.

    Raises:
        OptionError: the file would have none of the suffixes that the command writes.
    """
    if output is None:
        return Path(name)
    if names_folder(output):
        return Path(output) / name
    check_suffix(Path(output), suffixes, ", or a folder with / at its end")
    return Path(output)


def names_folder(output: str) -> bool:
    """Whether an output can only be meant as a folder."""
    return output.endswith(("/", os.sep)) or is_folder(output)


def check_suffix(output: Path, suffixes: Sequence[str], more: str = "") -> None:
    """Raise OptionError where an output has none of the suffixes that a command writes."""
    if output.suffix.lower() not in suffixes:
        raise OptionError(f"Expected an output that ends in {', '.join(suffixes)}{more}, got {str(output)!r}.")


def cannot_write(path: Path, error: OSError) -> str:
    """What is wrong with a place that cannot be written, and what to do; never the name of an unfinished file."""
    return f"Cannot write {printable(path)}: {error.strerror or error}. Choose another place with -o."


def notes_on(saliencies: Iterable[Any]) -> list[str]:
    """What a reader of these maps should bear in mind, each class of a picture once."""
    return list(
        dict.fromkeys(
            f"{printable(one.source)}, {one.label}: {one.facts['note']}." for one in saliencies if "note" in one.facts
        )
    )


def _told(name: str, row: Mapping[str, Any]) -> str:
    """What is wrong with a picture, its name told once."""
    message = f"{row['error']}: {row['message']}"
    return message if name in message else f"{name}: {message}"


@contextmanager
def going_on(kept: bool) -> Iterator[None]:
    """Say on Ctrl-C how a run goes on, and end with its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        if kept:
            say("interrupted: what was done is kept; the same command goes on from there")
        else:
            say("interrupted: nothing is kept; with -o FOLDER a run can be gone on with")
        sys.exit(130)


@contextmanager
def pictures_bar() -> Iterator[Any]:
    """A callback that shows pictures per second, the time left, the current file and what failed, on stderr."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        """A bar that tells its pace in words."""

        @property
        def format_dict(self) -> dict[str, Any]:
            found: dict[str, Any] = super().format_dict
            done, elapsed = found["n"] - found["initial"], found["elapsed"]
            pace = done / elapsed if elapsed else 0.0
            words = f"{pace:.1f} pictures/s" if pace >= 1 else f"{1 / pace:.1f} s/picture" if pace else "starting"
            return found | {"pace": words, "whole": int(found["n"])}

    bar: Any = None

    def show(state: Any) -> None:
        nonlocal bar
        if bar is None:
            bar = Bar(
                total=state.total,
                initial=state.done,
                dynamic_ncols=True,
                file=sys.stderr,
                disable=None,  # none into a file
                mininterval=0.2,
                smoothing=0,
                bar_format="{percentage:3.0f} %|{bar}| {whole}/{total} pictures, {elapsed} passed, {remaining} left, "
                "{pace}{postfix}",
            )
        if state.row is not None:
            name = printable(state.row["input"])
            bar.set_postfix_str(name[-40:], refresh=False)
            if state.row["status"] == "failed":
                bar.write(f"error: {_told(name, state.row)}", file=sys.stderr)
        bar.update(max(state.done + state.under_way - bar.n, 0))

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
