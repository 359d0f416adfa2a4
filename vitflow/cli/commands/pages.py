"""`vitflow explore` and `vitflow app`: a page that computes maps in the browser, and the page of a local server."""

import webbrowser
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.app import serve
from vitflow.cli import options as shared
from vitflow.cli.output import output_file, say, say_model_note, writing
from vitflow.errors import printable
from vitflow.registry.choices import choose_methods


@click.command(panel="Images")
@shared.images_argument
@shared.model_options
@shared.question_options
@shared.option(
    "Method",
    "--method methods",
    "NAME",
    "Map to compute in advance, in addition to those that the page computes; repeatable.  [default: the "
    "class-specific methods and flow, if the model supports them]",
    multiple=True,
)
@shared.classes_option(help="Class for class-specific maps; repeatable.  [default: top3]")
@shared.option(
    "",
    "--max-size",
    click.FloatRange(min=0, min_open=True),
    "Maximum size of the page. Data that does not fit is left out, single heads first, or stored in 8 bits; the "
    "page reports it.",
    default=40.0,
    metavar="MB",
)
@shared.output_option(
    help="The page, .html; or a folder.  [default: IMAGE-explore.html here; of several, IMAGE-and-N-more-explore.html]"
)
def explore(images: tuple[Path, ...], **given: Any) -> None:
    """Write an interactive page: click a patch of an IMAGE to see its attention.

    Rollout or raw attention through any of the layers, computed in the browser without a server or network.
    """
    output = output_file(images, given["output"], "explore", (".html",))
    methods = list(given["methods"]) or None
    choose_methods(methods or ["rollout"], {})  # before torch is loaded
    from vitflow.analysis.exploring import explore

    explainer = shared.make_explainer(given)
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
    say_model_note(explainer.model_id, explainer.model_info.note)
    click.echo(printable(output))


def _call(given: dict[str, Any]) -> Any:
    """Return the command and Python call that load the model of these options."""
    from vitflow.explaining.captions import python_call
    from vitflow.viewer.explorer import ModelCall

    model, native = given["model"] or shared.DEFAULT_MODEL, given["fit"] == "native"
    fit = None if given["fit"] == "crop" else given["fit"]
    loading = shared.given_options(given, ("checkpoint", "num_classes", "global_pool", "class_names"))
    loading = {name: str(value) if isinstance(value, Path) else value for name, value in loading.items()}
    question = {name: list(map(str, given[name])) for name in ("prompts", "templates", "like") if given[name]}
    arguments = ["--model", model]
    for name, values in {**{name: [value] for name, value in loading.items()}, **question}.items():
        flag = shared.flag_of(name.removesuffix("s") if name in question else name)
        arguments += [word for value in values for word in (flag, str(value))]
    arguments += [*(["--raw"] if given["raw"] else []), *(["--fit", fit] if fit else [])]
    loaded = python_call("vitflow.load_model", model, **loading, dynamic_img_size=native)
    outputs = None
    if prompts := question.pop("prompts", None):
        outputs = python_call("vitflow.prompts", prompts, **question, raw=given["raw"])
    elif question:
        outputs = python_call("vitflow.similarity_to", question["like"])
    built = python_call("vitflow.Explainer", loaded if loading or native else model, outputs=outputs, fit=fit)
    return ModelCall(arguments, built)


@click.command(short_help="Open the web app in a browser.", panel="Images")
@click.argument("images", nargs=-1, metavar="[IMAGE…]", type=shared.FILE)
@shared.option(
    "Model",
    "--model models",
    "ID|demo|PATH",
    "Image model to offer; repeatable. The first is selected.",
    multiple=True,
    default=(shared.DEFAULT_MODEL, "demo"),
)
@shared.option(
    "Model",
    "--language-model language_models",
    "ID|demo-caption|PATH",
    "Model for texts and captions to offer; repeatable.",
    multiple=True,
    default=("demo-caption",),
)
@shared.option("Model", "--checkpoint", shared.FILE, "Weights for the first --model: safetensors or a torch file.")
@shared.option("Model", "--class-names", shared.FILE, "File with its class names: one per line, or JSON.")
@shared.option(
    "Model",
    "--prompt prompts",
    "TEXT",
    "Prompt to begin with, if the first --model is an image-text model; repeatable.",
    multiple=True,
)
@shared.option(
    "Server", "--host", "ADDRESS", "Address to listen on; 0.0.0.0 also accepts other machines.", default="127.0.0.1"
)
@shared.option(
    "Server",
    "--allowed-host allowed_hosts",
    "NAME",
    "Additional host name to accept, such as that of a proxy; repeatable. *.NAME: any subdomain; *: any name.",
    multiple=True,
)
@shared.option(
    "Server", "--port", click.IntRange(1, 65535), "Port.  [default: the first free port from 7860]", metavar="N"
)
@shared.option(
    "Server",
    "--time-limit",
    click.FloatRange(min=0, min_open=True),
    "Maximum time for one request.",
    default=30.0,
    metavar="SECONDS",
)
@shared.option("Server", "--open/--no-open browser", None, "Open the page in a browser.", default=True)
def app(images: tuple[Path, ...], **given: Any) -> None:
    """Open the web app: upload a photograph, click a patch, click a word.

    \b
    vitflow app cat.jpg --model vit_base_patch16_224.augreg2_in21k_ft_in1k

    IMAGEs replace the bundled samples; the first is explained at once. The app contacts no other machine.
    """
    browser = given.pop("browser")
    page = serve(samples=images, **given)
    say(f"running on {page.local_url} (press Ctrl-C to stop)")
    if browser:
        webbrowser.open(page.local_url)
    page.block_thread()
