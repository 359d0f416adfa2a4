"""The notebook of first steps runs as it stands, shows pictures, and is kept with what it shows."""

import base64
import io
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from PIL import Image

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# What a reader finds in it, by words of the cell that shows it; and whether that is a picture.
SHOWN = {
    'vitflow.Explainer("demo")': False,
    'target="orange disc"': True,
    '"random", "centre"': True,
    "targets=[disc, star]": True,
    "Contrast(disc, against=star)": True,
    "mine.reset_classifier(2)": True,
    "transformers.ViTForImageClassification": True,
    "torchvision.models.VisionTransformer": True,
    "vitflow.explain_folder": True,
    "vitflow.evaluate": True,
}


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> nbformat.NotebookNode:
    """The notebook after a run in a process of its own, whose warnings are its own affair."""
    output = tmp_path_factory.mktemp("notebook") / "first_steps.ipynb"
    command = [sys.executable, EXAMPLES / "run_first_steps.py", "-o", output]
    path = f"{EXAMPLES.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return nbformat.read(output, as_version=4)


@pytest.fixture(scope="module")
def kept() -> nbformat.NotebookNode:
    return nbformat.read(EXAMPLES.parent / "docs" / "first_steps.ipynb", as_version=4)


def shown(notebook: nbformat.NotebookNode, words: str) -> dict:
    """What the one cell with these words shows."""
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    [data] = [output.data for output in cell.outputs if "data" in output]
    return data


@pytest.mark.parametrize("words", SHOWN)
def test_a_cell_shows_what_it_is_about(executed, words):
    data = shown(executed, words)
    assert data["text/plain"]
    if SHOWN[words]:
        with Image.open(io.BytesIO(base64.b64decode(data["image/png"]))) as picture:
            assert min(picture.size) >= 100
            low, high = zip(*picture.convert("RGB").getextrema(), strict=True)
            assert max(high) - min(low) > 100  # no blank


def test_the_notebook_is_kept_as_a_run_leaves_it(executed, kept):
    """After a change: python examples/run_first_steps.py"""
    assert [cell.source for cell in kept.cells] == [cell.source for cell in executed.cells]
    for words in SHOWN:
        before, now = shown(kept, words), shown(executed, words)
        assert before.keys() == now.keys() and before["text/plain"] == now["text/plain"], words


def test_the_kept_notebook_is_small_and_tells_of_no_machine(kept):
    text = nbformat.writes(kept)
    assert len(text) < 1_000_000
    assert "Traceback" not in text and str(Path.home()) not in text and "site-packages" not in text
    assert [cell for cell in kept.cells if cell.metadata or cell.get("outputs") == []] == []
