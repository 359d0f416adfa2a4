"""Command line. Data goes to stdout, messages to stderr.

Exit codes: 0 done, 1 some images failed, 2 usage, 130 interrupted.
Nothing here imports torch before a command runs, so that help and usage errors are fast.
"""

import gc
import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import rich_click as click
from click.exceptions import Abort, ClickException, Exit

from vitflow.cli.options import PANELS
from vitflow.cli.output import reporting
from vitflow.errors import printable


class _Reporting(click.RichGroup):
    """Command group that prints errors and warnings as lines on stderr."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the requested command."""
        with reporting():
            return super().invoke(ctx)


@click.group(
    cls=_Reporting,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "rich_help_config": {  # the decorator `rich_config` would import rich, which only help and errors need
            "theme": "default-slim",
            "max_width": 110,
            "text_markup": None,
            "padding_helptext_first_line": (0, 0, 1, 0),
            "default_string": r"\[default: {}]",
            "options_table_help_sections": ["help", "required", "default"],
        },
    },
)
@click.command_panel("Images")
@click.command_panel("Texts")
@click.command_panel("Many images")
@click.command_panel("Setup")
@click.version_option(package_name="vitflow", prog_name="vitflow")
def cli() -> None:
    """See what a Vision Transformer looks at.

    \b
    vitflow explain cat.jpg --model vit_base_patch16_224.augreg2_in21k_ft_in1k -o cat-rollout.png
    vitflow demo
    """


# Each command is a function in a file of this folder.
for _module in iter_modules(__path__, f"{__name__}."):
    for _command in vars(import_module(_module.name)).values():
        if isinstance(_command, click.RichCommand):
            _used = {getattr(param, "panel", None) or "Options" for param in _command.params}
            _command.panels = [click.RichOptionPanel(title) for title in PANELS if title in _used]
            cli.add_command(_command)


def main() -> None:
    """Run the command line."""
    # Loading torch creates a million objects that stay: looking for garbage among them took a tenth of a short command.
    gc.set_threshold(50_000)
    try:
        cli(standalone_mode=False)
    except Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except ClickException as error:
        vars(error)["message"] = printable(error.message or "", lines=True)  # it quotes the user's input
        error.show()
        sys.exit(error.exit_code)
    except Exit as stop:
        sys.exit(stop.exit_code)
