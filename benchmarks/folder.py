"""Throughput of a folder run, of the bare model and of a user's script, and memory by number of images.

    python -m benchmarks.folder [--images 500] [--models …] [--skip-memory] [--fuzz 3000] [--large 10000]
    python -m benchmarks.folder --brief

Bare: forward passes over random input in batches, nothing else. Script: decode by Pillow, timm's transform, the model
in batches, a JPEG of the same size written for each image. Ours: decode, preprocess, rollout, overlay at the
original size, encode as JPEG, write, manifest. The images are drawn here: JPEGs of about 500 × 375 pixels with the
detail of photographs. All are timed in turn, twice, so that a noisy machine meets them alike; the best counts.
Rollout runs with its defaults, with them but not refined, and as published (mean over heads, nothing discarded). A
last run of each model tells where the CPU time of the default rollout goes, part by part. As in `vitflow folder`,
waiting threads of OpenMP do not spin, in the bare forward neither. CPU seconds per image, summed over all threads
and decoders, tell more than the rates where other programs share the machine.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

import argparse
import io
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import timm
import torch
from PIL import Image

from benchmarks.overhead import memory
from tests.folder.test_run import write_mutations
from vitflow import Explainer, explain_folder
from vitflow.explaining import applying as answers
from vitflow.explaining.saliency import Saliency
from vitflow.folder import pipeline, run
from vitflow.folder.decoders import DecoderPool
from vitflow.images import WRITE_OPTIONS

MODELS = ("vit_tiny_patch16_224", "vit_base_patch16_224")
VARIANTS = (("default", {}), ("default, not refined", {"refine": 0}), ("paper", {"preset": "paper"}))
BATCH = 16
# So many images are enough for a first look, in about five minutes.
BRIEF = {"vit_tiny_patch16_224": 320, "vit_base_patch16_224": 80}


def draw_photographs(folder: Path, count: int) -> int:
    """JPEGs of noise at several scales, which compress about as photographs do; their mean size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for number in range(count):
        dice = np.random.default_rng(number)
        width, height = (500, int(dice.integers(330, 420)))[:: 1 if number % 4 else -1]
        values = np.zeros((height, width, 3), np.float32)
        for step, weight in ((160, 50), (40, 35), (10, 20), (3, 12)):
            shape = (-(-height // step), -(-width // step), 3)
            small = dice.standard_normal(shape, dtype=np.float32)
            scaled = [
                Image.fromarray(small[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(3)
            ]
            values += weight * np.stack([np.asarray(channel) for channel in scaled], axis=2)
        image = Image.fromarray(np.clip(values + 128, 0, 255).astype(np.uint8))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        (folder / f"{number:05}.jpg").write_bytes(file.getvalue())
        total += len(file.getvalue())
    return total // count


@contextmanager
def measured(images: int) -> Iterator[list[float]]:
    """Fills in images per second, and CPU milliseconds per image of this process and its ended children."""
    actual: list[float] = []
    before = os.times()
    yield actual
    after = os.times()
    cpu = sum(after[:4]) - sum(before[:4])
    actual += [images / (after.elapsed - before.elapsed), 1000 * cpu / images]


def bare(model: torch.nn.Module, batches: int) -> list[float]:
    pixels = torch.randn(BATCH, *model.pretrained_cfg["input_size"])
    with torch.inference_mode():
        model(pixels)
        with measured(batches * BATCH) as actual:
            for _ in range(batches):
                model(pixels)
    return actual


def script(model: torch.nn.Module, source: Path, limit: int) -> list[float]:
    """Run what a user would write without vitflow, for images of the same size."""
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
    files = sorted(source.iterdir())[:limit]
    with tempfile.TemporaryDirectory() as output, torch.inference_mode(), measured(limit) as actual:
        for start in range(0, limit, BATCH):
            images = {file.name: Image.open(file).convert("RGB") for file in files[start : start + BATCH]}
            model(torch.stack([transform(image) for image in images.values()])).softmax(dim=-1).max(dim=-1)
            for name, image in images.items():
                image.save(Path(output) / name, **WRITE_OPTIONS[".jpg"])
    return actual


class Parts:
    """CPU seconds by part of a run, each without the parts inside it, of all threads that a part is called in.

    What torch's own threads do beside the one that calls them, and threads that a part starts for itself, are told
    apart by what the whole process has taken.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = threading.local()
        self._lock = threading.Lock()

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            inside = self._inner.__dict__.setdefault("inside", [])
            started = time.thread_time()
            inside.append(0.0)
            try:
                return work(*args, **kwargs)
            finally:
                taken = time.thread_time() - started
                entry = taken - inside.pop()
                if inside:
                    inside[-1] += taken
                with self._lock:
                    self.seconds[name] = self.seconds.get(name, 0.0) + entry

        return run


# Where each part of a run happens.
PARTS = (
    (DecoderPool, "_decode", "pixels from the decoders"),
    (Explainer, "_tensor", "prepare"),
    (Explainer, "forward", "forward pass and recording, this thread"),
    (answers, "make_maps", "rollout and refinement, this thread"),
    (Saliency, "overlay", "overlay"),
    (Image.Image, "save", "encode, into the file"),
    (pipeline, "draw_files", "row"),
    (pipeline.Pipeline, "_write", "write"),
    (Explainer, "explain_batch", "the rest of explaining"),
    (pipeline.Pipeline, "run", "the rest of the pipeline"),
    (run, "explain_folder", "fingerprint, store, manifest, list of inputs"),
)


def print_parts(name: str, source: Path, images: int, checkpoint: str) -> None:
    """One more run, slower by the clocks in it: where its CPU time goes."""
    torch.manual_seed(0)
    model = timm.create_model(name, checkpoint_path=checkpoint).eval()
    parts = Parts()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as output:
        for owner, attribute, label in PARTS:
            entry = parts.timed(label, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, entry))
        torch_before, before = torch_seconds(), os.times()
        run.explain_folder(source, Path(output) / "out", model=model, limit=images)
        after, torch_after = os.times(), torch_seconds()
    parts.seconds["forward pass and recording, torch's other threads"] = torch_after - torch_before
    parts.seconds["decode, in processes of its own"] = sum(after[2:4]) - sum(before[2:4])
    total = sum(after[:4]) - sum(before[:4])
    reported = sum(parts.seconds.values())
    # Rollout and refinement work image by image in threads that end with them.
    parts.seconds["rollout and refinement, threads of their own (the remainder)"] = total - reported
    print(f"\n{name}, default rollout: {1000 * total / images:.1f} ms of CPU an image")
    for part, seconds in sorted(parts.seconds.items(), key=lambda pair: -pair[1]):
        print(f"  {1000 * seconds / images:6.2f}  {part}")
    print(f"  {reported / total:6.0%}  of it measured part by part")


def torch_seconds() -> float:
    """CPU seconds of the threads of this process that were not made by Python: those of torch's own pool."""
    ours = {thread.native_id for thread in threading.enumerate()}
    total = 0.0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) not in ours:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def ours(model: torch.nn.Module, source: Path, limit: int, options: dict[str, Any]) -> list[float]:
    methods = [("rollout", options)]
    with tempfile.TemporaryDirectory() as output, measured(limit) as actual:
        summary = explain_folder(source, Path(output) / "out", model=model, methods=methods, limit=limit)
    assert summary.explained == limit, summary
    return actual


def compare_rates(source: Path, counts: dict[str, int], rounds: int, checkpoint: str) -> None:
    print(
        "| model | rollout | images | bare, images/s | script | folder run | of bare | of script | CPU ms | CPU ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, images in counts.items():
        torch.manual_seed(0)
        model = timm.create_model(name, checkpoint_path=checkpoint).eval()
        for label, options in VARIANTS:
            timed: list[list[list[float]]] = [[], [], []]
            for _ in range(rounds):
                timed[0].append(bare(model, max(1, images // BATCH // 4)))
                timed[1].append(script(model, source, images // 2))
                timed[2].append(ours(model, source, images, options))
            plain, written, full = (max(rate for rate, _ in runs) for runs in timed)
            cpu = [min(cpu for _, cpu in runs) for runs in timed]
            print(
                f"| {name} | {label} | {images} | {plain:.1f} | {written:.1f} | {full:.1f} | {full / plain:.2f} "
                f"| {full / written:.2f} | {cpu[0]:.0f} → {cpu[2]:.0f} | {cpu[0] / cpu[2]:.2f} |",
                flush=True,
            )


def peak_mib(source: Path, limit: int) -> tuple[float, str]:
    """Peak resident memory of a fresh process that runs the demo model over a folder, and the counts."""
    command = [sys.executable, "-m", "benchmarks.folder", "--memory-of", str(source), "--images", str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, counts = done.stdout.split(maxsplit=1)
    return float(peak), counts.strip()


def print_peak(source: Path, limit: int) -> None:
    with tempfile.TemporaryDirectory() as output:
        summary = explain_folder(source, Path(output) / "out", model="demo", limit=limit, batch_size=BATCH)
        print(memory("VmHWM"), f"{summary.explained} explained, {summary.failed} failed")


def large_run(place: Path, count: int) -> None:
    """Many small files, of which exactly 2 % are bad: the counts must be exactly right."""
    source = place / "large"
    source.mkdir()
    small = [io.BytesIO() for _ in range(50)]
    for number, file in enumerate(small):
        values = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(values).resize((96, 96), Image.Resampling.BICUBIC).save(file, "JPEG")
    bad = set(random.Random(0).sample(range(count), count // 50))
    for number in range(count):
        data = small[number % 50].getvalue()
        (source / f"{number:06}.jpg").write_bytes(data[: len(data) // 2] if number in bad else data)
    started = time.perf_counter()
    summary = explain_folder(source, place / "large-out", model="demo", batch_size=64)
    failed = {row["input"] for row in summary.failures()}
    assert failed == {f"{number:06}.jpg" for number in bad}, "the wrong images failed"
    assert len(list((place / "large-out").glob("*-rollout.jpg"))) == summary.explained == count - len(bad)
    totals = json.loads((place / "large-out" / "run.json").read_text())["totals"]
    print(f"\n{count} files, {len(bad)} of them bad: {totals} in {time.perf_counter() - started:.0f} s")


def fuzz(place: Path, count: int) -> None:
    write_mutations(place / "fuzz", count)
    started = time.perf_counter()
    summary = explain_folder(place / "fuzz", place / "fuzz-out", model="demo")
    assert summary.total == count == len(list(summary))
    crashes = sum(row["error"] in ("DecoderCrash", "TimeoutError") for row in summary.failures())
    print(
        f"\n{count} mutated files: {summary.explained} explained, {summary.failed} failed, {crashes} decoders lost, "
        f"{time.perf_counter() - started:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--checkpoint", default="", help="weights of the model; attention of random ones is even")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--brief", action="store_true", help="fewer images and no memory: about five minutes")
    parser.add_argument("--fuzz", type=int, default=0, metavar="N", help="also run N mutated files")
    parser.add_argument("--large", type=int, default=0, metavar="N", help="also run N files, 2 %% of them bad")
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory_of:
        print_peak(given.memory_of, given.images)
        return
    counts = {name: BRIEF.get(name, 80) if given.brief else given.images for name in given.models}
    if given.brief:
        given.skip_memory, given.images = True, max(counts.values())
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "photographs"
        largest = 2000 if not given.skip_memory else given.images
        size = draw_photographs(source, max(largest, given.images))
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads on {os.cpu_count()} cores; ", end="")
        print(f"JPEGs of 500 × 375 pixels, {size / 1000:.0f} kB each\n")
        if given.models != ["none"]:
            compare_rates(source, counts, given.rounds, given.checkpoint)
            for name, images in counts.items():
                print_parts(name, source, min(images, 160), given.checkpoint)
        if not given.skip_memory:
            for limit in (200, 2000):
                peak, counts = peak_mib(source, limit)
                print(f"\ndemo model, {limit} images: peak {peak:.0f} MiB ({counts})")
        if given.fuzz:
            fuzz(Path(place), given.fuzz)
        if given.large:
            large_run(Path(place), given.large)


if __name__ == "__main__":
    main()
