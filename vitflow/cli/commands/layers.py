"""`vitflow layers`: a map as it builds up through the layers, and the heads of one layer, on one sheet."""

from pathlib import Path
from typing import Any

import click

from vitflow.cli.options import (
    DRAWING,
    class_option,
    drawing_options,
    given_options,
    make_explainer,
    method_option,
    method_options,
    model_options,
    output_option,
    question_options,
    use_specific,
)
from vitflow.cli.outputs import output_file, writing
from vitflow.cli.saying import say_record, tell_limits
from vitflow.cli.sections import SectionedCommand
from vitflow.errors import printable
from vitflow.explaining.asking.choices import choose_methods
from vitflow.explaining.asking.method_options import OPTIONS
from vitflow.pictures.options import FIGURE_FORMATS


@click.command(cls=SectionedCommand, short_help="Show a picture's map layer by layer, and the heads of one.")
@click.argument("image", metavar="IMAGE", type=click.Path(path_type=Path))
@model_options
@question_options
@method_option(help="What is built up: rollout, gradient_rollout or gae.")
@class_option
@method_options
@drawing_options
@output_option(
    help="File for the sheet: .png, .pdf or .svg; or a folder, with / at its end.  [default: IMAGE-layers.png here]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def layers(image: Path, **given: Any) -> None:
    """Show what each layer looks at, how the map of IMAGE builds up, and each head of one layer (--layer)."""
    options = given_options(given, OPTIONS)
    layer = options.pop("layer", -1)
    use_specific(given)
    choose_methods([given["method"], "attention"], options)  # before torch is loaded
    output = output_file([image], given["output"], f"{image.stem}-layers.png", FIGURE_FORMATS)
    explainer = make_explainer(given)
    found = explainer.layers(image, method=given["method"], layer=layer, target=given["target"], **options)
    with writing(output):
        found.figure(output, **given_options(given, DRAWING))
    tell_limits(explainer)
    if given["as_json"]:
        maps = [saliency.to_dict() for saliency in found.saliencies]
        say_record({"input": str(image), "output": str(output), "maps": maps})
    else:
        click.echo(printable(output))
