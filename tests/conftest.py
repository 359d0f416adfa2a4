"""Common fixtures: the hub is never contacted, and data from outside the project is optional."""

import functools
import gc
import inspect
import os
import shutil
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import settings

from vitflow import Explainer

# Before click 8.2 its runner cannot tell stderr and the mixture of both at once.
if "mix_stderr" in inspect.signature(CliRunner).parameters:
    CliRunner.__init__ = functools.partialmethod(CliRunner.__init__, mix_stderr=False)
    Result.output = property(lambda result: result.stdout + result.stderr)

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Try ten examples of each property at a push, and a hundred with the slow tests."""
    settings.register_profile("vitflow", max_examples=10 if config.option.markexpr else 100, deadline=None)
    settings.load_profile("vitflow")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Half a million objects of libraries and of the list of tests stay: they are not searched for garbage again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries take for leaks what nobody has looked for


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo() -> Explainer:
    """The bundled model, loaded and measured once."""
    return Explainer("demo")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the trained ViT-Tiny and real photographs, where it exists."""
    folder = Path(os.environ.get("VITFLOW_SHARED", ROOT.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip("the trained ViT-Tiny and its photographs are not here (set VITFLOW_SHARED to their folder)")
    return folder


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium, if there is one. Its event loop stays in this thread: others run in threads of their own."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium here (on Debian: apt-get install chromium)")
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
