"""`vitflow layers`: maps layer by layer, and the heads of one layer."""

from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.messages import say_model_note, say_written
from vitflow.cli.outputs import name_for, output_file, writing
from vitflow.explaining.choices import choose_methods, default_method
from vitflow.images import FIGURE_FORMATS


@click.command(short_help="Show a map layer by layer, and the heads of one layer.", panel="Images")
@click.argument("image", metavar="IMAGE", type=click.Path(path_type=Path))
@shared.model_options
@shared.question_options
@shared.method_option(help="Method to accumulate: rollout, gradient_rollout or gae.")
@shared.class_option(metavar="NAME|INDEX", help="Class to explain and report.  [default: the predicted class]")
@shared.method_options
@shared.drawing_options
@shared.output_option(
    help="File for the sheet: .png, .pdf, .svg; or .json for the numbers; or a folder, with / at its end.  [default: "
    "IMAGE-layers.png here]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def layers(image: Path, **given: Any) -> None:
    """Show each layer's map of IMAGE, the accumulated map, and each head of one layer (--layer)."""
    options = shared.method_values(given)
    layer = options.pop("layer", -1)
    method = given["method"] or default_method(shared.asks(given))
    choose_methods([method, "attention"], options)  # before torch is loaded
    output = output_file([image], given["output"], name_for([image], "layers.png"), (*FIGURE_FORMATS, ".json"))
    explainer = shared.make_explainer(given)
    from vitflow.explaining.layer_maps import layer_maps

    maps = layer_maps(image, model=explainer, method=given["method"], layer=layer, target=given["target"], **options)
    if given["method"] is None:
        shared.say_default(method)
    with writing(output):
        maps.save(output, **({} if output.suffix.lower() == ".json" else shared.drawing_values(given)))
    say_model_note(explainer)
    record = {"input": str(image), "maps": [saliency.to_dict() for saliency in maps.saliencies]}
    say_written(output, [record] if given["as_json"] else None)
