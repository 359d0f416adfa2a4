"""`vitflow app`: local web app."""

from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.app import serve
from vitflow.cli import options as shared
from vitflow.cli.output import say


@click.command(short_help="Open the web app in a browser.", panel="Images")
@click.argument("images", nargs=-1, metavar="[IMAGE…]", type=shared.FILE)
@click.option(
    "--model",
    "models",
    panel="Model",
    multiple=True,
    default=(shared.DEFAULT_MODEL, "demo"),
    metavar="ID|demo|PATH",
    help="Image model to offer; repeatable. The first is selected.",
)
@click.option(
    "--language-model",
    "language_models",
    panel="Model",
    multiple=True,
    default=("demo-caption",),
    metavar="ID|demo-caption|PATH",
    help="Model for texts and captions to offer; repeatable.",
)
@click.option(
    "--checkpoint", panel="Model", type=shared.FILE, help="Weights for the first --model: safetensors or a torch file."
)
@click.option(
    "--class-names", panel="Model", type=shared.FILE, help="File with its class names: one per line, or JSON."
)
@click.option(
    "--prompt",
    "prompts",
    panel="Model",
    multiple=True,
    metavar="TEXT",
    help="Prompt to begin with, if the first --model is an image-text model; repeatable.",
)
@click.option(
    "--host",
    panel="Server",
    metavar="ADDRESS",
    default="127.0.0.1",
    help="Address to listen on; 0.0.0.0 also accepts other machines.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    panel="Server",
    multiple=True,
    metavar="NAME",
    help="Additional host name to accept, such as that of a proxy; repeatable. *.NAME: any subdomain; *: any name.",
)
@click.option(
    "--port",
    panel="Server",
    type=click.IntRange(1, 65535),
    metavar="N",
    help="Port.  [default: the first free port from 7860]",
)
@click.option(
    "--time-limit",
    panel="Server",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    metavar="SECONDS",
    help="Maximum time for one request.",
)
@click.option("--open/--no-open", "browser", panel="Server", default=True, help="Open the page in a browser.")
def app(images: tuple[Path, ...], **given: Any) -> None:
    """Open the web app: upload a photograph, click a patch, click a word.

    \b
    vitflow app cat.jpg --model vit_base_patch16_224.augreg2_in21k_ft_in1k

    IMAGEs replace the bundled samples. The app runs locally and contacts no other machine.
    """
    page = serve(samples=images, wait=False, **given)
    say(f"running on {page.local_url} (press Ctrl-C to stop)")
    page.block_thread()
