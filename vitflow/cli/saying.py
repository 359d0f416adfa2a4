"""What the commands print: talk on stderr and records on stdout, whatever strings of others stand in them."""

import json
from typing import Any

import click

from vitflow.errors import printable, printable_json


def say(text: object, *, err: bool = True) -> None:
    """Print lines, on stderr unless asked otherwise; what a terminal would take for a command becomes escapes."""
    click.echo(printable(str(text), lines=True), err=err)


def say_record(record: Any) -> None:
    """Print one line of JSON on stdout, from which a parser gets back the very strings."""
    click.echo(printable_json(json.dumps(record, ensure_ascii=False, allow_nan=False)))
