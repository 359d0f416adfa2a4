"""`vitflow features`: what the patches of images hold, as colours."""

from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.outputs import name_for, output_file, writing
from vitflow.cli.saying import say, say_model_note, say_written
from vitflow.images import FIGURE_FORMATS


@click.command(short_help="Show what patches hold: three components as colours.", panel="Images")
@shared.images_argument
@shared.model_options
@click.option(
    "--layer",
    "of_layer",
    panel="Method",
    type=int,
    default=-1,
    metavar="N≥1|-1",
    help="Layer whose features are shown, counted from 1; -1 is the last.",
)
@click.option(
    "--foreground",
    panel="Method",
    is_flag=True,
    help="Leave out the background: the side of the first component that has more of the images' edges.",
)
@shared.drawing_option("alpha", "1")
@shared.drawing_option("interpolation")
@shared.output_option(
    help="File for the figure: .png, .pdf, .svg; or .json for the numbers; or a folder, with / at its end.  [default: "
    "IMAGE-features.png here; of several, IMAGE-and-N-more-features.png]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per image.")
def features(images: tuple[Path, ...], **given: Any) -> None:
    """Show what the patches of each IMAGE hold: the first three principal components of their features as colours.

    The components are those of all images together, so that one colour means the same in each.
    """
    output = output_file(images, given["output"], name_for(images, "features.png"), (*FIGURE_FORMATS, ".json"))
    explainer = shared.make_explainer(given)
    from vitflow.explaining.features import feature_maps

    found = feature_maps(list(images), model=explainer, layer=given["of_layer"], foreground=given["foreground"])
    drawing = () if output.suffix.lower() == ".json" else ("alpha", "interpolation")
    with writing(output):
        found.save(output, **shared.given_options(given, drawing))
    say(repr(found))
    say_model_note(explainer)
    say_written(output, found.records() if given["as_json"] else None)
