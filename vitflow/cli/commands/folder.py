"""`vitflow folder`: every image of a folder, resumable."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import rich_click as click
from click import get_current_context
from click.core import ParameterSource

from vitflow.cli import options as shared
from vitflow.cli.saying import going_on, images_bar, say, say_model_note
from vitflow.errors import OptionError, printable
from vitflow.explaining.choices import choose_methods
from vitflow.files import is_link, is_there
from vitflow.images import ENGINES, MANIFEST_FORMATS, OVERLAY_FORMATS
from vitflow.text.method_table import IMAGE_DEFAULT, text_method

_ASKED = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
# What a run of captions takes beside its method's own options.
_OF_CAPTIONS = "sources output caption model name prompts method_names recursive glob limit resume save_map max_pixels"


class _Model:
    """Makes the explainer, once where it is; what is sent to other processes makes one there."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    def __getstate__(self) -> dict[str, Any]:
        return {"_given": self._given | {"model": self._given["model"] or shared.DEFAULT_MODEL}}

    @cached_property
    def _explainer(self) -> Any:
        return shared.make_explainer(self._given)

    def __call__(self) -> Any:
        return self._explainer


@click.command(short_help="Explain every image of folders; resumable.", panel="Many images")
@click.argument("sources", nargs=-1, required=True, metavar="IN…", type=shared.PathOrURL(path_type=Path))
@shared.model_options
@shared.question_options
@click.option(
    "--method",
    "method_names",
    panel="Method",
    multiple=True,
    metavar="NAME",
    help="What to compute; may be given several times.  [default: gae with --class, --against, --prompt, --like or "
    "--caption; else rollout]",
)
@shared.class_option
@shared.against_option
@click.option(
    "--caption",
    panel="Text",
    is_flag=True,
    help="Let a model that sees and writes, --model, describe each image, or answer --prompt: the words go to the "
    "manifest, a map of each into one strip an image.",
)
@click.option("--recursive", "-r", panel="Images", is_flag=True, help="Read the folders below, too.")
@click.option(
    "--glob",
    panel="Images",
    metavar="PATTERN",
    help="Read the files whose name or path matches, whatever their suffix.",
)
@shared.limit_option
@shared.batch_size_option
@click.option(
    "--workers",
    panel="Images",
    type=click.IntRange(min=0),
    metavar="N",
    help="Processes that read images, at most one for each core; 0 reads them in this process.  "
    "[default: half the cores, at most 8; 8 for a URL]",
)
@shared.resume_option
@click.option(
    "-o",
    "--output",
    required=True,
    type=shared.NEW_FOLDER,
    help="Folder for the overlays, the manifest, run.json and run.sqlite, on a disk of this machine.",
)
@click.option("--save-map", is_flag=True, help="Write each unscaled map as .npz, too.")
@click.option(
    "--overlays/--no-overlays",
    default=True,
    help="Draw each map. The run keeps all maps either way: vitflow draw and vitflow report draw them later.",
)
@click.option("--format", type=click.Choice(OVERLAY_FORMATS), default="jpg", help="Of the overlays.")
@click.option(
    "--manifest",
    type=click.Choice(MANIFEST_FORMATS),
    default="jsonl",
    help="Table with one row per input; parquet+grids has the maps, too.",
)
@click.option("--report", is_flag=True, help="Write a report in HTML at the end; not for a URL.")
@click.option(
    "--engine",
    panel="Cluster",
    type=click.Choice(ENGINES),
    default="local",
    help="Compute in this process, or on a cluster of Ray: the same rows and maps, without overlays, --save-map, "
    "--workers and --report.",
)
@click.option(
    "--address", panel="Cluster", metavar="HOST:PORT", help="Of the cluster.  [default: Ray is started on this machine]"
)
@click.option(
    "--actors",
    panel="Cluster",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes of the cluster with a model each.  [default: one for each GPU, or for each core]",
)
@click.option(
    "--max-pixels",
    panel="Images",
    type=click.IntRange(min=1),
    metavar="N",
    help="Refuse larger images.  [default: 178956970]",
)
@shared.method_options
@shared.drawing_options
def folder(sources: tuple[Path | str, ...], **given: Any) -> None:
    """Explain every image in IN…: folders, images, or patterns; or one folder at a URL, such as s3://bucket/in.

    An image that fails gets a row with its error, and the others go on. What an earlier run with the same options has
    done is kept; Ctrl-C keeps what is done, too.
    """
    options = shared.method_values(given)
    named = given["method_names"]
    if given.pop("caption"):
        model, run = None, _captions(sources, given, options)
    else:
        chosen = choose_methods(named or None, options, asks=shared.asks(given))  # before torch is loaded
        given["method_names"] = [one.name for one in chosen]
        _check_sources(sources)
        model = _Model(given)
        run = _maps(given, model)
    with going_on(kept=True), images_bar() as progress:
        summary = run(
            sources,
            given["output"],
            overwrite=not given["resume"],
            progress=progress,
            command=[printable(word) for word in ["vitflow", *sys.argv[1:]]],
            **{name: given[name] for name in ("recursive", "glob", "limit", "save_map")},
            **shared.given_options(given, ["max_pixels"]),
            **options,
        )
    if model is not None:
        if not named:
            shared.say_default(chosen[0].name)
        say_model_note(model())
    _tell(summary)


def _tell(summary: Any) -> None:
    """Say what a run has left behind, and end with its exit code."""
    click.echo(printable(summary.manifest))
    if summary.report:
        click.echo(printable(summary.report))
    line = f"{summary.explained:,} explained".replace(",", " ")
    if summary.kept:
        line += f" ({summary.kept} of them before)"
    if summary.failed:
        line += f", {summary.failed} failed (see {printable(summary.manifest)})"
    say(line)
    if summary.failed:
        sys.exit(1)


def _captions(sources: tuple[Path | str, ...], given: dict[str, Any], options: dict[str, Any]) -> Callable[..., Any]:
    """What captions images, told all but what every run takes; OptionError for what it does not take."""
    context = get_current_context()
    asked = [one for one in context.command.params if context.get_parameter_source(one.name or "") in _ASKED]
    if other := [one.opts[0] for one in asked if one.name not in {*_OF_CAPTIONS.split(), *options}]:
        raise OptionError(f"--caption takes no {', '.join(other)}: leave it out, or --caption.")
    if given["model"] is None:
        raise OptionError(
            "Expected --model with --caption, a model that sees and writes, such as demo-caption; got none."
        )
    if len(given["method_names"]) > 1 or len(given["prompts"]) > 1:
        raise OptionError("Expected one --method and one --prompt with --caption, got several.")
    named = context.get_parameter_source("method_names") in _ASKED
    method, prompt = given["method_names"][0] if named else IMAGE_DEFAULT, next(iter(given["prompts"]), None)
    text_method(method, options)
    _check_sources(sources)
    with suppress(ImportError):  # the loader says what is missing
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    from vitflow.folder.captions import caption_folder

    return partial(caption_folder, model=given["model"], name=given["name"], prompt=prompt, method=method)


def _check_sources(sources: tuple[Path | str, ...]) -> None:
    """A mistyped path is told before torch is loaded."""
    for source in sources:
        if isinstance(source, str):
            continue
        if not is_there(source) and not is_link(source) and not set("*?[") & set(str(source)):
            raise OptionError(f"Expected a folder or an image, but there is nothing at {printable(source)!r}.")


def _maps(given: dict[str, Any], model: _Model) -> Callable[..., Any]:
    """What explains images, told all but what every run takes."""
    # Threads of the model that wait for each other shall not take the cores from those that read and write images;
    # it counts only before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from vitflow.folder.run import explain_folder

    same = ("batch_size", "workers", "overlays", "format", "manifest", "report", "engine", "address", "actors")
    return partial(
        explain_folder,
        model=model,
        methods=given["method_names"],
        drawing=shared.drawing_values(given),
        target=shared.target_of(given["target"], given),
        **{name: given[name] for name in same},
    )
