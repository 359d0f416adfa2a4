"""Time of the first map: `vitflow explain` and a script that runs the same model on the same image.

    python -m benchmarks.first_map [--image FILE --model ID --checkpoint FILE --rounds 5]

Each round starts both as processes of their own, in turn. The script imports torch and timm, makes the model, prepares
the image and runs it; `vitflow explain` also makes the map and writes the overlay. Prints the wall and the processor
time of each round, and the ratios of the medians. A first round, in which bytecode and what the system caches come to
lie ready, is not counted. Without a checkpoint the script's weights are random, and `vitflow explain` loads a file of
such weights, which is written for it.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

_SCRIPT = """
import sys
import timm, torch
from PIL import Image

model = timm.create_model(sys.argv[2], checkpoint_path=sys.argv[3]).eval()
prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
with torch.inference_mode():
    print(int(model(prepare(Image.open(sys.argv[1]).convert("RGB")).unsqueeze(0)).argmax()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", type=Path)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        image = given.image or _noise(Path(folder) / "image.jpg")
        checkpoint = given.checkpoint or _weights(given.model, Path(folder) / "weights.safetensors")
        common = [str(image), given.model, str(checkpoint)]
        explain = [common[0], "--model", common[1], "--checkpoint", common[2], "-o", str(Path(folder) / "map.png")]
        commands = {
            "script": [sys.executable, "-c", _SCRIPT, *common],
            "vitflow explain": [sys.executable, "-m", "vitflow", "explain", *explain],
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for number in range(given.rounds + 1):
            for name, command in commands.items():
                wall, processor = _timed(command)
                if number:
                    times[name].append((wall, processor))
                    print(f"{name:16} {wall:6.2f} s, of a processor {processor:6.2f} s", flush=True)
    walls, processors = ({name: median(one[kind] for one in times[name]) for name in times} for kind in (0, 1))
    for label, of in (("wall time", walls), ("processor time", processors)):
        script, ours = of["script"], of["vitflow explain"]
        print(f"{label:16} {script:6.2f} s -> {ours:6.2f} s, {ours / script:.2f} x")


def _timed(command: list[str]) -> tuple[float, float]:
    """Wall and processor time of a process, in seconds."""
    # An installed package has its bytecode; a checkout under this setting never would.
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=settings)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _noise(path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((500, 375), Image.Resampling.BICUBIC).save(path)
    return path


def _weights(model: str, path: Path) -> Path:
    import timm
    from safetensors.torch import save_file

    save_file(timm.create_model(model).state_dict(), path)
    return path


if __name__ == "__main__":
    main()
