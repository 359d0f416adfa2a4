"""`vitflow features`: principal components of patch features as colours."""

from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.output import output_file, save_result, say, say_model_note


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
    help="Hide background patches: those on the side of the first component that covers more of the image border.",
)
@shared.drawing_option("alpha", "1")
@shared.drawing_option("interpolation")
@shared.figure_option("figure", "features")
@shared.json_option
def features(images: tuple[Path, ...], **given: Any) -> None:
    """Show the first three principal components of each IMAGE's patch features as colours.

    The components are computed over all images together, so that colours are comparable.
    """
    output = output_file(images, given["output"], "features")
    explainer = shared.make_explainer(given)
    from vitflow.explaining.features import feature_maps

    components = feature_maps(list(images), model=explainer, layer=given["of_layer"], foreground=given["foreground"])
    save_result(components, output, shared.given_options(given, ("alpha", "interpolation")), given["as_json"])
    say(repr(components))
    say_model_note(explainer.model_id, explainer.facts.note)
