"""`vitflow doctor`: check the installation."""

import platform
import re
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

import rich_click as click

from vitflow.cli.output import say_record
from vitflow.errors import printable

# Extras for developing vitflow.
_OURS = {"test", "bench", "dist", "docs"}
# Timeout of the hub, in seconds.
_PATIENCE = 2.0


@click.command(short_help="Check the installation.", panel="Setup")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Report versions, the device, installed extras, and whether a model runs and the hub can be reached.

    Include the output in bug reports. The hub is contacted for at most two seconds, and not if HF_HUB_OFFLINE=1. The
    exit code is 1 if the bundled model fails.
    """
    checks: dict[str, str] = {}
    for name, result in _checks():
        checks[name] = result
        if not as_json:
            click.echo(printable(f"{name:<24} {result}"))
    if as_json:
        say_record(checks)
    if checks["demo model"].startswith("FAILS"):
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
    from vitflow.recording.isolation import default_device, device_in_words

    yield "device", device_in_words(default_device())
    yield "demo model", _runs()
    yield "Hugging Face hub", _hub()


def _required() -> dict[str, list[str]]:
    """Return the required packages by extra; "" for those that are always required."""
    packages: dict[str, list[str]] = {"": []}
    for line in requires("vitflow") or []:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if extra is None or extra[1] not in _OURS:
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


def _hub() -> str:
    """Check that models can be downloaded by name."""
    from huggingface_hub import constants

    from vitflow.models.hub import hub_responds

    if constants.HF_HUB_OFFLINE:
        return "not checked: HF_HUB_OFFLINE is set"
    if hub_responds(_PATIENCE):
        return "reachable"
    return f"not reachable within {_PATIENCE:g} s: only cached models and local folders can be loaded"
