"""Build the package and try it as somebody who installs it would: `make dist`.

    python -m tests.package [-o dist]

Builds the source distribution, and of that the wheel; checks both with twine; installs the wheel into an empty
environment, and there, outside this clone, runs the demo. Prints the sizes. The environment (about 6 GB) is removed.
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
    return source, wheel


def try_wheel(wheel: Path) -> None:
    """Install the wheel into an empty environment, and run the demo far from this clone."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(sys.executable, "-m", "venv", place / "env")
        tools = place / "env" / ("Scripts" if os.name == "nt" else "bin")
        run(tools / "python", "-m", "pip", "install", "--quiet", wheel)
        alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        for words in (["--version"], ["doctor"], ["demo", "-o", "images"]):
            run(tools / "vitflow", *words, cwd=place, env=alone)
        drawn = sorted(file.name for file in (place / "images").iterdir())
        print(f"the demo drew {len(drawn)} files: {', '.join(drawn)}")


def main() -> None:
    """Build, check, install, try."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist", help="where the two files go")
    try_wheel(build(parser.parse_args().output)[1])


if __name__ == "__main__":
    main()
