"""`vitflow draw` and `vitflow report`: overlays and a page from the stored maps of a folder run."""

import sys
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.output import say
from vitflow.errors import printable
from vitflow.images import OVERLAY_FORMATS


@click.command(short_help="Draw overlays from the stored maps of a run.", panel="Many images")
@click.argument("run", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", required=True, type=shared.NEW_FOLDER, help="Folder for the overlays.")
@click.option(
    "--images",
    panel="Images",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Local folder of the images.  [default: the input folder of the run]",
)
@click.option(
    "--where",
    panel="Images",
    metavar="SQL",
    help="Filter, such as \"probability < 0.5 AND class_name = 'disc'\".",
)
@click.option(
    "--method",
    "methods",
    panel="Method",
    multiple=True,
    metavar="NAME",
    help="Method to draw; repeatable.  [default: all methods of the run]",
)
@shared.limit_option
@click.option(
    "--format", type=click.Choice(OVERLAY_FORMATS), help="Format of the overlays.  [default: that of the run]"
)
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

    drawing = shared.drawing_values(given)
    results = draw_run(
        run,
        given["output"],
        where=given["where"],
        methods=given["methods"] or None,
        limit=given["limit"],
        format=given["format"],
        drawing=drawing,
        images=given["images"],
        progress=report_drawn,
    )
    failed = sum(result.error is not None for result in results)
    line = f"{len(results) - failed} drawn"
    say(f"{line}, {failed} failed" if failed else line)
    if failed:
        sys.exit(1)


@click.command(short_help="Write an HTML report of a folder run.", panel="Many images")
@click.argument("output", metavar="OUT", type=click.Path(exists=True, file_okay=False, path_type=Path))
def report(output: Path) -> None:
    """Write report.html, a self-contained page, into OUT, the output folder of `vitflow folder`."""
    from vitflow.folder.draw import report_run

    click.echo(printable(report_run(output)))
