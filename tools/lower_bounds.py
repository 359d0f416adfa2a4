"""Run the core tests with old versions of the dependencies: `make test-lowest`.

    python -m tools.lower_bounds [--keep] [--set oldest|middle] [pytest's arguments]

Two sets, one after the other: exactly the lower bounds that pyproject.toml gives for users, and one from between them
and today. Each gets an environment of its own in .venv-lowest (about 7 GB), with the tools of the test group beside it,
which is removed after the run unless it is to be kept.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-lowest"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, TEST = SETTINGS["project"], SETTINGS["dependency-groups"]["test"]
EXTRAS = PROJECT["optional-dependencies"]
# Gradio cannot stand beside the oldest transformers.
USERS = [*PROJECT["dependencies"], *(line for name in EXTRAS if name != "app" for line in EXTRAS[name])]
SETS = {
    "oldest": sorted({line.replace(">=", "==") for line in USERS}),
    "middle": [
        "click==8.1.7",
        "jinja2==3.1.4",
        "lazy-loader==0.4",
        "matplotlib==3.9",
        "networkx==3.3",
        "numba==0.61",
        "numpy==2.0",
        "opencv-python-headless==4.10.0.84",
        "pillow==11.0",
        "pyarrow==17.0",
        "pycocotools==2.0.8",
        "ray[data]==2.40",
        "rich-click==1.9.9",
        "safetensors==0.5",
        "scikit-image==0.25",
        "scipy==1.14",
        "timm==1.0.24",
        "torch==2.10",
        "torchvision==0.25",
        "tqdm==4.66.5",
        "transformers==5.8",  # in 5.10, RoFormer sees later tokens although it is to be causal
    ],
}
CORE = [
    f"tests/{name}"
    for name in ("methods", "images", "models", "recording", "explaining", "cli", "test_documentation.py")
]
# These take minutes, and what they hold is held by others for fewer models and images.
LONG = ("recording/test_families.py", "recording/test_threads.py", "models/test_checkpoint_fuzz.py")
# Old libraries warn of newer ones beside them, which is their own affair.
WARNINGS = ("ignore::DeprecationWarning", "ignore::FutureWarning")


def passes(name: str, arguments: list[str]) -> bool:
    """Make the environment of a set where it is not there yet, and run the tests in it."""
    python = FOLDER / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER / name], check=True)
    wanted = [*SETS[name], *(line for line in TEST if line not in EXTRAS["app"])]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--editable", ROOT, *wanted], check=True)
    print(f"{name}:", *SETS[name], flush=True)
    left_out = [word for file in LONG for word in ("--ignore", f"tests/{file}")]
    options = ["-q", "-m", "not slow and not shared", *(word for kind in WARNINGS for word in ("-W", kind)), *left_out]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([python, "-m", "pytest", *options, *CORE, *arguments], cwd=ROOT, env=environment, check=False)
    return done.returncode == 0


def main() -> None:
    """Run the tests with every set, and leave with 1 where they failed with one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--set", dest="sets", action="append", choices=SETS, help="run this one alone")
    given, arguments = parser.parse_known_args()
    failed = []
    for name in given.sets or SETS:
        try:
            failed += [] if passes(name, arguments) else [name]
        finally:
            if not given.keep:
                shutil.rmtree(FOLDER / name)
    sys.exit(f"The tests failed with: {', '.join(failed)}." if failed else 0)


if __name__ == "__main__":
    main()
