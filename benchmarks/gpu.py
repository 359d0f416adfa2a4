"""All that is worth knowing of vitflow on a GPU, in one command.

    python -m benchmarks.gpu [--device cuda] [--models …] [--batch-sizes 1 32] [--images 2000]

One after the other: the forward pass with rollout beside the fused forward pass in float32 and bfloat16, with its
memory; seconds an image of each method; how far the maps lie from those of the processor (the largest difference as a
share of the map's largest value; at most 1e-3 is asked for); a folder run beside the model's own rate, and the same
through Ray with one actor, where Ray is installed. Weights are random, images are drawn. With --device cpu it is
tried without a GPU, on small numbers. The tests for a GPU are run by `pytest -m gpu`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import timm
import torch

from benchmarks.folder import draw_photographs
from benchmarks.overhead import MODELS, WORK, prepare
from vitflow import Explainer, explain_folder

METHODS = ("rollout", "flow", "gae", "gradient_rollout", "gradcam", "sampling", "consensus", "occlusion")
DTYPES = ("float32", "bfloat16")
REQUESTED = 1e-3


def settled(device: str, work: Callable[[], object]) -> float:
    """Seconds until the device has done the work."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def peak_of(device: str, work: Callable[[], object]) -> float:
    """The most memory in MiB that the work takes on a GPU beyond what lies there before; 0 on a processor."""
    if not device.startswith("cuda"):
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def forward_passes(name: str, batch: int, dtype: str, device: str, repeats: int) -> None:
    """A line of the table: fused forward, and with rollout as published and as it is by default."""
    model, pixels = prepare(name, batch)
    kind = getattr(torch, dtype)
    model, pixels = model.to(device, kind), pixels.to(device, kind)
    rounds: dict[str, list[float]] = {what: [] for what in WORK}
    with torch.inference_mode():
        for number in range(repeats + 3):
            for what, work in WORK.items():
                seconds = settled(device, lambda work=work: work(model, pixels))
                if number >= 3:  # kernels are chosen, and memory is there
                    rounds[what].append(seconds)
        peaks = {what: peak_of(device, lambda work=work: work(model, pixels)) for what, work in WORK.items()}
    base = min(rounds["plain"])
    medians = {what: statistics.median(seconds) for what, seconds in rounds.items()}
    ratios = " | ".join(
        f"{min(rounds[what]) / base:.2f} (median {medians[what] / medians['plain']:.2f})" for what in tuple(WORK)[1:]
    )
    memory = " → ".join(f"{peaks[what]:.0f}" for what in WORK)
    print(f"| {name} | {batch} | {dtype} | {batch / base:.0f} | {ratios} | {memory} |", flush=True)


def methods_next_to_the_processor(name: str, device: str) -> None:
    """Seconds an image of each method, and the distance of its map from the processor's."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    size = model.pretrained_cfg["input_size"][-2:]
    images = [np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8) for seed in range(2)]
    here, there = Explainer(model), Explainer(timm.create_model(name, num_classes=10).eval(), device=device)
    there.model.load_state_dict(model.state_dict())
    print(f"\n| {name}, float32 | ms an image | largest difference from the processor |\n|---|---|---|")
    for method in METHODS:
        ours = here.explain_batch(images, methods=[method], targets=[0])
        there.explain_batch(images, methods=[method], targets=[0])  # kernels are chosen
        theirs: list = []
        seconds = settled(
            device,
            lambda method=method, theirs=theirs: theirs.extend(
                there.explain_batch(images, methods=[method], targets=[0])
            ),
        )
        apart = max(
            float(np.abs(a.grid - b.grid).max() / max(np.abs(a.grid).max(), 1e-30))
            for a, b in zip(ours, theirs, strict=True)
        )
        verdict = "" if apart <= REQUESTED else f", more than the {REQUESTED:g} that is asked for"
        print(f"| {method} | {1000 * seconds / len(images):.1f} | {apart:.1e}{verdict} |", flush=True)


def explainer_of(name: str, device: str) -> Explainer:
    """The same model in every process."""
    return Explainer(prepare(name, 1)[0], device=device)


def folder_runs(name: str, device: str, images: int, batch: int) -> None:
    """A folder run beside the model's own rate, and through Ray."""
    model, pixels = prepare(name, batch)
    model, pixels = model.to(device), pixels.to(device)
    count = max(images // batch, 1)
    with torch.inference_mode():
        model(pixels)
        alone = settled(device, lambda: [model(pixels) for _ in range(count)]) / (count * batch)
    print(f"\n{name}, float32, batches of {batch}: the bare model takes {1 / alone:.0f} images/s")
    with tempfile.TemporaryDirectory() as folder:
        draw_photographs(Path(folder, "in"), images)
        engines = ["local"] + (["ray"] if find_spec("ray") else [])
        for engine in engines:
            for overlays in (False, True):
                make = partial(explainer_of, name, device)
                kept = {"model": make, "actors": 1} if engine == "ray" else {"model": make(), "batch_size": batch}
                output = Path(folder, f"{engine}-{overlays}")
                started = time.perf_counter()
                explain_folder(Path(folder, "in"), output, overlays=overlays, engine=engine, **kept)
                rate = images / (time.perf_counter() - started)
                kind = "with" if overlays else "without"
                print(f"  {engine}, {kind} overlays: {rate:.0f} images/s, {rate * alone:.2f} of it", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--images", type=int, default=2000, help="of the folder runs; 0 leaves them out")
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch finds no GPU here: --device cpu tries the benchmark without one.")
    where = torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device
    print(f"torch {torch.__version__}, timm {timm.__version__}, {where}\n")
    print("| model | batch | precision | fused, images/s | with rollout as published × | by default × | peak MiB |")
    print("|---|---|---|---|---|---|---|")
    for name in given.models:
        for batch in given.batch_sizes:
            for dtype in DTYPES:
                forward_passes(name, batch, dtype, given.device, given.repeats)
    for name in given.models:
        methods_next_to_the_processor(name, given.device)
    if given.images:
        for name in given.models:
            folder_runs(name, given.device, given.images, max(given.batch_sizes))


if __name__ == "__main__":
    main()
