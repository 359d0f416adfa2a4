"""`vitflow layers`: maps layer by layer, and the heads of one layer."""

from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.output import output_file, save_result, say_model_note
from vitflow.explaining.choices import choose_methods, default_method


@click.command(short_help="Show a map layer by layer, and the heads of one layer.", panel="Images")
@click.argument("image", metavar="IMAGE", type=click.Path(path_type=Path))
@shared.model_options
@shared.question_options
@shared.method_option(help="Method to accumulate: rollout, gradient_rollout or gae.")
@shared.class_option(metavar="NAME|INDEX", help="Class to explain and report.  [default: the predicted class]")
@shared.method_options
@shared.drawing_options
@shared.figure_option("sheet", "layers")
@shared.json_option
def layers(image: Path, **given: Any) -> None:
    """Show each layer's map of IMAGE, the accumulated map, and each head of one layer (--layer)."""
    options = shared.method_values(given)
    layer = options.pop("layer", -1)
    method = given["method"] or default_method(shared.has_target(given))
    choose_methods([method, "attention"], options)  # before torch is loaded
    output = output_file([image], given["output"], "layers")
    explainer = shared.make_explainer(given)
    from vitflow.explaining.layer_maps import layer_maps

    maps = layer_maps(image, model=explainer, method=given["method"], layer=layer, target=given["target"], **options)
    if given["method"] is None:
        shared.say_default(method)
    save_result(maps, output, shared.drawing_values(given), given["as_json"])
    say_model_note(explainer.model_id, explainer.facts.note)
