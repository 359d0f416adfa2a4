"""`vitflow draw` and `vitflow report`: overlays and a page from the maps that a folder run keeps."""

import sys
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.saying import say
from vitflow.errors import printable
from vitflow.images import OVERLAY_FORMATS


@click.command(short_help="Draw overlays of the maps that a run keeps.", panel="Many images")
@click.argument("run", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", required=True, type=shared.NEW_FOLDER, help="Folder for the overlays.")
@click.option(
    "--images",
    panel="Images",
    metavar="FOLDER|URL",
    type=shared.PathOrURL(exists=True, file_okay=False, path_type=Path),
    help="Where the photographs are; a URL must be named.  [default: the folder that the run read]",
)
@click.option(
    "--where",
    panel="Images",
    metavar="SQL",
    help="Draw where this holds, such as \"probability < 0.5 AND class_name = 'disc'\".",
)
@click.option(
    "--method",
    "methods",
    panel="Method",
    multiple=True,
    metavar="NAME",
    help="Draw this map.  [default: all of the run]",
)
@shared.limit_option
@click.option("--format", type=click.Choice(OVERLAY_FORMATS), help="Of the overlays.  [default: as the run was asked]")
@shared.drawing_options
def draw(run: Path, **given: Any) -> None:
    """Draw overlays from RUN, the output folder of `vitflow folder`, without running the model again.

    A run with --no-overlays keeps maps without overlays: this draws those that are worth a look. --where is an SQL
    expression over input, size, width, height, class_index, class_name, probability, target, value, predicted_index,
    saturated_share and seconds.
    """
    from vitflow.folder.draw import Drawn, draw_run

    def tell(drawn: Drawn) -> None:
        for path in drawn.paths:
            click.echo(printable(path))
        if drawn.error is not None:
            say(f"error: {printable(drawn.input)}: {drawn.error}")

    drawing = shared.drawing_values(given)
    found = draw_run(
        run,
        given["output"],
        where=given["where"],
        methods=given["methods"] or None,
        limit=given["limit"],
        format=given["format"],
        drawing=drawing,
        images=given["images"],
        progress=tell,
    )
    failed = sum(one.error is not None for one in found)
    line = f"{len(found) - failed} drawn"
    say(f"{line}, {failed} failed" if failed else line)
    if failed:
        sys.exit(1)


@click.command(short_help="Make a page of what a folder run found.", panel="Many images")
@click.argument("output", metavar="OUT", type=click.Path(exists=True, file_okay=False, path_type=Path))
def report(output: Path) -> None:
    """Write report.html into OUT, the output folder of `vitflow folder`: one page that needs no network."""
    from vitflow.folder.draw import report_run

    click.echo(printable(report_run(output)))
