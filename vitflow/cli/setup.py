"""`vitflow methods`, `demo`, `doctor`, `check` and `app`: methods, a first example, checks, the web app."""

import platform
import re
import sys
import time
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import rich_click as click

from vitflow.app import serve
from vitflow.cli import options as shared
from vitflow.cli.explainer import make_explainer
from vitflow.cli.output import say, say_record, writing
from vitflow.errors import check_known, printable
from vitflow.registry.method_table import Method
from vitflow.registry.options import OPTIONS, default_in_words
from vitflow.text.method_table import list_methods


@click.command(short_help="List the methods, or describe one.", panel="Setup")
@click.argument("name", required=False)
def methods(name: str | None) -> None:
    """List the methods.

    With NAME, describe one method: its question, its source, and the meaning and values of each option.
    """
    tables = {"image": list_methods(text=False), "text": list_methods(text=True)}
    if name is not None:
        check_known("method", name, {method.name for table in tables.values() for method in table})
        rows = [(kind, method) for kind, table in tables.items() for method in table if name == method.name]
        click.echo("\n".join(_description(kind, method) for kind, method in rows), nl=False)
    else:
        click.echo(_table(tables))


def _table(tables: Mapping[str, Sequence[Method]]) -> str:
    """Return the names of methods, class-specific and not, of images and texts."""
    lines = [f"{'':7} {'class-specific':20} not class-specific"]
    for kind, table in tables.items():
        columns = [[each.name for each in table if each.class_specific is specific] for specific in (True, False)]
        pairs = enumerate(zip_longest(*columns, fillvalue=""))
        lines += [f"{f'{kind}s' if index == 0 else '':7} {one:20} {other}".rstrip() for index, (one, other) in pairs]
    return "\n".join([*lines, "", "vitflow methods NAME: the question, the source and the options of a method."])


def _description(kind: str, method: Method) -> str:
    """Describe a method: its question, its source, and the values of each option."""
    formatter = click.HelpFormatter(max_width=110)
    formatter.write(f"{method.name}{' (texts)' if kind == 'text' else ''}\n")
    with formatter.indentation():
        formatter.write_text(method.summary)
        formatter.write_dl(
            [
                ("question", method.question or "(not given)"),
                ("class-specific", "yes" if method.class_specific else "no"),
                ("source", method.paper or "vitflow"),
            ]
        )
    rows = []
    for name, value in method.defaults.items():
        about = f"{OPTIONS[name].help}  [{_values(method, name)}; default: {default_in_words(name, value)}]"
        rows.append((shared.flag_of(name), about))
    for preset, values in method.presets.items():
        differing = {name: value for name, value in values.items() if value != method.defaults[name]}
        settings = "  ".join(f"{shared.flag_of(name)} {default_in_words(name, v)}" for name, v in differing.items())
        rows.append((f"--preset {preset}", f"{OPTIONS['preset'].help}  [{settings or 'the defaults'}]"))
    if rows:
        with formatter.section("Options"):
            formatter.write_dl(rows)
    return formatter.getvalue()


def _values(method: Method, name: str) -> str:
    """Return the values of an option; signed_mean requires gradients."""
    values = OPTIONS[name].values
    return values if "gradients" in method.needs else values.replace("|signed_mean", "")


@click.command(short_help="Explain the bundled images with the bundled model.", panel="Setup")
@shared.option("", "-o --output", shared.NEW_FOLDER, "Folder for the overlays.", default=Path("vitflow-demo"))
def demo(output: Path) -> None:
    """Explain the bundled images with the bundled model: overlays, and a strip of the first three by four methods."""
    from vitflow.analysis.comparison import compare
    from vitflow.demo import load_demo_model, sample_images
    from vitflow.explaining.explainer import Explainer

    explainer, images = Explainer(load_demo_model()), sample_images()
    with writing(output):
        for image in images:
            # The map explains the predicted class.
            click.echo(printable(explainer.explain(image, method="gae").save(output / f"{image.stem}-gae.png")))
        methods = ["rollout", "gae", "gradcam", "random"]
        click.echo(printable(compare(images[:3], model=explainer, methods=methods).save(output / "strip.png", dpi=150)))


@click.command(short_help="Check the installation.", panel="Setup")
def doctor() -> None:
    """Report versions, the device, installed extras, and whether a model runs.

    Include the output in bug reports. The exit code is 1 if the bundled model fails.
    """
    failed = False
    for name, result in _checks():
        click.echo(printable(f"{name:<24} {result}"))
        failed |= name == "demo model" and result.startswith("FAILS")
    if failed:
        sys.exit(1)


def _checks() -> Iterator[tuple[str, str]]:
    """Yield the name and result of each check."""
    yield "vitflow", version("vitflow")
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    needed = _required()
    for name in needed.pop("", []):
        yield name, _installed(name) or "MISSING"
    for extra, names in needed.items():
        missing = [name for name in names if _installed(name) is None]
        there = ", ".join(f"{name} {_installed(name)}" for name in names)
        yield f"extra {extra}", f"not installed (pip install 'vitflow[{extra}]')" if missing else there
    from vitflow.models.devices import default_device, device_in_words

    yield "device", device_in_words(default_device())
    yield "demo model", _runs()
    yield "other models", "not checked here: vitflow check MODEL"


def _required() -> dict[str, list[str]]:
    """Return the required packages by extra; "" for those that are always required."""
    packages: dict[str, list[str]] = {"": []}
    for line in requires("vitflow") or []:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        packages.setdefault(extra[1] if extra else "", []).append(re.split(r"[^\w.-]", line)[0])
    return packages


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _runs() -> str:
    """Explain a bundled image with the bundled model, and report any error."""
    from vitflow.demo import sample_images
    from vitflow.explaining.explainer import Explainer

    started = time.perf_counter()
    try:
        saliency = Explainer("demo").explain(sample_images()[0], method="gae")
    except Exception as error:
        return f"FAILS: {type(error).__name__}: {error}"
    return f"works: {saliency.score.name}, {saliency.score.display}, a map in {time.perf_counter() - started:.1f} s"


@click.command(short_help="Check whether methods apply to a model.", panel="Setup")
@click.argument("model", metavar="MODEL")
@shared.loading_options
@shared.option("", "--json as_json", bool, "Print one JSON object.")
def check(**given: Any) -> None:
    """Check MODEL (id, demo, or PATH): clauses of the contract, tokens, and the methods that apply.

    The model runs on noise; nothing is explained. The exit code is 1 if rollout is refused.
    """
    explainer = make_explainer(given)
    from vitflow.explaining.checking import check

    checked = check(explainer)
    if given["as_json"]:
        say_record(checked.to_dict())
    else:
        click.echo(printable(str(checked), lines=True))
    if checked.refusal:
        sys.exit(1)


@click.command(short_help="Open the web app in a browser.", panel="Images")
@click.argument("images", nargs=-1, metavar="[IMAGE…]", type=shared.FILE)
@shared.option(
    "Model",
    "--model models",
    "ID|demo|PATH",
    "Model to offer; repeatable. The first is selected.",
    multiple=True,
    default=(shared.DEFAULT_MODEL, "demo"),
)
@shared.option("Model", "--checkpoint", shared.PATH, "Weights for the first --model: a file or a folder of a run.")
@shared.option("Model", "--class-names", shared.FILE, "File with its class names: one per line, or JSON.")
@shared.option("Model", "--prompt prompts", "TEXT", "Initial prompt of an image-text model; repeatable.", multiple=True)
@shared.option("Server", "--host", "ADDRESS", "Address to listen on; 0.0.0.0: other machines too.", default="127.0.0.1")
@shared.option(
    "Server",
    "--allowed-host allowed_hosts",
    "NAME",
    "Additional host name to accept, such as that of a proxy; repeatable. *.NAME: any subdomain; *: any name.",
    multiple=True,
)
@shared.option("Server", "--port", click.IntRange(1, 65535), "Port.  [default: the first free from 7860]", metavar="N")
@shared.option("Server", "--open/--no-open browser", None, "Open the page in a browser.", default=True)
def app(images: tuple[Path, ...], **given: Any) -> None:
    """Open the web app: upload a photograph, click a class or a patch.

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
