"""`vitflow compare`: several methods over the same pictures, as one strip."""

import re
from pathlib import Path
from typing import Any, cast

import click

from vitflow.cli.options import (
    DRAWING,
    against_option,
    cannot_write,
    check_pictures,
    drawing_options,
    given_options,
    make_explainer,
    method_options,
    model_options,
    notes_on,
    output_file,
    talking,
    target_of,
    tell_limits,
)
from vitflow.cli.saying import say, say_record
from vitflow.cli.sections import SectionedCommand
from vitflow.errors import OptionError, VitflowError, printable
from vitflow.explaining.asking.choices import check_methods
from vitflow.explaining.asking.method_options import OPTIONS
from vitflow.explaining.asking.method_table import DEFAULT_METHODS, Method, get_method
from vitflow.pictures.options import FIGURE_FORMATS, SCALINGS

_SUFFIXES = (*FIGURE_FORMATS, ".json")


class MethodWithOptions(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """NAME or NAME:OPTION=VALUE,…, each value read as the command line reads that option."""

    name = "NAME[:OPTION=VALUE,…]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, dict[str, Any]]:
        """The method's name and its options; a usage error where there is no such one."""
        if isinstance(value, tuple):
            return value
        name, _, told = str(value).partition(":")
        options = {}
        # A comma separates options only where a name and "=" follow: a patch is written 3,7.
        for part in re.split(r",(?=[\w-]+=)", told) if told else []:
            key, equals, text = part.partition("=")
            if not equals:
                self.fail(f"expected OPTION=VALUE after {name}:, got {part!r}.", param, ctx)
            options[key.strip().replace("-", "_")] = text.strip()
        try:
            method = get_method(name)
            method.complete(dict.fromkeys(options))  # the names alone; values are still text
        except OptionError as error:
            self.fail(str(error), param, ctx)
        return name, {key: _type_of(key, method, ctx).convert(text, param, ctx) for key, text in options.items()}


def _type_of(option: str, method: Method, ctx: click.Context | None) -> "click.ParamType[Any]":
    """How the command itself reads an option; one that only a registered method has is read as its default's type."""
    for param in ctx.command.params if ctx is not None else ():
        if param.name == option:
            return param.type
    return cast("click.ParamType[Any]", click.types.convert_type(None, method.defaults[option]))


@click.command(cls=SectionedCommand, short_help="Show several methods over the same pictures, in one strip.")
@click.argument("images", nargs=-1, required=True, metavar="IMAGE…", type=click.Path(path_type=Path))
@model_options
@click.option(
    "--method",
    "methods",
    type=MethodWithOptions(),
    multiple=True,
    help="A method to show, also with options of its own: rollout:head_fusion=max,discard_ratio=0.9. Repeat it for "
    "more columns.  [default: all quick ones and two baselines]",
)
@click.option(
    "--class",
    "targets",
    metavar="NAME|INDEX|top5",
    multiple=True,
    help="Class to explain; repeat it for more rows.  [default: the predicted class]",
)
@against_option
@method_options
@drawing_options
@click.option(
    "--scaling",
    type=click.Choice(SCALINGS),
    help="Which maps of one method have the limits of their colours in common.  [default: those of one picture]",
)
@click.option("--timings", is_flag=True, default=None, help="Tell below each map how long it took.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=str),
    help="File for the strip: .png, .pdf, .svg; or .json for the numbers; or a folder, with / at its end.  [default: "
    "IMAGE-compare.png here; of several, IMAGE-and-N-more-compare.png]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per picture.")
def compare(images: tuple[Path, ...], **given: Any) -> None:
    """Lay several methods over each IMAGE, side by side in one strip, and say how far they agree."""
    options = given_options(given, OPTIONS)
    with talking():
        check_pictures(images, "compare")
        output = _output_path(images, given["output"])
        methods = given["methods"] or None
        check_methods(methods or DEFAULT_METHODS, options)  # before torch is loaded
        from vitflow.explaining.showing.comparison import compare

        explainer = make_explainer(given)
        comparison = compare(images, model=explainer, methods=methods, targets=_targets(given), **options)
        drawing = {} if output.suffix.lower() == ".json" else given_options(given, (*DRAWING, "scaling", "timings"))
        try:
            comparison.save(output, **drawing)
        except OSError as error:
            raise VitflowError(cannot_write(output, error)) from error
        for note in notes_on(comparison.saliencies):
            say(f"note: {note}")
        say(str(comparison.agreement()))
        tell_limits(explainer)
        if not given["as_json"]:
            click.echo(printable(output))
        for record in comparison.records() if given["as_json"] else ():
            say_record(record | {"output": str(output)})


def _targets(given: dict[str, Any]) -> Any:
    """The classes that were asked for, or each of them against another."""
    if given["against"] is None:
        return list(given["targets"]) or None
    return [target_of(target, given) for target in given["targets"] or (None,)]


def _output_path(images: tuple[Path, ...], asked: str | None) -> Path:
    """Where the strip goes; it overwrites none of the pictures."""
    others = len(images) - 1
    name = f"{images[0].stem}{f'-and-{others}-more' if others else ''}-compare.png"
    output = output_file(asked, name, _SUFFIXES)
    if output.resolve() in {image.resolve() for image in images}:
        raise OptionError(f"The strip would overwrite the picture {str(output)!r}: choose another output.")
    return output
