"""The command line. Data goes to stdout, talk to stderr; exit codes: 0 done, 1 some pictures failed, 2 usage, 130 interrupted.

Nothing here imports torch before a command runs, so that help and usage errors answer at once.
"""

import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from vitflow import __version__
from vitflow.errors import ModelError, OptionError, VitflowError, VitflowWarning
from vitflow.methods import OPTIONS, Method, get_method, list_methods

_FITS = ("crop", "squash", "pad", "native")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


class _Patch(click.ParamType):
    name = "ROW,COL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            row, col = (int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"expected ROW,COL counted from 0, such as 3,7, got {value!r}.", param, ctx)
        return row, col


def _method_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of the table of methods."""
    for option in reversed(OPTIONS.values()):
        having = [method for method in list_methods() if option.name in method.defaults]
        kind: Any = {"choice": click.Choice(option.choices), "patch": _Patch()}.get(str(option.kind), option.kind)
        flag = f"--{option.name.replace('_', '-')}"
        text = f"{option.help} [{_defaults(having, option.name)}]"
        if option.kind is bool:
            command = click.option(f"{flag}/--no-{flag[2:]}", option.name, default=None, help=text)(command)
        else:
            command = click.option(flag, option.name, type=kind, default=None, metavar=option.metavar, help=text)(
                command
            )
    return command


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else "none" if value is None else str(value)


def _defaults(methods: list[Method], name: str) -> str:
    """Which methods have an option, and its default, such as "rollout, attention: mean"."""
    by_default: dict[str, list[str]] = {}
    for method in methods:
        text = _shown(method.defaults[name])
        by_default.setdefault(text, []).append(method.name)
    return "; ".join(f"{', '.join(names)}: {default}" for default, names in by_default.items())


@contextmanager
def _talking() -> Iterator[None]:
    """Turn errors into one line and an exit code, and warnings into lines on stderr."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        click.echo(f"{'note' if issubclass(category, VitflowWarning) else 'warning'}: {message}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", VitflowWarning)
        warnings.showwarning = show
        try:
            yield
        except (OptionError, ModelError) as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(2)
        except VitflowError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(1)


def _model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that choose a model and where it runs."""
    options = (
        click.option(
            "--model",
            default="demo",
            show_default=True,
            metavar="ID|demo|PATH",
            help="timm id, hf-hub:…, local-dir:…, a folder, a weights file, or the bundled demo model.",
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
        click.option("--device", metavar="cpu|cuda|mps|…", help="Where to run.  [default: a GPU if there is one]"),
        click.option(
            "--fit",
            type=click.Choice(_FITS),
            default="crop",
            show_default=True,
            help="How the picture becomes the model's input: the model's own crop, the whole picture squashed or padded, or its own aspect ratio.",
        ),
    )
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def _drawing_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say how a map is drawn."""
    options = (
        click.option("--cmap", metavar="NAME", help="Colour map of matplotlib.  [default: turbo]"),
        click.option("--alpha", type=click.FloatRange(0, 1), help="Strength of the colours.  [default: 0.6]"),
        click.option("--vmin", type=float, help="Value of the first colour.  [default: 2nd percentile of the map]"),
        click.option("--vmax", type=float, help="Value of the last colour.  [default: 98th percentile of the map]"),
        click.option(
            "--interpolation",
            type=click.Choice(["linear", "cubic", "nearest"]),
            help="How patches become pixels.  [default: linear]",
        ),
    )
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="vitflow")
def cli() -> None:
    """See what a Vision Transformer looks at.

    \b
    vitflow explain cat.jpg --model vit_base_patch16_224.augreg2_in21k_ft_in1k -o cat-rollout.png
    vitflow demo
    """


@cli.command()
@click.argument("images", nargs=-1, required=True, metavar="IMAGE…", type=click.Path(path_type=Path))
@_model_options
@click.option(
    "--method",
    default="rollout",
    show_default=True,
    metavar="NAME",
    help="What to compute; `vitflow methods` lists the choices.",
)
@click.option(
    "--class", "target", metavar="NAME|INDEX", help="Class to explain and report.  [default: the predicted class]"
)
@_method_options
@_drawing_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="File for one picture, folder for several.  [default: here]"
)
@click.option("--save-map", is_flag=True, help="Write the unscaled map as .npz beside the overlay.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per picture.")
def explain(images: tuple[Path, ...], **given: Any) -> None:
    """Lay a saliency map over each IMAGE."""
    method = _known_method(given["method"])
    options = _given(given, OPTIONS)
    with _talking():
        method.complete(options)  # before torch is loaded
        targets = _output_paths(images, given["output"], method.name)
        explainer = _explainer(given)
        failed = sum(
            not _explain_one(explainer, image, target, options, given)
            for image, target in zip(images, targets, strict=True)
        )
        if failed:
            click.echo(f"{len(images) - failed} explained, {failed} failed", err=True)
            sys.exit(1)


def _explain_one(
    explainer: Any, image: Path, output: Path, options: Mapping[str, Any], given: Mapping[str, Any]
) -> bool:
    """Explain one picture and say so; whether it worked."""
    from vitflow.errors import ImageError

    drawing = _given(given, ("cmap", "alpha", "vmin", "vmax", "interpolation"))
    try:
        saliency = explainer.explain(image, method=given["method"], target=given["target"], **options)
        saliency.save(output, **drawing)
        files = [output]
        if given["save_map"]:
            files.append(saliency.save(output.with_suffix(".npz")))
    except (ImageError, OSError) as error:
        click.echo(f"error: {_printable(image)}: {error}", err=True)
        return False
    click.echo(f"{_printable(image)}: {_answer(saliency, explainer.class_names)}", err=True)
    if given["as_json"]:
        record = saliency.to_dict() | {"output": str(output)} | ({"map": str(files[1])} if len(files) > 1 else {})
        click.echo(json.dumps(record, ensure_ascii=False))
    else:
        for file in files:
            click.echo(_printable(file))
    return True


def _answer(saliency: Any, class_names: list[str] | None) -> str:
    """What the model said of a picture, in words."""
    if saliency.target is None:
        return f"{saliency.method} (the model has no classes)"
    words = f"{saliency.label} ({saliency.target}), {saliency.probability:.1%}"
    if saliency.predicted != saliency.target:
        name = class_names[saliency.predicted] if class_names else "class"
        words += f"; predicted: {name} ({saliency.predicted})"
        if not saliency.class_specific:
            words += f"; {saliency.method} does not depend on the class"
    return words


def _known_method(name: str) -> Method:
    try:
        return get_method(name)
    except OptionError as error:
        raise click.UsageError(str(error)) from error


def _given(values: Mapping[str, Any], names: Any) -> dict[str, Any]:
    """The options that the user gave."""
    return {name: values[name] for name in names if values.get(name) is not None}


def _explainer(given: Mapping[str, Any]) -> Any:
    from vitflow.explainer import Explainer, default_device
    from vitflow.models import load_model

    model = load_model(
        given["model"],
        checkpoint=given["checkpoint"],
        num_classes=given["num_classes"],
        class_names=given["class_names"],
        dynamic_img_size=given["fit"] == "native",
    )
    return Explainer(model, device=given["device"] or default_device(), fit=given["fit"])


def _output_paths(images: tuple[Path, ...], output: Path | None, method: str) -> list[Path]:
    """Where each overlay goes: no two pictures claim one file, and none overwrites a picture that is read."""
    if output is not None and output.suffix.lower() in _SUFFIXES and not output.is_dir():
        if len(images) > 1:
            raise OptionError(f"Expected a folder for {len(images)} pictures, got the file name {str(output)!r}.")
        paths = [output]
    else:
        folder, taken, paths = output or Path(), set[str](), []
        for image in images:
            stem, number = f"{image.stem}-{method}", 2
            while stem.lower() in taken:  # some file systems do not tell upper from lower case
                stem, number = f"{image.stem}-{number}-{method}", number + 1
            taken.add(stem.lower())
            paths.append(folder / f"{stem}.png")
    read = {image.resolve() for image in images}
    for path in paths:
        if path.resolve() in read:
            raise OptionError(f"The overlay would overwrite the picture {str(path)!r}: choose another output.")
    return paths


def _printable(path: Path) -> str:
    """A path that any terminal can print: invalid UTF-8 and control characters are escaped."""
    text = str(path).encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def methods(as_json: bool) -> None:
    """List the methods, their options and where they come from."""
    if as_json:
        rows = [
            {
                "name": m.name,
                "summary": m.summary,
                "class_specific": m.class_specific,
                "options": dict(m.defaults),
                "paper": m.paper,
            }
            for m in list_methods()
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    for method in list_methods():
        click.echo(f"{method.name}{'  (class-specific)' if method.class_specific else ''}")
        click.echo(f"    {method.summary}")
        options = "  ".join(f"--{name.replace('_', '-')} {_shown(value)}" for name, value in method.defaults.items())
        if options:
            click.echo(f"    defaults: {options}")
        if method.paper:
            click.echo(f"    source: {method.paper}")


@cli.command()
@click.argument("pattern", default="*vit*")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per model.")
def models(pattern: str, as_json: bool) -> None:
    """List pretrained timm models whose id matches PATTERN (with * as a wildcard)."""
    with _talking():
        from vitflow.models import list_models

        rows = list_models(pattern)
        if not rows:
            raise ModelError(f"No pretrained timm model matches {pattern!r}. Use * as a wildcard, such as 'vit_base*'.")
        if as_json:
            for row in rows:
                click.echo(json.dumps(row))
            return
        width = max(len(row["model"]) for row in rows)
        click.echo(f"{'model':{width}}  {'input':>9}  {'classes':>7}  attention", err=True)
        for row in rows:
            size = "×".join(str(side) for side in row["input_size"][1:])
            click.echo(f"{row['model']:{width}}  {size:>9}  {row['num_classes']:>7}  {row['attention']}")


@cli.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("vitflow-demo"),
    show_default=True,
    help="Folder for the overlays.",
)
def demo(output: Path) -> None:
    """Explain the bundled pictures with the bundled model: overlays and one strip."""
    with _talking():
        from vitflow.demo.show import run_demo

        for path in run_demo(output):
            click.echo(_printable(path))


def main() -> None:
    """Run the command line."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
