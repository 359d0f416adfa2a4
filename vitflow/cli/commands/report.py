"""`vitflow report`: a page to look through what a folder run found."""

from pathlib import Path

import rich_click as click

from vitflow.errors import printable


@click.command(short_help="Make a page of what a folder run found.", panel="Many images")
@click.argument("output", metavar="OUT", type=click.Path(exists=True, file_okay=False, path_type=Path))
def report(output: Path) -> None:
    """Write report.html into OUT, the output folder of `vitflow folder`: one page that needs no network."""
    from vitflow.folder.draw import report_run

    click.echo(printable(report_run(output)))
