"""Time and memory of vitflow on a GPU, in one command.

    python -m benchmarks.gpu [--device cuda] [--models …] [--batch-sizes 1 8 64] [--images 2000] [--docs docs/costs.md]

One after the other: the forward pass with rollout, relative to the fused forward pass in float32 and bfloat16, with its
memory; time and memory of each method, and the difference of its maps from those of the CPU (the largest, relative to
the largest value of the map; at most 1e-3 is expected); folder runs relative to the bare model in both precisions, and
through Ray with one actor, if Ray is installed. Weights are random, images are drawn. The tables are Markdown; with
--docs they replace those of a page. `--device cpu` tries the benchmark without a GPU, with small numbers. The tests for
a GPU are run by `pytest -m gpu`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import timm
import torch

from benchmarks.folder import draw_photographs
from benchmarks.overhead import MODELS, WORK, prepare
from vitflow import Explainer, explain_folder

GPU_MODELS = (*MODELS, "vit_base_patch14_dinov2")  # the last has 1,370 tokens
METHODS = ("rollout", "flow", "gae", "gradient_rollout", "gradcam", "legrad", "frozen_gradient", "sampling")
METHODS += ("consensus", "occlusion")
# Lines of a page between which the tables are written.
FIRST, LAST = "<!-- python -m benchmarks.gpu -->", "<!-- end of python -m benchmarks.gpu -->"
DTYPES = ("float32", "bfloat16")
REQUESTED = 1e-3


class Report:
    """Lines that are printed as they are made, and kept for a page."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)

    def write(self, page: Path) -> None:
        """Replace the tables of a page."""
        before, rest = page.read_text().split(f"{FIRST}\n")
        after = rest.split(LAST)[1]
        page.write_text("\n".join([f"{before}{FIRST}", *self.lines, f"{LAST}{after}"]))


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


def forward_passes(name: str, batch: int, dtype: str, device: str, repeats: int, report: Report) -> None:
    """Report a row: the fused forward pass, and that with rollout, as published and by default."""
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
    report(f"| {name} | {batch} | {dtype} | {batch / base:.0f} | {ratios} | {memory} |")


def methods_and_the_cpu(name: str, batch: int, device: str, report: Report) -> None:
    """Report time and memory of each method for a batch, and the difference of two maps from those of the CPU."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    size = model.pretrained_cfg["input_size"][-2:]
    images = [np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8) for seed in range(batch)]
    here, there = Explainer(model), Explainer(timm.create_model(name, num_classes=10).eval(), device=device)
    there.model.load_state_dict(model.state_dict())
    report(f"\n| {name}, float32, batch {batch} | ms per image | peak MiB | difference from the CPU |")
    report("|---|---:|---:|---:|")
    for method in METHODS:
        if method == "occlusion" and size[0] > 224:  # a pass for each patch, which takes hours on a CPU
            continue
        ours = here.explain_batch(images[:2], methods=[method], targets=[0])
        work = partial(there.explain_batch, images, methods=[method], targets=[0])
        theirs = work()[:2]  # kernels are chosen
        seconds, peak = settled(device, work), peak_of(device, work)
        apart = max(
            float(np.abs(a.grid - b.grid).max() / max(np.abs(a.grid).max(), 1e-30))
            for a, b in zip(ours, theirs, strict=True)
        )
        verdict = "" if apart <= REQUESTED else f" (above {REQUESTED:g})"
        report(f"| {method} | {1000 * seconds / batch:.1f} | {peak:.0f} | {apart:.1e}{verdict} |")


def explainer_of(name: str, device: str, dtype: str) -> Explainer:
    """Make the same model in every process."""
    return Explainer(prepare(name, 1)[0], device=device, dtype=dtype)


def folder_runs(name: str, device: str, dtype: str, images: int, batch: int, report: Report) -> None:
    """Report the rate of folder runs relative to that of the bare model, also through Ray."""
    model, pixels = prepare(name, batch)
    kind = getattr(torch, dtype)
    model, pixels = model.to(device, kind), pixels.to(device, kind)
    count = max(images // batch, 1)
    with torch.inference_mode():
        model(pixels)
        alone = settled(device, lambda: [model(pixels) for _ in range(count)]) / (count * batch)
    report(f"\n| {name}, {dtype}, batches of {batch} | images/s | relative to the bare model |\n|---|---:|---:|")
    report(f"| bare model | {1 / alone:.0f} | 1.00 |")
    with tempfile.TemporaryDirectory() as folder:
        draw_photographs(Path(folder, "in"), images)
        engines = ["local"] + (["ray"] if find_spec("ray") else [])
        for engine in engines:
            for overlays in (False, True):
                make = partial(explainer_of, name, device, dtype)
                kept = {"model": make, "actors": 1} if engine == "ray" else {"model": make(), "batch_size": batch}
                output = Path(folder, f"{engine}-{overlays}")
                started = time.perf_counter()
                explain_folder(Path(folder, "in"), output, overlays=overlays, engine=engine, **kept)
                rate = images / (time.perf_counter() - started)
                kind = "with" if overlays else "without"
                report(f"| {engine}, {kind} overlays | {rate:.0f} | {rate * alone:.2f} |")


def unless_memory_runs_out(report: Report, work: Callable[..., None], *arguments: object) -> None:
    """Report a measurement, or that the memory of the device does not suffice for it."""
    try:
        work(*arguments, report)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        report(f"| {', '.join(map(str, arguments))}: out of memory |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=GPU_MODELS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--images", type=int, default=2000, help="of the folder runs; 0 leaves them out")
    parser.add_argument("--docs", type=Path, help="page whose tables are replaced")
    given, report = parser.parse_args(), Report()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch finds no GPU here: --device cpu tries the benchmark without one.")
    where = torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device
    report(f"torch {torch.__version__}, timm {timm.__version__}, {where}\n")
    report("| model | batch | precision | fused, images/s | rollout as published × | default rollout × | peak MiB |")
    report("|---|---:|---|---:|---:|---:|---:|")
    batch = max(given.batch_sizes)
    for name, size, dtype in product(given.models, given.batch_sizes, DTYPES):
        unless_memory_runs_out(report, forward_passes, name, size, dtype, given.device, given.repeats)
    for name in given.models:
        unless_memory_runs_out(report, methods_and_the_cpu, name, min(batch, 8), given.device)
    for name, dtype in product(given.models if given.images else (), DTYPES):
        unless_memory_runs_out(report, folder_runs, name, given.device, dtype, given.images, batch)
    if given.docs:
        report.write(given.docs)


if __name__ == "__main__":
    main()
