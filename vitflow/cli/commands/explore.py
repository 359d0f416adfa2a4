"""`vitflow explore`: a page that answers in the browser when a patch is clicked."""

from pathlib import Path
from typing import Any

import click

from vitflow.cli.options import (
    DEFAULT_MODEL,
    classes_option,
    flag_of,
    make_explainer,
    model_options,
    output_option,
    pictures_argument,
    question_options,
)
from vitflow.cli.outputs import output_file, writing
from vitflow.cli.saying import say, tell_limits
from vitflow.cli.sections import SectionedCommand
from vitflow.errors import printable
from vitflow.explaining.asking.choices import choose_methods


@click.command(cls=SectionedCommand)
@pictures_argument
@model_options
@question_options
@click.option(
    "--method",
    "methods",
    metavar="NAME",
    multiple=True,
    help="A map to make beforehand, beside those that the page computes; repeat it for more.  [default: the "
    "class-specific ones and flow, as far as they apply]",
)
@classes_option(help="Class for class-specific maps; repeat it for more.  [default: top3]")
@click.option(
    "--max-size",
    type=click.FloatRange(min=0, min_open=True),
    default=40.0,
    show_default=True,
    metavar="MB",
    help="Size of the page. What does not fit is left out, single heads first, or kept in 8 bits; the page says so.",
)
@output_option(help="The page, .html; or a folder, with / at its end.  [default: IMAGE-explore.html here]")
def explore(images: tuple[Path, ...], **given: Any) -> None:
    """Make a page that answers in the browser when a patch is clicked.

    It shows what each patch of an IMAGE looks at, by rollout or raw attention through any of the layers: no server, no
    network.
    """
    name = f"{images[0].stem}-explore.html" if len(images) == 1 else "explore.html"
    output = output_file(images, given["output"], name, (".html",))
    methods = list(given["methods"]) or None
    choose_methods(methods or ["rollout"], {})  # before torch is loaded
    from vitflow.explaining.showing.exploring import explore

    explainer = make_explainer(given)
    page = explore(
        list(images),
        model=explainer,
        methods=methods,
        targets=list(given["targets"] or given["prompts"]) or "top3",
        max_size=given["max_size"],
        call=_call(given),
    )
    with writing(output):
        page.save(output)
    for note in page.notes:
        say(note)
    tell_limits(explainer)
    click.echo(printable(output))


def _call(given: dict[str, Any]) -> Any:
    """How a reader of the page gets the model that these options chose."""
    from vitflow.viewer.explorer import ModelCall

    model = given["model"] or DEFAULT_MODEL
    arguments, loading = ["--model", model], [repr(model)]
    for name in ("checkpoint", "num_classes", "class_names"):
        if given[name] is not None:
            arguments += [flag_of(name), str(given[name])]
            loading.append(f"{name}={given[name] if isinstance(given[name], int) else str(given[name])!r}")
    making = []
    for name in ("prompts", "templates", "like"):
        if given[name]:
            arguments += [word for one in given[name] for word in (flag_of(name.removesuffix("s")), str(one))]
            making.append(f"{name}={list(map(str, given[name]))!r}")
    if given["alone"]:
        arguments.append("--alone")
        making.append("alone=True")
    if given["fit"] != "crop":
        arguments += ["--fit", given["fit"]]
        making.append(f"fit={given['fit']!r}")
    if given["fit"] == "native":
        loading.append("dynamic_img_size=True")
    loaded = loading[0] if len(loading) == 1 else f"vitflow.load_model({', '.join(loading)})"
    return ModelCall(arguments, f"vitflow.Explainer({', '.join([loaded, *making])})")
