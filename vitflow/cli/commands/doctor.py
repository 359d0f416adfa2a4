"""`vitflow doctor`: what is installed here, and whether it works."""

import platform
import re
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

import rich_click as click

from vitflow.cli.saying import say_record
from vitflow.errors import printable

# Extras that are for working on vitflow itself.
_OURS = {"test", "bench", "dist", "docs"}
# Seconds in which the hub must answer.
_PATIENCE = 2.0


@click.command(short_help="Tell what is installed here, and whether it works.", panel="Setup")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Tell versions, the device, which extras are there, whether a model runs, and whether the hub answers.

    Say what it prints where you report a fault. The hub is asked for two seconds at most, and not at all under
    HF_HUB_OFFLINE=1. The exit code is 1 where the bundled model does not run.
    """
    told: dict[str, str] = {}
    for name, words in _findings():
        told[name] = words
        if not as_json:
            click.echo(printable(f"{name:<24} {words}"))
    if as_json:
        say_record(told)
    if told["demo model"].startswith("FAILS"):
        sys.exit(1)


def _findings() -> Iterator[tuple[str, str]]:
    """What is found, one after the other, as it is found."""
    yield "vitflow", version("vitflow")
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    needed = _required()
    for name in needed.pop("", []):
        yield name, _installed(name) or "MISSING"
    for extra, names in needed.items():
        missing = [name for name in names if _installed(name) is None]
        there = ", ".join(f"{name} {_installed(name)}" for name in names)
        yield f"extra {extra}", f"not installed (pip install 'vitflow[{extra}]')" if missing else there
    from vitflow.recording.isolation import default_device, device_in_words

    yield "device", device_in_words(default_device())
    yield "demo model", _runs()
    yield "Hugging Face hub", _hub()


def _required() -> dict[str, list[str]]:
    """The packages that vitflow asks for, by extra; "" for those that it cannot do without."""
    found: dict[str, list[str]] = {"": []}
    for line in requires("vitflow") or []:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if extra is None or extra[1] not in _OURS:
            found.setdefault(extra[1] if extra else "", []).append(re.split(r"[^\w.-]", line)[0])
    return found


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _runs() -> str:
    """What the bundled model answers to a bundled image; any error is what is looked for."""
    from vitflow.demo import sample_images
    from vitflow.explaining.explainer import Explainer

    started = time.perf_counter()
    try:
        found = Explainer("demo").explain(sample_images()[0], method="gae")
    except Exception as error:
        return f"FAILS: {type(error).__name__}: {error}"
    return f"works: {found.score.name}, {found.score.display}, a map in {time.perf_counter() - started:.1f} s"


def _hub() -> str:
    """Whether models can be fetched by name."""
    from huggingface_hub import constants

    from vitflow.models.hub import hub_answers

    if constants.HF_HUB_OFFLINE:
        return "not asked: HF_HUB_OFFLINE is set"
    if hub_answers(_PATIENCE):
        return "answers"
    return f"does not answer within {_PATIENCE:g} s: only models in its cache and in folders of yours can be loaded"
