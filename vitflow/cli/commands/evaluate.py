"""`vitflow evaluate`: measure the quality of maps on the user's model and data."""

import os
import sys
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.commands.figures import MethodWithOptions
from vitflow.cli.output import images_bar, resumable, say, say_record
from vitflow.errors import OptionError, printable
from vitflow.evaluation.metrics import choose_metrics


class _MethodOrAll(MethodWithOptions):
    """A method, or "all"."""

    name = "NAME[:OPTION=VALUE,…]|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return "all" if value == "all" else super().convert(value, param, ctx)


@click.command(short_help="Measure the quality of each method's maps.", panel="Many images")
@click.argument("data")
@shared.model_options
@shared.question_options
@click.option(
    "--method",
    "methods",
    panel="Method",
    type=_MethodOrAll(),
    multiple=True,
    metavar="NAME[:OPTION=VALUE,…]|all",
    help="Method to measure, optionally with options: rollout:preset=paper; repeatable. all: every method that the "
    "model supports. Baselines are always included.  [default: all but similarity and the slow methods: occlusion, "
    "sampling, consensus, LeGrad]",
)
@click.option(
    "--metric",
    "metrics",
    panel="Measurement",
    multiple=True,
    metavar="NAME|GROUP|all",
    help="Metric or group (localisation, faithfulness, sanity, grid, intervals, correlation); repeatable.  "
    "[default: the first three groups]",
)
@click.option(
    "-o",
    "--output",
    type=shared.NEW_FOLDER,
    help="Folder for rows, tables, figures and report.html; makes the run resumable.",
)
@click.option(
    "--images",
    panel="Images",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the images of an annotation file.  [default: the folder of the file]",
)
@shared.limit_option
@click.option(
    "--replace",
    "replace_by",
    panel="Measurement",
    type=click.Choice(["drop", "blank", "blur"]),
    help="How to remove patches: drop their tokens, fill with the image's mean colour, or blur.  "
    "[default: drop if the model supports it, else blank]",
)
@click.option(
    "--points",
    panel="Measurement",
    type=click.IntRange(min=2),
    metavar="N",
    default=11,
    help="Points of the deletion and insertion curves.",
)
@click.option(
    "--blurred-control/--no-blurred-control",
    panel="Measurement",
    default=True,
    help="Also measure a blurred copy of each map: the control for smoothness.",
)
@click.option(
    "--sanity-images",
    panel="Measurement",
    type=click.IntRange(min=0),
    default=24,
    metavar="N",
    help="Measure sanity and rank correlation (many forward passes) on N randomly chosen images.",
)
@shared.batch_size_option
@click.option(
    "--seed",
    panel="Measurement",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="Seed of all random choices.",
)
@shared.resume_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object instead of tables.")
@shared.method_options
def evaluate(data: str, **given: Any) -> None:
    """Measure the quality of each method's maps on DATA, with two baselines.

    DATA is demo:500 for 500 drawn images with exact masks; a folder of images with masks (cat_mask.png or
    masks/cat.png), boxes.json, labels.csv or no annotations; or a COCO or plain JSON file. Images that fail are
    reported and skipped. The default model for drawn images is demo.
    """
    choose_metrics(given["metrics"] or None)  # before torch is loaded
    evaluation = _run(data, given)
    if given["as_json"]:
        say_record(evaluation.to_dict())
    else:
        click.echo(printable(evaluation.to_markdown(), lines=True), nl=False)
    if given["output"] is not None:
        say(f"report: {printable(given['output'] / 'report.html')}")
    if evaluation.failures:
        where = f" (see {printable(given['output'] / 'report.html')})" if given["output"] is not None else ""
        failed = len(evaluation.failures)
        say(f"{failed} image{'s' if failed > 1 else ''} failed{where}")
        sys.exit(1)


def _run(data: str, given: dict[str, Any]) -> Any:
    # Waiting threads must not occupy cores; this has an effect only before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from vitflow.evaluation.run import evaluate

    if data.startswith("demo:"):
        given["model"] = given["model"] or "demo"
    methods: Any = list(given["methods"]) or None
    if methods and "all" in methods:
        if len(methods) > 1:
            raise OptionError("--method all cannot be combined with other methods.")
        methods = "all"
    same = (
        *("output", "images", "limit", "replace_by", "points", "blurred_control", "sanity_images", "batch_size"),
        "seed",
    )
    with resumable(kept=given["output"] is not None), images_bar() as progress:
        return evaluate(
            data,
            model=lambda: shared.make_explainer(given),
            methods=methods,
            metrics=given["metrics"] or None,
            overwrite=not given["resume"],
            progress=progress,
            **{name: given[name] for name in same},
            **shared.method_values(given),
        )
