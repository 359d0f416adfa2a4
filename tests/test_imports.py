"""Libraries that commands and modules leave alone: each question in a fork of one process that has loaded nothing."""

import json
import subprocess
import sys

import pytest

import vitflow
from vitflow.demo import sample_images

IMAGE = sample_images()[0]
#: Command lines that load no torch, with their exit code and a word of what they report.
QUICK = [
    ("--help", 0, ""),
    ("--version", 0, vitflow.__version__),
    *((f"{command} --help", 0, "") for command in ("explain", "compare", "evaluate", "read")),
    ("methods", 0, ""),
    ("methods flow", 0, ""),
    ("methods rolout", 2, "Did you mean 'rollout'"),
    ("nonsense", 2, ""),
    ("explain x.png --discard-ratio much", 2, ""),
    ("compare x.png --method rollout:layer=3", 2, "Unknown rollout option 'layer'"),
    ("read --prompt a --model x --target b", 2, "--target"),
    ("evaluate demo:2 --metric roc", 2, "Did you mean 'roc_auc'?"),
    *(
        (f"{command} --method rolout", 2, "Unknown method 'rolout'. Did you mean 'rollout'?")
        for command in (f"explain {IMAGE}", "evaluate demo:1")
    ),
    *(
        (f"{command} --method centre --layers 3", 2, "Unknown centre option 'layers'")
        for command in (f"compare {IMAGE}", "folder . -o out")
    ),
]
HEAVY = "scipy matplotlib networkx numba pandas jinja2 transformers open_clip captum pytorch_grad_cam ray"
DRAW = """
import numpy as np
from vitflow.images.figures import Cell, Column, draw_bands, save_figure
figure = draw_bands([([Column("a")], [[[Cell(np.zeros((9, 9, 3), np.uint8))]]])])
for suffix in ("png", "svg", "pdf"):
    save_figure(figure, f"strip.{suffix}")
"""
EXPLAIN = """
import vitflow.folder.run
from vitflow.cli import cli
for method in ("rollout", "gae"):
    cli(["explain", IMAGE, "--model", "demo", "--method", method, "-o", "map.png"], standalone_mode=False)
""".replace("IMAGE", repr(str(IMAGE)))
CHOOSE = """
from vitflow.registry.choices import choose_methods
[one] = choose_methods([("rollout", {"residual": 0.3})], {"head_fusion": "min"})
print(one.name, one.options["residual"], one.options["head_fusion"])
"""
#: Code or command line → exit code, a word of its output, and modules that it must not load.
QUESTIONS = {
    **{f"vitflow {line}": (code, word, "torch numpy") for line, code, word in QUICK},
    EXPLAIN: (0, "", HEAVY),
    "import vitflow": (0, "", "torch numpy"),
    "import vitflow.folder.decoders": (0, "", "torch cv2"),
    CHOOSE: (0, "rollout 0.3 min", "torch numpy"),
    DRAW: (0, "", "matplotlib.pyplot"),
}
ASK = """
import json, os, sys, tempfile, traceback
from vitflow.cli import main
for question in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile("w+") as said:
        if not (child := os.fork()):
            os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
            code = 0
            try:
                if question.startswith("vitflow "):
                    sys.argv = question.split()
                    main()
                else:
                    exec(question)
            except SystemExit as stop:
                code = stop.code or 0
            except BaseException:
                traceback.print_exc()
                code = 99
            print(flush=True), print(json.dumps([code, [*sys.modules]]), file=sys.stderr, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        said.seek(0)
        words, _, last = said.read().rstrip().rpartition("\\n")
        print(json.dumps([words, *json.loads(last)]), flush=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[str, int, list[str]]]:
    """The words, exit code and loaded modules of each question."""
    command = [sys.executable, "-c", ASK, json.dumps([*QUESTIONS])]
    place = tmp_path_factory.mktemp("imports")
    (place / "x.png").touch()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=place)
    return dict(zip(QUESTIONS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_loaded_and_how_it_ends(answers, question):
    code, word, left_alone = QUESTIONS[question]
    words, actual, loaded = answers[question]
    assert actual == code and word in words, words
    assert not set(left_alone.split()) & set(loaded)


def test_python_m_vitflow_is_the_command_line():
    done = subprocess.run([sys.executable, "-m", "vitflow", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["vitflow,", "version", vitflow.__version__]
