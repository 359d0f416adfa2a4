"""`vitflow features`: what the patches of pictures hold, as colours."""

from pathlib import Path
from typing import Any

import click

from vitflow.cli.options import make_explainer, model_options, output_option, pictures_argument
from vitflow.cli.outputs import output_file, writing
from vitflow.cli.saying import say, say_record, tell_limits
from vitflow.cli.sections import SectionedCommand
from vitflow.errors import printable
from vitflow.pictures.options import FIGURE_FORMATS, INTERPOLATIONS

_SUFFIXES = (*FIGURE_FORMATS, ".json")


@click.command(cls=SectionedCommand, short_help="Show what patches hold: three components as colours.")
@pictures_argument
@model_options
@click.option(
    "--layer",
    "of_layer",
    type=int,
    default=-1,
    show_default=True,
    metavar="N≥1|-1",
    help="Layer whose features are shown, counted from 1; -1 is the last.",
)
@click.option(
    "--foreground",
    is_flag=True,
    help="Leave out the background: the side of the first component that has more of the pictures' edges.",
)
@click.option("--alpha", type=click.FloatRange(0, 1), help="Strength of the colours.  [default: 1]")
@click.option(
    "--interpolation", type=click.Choice(INTERPOLATIONS), help="How patches become pixels.  [default: smooth]"
)
@output_option(
    help="File for the figure: .png, .pdf, .svg; or .json for the numbers; or a folder, with / at its end.  [default: "
    "IMAGE-features.png here; of several, IMAGE-and-N-more-features.png]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per picture.")
def features(images: tuple[Path, ...], **given: Any) -> None:
    """Show what the patches of each IMAGE hold: the first three principal components of their features as colours.

    The components are those of all pictures together, so that one colour means the same in each.
    """
    others = f"-and-{len(images) - 1}-more" if len(images) > 1 else ""
    output = output_file(images, given["output"], f"{images[0].stem}{others}-features.png", _SUFFIXES)
    explainer = make_explainer(given)
    found = explainer.features(list(images), layer=given["of_layer"], foreground=given["foreground"])
    drawing = {name: given[name] for name in ("alpha", "interpolation") if given[name] is not None}
    with writing(output):
        found.save(output, **({} if output.suffix.lower() == ".json" else drawing))
    say(repr(found))
    tell_limits(explainer)
    if not given["as_json"]:
        click.echo(printable(output))
    for record in found.records() if given["as_json"] else ():
        say_record(record | {"output": str(output)})
