"""Time of recording: the plain fused forward pass, and the forward pass with rollout, in one run.

    python -m benchmarks.overhead [--models …] [--batch-sizes 1 8] [--repeats 15] [--preset paper|default]
    python -m benchmarks.overhead --refinement [--models …] [--batch-sizes 8]
    python -m benchmarks.overhead --sampling 128 256 [--models …] [--repeats 3]
    python -m benchmarks.overhead --python [--repeats 100]
    python -m benchmarks.overhead --by-hand [--skip-memory] [--models …] [--batch-sizes 1 8] [--repeats 15]

The two are timed in turn, round by round, so that a noisy machine meets both alike; the table shows the ratio of the
fastest rounds and the median of the rounds' own ratios, the last also in processor time: with OMP_NUM_THREADS=1 that
tells most where other programs share the machine. Peak memory is what a fresh process needs beyond what it held before
the first forward pass (Linux only: VmHWM), so that neither the libraries nor the weights hide a difference; the
allocator of that process keeps nothing that is free.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import timm
import torch

from benchmarks import by_hand
from vitflow import Explainer
from vitflow.explaining.applying import make_maps, recording_options, starts_at_readout
from vitflow.recording.recorder import record_attention
from vitflow.registry.choices import choose_methods

# glibc gives memory back as soon as it is free: else the peak depends on what was kept from before.
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": "0"}

MODELS = ("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224")

explainer_of = cache(Explainer)  # not part of what is measured


def plain(model: torch.nn.Module, pixels: torch.Tensor) -> None:
    model(pixels)


def with_rollout(model: torch.nn.Module, pixels: torch.Tensor, **chosen: object) -> None:
    """Rollout as an explainer computes it from its model input, with the defaults of the method or a preset."""
    [rollout] = choose_methods(["rollout"], chosen)
    explainer = explainer_of(model)
    with torch.inference_mode(False), torch.no_grad():
        trace = explainer._run_recorded(pixels, explainer.outputs, reads=True, **recording_options([rollout], model))
        make_maps(rollout.method, rollout.options, explainer.targeted(trace, None))


def with_gradients(model: torch.nn.Module, pixels: torch.Tensor, *, method: str) -> None:
    """A class-specific map of the largest logit as an explainer computes it from its model input."""
    [chosen] = choose_methods([method], {})
    explainer, reads = explainer_of(model), starts_at_readout(chosen)
    with torch.inference_mode(False), torch.enable_grad():
        trace = explainer._run_recorded(pixels, explainer.outputs, reads=reads, **recording_options([chosen], model))
        targeted = explainer.targeted(trace, trace.logits.argmax(dim=1))
        make_maps(chosen.method, chosen.options, targeted)


def refinement_share(name: str, batch: int, repeats: int) -> float:
    """The part that refinement has in the processor time of the default rollout: the median over paired rounds."""
    model, pixels = prepare(name, batch)
    shares = []
    with torch.inference_mode():
        for number in range(repeats + 1):
            seconds = []
            for steps in (0, 1):
                started = time.process_time()
                with_rollout(model, pixels, refine=steps)
                seconds.append(time.process_time() - started)
            if number:  # the first round compiles
                shares.append(1 - seconds[0] / seconds[1])
    return statistics.median(shares)


class WrittenOut:
    """Run the attention that recording requires for the paper's rollout, without anything else."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: object) -> torch.Tensor:
        (_, heads, tokens, width), output = query.shape, torch.empty_like(query)
        attention = query.new_empty(heads, tokens, tokens)
        attention.baddbmm_(query[0], key[0].mT, beta=0, alpha=width**-0.5)
        torch.softmax(attention, dim=-1, out=attention)
        torch.bmm(attention, value[0], out=output[0])
        fused = query.new_empty(1, tokens, tokens)
        share = torch.full((1, 1, 1), 1 / heads).expand(1, 1, heads)
        torch.bmm(share, attention.view(1, heads, -1), out=fused.view(1, 1, -1))
        return output


def python_cost(repeats: int) -> dict[str, float]:
    """Milliseconds of a processor for each part of a recording of a model with a ViT-Ti's modules and next to no width.

    "forward" is what the forward pass takes longer for being recorded: the hooks, the mode, and what is done with what
    they see. "attention" is no Python: what torch takes on next to nothing for attention that is written out.
    """
    model = timm.models.VisionTransformer(img_size=32, patch_size=16, embed_dim=12, depth=12, num_heads=3).eval()
    pixels, rounds = torch.randn(1, 3, 32, 32), []
    [rollout] = choose_methods(["rollout"], {"preset": "paper"})
    fused = torch.nn.functional.scaled_dot_product_attention
    with torch.inference_mode():
        for _ in range(repeats):
            times = [time.thread_time()]
            model(pixels)
            times.append(time.thread_time())
            torch.nn.functional.scaled_dot_product_attention = WrittenOut()
            model(pixels)
            torch.nn.functional.scaled_dot_product_attention = fused
            times.append(time.thread_time())
            recording = record_attention(model, **recording_options([rollout], model))
            times.append(time.thread_time())
            with recording:
                times.append(time.thread_time())
                model(pixels)
                times.append(time.thread_time())
            times.append(time.thread_time())
            plain, written, made, entered, forward, left = (1e3 * (end - start) for start, end in pairwise(times))
            rounds.append((made, entered, forward - written, left, written - plain))
    cheap = (sorted(one)[repeats // 10] for one in zip(*rounds, strict=True))
    return dict(zip(("made", "entered", "forward", "left", "attention"), cheap, strict=True))


def sampling_cost(name: str, masks: int, repeats: int) -> tuple[float, float]:
    """The processor time of a whole map by sampling in forward passes of its image; and of ten classes in one's."""
    model, pixels = prepare(name, 1)
    explainer = Explainer(model)
    image = np.random.default_rng(0).integers(0, 256, (*pixels.shape[-2:], 3), dtype=np.uint8)
    work = (
        lambda count: plain(model, pixels),
        lambda count: explainer.explain(image, method="sampling", target=0, masks=count),
        lambda count: explainer.explain_batch([image], methods=["sampling"], targets=list(range(10)), masks=count),
    )
    rounds = []
    with torch.inference_mode():
        for number in range(repeats + 1):
            seconds = []
            for one in work:
                started = time.process_time()
                one(masks if number else 2)  # the first round compiles, and tries whether tokens can be dropped
                seconds.append(time.process_time() - started)
            if number:
                rounds.append((seconds[1] / seconds[0], seconds[2] / seconds[1]))
    passes, classes = (statistics.median(one) for one in zip(*rounds, strict=True))
    return passes, classes


# As published: heads averaged, nothing discarded. Default: as `vitflow explain` does it.
WORK: dict[str, by_hand.Work] = {
    "plain": plain,
    "paper": partial(with_rollout, preset="paper"),
    "default": with_rollout,
    "by hand": by_hand.rollout,
    "forward and backward": by_hand.forward_and_backward,
    "gae": partial(with_gradients, method="gae"),
    "grad_cam": partial(with_gradients, method="grad_cam"),
}
if (peer := by_hand.peer_grad_cam()) is not None:
    WORK["pytorch-grad-cam"] = peer


def prepare(name: str, batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    return model, torch.randn(batch, *model.pretrained_cfg["input_size"])


def time_both(name: str, batch: int, repeats: int, preset: str) -> tuple[tuple[list[float], list[float]], list[float]]:
    """Seconds of each round, plain and with rollout; and the ratio of their processor times."""
    model, pixels = prepare(name, batch)
    seconds: tuple[list[float], list[float]] = ([], [])
    ratios = []
    with torch.inference_mode():
        for work in (plain, WORK[preset]):
            work(model, pixels)
        for _ in range(repeats):
            taken = []
            for index, work in enumerate((plain, WORK[preset])):
                started, before = time.perf_counter(), time.process_time()
                work(model, pixels)
                taken.append(time.process_time() - before)
                seconds[index].append(time.perf_counter() - started)
            ratios.append(taken[1] / taken[0])
    return seconds, ratios


def memory(field: str) -> float:
    """A field of this process's status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def peak_mib(name: str, batch: int, what: str) -> float:
    """Peak memory in MiB of five forward passes in a fresh process, beyond what it held before them."""
    command = [sys.executable, "-m", "benchmarks.overhead", "--memory-of", what, "--models", name]
    command += ["--batch-sizes", str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | GIVING_BACK)
    return float(done.stdout)


def print_by_hand(names: Sequence[str], batches: Sequence[int], repeats: int, with_memory: bool) -> None:
    print("| model, batch | what | ms | of the plain pass | of the script | peak MiB | of the plain pass |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for name in names:
        for batch in batches:
            seconds = by_hand.seconds_of(WORK, *prepare(name, batch), repeats)
            peaks = {what: peak_mib(name, batch, what) for what in WORK} if with_memory else {}
            by_hand.print_rows(f"{name}, {batch}", seconds, peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--refinement", action="store_true", help="print refinement's share of the processor time alone"
    )
    parser.add_argument(
        "--sampling", nargs="+", type=int, metavar="MASKS", help="print what sampling costs in forward passes alone"
    )
    parser.add_argument("--python", action="store_true", help="print what a recording costs by itself alone")
    parser.add_argument("--by-hand", action="store_true", help="print rollout by hand and several methods, in turn")
    parser.add_argument("--skip-memory", action="store_true", help="with --by-hand, do not measure memory")
    parser.add_argument("--memory-of", choices=list(WORK), help=argparse.SUPPRESS)
    parser.add_argument("--preset", choices=["paper", "default"], default="paper", help="which rollout")
    given = parser.parse_args()
    if given.memory_of:
        small = prepare("test_vit", 1)  # compiled code and libraries are no part of the difference
        with torch.inference_mode():
            WORK[given.memory_of](*small)
        model, pixels = prepare(given.models[0], given.batch_sizes[0])
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = memory("VmRSS")
        with torch.inference_mode():
            for _ in range(5):
                WORK[given.memory_of](model, pixels)
        print(memory("VmHWM") - before)
        return
    if given.refinement:
        for name in given.models:
            for batch in given.batch_sizes:
                print(f"{name}, batch {batch}: {refinement_share(name, batch, given.repeats):.1%}", flush=True)
        return
    if given.python:
        actual = python_cost(max(given.repeats, 20))
        attention, python = actual.pop("attention"), ", ".join(f"{name} {cost:.2f}" for name, cost in actual.items())
        print(f"Python: {python}: {sum(actual.values()):.2f} ms; torch's functions of attention: {attention:.2f} ms")
        return
    if given.sampling:
        for name in given.models:
            for masks in given.sampling:
                passes, classes = sampling_cost(name, masks, given.repeats)
                reported = f"{name}: {masks} masks in {passes:.1f} forward passes, ten classes in {classes:.2f} × one"
                print(reported, flush=True)
        return
    print(f"torch {torch.__version__}, timm {timm.__version__}, {torch.get_num_threads()} threads, float32\n")
    if given.by_hand:
        print_by_hand(given.models, given.batch_sizes, given.repeats, not given.skip_memory)
        return
    print(
        "| model | batch | plain, images/s | with rollout, images/s | time × | median × | CPU × | peak MiB | memory × |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.models:
        for batch in given.batch_sizes:
            (ours, theirs), cpu = time_both(name, batch, given.repeats, given.preset)
            median = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
            peaks = [peak_mib(name, batch, what) for what in ("plain", given.preset)]
            print(
                f"| {name} | {batch} | {batch / min(ours):.1f} | {batch / min(theirs):.1f} "
                f"| {min(theirs) / min(ours):.2f} | {median:.2f} | {statistics.median(cpu):.2f} "
                f"| {peaks[0]:.0f} → {peaks[1]:.0f} | {peaks[1] / peaks[0]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
