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

# Before click 8.2 its runner cannot tell stderr and the mixture of both at once.
if "mix_stderr" in inspect.signature(CliRunner).parameters:
    CliRunner.__init__ = functools.partialmethod(CliRunner.__init__, mix_stderr=False)
    Result.output = property(lambda result: result.stdout + result.stderr)

ROOT = Path(__file__).resolve().parent.parent


#: The files that take longest come first, or a worker would end alone with one of them (pytest --durations=0).
LONGEST = (
    *(
        "folder/test_ray.py",
        "recording/test_families.py",
        "app/test_app.py",
        "cli/test_cli.py",
        "evaluation/test_run.py",
    ),
    *("test_notebooks.py", "explaining/test_comparison.py", "methods/test_maxflow.py", "test_documentation.py"),
    *("folder/test_run.py", "folder/test_store.py", "demo/test_demo.py"),
    *("evaluation/test_grid.py", "folder/test_lanes.py", "methods/test_value_weighting.py", "images/test_figures.py"),
    *("evaluation/test_correlation.py", "text/test_text_page.py", "viewer/test_explorer.py", "test_images.py"),
    *("explaining/test_class_specific.py", "evaluation/test_faithfulness.py", "evaluation/test_hostile_data.py"),
    *("methods/test_flow.py", "evaluation/test_page.py", "viewer/test_report.py", "recording/test_threads.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


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
def shared_data() -> Path:
    """The folder with the trained ViT-Tiny and real photographs, where it exists."""
    folder = Path(os.environ.get("VITFLOW_SHARED", ROOT.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip("the trained ViT-Tiny and its photographs are not here (set VITFLOW_SHARED to their folder)")
    return folder


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, where there is one."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium here (on Debian: apt-get install chromium)")
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
