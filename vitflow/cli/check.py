"""`vitflow check`: whether a model keeps the contract of rollout, and the methods that apply to it."""

import sys
from typing import Any

import rich_click as click

from vitflow.cli import options as shared
from vitflow.cli.output import say_record
from vitflow.errors import printable


@click.command(short_help="Check whether methods apply to a model.", panel="Setup")
@click.argument("model", metavar="MODEL")
@shared.loading_options
@shared.option("", "--json as_json", bool, "Print one JSON object.")
def check(**given: Any) -> None:
    """Check MODEL (id, demo, or PATH): clauses of the contract, tokens, and the methods that apply.

    The model runs on noise; nothing is explained. The exit code is 1 if rollout is refused.
    """
    shared.check_before_loading(given)
    explainer = shared.make_explainer(given)
    from vitflow.explaining.checking import check

    checked = check(explainer)
    if given["as_json"]:
        say_record(checked.to_dict())
    else:
        click.echo(printable(str(checked), lines=True))
    if checked.refusal:
        sys.exit(1)
