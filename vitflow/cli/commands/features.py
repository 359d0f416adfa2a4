"""`vitflow features`: principal components of patch features as colours."""

from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.messages import say, say_model_note, say_written
from vitflow.cli.outputs import name_for, output_file, writing
from vitflow.images import FIGURE_FORMATS


@click.command(short_help="Show three principal components of patch features as colours.", panel="Images")
@shared.images_argument
@shared.model_options
@click.option(
    "--layer",
    "of_layer",
    panel="Method",
    type=int,
    default=-1,
    metavar="N≥1|-1",
    help="Layer of the features, counted from 1; -1 is the last.",
)
@click.option(
    "--foreground",
    panel="Method",
    is_flag=True,
    help="Hide the background: the sign of the first component that covers more of the image borders.",
)
@shared.drawing_option("alpha", "1")
@shared.drawing_option("interpolation")
@shared.output_option(
    help="File for the figure: .png, .pdf, .svg; or .json for the numbers; or a folder, with / at its end.  [default: "
    "IMAGE-features.png here; of several, IMAGE-and-N-more-features.png]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per image.")
def features(images: tuple[Path, ...], **given: Any) -> None:
    """Show the first three principal components of each IMAGE's patch features as colours.

    The components are computed over all images together, so that colours are comparable.
    """
    output = output_file(images, given["output"], name_for(images, "features.png"), (*FIGURE_FORMATS, ".json"))
    explainer = shared.make_explainer(given)
    from vitflow.explaining.features import feature_maps

    components = feature_maps(list(images), model=explainer, layer=given["of_layer"], foreground=given["foreground"])
    drawing = () if output.suffix.lower() == ".json" else ("alpha", "interpolation")
    with writing(output):
        components.save(output, **shared.given_options(given, drawing))
    say(repr(components))
    say_model_note(explainer)
    say_written(output, components.records() if given["as_json"] else None)
