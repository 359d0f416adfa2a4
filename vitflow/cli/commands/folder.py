"""`vitflow folder`: every image of a folder, resumable."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.output import images_bar, resumable, say, say_model_note
from vitflow.errors import OptionError, printable
from vitflow.files import is_link, is_there
from vitflow.images import ENGINES, MANIFEST_FORMATS, OVERLAY_FORMATS
from vitflow.registry.choices import choose_methods


@click.command(short_help="Explain every image of folders; resumable.", panel="Many images")
@click.argument("sources", nargs=-1, required=True, metavar="IN…", type=shared.PathOrURL(path_type=Path))
@shared.model_options
@shared.question_options
@click.option(
    "--method",
    "method_names",
    panel="Method",
    multiple=True,
    metavar="NAME",
    help="Method; repeatable.  [default: gae with --class, --against, --prompt or --like; else rollout]",
)
@shared.class_option(
    metavar="NAME|INDEX|top3",
    help="Class to explain and report; top3: a row and a map for each of the three most probable classes or "
    "detections.  [default: the predicted class]",
)
@shared.against_option
@click.option("--recursive", "-r", panel="Images", is_flag=True, help="Include subfolders.")
@click.option(
    "--glob",
    panel="Images",
    metavar="PATTERN",
    help="Read files whose name or path matches, with any suffix.",
)
@shared.limit_option
@shared.batch_size_option
@click.option(
    "--workers",
    panel="Images",
    type=click.IntRange(min=0),
    metavar="N",
    help="Processes that read images, at most one per core; 0 reads in this process.  "
    "[default: half the cores, at most 8]",
)
@shared.resume_option
@click.option(
    "-o",
    "--output",
    required=True,
    type=shared.NEW_FOLDER,
    help="Local folder for the overlays, the manifest, run.json and run.sqlite.",
)
@click.option(
    "--overlays/--no-overlays",
    default=True,
    help="Draw overlays. All maps are stored either way, for vitflow draw and vitflow report.",
)
@click.option("--format", type=click.Choice(OVERLAY_FORMATS), default="jpg", help="Format of the overlays.")
@click.option(
    "--manifest",
    type=click.Choice(MANIFEST_FORMATS),
    default="jsonl",
    help="Table with one row per input; parquet+grids includes the maps.",
)
@click.option("--report", is_flag=True, help="Write an HTML report at the end.")
@click.option(
    "--engine",
    panel="Cluster",
    type=click.Choice(ENGINES),
    default="local",
    help="Compute locally or on a Ray cluster. ray gives the same rows and maps, but no overlays, "
    "--workers or --report.",
)
@click.option(
    "--address", panel="Cluster", metavar="HOST:PORT", help="Address of the cluster.  [default: start Ray locally]"
)
@click.option(
    "--actors",
    panel="Cluster",
    type=click.IntRange(min=1),
    metavar="N",
    help="Actors, each with a copy of the model.  [default: one per GPU, or per core]",
)
@click.option(
    "--max-pixels",
    panel="Images",
    type=click.IntRange(min=1),
    metavar="N",
    help="Reject larger images.  [default: 178956970]",
)
@shared.method_options
@shared.drawing_options
def folder(sources: tuple[Path | str, ...], **given: Any) -> None:
    """Explain every image in IN…: folders, images, or patterns; with --engine ray, also one folder at a URL, such as
    s3://bucket/in.

    An image that fails gets a row with its error. Results of an earlier run with the same options are reused, also
    after Ctrl-C.
    """
    options = shared.method_values(given)
    named = given["method_names"]
    chosen = choose_methods(named or None, options, has_target=shared.has_target(given))  # before torch is loaded
    given["method_names"] = [method.name for method in chosen]
    _check_sources(sources)
    run = _maps(given)
    from vitflow.folder.saved import SavedRun

    with resumable(kept=True), images_bar() as progress:
        summary = run(
            sources,
            given["output"],
            overwrite=not given["resume"],
            progress=progress,
            command=[printable(word) for word in ["vitflow", *sys.argv[1:]]],
            **{name: given[name] for name in ("recursive", "glob", "limit")},
            **shared.given_options(given, ["max_pixels"]),
            **options,
        )
    if not named:
        shared.say_default(chosen[0].name)
    with SavedRun(given["output"]) as saved:
        say_model_note(saved.fingerprint["model"], saved.fingerprint.get("note", ""))
    _report(summary)


def _report(summary: Any) -> None:
    """Print the output files and counts of a run; exit with code 1 if images failed."""
    click.echo(printable(summary.manifest))
    if summary.report:
        click.echo(printable(summary.report))
    line = f"{summary.explained:,} explained".replace(",", " ")
    if summary.kept:
        line += f" ({summary.kept} by an earlier run)"
    if summary.failed:
        line += f", {summary.failed} failed (see {printable(summary.manifest)})"
    say(line)
    if summary.failed:
        sys.exit(1)


def _check_sources(sources: tuple[Path | str, ...]) -> None:
    """Raise OptionError for a path that does not exist, before torch is loaded."""
    for source in sources:
        if isinstance(source, str):
            continue
        if not is_there(source) and not is_link(source) and not set("*?[") & set(str(source)):
            raise OptionError(f"Expected a folder or an image, but {printable(source)!r} does not exist.")


def _maps(given: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that explains images, without the arguments of every run."""
    # Waiting threads of the model must not occupy the cores that read and write images; this has an effect only
    # before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from vitflow.folder.run import explain_folder

    same = ("batch_size", "workers", "overlays", "format", "manifest", "report", "engine", "address", "actors")
    return partial(
        explain_folder,
        model=partial(shared.make_explainer, given),
        methods=given["method_names"],
        drawing=shared.drawing_values(given),
        target=shared.target_of(given["target"], given),
        **{name: given[name] for name in same},
    )
