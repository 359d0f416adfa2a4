"""What following a generation costs: plain `generate` beside `explain_generation`, in one run.

    python -m tests.benchmarks.generation [--what paper default weighted] [--prompt 512] [--new 64] [--repeats 3]

A GPT-2-sized model with random weights writes after a prompt. The two take turns, so that a noisy machine meets both
alike; the ratio is that of the fastest rounds, with the median of the rounds' own ratios and the ratio of processor
time beside it. Working memory is
what a fresh process needs at its peak beyond what plain `generate` needs there (Linux only: VmHWM), beside the size of
one [layers, T, T] in float32.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import transformers

from tests.benchmarks.overhead import memory
from vitflow import explain_generation
from vitflow.explaining.text.method_table import TEXT_METHODS

WORK = {
    "plain": None,
    "paper": {"preset": "paper"},
    "default": {},
    "weighted": {"value_weighted": "output", "causal": "raw"},
}


def prepare(given: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=given.layers, n_embd=given.width, n_head=given.width // 64, bos_token_id=1, eos_token_id=2
    )
    prompt = torch.randint(3, config.vocab_size, (1, given.prompt))
    return transformers.GPT2LMHeadModel(config).eval(), prompt


def work(name: str, model: torch.nn.Module, prompt: torch.Tensor, new: int) -> None:
    given = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False}
    options = WORK[name]
    arguments = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    with torch.inference_mode():
        if options is None:
            model.generate(**arguments, **given)
        else:
            explain_generation(model, arguments, **given, **options)


def seconds(function: partial[None]) -> tuple[float, float]:
    """By the clock, and of the processor."""
    started = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - started[0], time.process_time() - started[1]


def peak_mib(name: str) -> float:
    """Peak memory in MiB of one generation in a fresh process, beyond what it held before."""
    command = [sys.executable, "-m", "tests.benchmarks.generation", *sys.argv[1:], "--memory-of", name]
    # Freed memory goes back at once, so that what is counted is what was held.
    held = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **held})
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", nargs="+", choices=list(WORK), default=["paper", "default", "weighted"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--memory-of", choices=list(WORK), help=argparse.SUPPRESS)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model, prompt = prepare(given)
    if given.memory_of:
        work(given.memory_of, model, prompt[:, :8], 2)  # what is loaded or compiled once is no part of it
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = memory("VmRSS")
        work(given.memory_of, model, prompt, given.new)
        print(memory("VmHWM") - before)
        return
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(f"{given.new} tokens after {given.prompt}; {given.layers} layers of width {given.width}, float32")
    tokens = given.prompt + given.new
    print(f"one [layers, T, T]: {given.layers * tokens**2 * 4 / 2**20:.1f} MiB\n")
    chosen = ["plain", *given.what]
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for number in range(given.repeats + 1):
        for name in chosen:
            took = seconds(partial(work, name, model, prompt, given.new))
            if number:  # the first round compiles
                rounds[name].append(took)
    print("| | seconds | ratio | median ratio | ratio of processor time | peak beyond plain, MiB |")
    print("|---|---|---|---|---|---|")
    plain = peak_mib("plain")
    for name in chosen:
        ratios = [own[0] / other[0] for own, other in zip(rounds[name], rounds["plain"], strict=True)]
        (clock, processor), (clock_of_plain, processor_of_plain) = (
            [min(took[which] for took in rounds[one]) for which in (0, 1)] for one in (name, "plain")
        )
        print(
            f"| {name} | {clock:.2f} | {clock / clock_of_plain:.2f} | {statistics.median(ratios):.2f} "
            f"| {processor / processor_of_plain:.2f} | {peak_mib(name) - plain:.1f} |",
            flush=True,
        )
    print(f"\ndefault: {TEXT_METHODS['rollout'].complete({})}")


if __name__ == "__main__":
    main()
