"""Build the package and try it as somebody who installs it would: `make dist`.

    python -m tools.package [-o dist] [--python python3.11 --python python3.13]

Builds the source distribution, and of that the wheel; checks both with twine and the wheel's size; installs the wheel
into an empty environment of each Python, and there, outside this clone and without network, runs `vitflow doctor`, the
demo and a first map. Prints the sizes. Each environment (about 6 GB) is removed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What must be in the wheel beside Python.
HELD = (
    "vitflow/py.typed",
    "vitflow/__init__.pyi",
    *(f"vitflow/demo/{name}.safetensors" for name in ("vitflow_demo", "demo_caption/model", "demo_text/model")),
)


#: The wheel is smaller than this, in MiB.
LARGEST_WHEEL = 8

# Any use of the network fails, whatever library wants it; sockets within the machine work.
OFFLINE = """import socket

def _refuse(*address, **options):
    raise OSError(f"This environment has no network; something asked for {address}.")

socket.getaddrinfo = _refuse
"""


def run(*command: object, **options: object) -> None:
    """Run a command, and stop where it fails."""
    print("$", *command, file=sys.stderr, flush=True)
    subprocess.run([str(part) for part in command], check=True, **options)


def build(output: Path) -> tuple[Path, Path]:
    """The source distribution and the wheel, checked."""
    shutil.rmtree(output, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", output, ROOT)
    [source], [wheel] = output.glob("*.tar.gz"), output.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", source, wheel)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = [name for name in HELD if name not in names]
    strays = sorted(name for name in names if name.startswith("tests/") or name.endswith((".pyc", ".nbi", ".nbc")))
    if missing or strays:
        raise SystemExit(f"Expected the wheel to hold {', '.join(HELD)} and no tests, got {missing or strays}.")
    for file in (source, wheel):
        print(f"{file.name}: {file.stat().st_size / 2**20:.1f} MiB")
    if wheel.stat().st_size > LARGEST_WHEEL * 2**20:
        raise SystemExit(f"Expected a wheel of at most {LARGEST_WHEEL} MiB.")
    return source, wheel


def try_wheel(wheel: Path, python: str) -> None:
    """Install the wheel into an empty environment of a Python, and use it there without network or this clone."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(python, "-m", "venv", place / "env")
        tools = place / "env" / ("Scripts" if os.name == "nt" else "bin")
        run(tools / "python", "-m", "pip", "install", "--quiet", wheel)
        (place / "offline").mkdir()
        (place / "offline" / "sitecustomize.py").write_text(OFFLINE, encoding="utf-8")
        alone = os.environ | {"PYTHONPATH": str(place / "offline"), "HF_HOME": str(place / "hub")}
        alone.pop("HF_HUB_OFFLINE", None)  # a bundled model needs no such setting
        copy = "import shutil, vitflow.demo as demo; shutil.copy(demo.sample_images()[0], 'photo.png')"
        run(tools / "python", "-c", copy, cwd=place, env=alone)
        first_map = ["explain", "photo.png", "--model", "demo", "-o", "first.png"]
        for words in (["--version"], ["doctor"], ["demo", "-o", "images"], first_map):
            run(tools / "vitflow", *words, cwd=place, env=alone)
        drawn = sorted(file.name for file in (place / "images").iterdir())
        if not (place / "first.png").stat().st_size:
            raise SystemExit("Expected a first map in first.png, got an empty file.")
        print(f"{python}: the demo drew {len(drawn)} files ({', '.join(drawn)}), and a first map was drawn")


def main() -> None:
    """Build and check, then install and try with each Python."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist", help="where the two files go")
    parser.add_argument("--python", dest="pythons", action="append", help="a Python to try the wheel with; repeatable")
    given = parser.parse_args()
    wheel = build(given.output)[1]
    for python in given.pythons or [sys.executable]:
        try_wheel(wheel, python)


if __name__ == "__main__":
    main()
