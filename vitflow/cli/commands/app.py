"""`vitflow app`: a page on which all of it can be tried in a browser."""

from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.app import serve
from vitflow.cli import options as shared
from vitflow.cli.saying import say


@click.command(short_help="Open a page to try it all in a browser.", panel="Images")
@click.argument("images", nargs=-1, metavar="[IMAGE…]", type=shared.FILE)
@click.option(
    "--model",
    "models",
    panel="Model",
    multiple=True,
    default=(shared.DEFAULT_MODEL, "demo"),
    metavar="ID|demo|PATH",
    help="A model for photographs that the page offers; repeatable. The first is chosen.",
)
@click.option(
    "--language-model",
    "language_models",
    panel="Model",
    multiple=True,
    default=("demo-caption",),
    metavar="ID|demo-caption|PATH",
    help="A model for texts and captions that the page offers; repeatable.",
)
@click.option(
    "--checkpoint", panel="Model", type=shared.FILE, help="Weights for the first --model: safetensors or a torch file."
)
@click.option(
    "--class-names", panel="Model", type=shared.FILE, help="File with the names of its classes: one per line, or JSON."
)
@click.option(
    "--host",
    panel="Server",
    metavar="ADDRESS",
    default="127.0.0.1",
    help="Who may reach it; 0.0.0.0: not this machine alone.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    panel="Server",
    multiple=True,
    metavar="NAME",
    help="Also answer browsers that ask for the page by this name, such as that of a proxy; repeatable. *.NAME: any "
    "name below it; *: any name.",
)
@click.option(
    "--port",
    panel="Server",
    type=click.IntRange(1, 65535),
    metavar="N",
    help="[default: the first free one from 7860 on]",
)
@click.option(
    "--time-limit",
    panel="Server",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    metavar="SECONDS",
    help="What one question may take, so that the next visitor has a turn.",
)
@click.option("--open/--no-open", "browser", panel="Server", default=True, help="Open the page in a browser.")
def app(images: tuple[Path, ...], **given: Any) -> None:
    """Open a page in the browser: drop a photograph, click a patch, click a word.

    \b
    vitflow app cat.jpg --model vit_base_patch16_224.augreg2_in21k_ft_in1k

    Each IMAGE is offered as a sample, instead of drawn ones. The page is for this machine, and asks no other.
    """
    page = serve(samples=images, wait=False, **given)
    say(f"the page is at {page.local_url} until you press Ctrl-C")
    page.block_thread()
