"""Time of plain `generate` and of `explain_generation`, in one run.

    python -m benchmarks.generation [--what paper rollout weighted] [--prompt 512] [--new 64] [--repeats 3]
    python -m benchmarks.generation --captioner

A GPT-2-sized model with random weights writes after a prompt. With --captioner it is a LLaVA whose decoder has that
size, behind a tower of ViT-B's size with 196 patches; what its processor does is a part of both times. The two take
turns, so that a noisy machine meets both alike; the ratio is that of the fastest rounds, with the median of the rounds'
own ratios and the ratio of processor time beside it. Working memory is what a fresh process needs at its peak beyond
what plain `generate` needs there (Linux only: VmHWM), beside the size of one [layers, T, T] in float32.
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

from benchmarks.overhead import memory
from tools.scenes import draw_scene
from vitflow.demo import DEMO_CAPTION
from vitflow.text import explain_generation
from vitflow.text.languages import load_processor
from vitflow.text.method_table import TEXT_METHODS

WORK = {
    "plain": None,
    "paper": {"method": "rollout", "preset": "paper"},
    "rollout": {"method": "rollout"},
    "weighted": {"method": "rollout", "value_weighted": "output", "causal": "raw"},
    "attention": {"method": "attention"},
    "logit_lens": {"method": "logit_lens"},
    "gae": {"method": "gae"},
}


class Text:
    """A GPT-2-sized model and a prompt of random tokens."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=given.layers, n_embd=given.width, n_head=given.width // 64, bos_token_id=1, eos_token_id=2
        )
        self.length = given.prompt
        self.prompt = torch.randint(3, config.vocab_size, (1, given.prompt))
        self.model = transformers.GPT2LMHeadModel(config).eval()

    def work(self, options: dict | None, **given: object) -> None:
        arguments = {"input_ids": self.prompt, "attention_mask": torch.ones_like(self.prompt)}
        if options is None:
            self.model.generate(**arguments, **given)
        else:
            explain_generation(self.model, arguments, **given, **options)


class Captioner:
    """A model of GPT-2's size that sees, and a drawn image."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.processor = load_processor(DEMO_CAPTION)
        self.processor.image_processor.size, self.processor.patch_size = {"height": 224, "width": 224}, 16
        words, heads = self.processor.tokenizer, given.width // 64
        size = {"hidden_size": given.width, "num_hidden_layers": given.layers, "num_attention_heads": heads}
        tower = {"image_size": 224, "patch_size": 16, "intermediate_size": 4 * given.width, "vision_use_head": False}
        decoder = {"vocab_size": 50257, "intermediate_size": 8 * given.width // 3, "num_key_value_heads": heads}
        ends = {name: getattr(words, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        config = transformers.LlavaConfig(
            vision_config=transformers.SiglipVisionConfig(**size, **tower),
            text_config=transformers.LlamaConfig(**size, **decoder, **ends, max_position_embeddings=1024),
            image_token_index=words.convert_tokens_to_ids("<image>"),
            image_seq_length=196,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        )
        self.model = transformers.LlavaForConditionalGeneration(config).eval()
        self.image, self.length = draw_scene(0).image, 196 + 3

    def work(self, options: dict | None, **given: object) -> None:
        prompt = "<image> here is"
        if options is None:
            inputs = self.processor(images=[self.image], text=prompt, return_tensors="pt")
            self.model.generate(**inputs, **given)
        else:
            whole = {"image": self.image, "processor": self.processor, **given, **options}
            explain_generation(self.model, prompt, **whole)


def work(name: str, subject: Text | Captioner, new: int) -> None:
    with torch.inference_mode():
        subject.work(WORK[name], min_new_tokens=new, max_new_tokens=new, do_sample=False)


def seconds(function: partial[None]) -> tuple[float, float]:
    """By the clock, and of the processor."""
    started = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - started[0], time.process_time() - started[1]


def peak_mib(name: str) -> float:
    """Peak memory in MiB of one generation in a fresh process, beyond what it held before."""
    command = [sys.executable, "-m", "benchmarks.generation", *sys.argv[1:], "--memory-of", name]
    # Freed memory goes back at once, so that what is counted is what was held.
    held = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **held})
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", nargs="+", choices=list(WORK), default=["paper", "rollout", "weighted"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--captioner", action="store_true", help="a model that sees, and an image as its prompt")
    parser.add_argument("--memory-of", choices=list(WORK), help=argparse.SUPPRESS)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    subject = (Captioner if given.captioner else Text)(given)
    if given.memory_of:
        work(given.memory_of, subject, 2)  # what is loaded or compiled once is no part of it
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = memory("VmRSS")
        work(given.memory_of, subject, given.new)
        print(memory("VmHWM") - before)
        return
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(f"{given.new} tokens after {subject.length}; {given.layers} layers of width {given.width}, float32")
    tokens = subject.length + given.new
    print(f"one [layers, T, T]: {given.layers * tokens**2 * 4 / 2**20:.1f} MiB\n")
    chosen = ["plain", *given.what]
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for number in range(given.repeats + 1):
        for name in chosen:
            took = seconds(partial(work, name, subject, given.new))
            if number:  # the first round compiles
                rounds[name].append(took)
    print("| | seconds | ratio | median ratio | ratio of processor time | peak beyond plain, MiB |")
    print("|---|---|---|---|---|---|")
    plain = peak_mib("plain")
    for name in chosen:
        ratios = [entry[0] / other[0] for entry, other in zip(rounds[name], rounds["plain"], strict=True)]
        (clock, processor), (clock_of_plain, processor_of_plain) = (
            [min(took[which] for took in rounds[one]) for which in (0, 1)] for one in (name, "plain")
        )
        print(
            f"| {name} | {clock:.2f} | {clock / clock_of_plain:.2f} | {statistics.median(ratios):.2f} "
            f"| {processor / processor_of_plain:.2f} | {peak_mib(name) - plain:.1f} |",
            flush=True,
        )
    print(f"\nrollout: {TEXT_METHODS['rollout'].complete({})}")


if __name__ == "__main__":
    main()
