"""The command line. Data goes to stdout, talk to stderr.

Exit codes: 0 done, 1 some pictures failed, 2 usage, 130 interrupted.
Nothing here imports torch before a command runs, so that help and usage errors answer at once.
"""

import sys
from typing import Any

import click

from vitflow.cli.commands.app import app
from vitflow.cli.commands.caption import caption
from vitflow.cli.commands.compare import compare
from vitflow.cli.commands.doctor import doctor
from vitflow.cli.commands.draw import draw
from vitflow.cli.commands.evaluate import evaluate
from vitflow.cli.commands.explain import explain
from vitflow.cli.commands.explore import explore
from vitflow.cli.commands.features import features
from vitflow.cli.commands.folder import folder
from vitflow.cli.commands.layers import layers
from vitflow.cli.commands.listing import demo, methods, models
from vitflow.cli.commands.read import read
from vitflow.cli.commands.report import report
from vitflow.cli.saying import talking
from vitflow.errors import printable


class _Talking(click.Group):
    """Commands whose errors and warnings are told in lines on stderr."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        with talking():
            return super().invoke(ctx)


@click.group(
    cls=_Talking,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(package_name="vitflow", prog_name="vitflow")
def cli() -> None:
    """See what a Vision Transformer looks at.

    \b
    vitflow explain cat.jpg --model vit_base_patch16_224.augreg2_in21k_ft_in1k -o cat-rollout.png
    vitflow demo
    """


# In the order in which the help lists them.
_OF_PICTURES, _OF_WORDS = (explain, compare, layers, features, explore, app), (read, caption)
_OF_RUNS, _OF_VITFLOW = (evaluate, folder, draw, report), (demo, methods, models, doctor)
for _command in (*_OF_PICTURES, *_OF_WORDS, *_OF_RUNS, *_OF_VITFLOW):
    cli.add_command(_command)


def main() -> None:
    """Run the command line."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        vars(error)["message"] = printable(error.message or "", lines=True)  # it quotes what was typed
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
