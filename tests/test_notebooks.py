"""The notebooks of the documentation run as they stand, show images, and are kept with what they show."""

import base64
import io
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from PIL import Image

pytestmark = pytest.mark.slow  # each runs in a process of its own
ROOT = Path(__file__).resolve().parent.parent
# What a reader finds in each, by words of the cell that shows it; and whether that is an image.
SHOWN = {
    "docs/first_steps.ipynb": {
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
    },
    "docs/understand/lesson.ipynb": {
        "residual=0.0)[0, 0])": "C     0.7500",
        "residual=0.5)[0, 0])": "C     0.1875",
        "show(flow.values[0])": "D     0.5000",
        "flow >= rollout": "True",
        "saturated_share": "12 layers: 100%",
        '"flow", "random"]': True,
        "targets=[disc, star]": True,
    },
}


@pytest.fixture(scope="module", params=SHOWN)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def executed(name, tmp_path_factory) -> nbformat.NotebookNode:
    """The notebook after a run in a process of its own, whose warnings are its own affair."""
    output = tmp_path_factory.mktemp("notebook") / "executed.ipynb"
    command = [sys.executable, "-m", "tools.run_notebook", ROOT / name, "-o", output]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return nbformat.read(output, as_version=4)


@pytest.fixture(scope="module")
def kept(name) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / name, as_version=4)


def shown(notebook: nbformat.NotebookNode, words: str) -> dict:
    """Return the output of the cell with these words."""
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    [data] = [output.get("data") or {"text/plain": output.text} for output in cell.outputs]
    return data


def test_each_cell_shows_what_it_is_about(name, executed):
    for words, expected in SHOWN[name].items():
        data = shown(executed, words)
        assert data["text/plain"], words
        if isinstance(expected, str):
            assert expected in data["text/plain"], words
        elif expected:
            with Image.open(io.BytesIO(base64.b64decode(data["image/png"]))) as image:
                assert min(image.size) >= 100
                low, high = zip(*image.convert("RGB").getextrema(), strict=True)
                assert max(high) - min(low) > 100  # no blank


def test_the_notebook_is_kept_as_a_run_leaves_it(name, executed, kept):
    """After a change: python -m tools.run_notebook FILE"""
    assert [cell.source for cell in kept.cells] == [cell.source for cell in executed.cells]
    for words in SHOWN[name]:
        before, now = shown(kept, words), shown(executed, words)
        assert before.keys() == now.keys() and before["text/plain"] == now["text/plain"], words


def test_the_kept_notebook_is_small_and_reports_of_no_machine(kept):
    text = nbformat.writes(kept)
    assert len(text) < 1_000_000
    assert "Traceback" not in text and str(Path.home()) not in text and "site-packages" not in text
    assert [cell for cell in kept.cells if set(cell.metadata) - {"tags"} or cell.get("outputs") == []] == []
