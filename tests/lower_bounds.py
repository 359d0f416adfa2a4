"""Run the core tests with the oldest versions that pyproject.toml allows: `make test-lowest`.

    python -m tests.lower_bounds [--keep] [pytest's arguments]

Makes an environment of its own in .venv-lowest (about 7 GB) from exactly the lower bounds of the dependencies and of
the extras for users, with the tools of the test extra beside them, and removes it after the run unless it is to be
kept.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-lowest"
# Extras that no user installs: their tools may be new.
TOOLS = ("test", "bench")
CORE = [
    f"tests/{name}" for name in ("methods", "pictures", "models", "recording", "explaining", "test_documentation.py")
]
# These take minutes, and what they hold is held by others for fewer models and pictures.
LONG = ("recording/test_families.py", "recording/test_threads.py", "models/test_checkpoint_fuzz.py")
# Old libraries warn of newer ones beside them, which is their own affair.
WARNINGS = ("ignore::DeprecationWarning", "ignore::FutureWarning")


def requirements() -> list[str]:
    """What to install: `name==bound` for what users get, and the tools of the tests as they stand."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    own = [*project["dependencies"], *(line for name in extras if name not in TOOLS for line in extras[name])]
    return sorted({line.replace(">=", "==") for line in own} | set(extras["test"]))


def main() -> None:
    """Make the environment, run the tests in it, and leave with their exit code."""
    arguments = [word for word in sys.argv[1:] if word != "--keep"]
    python = FOLDER / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--editable", ROOT, *requirements()], check=True)
    print("\n".join(line for line in requirements() if "==" in line), flush=True)
    left_out = [word for name in LONG for word in ("--ignore", f"tests/{name}")]
    options = ["-q", "-m", "not slow and not shared", *(word for kind in WARNINGS for word in ("-W", kind)), *left_out]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([python, "-m", "pytest", *options, *CORE, *arguments], cwd=ROOT, env=environment, check=False)
    if "--keep" not in sys.argv:
        shutil.rmtree(FOLDER)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
