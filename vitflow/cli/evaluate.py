"""`vitflow evaluate`: measure the quality of maps on the user's model and data."""

import os
import sys
from contextlib import nullcontext
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.explainer import check_before_loading, make_explainer
from vitflow.cli.figures import MethodWithOptions
from vitflow.cli.output import check_suffix, images_bar, resumable, say, say_record, writing
from vitflow.errors import OptionError, printable
from vitflow.evaluation.metrics import choose_metrics
from vitflow.files import is_there
from vitflow.images import FIGURE_FORMATS


@click.command(short_help="Measure the quality of each method's maps.", panel="Many images")
@click.argument("data")
@shared.model_options
@shared.question_options
@shared.methods_option(
    "Method to measure, optionally with options: rollout:preset=paper; repeatable. all: every method that the "
    "model supports. Baselines are always included.  [default: all but similarity and methods that run the "
    "model again: frozen_gradient, occlusion, sampling, consensus, legrad]",
    MethodWithOptions("all"),
)
@shared.option(
    "Measurement",
    "--metric metrics",
    "NAME|GROUP",
    "Metric or group (localisation, faithfulness, sanity, grid, sameness); repeatable.  [default: all]",
    multiple=True,
)
@shared.option(
    "", "-o --output", shared.NEW_FOLDER, "Folder for rows, tables, figures and report.html; makes the run resumable."
)
@shared.option(
    "",
    "--card",
    shared.NEW_FILE,
    "Card of the only method, or of that of the verdict, for a model's page (.png, .pdf, .svg); at least 10 images.",
)
@shared.option(
    "Images", "--images", shared.FOLDER, "Folder with the images of an annotation file.  [default: that of the file]"
)
@shared.limit_option
@shared.option(
    "Measurement details",
    "--replace replace_by",
    ("drop", "blank"),
    "How to remove patches: drop their tokens, or fill with the image's mean colour.  "
    "[default: drop if the model supports it, else blank]",
)
@shared.option("Measurement details", "--points", 2, "Points of the deletion and insertion curves.", default=11)
@shared.option(
    "Measurement details",
    "--blurred-control",
    bool,
    "Also measure a blurred copy of each map: the control for smoothness.",
)
@shared.option(
    "Measurement details",
    "--sanity-images",
    0,
    "Measure sanity (many forward passes) on N randomly chosen images.",
    default=24,
)
@shared.batch_size_option
@shared.option("Measurement details", "--seed", 0, "Seed of all random choices.", default=0)
@shared.resume_option
@shared.option("", "--json as_json", bool, "Print all numbers as one JSON object.")
@shared.method_options
def evaluate(data: str, **given: Any) -> None:
    """Measure the quality of each method's maps on DATA, with two baselines.

    DATA is demo:500 for 500 drawn images with exact masks; a folder of images with masks (cat_mask.png or
    masks/cat.png), boxes.json, labels.csv or no annotations; or a COCO or plain JSON file. Images that fail are
    reported and skipped. The default model for drawn images is demo.
    """
    choose_metrics(given["metrics"] or None)  # before torch is loaded
    if given["card"] is not None:
        check_suffix(given["card"], FIGURE_FORMATS)
    check_before_loading(given)
    if not data.startswith("demo:") and not is_there(data):
        raise OptionError(
            f"No data at {printable(data)!r}. Expected a folder with images, an annotation file, or demo:500."
        )
    # Waiting threads must not occupy cores; this has an effect only before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from vitflow.evaluation.run import evaluate

    if data.startswith("demo:"):
        given["model"] = given["model"] or "demo"
    methods = list(given["methods"])
    if "all" in methods and len(methods) > 1:
        raise OptionError("--method all cannot be combined with other methods.")
    arguments = shared.arguments_of(evaluate, given) | {
        "model": lambda: make_explainer(given),
        "methods": "all" if "all" in methods else methods or None,
        "metrics": given["metrics"] or None,
        "overwrite": not given["resume"],
    }
    written = writing(given["card"], "--card") if given["card"] else nullcontext()
    with written, resumable(kept=given["output"] is not None), images_bar() as progress:
        evaluation = evaluate(data, progress=progress, **arguments, **shared.method_values(given))
    if given["as_json"]:
        say_record(evaluation.to_dict())
    else:
        click.echo(printable(str(evaluation), lines=True))
        for note in evaluation.skipped:
            say(f"note: {note}")
    if given["output"] is not None:
        say(f"report: {printable(given['output'] / 'report.html')}")
    elif not given["as_json"]:
        say("-o FOLDER writes a page with all metrics, what they do not show, charts and maps.")
    if given["card"] is not None:
        say(f"card: {printable(given['card'])}")
    if failed := len(evaluation.failures):
        say(f"{failed} image{'s' if failed > 1 else ''} failed{' (see the report)' if given['output'] else ''}")
        sys.exit(1)
