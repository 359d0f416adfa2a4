"""Execute a notebook of the documentation in place, with the bundled model: python -m tools.run_notebook [FILE]

The notebook is kept with its outputs, so that it can be read where it cannot be run: its images in 256 colours, for
the file's size. What changes from run to run (when it ran, on which versions) is not kept.
"""

import argparse
import base64
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "first_steps.ipynb"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "notebook", nargs="?", type=Path, default=NOTEBOOK, help="the first steps, unless another is named"
    )
    parser.add_argument("-o", "--output", type=Path, help="where the executed notebook goes, if not to its own place")
    given = parser.parse_args(arguments)
    output = given.output or given.notebook
    notebook = nbformat.read(given.notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = folder  # no settings and no history of the user's
        os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # bars in words will do
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata = {key: value for key, value in cell.metadata.items() if key == "tags"}
        for shown in cell.get("outputs", ()):
            if "image/png" in shown.get("data", {}):
                shrink(shown.data, shown.get("metadata", {}).get("image/png", {}).get("width"))
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(notebook, output)
    print(output)


def shrink(data: dict[str, str], width: int | None = None) -> None:
    """Give the image of an output, and its copy in HTML, the width that it is shown in and a palette of 256 colours."""
    before, file = data["image/png"].strip(), io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(before))) as image:
        small = image.convert("RGB")
        if width is not None and width < small.width:
            small = small.resize((width, round(small.height * width / small.width)), Image.Resampling.LANCZOS)
        small.quantize(256).save(file, "PNG", optimize=True)
    after = base64.b64encode(file.getvalue()).decode()
    data["image/png"] = after
    if "text/html" in data:
        data["text/html"] = data["text/html"].replace(before, after)


if __name__ == "__main__":
    main()
