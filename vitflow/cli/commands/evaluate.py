"""`vitflow evaluate`: what the maps of each method are worth, on a model and data of the user's own."""

import os
import sys
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.commands.compare import MethodWithOptions
from vitflow.cli.saying import going_on, images_bar, say, say_record
from vitflow.errors import OptionError, printable
from vitflow.evaluation.metrics import choose_metrics


class _MethodOrAll(MethodWithOptions):
    """A method, or all of them."""

    name = "NAME[:OPTION=VALUE,…]|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return "all" if value == "all" else super().convert(value, param, ctx)


@click.command(short_help="Measure what the maps of each method are worth.", panel="Many images")
@click.argument("data", required=False, metavar="[DATA]")
@click.option("--data", "data_option", panel="Images", metavar="DATA", help="The same as the argument.")
@shared.model_options
@shared.question_options
@click.option(
    "--method",
    "methods",
    panel="Method",
    type=_MethodOrAll(),
    multiple=True,
    metavar="NAME[:OPTION=VALUE,…]|all",
    help="A method to measure, also with options of its own: rollout:preset=paper. Repeat it for more; all: every "
    "method that applies to the model. The baselines are always there.  [default: all but similarity and those that "
    "run the model many times: occlusion, sampling, consensus, LeGrad]",
)
@click.option(
    "--metric",
    "metrics",
    panel="Measurement",
    multiple=True,
    metavar="NAME|GROUP|all",
    help="A metric, or one of the groups localisation, faithfulness, sanity, grid, correlation; repeat it for more.  "
    "[default: the first three groups]",
)
@click.option(
    "-o",
    "--output",
    type=shared.NEW_FOLDER,
    help="Folder for the rows, tables, figures and report.html; a run that was ended goes on from there.",
)
@click.option(
    "--images",
    panel="Images",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the images of an annotation file are.  [default: beside it]",
)
@shared.limit_option
@click.option(
    "--replace",
    "replace_by",
    panel="Measurement",
    type=click.Choice(["drop", "blank", "blur"]),
    help="What is left of removed patches: nothing (their tokens are dropped), the image's mean colour, or a blur.  "
    "[default: drop where the model can, else blank]",
)
@click.option(
    "--points",
    panel="Measurement",
    type=click.IntRange(min=2),
    metavar="N",
    default=11,
    help="Of deletion and insertion curves.",
)
@click.option(
    "--blurred-twin/--no-blurred-twin",
    panel="Measurement",
    default=True,
    help="Measure each map blurred, too: the control that tells what comes of smoothness alone.",
)
@click.option(
    "--sanity-images",
    panel="Measurement",
    type=click.IntRange(min=0),
    default=24,
    metavar="N",
    help="Measure sanity and rank correlation, which take many forward passes, on N images drawn at random.",
)
@shared.batch_size_option
@click.option(
    "--resamples",
    panel="Measurement",
    type=click.IntRange(min=1),
    metavar="N",
    default=2000,
    help="Behind each bootstrap interval.",
)
@click.option(
    "--seed",
    panel="Measurement",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="Of all that is drawn at random.",
)
@shared.resume_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object instead of tables.")
@shared.method_options
def evaluate(data: str | None, **given: Any) -> None:
    """Measure what the maps of each method are worth on DATA, beside two baselines.

    DATA is demo:500 for so many drawn images with exact masks; a folder of images with masks (cat_mask.png or
    masks/cat.png), with boxes.json, with labels.csv, or with nothing; a COCO or plain JSON file. An image that
    fails is told, and the others go on. Drawn images are measured with the demo model, unless --model names
    another.
    """
    if (data is None) == (given["data_option"] is None):
        raise click.UsageError("Give DATA once, as an argument or with --data: a folder, annotations, or demo:500.")
    choose_metrics(given["metrics"] or None)  # before torch is loaded
    found = _run(data or given["data_option"], given)
    if given["as_json"]:
        say_record(found.to_dict())
    else:
        click.echo(printable(found.to_markdown(), lines=True), nl=False)
    if given["output"] is not None:
        say(f"report: {printable(given['output'] / 'report.html')}")
    if found.failures:
        where = f" (see {printable(given['output'] / 'report.html')})" if given["output"] is not None else ""
        say(f"{len(found.failures)} of the images failed{where}")
        sys.exit(1)


def _run(data: str, given: dict[str, Any]) -> Any:
    # Threads that wait for each other shall not take the cores from others; it counts only before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from vitflow.evaluation.run import evaluate

    if data.startswith("demo:"):
        given["model"] = given["model"] or "demo"
    methods: Any = list(given["methods"]) or None
    if methods and "all" in methods:
        if len(methods) > 1:
            raise OptionError("Expected --method all alone, or methods by name, got both.")
        methods = "all"
    same = (
        *("output", "images", "limit", "replace_by", "points", "blurred_twin", "sanity_images", "batch_size"),
        *("resamples", "seed"),
    )
    with going_on(kept=given["output"] is not None), images_bar() as progress:
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
