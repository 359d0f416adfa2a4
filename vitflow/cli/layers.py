"""`vitflow layers`: a map as it builds up through the layers, and the heads of one layer, on one sheet."""

from pathlib import Path
from typing import Any

import click

from vitflow.cli.options import (
    DRAWING,
    Once,
    cannot_write,
    check_pictures,
    class_option,
    drawing_options,
    given_options,
    make_explainer,
    method_options,
    model_options,
    output_file,
    talking,
    tell_limits,
)
from vitflow.cli.saying import say_record
from vitflow.cli.sections import SectionedCommand
from vitflow.errors import OptionError, VitflowError, printable
from vitflow.explaining.asking.choices import choose_methods
from vitflow.explaining.asking.method_options import OPTIONS
from vitflow.pictures.options import FIGURE_FORMATS


@click.command(cls=SectionedCommand, short_help="Show a picture's map layer by layer, and the heads of one.")
@click.argument("image", metavar="IMAGE", type=click.Path(path_type=Path))
@model_options
@click.option(
    "--method",
    default=["rollout"],
    show_default=True,
    metavar="NAME",
    cls=Once,
    help="What is built up: rollout, gradient_rollout or gae.",
)
@class_option
@method_options
@drawing_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=str),
    help="File for the sheet: .png, .pdf or .svg; or a folder, with / at its end.  [default: IMAGE-layers.png here]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def layers(image: Path, **given: Any) -> None:
    """Show what each layer looks at, how the map of IMAGE builds up, and each head of one layer (--layer)."""
    options = given_options(given, OPTIONS)
    layer = options.pop("layer", -1)
    with talking():
        choose_methods([given["method"], "attention"], options)  # before torch is loaded
        check_pictures([image], "layers")
        output = output_file(given["output"], f"{image.stem}-layers.png", FIGURE_FORMATS)
        if output.resolve() == image.resolve():
            raise OptionError(f"The sheet would overwrite the picture {str(output)!r}: choose another output.")
        explainer = make_explainer(given)
        found = explainer.layers(image, method=given["method"], layer=layer, target=given["target"], **options)
        try:
            found.figure(output, **given_options(given, DRAWING))
        except OSError as error:
            raise VitflowError(cannot_write(output, error)) from error
        tell_limits(explainer)
        if given["as_json"]:
            maps = [saliency.to_dict() for saliency in found.saliencies]
            say_record({"input": str(image), "output": str(output), "maps": maps})
        else:
            click.echo(printable(output))
