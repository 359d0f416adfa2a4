"""`vitflow folder`, `draw` and `report`: every image of a folder, resumable, and overlays and a page of such a run."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.explainer import check_before_loading, make_explainer
from vitflow.cli.output import images_bar, resumable, say, say_model_note
from vitflow.errors import printable
from vitflow.files import is_link, is_remote, is_there
from vitflow.images import ENGINES, MANIFEST_FORMATS, OVERLAY_FORMATS
from vitflow.registry.choices import choose_methods


class _Source(click.Path):
    """A URL, a pattern, or the path of an existing folder or image."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a local path as a Path, a URL as text."""
        if not is_remote(value) and not is_there(value) and not is_link(value) and not set("*?[") & set(str(value)):
            self.fail(f"expected a folder or an image, but {printable(value)!r} does not exist.", param, ctx)
        return value if is_remote(value) else super().convert(value, param, ctx)


@click.command(short_help="Explain every image of folders; resumable.", panel="Many images")
@click.argument("sources", nargs=-1, required=True, metavar="IN…", type=_Source(path_type=Path))
@shared.model_options
@shared.class_option(
    metavar="NAME|INDEX",
    help="Class to explain, INDEX from 0.  [default: the predicted class]",
)
@shared.against_option
@shared.question_options
@shared.methods_option(f"Method; repeatable.  {shared.METHOD_DEFAULT}")
@shared.option("Images", "--recursive -r", bool, "Include subfolders.")
@shared.limit_option
@shared.batch_size_option
@shared.option(
    "Images",
    "--workers",
    0,
    "Processes that read images, at most one per core; 0: this process.  [default: half the cores, at most 8]",
)
@shared.resume_option
@shared.option(
    "", "-o --output", shared.NEW_FOLDER, "Local folder for overlays, manifest, run.json and run.sqlite.", required=True
)
@shared.option(
    "",
    "--overlays/--no-overlays",
    None,
    "Draw overlays. All maps are stored either way, for vitflow draw and vitflow report.",
    default=True,
)
@shared.option("", "--format", OVERLAY_FORMATS, "Format of the overlays.", default="jpg")
@shared.option(
    "", "--manifest", MANIFEST_FORMATS, "Table with one row per input; parquet+grids: with the maps.", default="jsonl"
)
@shared.option("", "--report", bool, "Write an HTML report at the end.")
@shared.option(
    "Cluster",
    "--engine",
    ENGINES,
    "Compute here or on a Ray cluster, which gives the same rows and maps, but no overlays, --workers or --report.",
    default="local",
)
@shared.option("Cluster", "--address", "HOST:PORT", "Address of the cluster.  [default: start Ray on this machine]")
@shared.option("Cluster", "--actors", 1, "Actors, each with a copy of the model.  [default: one per GPU, or per core]")
@shared.method_options
@shared.drawing_options
def folder(sources: tuple[Path | str, ...], **given: Any) -> None:
    """Explain every image in IN…: folders, images, or patterns; with --engine ray, also one folder at a URL, such as
    s3://bucket/in.

    An image that fails gets a row with its error. Results of an earlier run with the same options are reused, also
    after Ctrl-C.
    """
    options, is_default = shared.method_values(given), not given["methods"]
    chosen = choose_methods(given["methods"] or None, options, has_target=shared.has_target(given))
    check_before_loading(given)
    # Before torch is loaded: waiting threads of the model must not occupy the cores that read and write images.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from vitflow.folder.run import explain_folder
    from vitflow.folder.saved import SavedRun

    arguments = shared.arguments_of(explain_folder, given) | {
        "model": partial(make_explainer, given),
        "methods": [method.name for method in chosen],
        "target": shared.target_of(given["target"], given),
        "overwrite": not given["resume"],
        "drawing": shared.drawing_values(given),
    }
    with resumable(kept=True), images_bar() as progress:
        summary = explain_folder(sources, progress=progress, **arguments, **options)
    if is_default:
        shared.say_default(chosen[0].name)
    with SavedRun(given["output"]) as saved:
        say_model_note(saved.fingerprint["model"], saved.fingerprint.get("note", ""))
    for path in filter(None, (summary.manifest, summary.report)):
        click.echo(printable(path))
    line = f"{summary.explained:,} explained".replace(",", " ")
    if summary.kept:
        line += f" ({summary.kept} by an earlier run)"
    if summary.failed:
        say(f"{line}, {summary.failed} failed (see {printable(summary.manifest)})")
        sys.exit(1)
    say(line)


@click.command(short_help="Draw overlays from the stored maps of a run.", panel="Many images")
@click.argument("run", metavar="RUN", type=shared.FOLDER)
@shared.option("", "-o --output", shared.NEW_FOLDER, "Folder for the overlays.", required=True)
@shared.option(
    "Images", "--images", shared.FOLDER, "Local folder of the images.  [default: the input folder of the run]"
)
@shared.option("Images", "--where", "SQL", "Filter, such as \"probability < 0.5 AND class_name = 'disc'\".")
@shared.methods_option("Method to draw; repeatable.  [default: all methods of the run]")
@shared.limit_option
@shared.option("", "--format", OVERLAY_FORMATS, "Format of the overlays.  [default: that of the run]")
@shared.drawing_options
def draw(run: Path, **given: Any) -> None:
    """Draw overlays from RUN, the output folder of `vitflow folder`, without running the model again.

    --where is an SQL expression over input, size, width, height, class_index, class_name, probability, target, value,
    predicted_index and seconds.
    """
    from vitflow.folder.draw import Drawn, draw_run

    def report_drawn(drawn: Drawn) -> None:
        for path in drawn.paths:
            click.echo(printable(path))
        if drawn.error is not None:
            say(f"error: {printable(drawn.input)}: {drawn.error}")

    arguments = shared.arguments_of(draw_run, given) | {"methods": given["methods"] or None}
    results = draw_run(run, drawing=shared.drawing_values(given), progress=report_drawn, **arguments)
    failed = sum(result.error is not None for result in results)
    line = f"{len(results) - failed} drawn"
    say(f"{line}, {failed} failed" if failed else line)
    if failed:
        sys.exit(1)


@click.command(short_help="Write an HTML report of a folder run.", panel="Many images")
@click.argument("output", metavar="OUT", type=shared.FOLDER)
@shared.option(
    "",
    "--labels",
    "folders|FILE.csv",
    "True classes, to compare the predictions with: the names of the images' folders, or a table with the columns file "
    "and label or label_index.",
)
def report(output: Path, labels: str | None) -> None:
    """Write report.html, a self-contained page, into OUT, the output folder of `vitflow folder`."""
    from vitflow.folder.report import report_run

    click.echo(printable(report_run(output, labels=labels)))
