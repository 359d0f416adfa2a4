"""Time of exact attention flow: all sinks, a forward pass of the same size, and networkx.

    python -m benchmarks.flow [--default] [--rounds 5] [--networkx-tokens 197]

Flow and forward pass are timed in turn, round by round, and the fastest rounds are compared, so that a noisy machine
meets both alike. networkx solves one pair of source and sink of the same graph (building the graph is not
counted), and the table multiplies its time by the number of sinks; a dash means not run at this size. "real" is
recorded from the trained ViT-Tiny/16 where its checkpoint is there (VITFLOW_SHARED), otherwise from the bundled model.
Random graphs are softmax rows of normal logits times a sharpness, averaged over heads.

`--default` takes the graphs of the default map: the last 4 layers, 0.9 discarded, real attention weighted by value and
recorded from several photographs, its model's positions interpolated to the larger images.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor

from vitflow import record_attention
from vitflow.demo import load_demo_model, sample_images
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.flow.layers import graph_of, layer_capacities, parse_window

SHARED = Path(os.environ.get("VITFLOW_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "data"
TINY = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
# The model of the same size, for each number of tokens.
FORWARDS = {
    145: "vit_base_patch16_224",
    197: "vit_base_patch16_224",
    577: "vit_base_patch16_384",
    1370: "vit_base_patch14_dinov2",
}


@dataclass
class Case:
    """One graph: fused attention, and the layers to use."""

    name: str
    attention: list[Tensor]
    layers: Any = "all"
    options: dict[str, Any] = field(default_factory=dict)
    peers: bool = True

    @property
    def tokens(self) -> int:
        return int(self.attention[0].shape[-1])

    @property
    def depth(self) -> int:
        first, last = parse_window(self.layers, len(self.attention))
        return last - first + 1

    def capacities(self) -> NDArray[np.float64]:
        options = {"discard_ratio": 0.0, "residual": 0.5, "num_prefix_tokens": 1} | self.options
        return layer_capacities([layer[0] for layer in self.attention[-self.depth :]], **options)

    def run(self) -> Any:
        return attention_flow(self.attention, layers=self.layers, **self.options)


@cache
def recorder(pixels: int) -> tuple[str, torch.nn.Module, list[Path]]:
    """The trained model for images of this size and some photographs, or the bundled model and its images."""
    checkpoint = SHARED / f"{TINY}.safetensors"
    if not checkpoint.is_file():
        return "real demo model", load_demo_model(), list(sample_images())
    model = timm.create_model(TINY, checkpoint_path=str(checkpoint)).eval()
    model.set_input_size(img_size=pixels)
    return "real ViT-Tiny/16", model, sorted((SHARED / "photos").glob("*.png"))[:3]


def recorded(fusion: str, *, pixels: int = 224, image: int = 0, weighted: bool = False) -> tuple[str, list[Tensor]]:
    """Fused attention of a trained model in a photograph or a drawn image."""
    name, model, images = recorder(pixels)
    return name, fused(model, images[image], fusion, weighted)


def fused(model: torch.nn.Module, photo: Path, fusion: str, weighted: bool) -> list[Tensor]:
    config = resolve_model_data_config(model)
    if hasattr(model, "patch_embed"):
        config["input_size"] = (3, *model.patch_embed.img_size)  # type: ignore[misc]
    transform = create_transform(**config, is_training=False)
    with Image.open(photo) as image, record_attention(model, values=weighted) as trace, torch.no_grad():
        model(transform(image.convert("RGB"))[None])
    return trace.fused(fusion, value_weighted="output" if weighted else False)


def drawn(tokens: int, sharpness: float, heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    layers = []
    for _ in range(12):
        fused = torch.zeros(1, tokens, tokens)
        for _ in range(heads):
            fused += (sharpness * torch.randn(1, tokens, tokens, generator=generator)).softmax(dim=-1) / heads
        layers.append(fused)
    return layers


def cases() -> Iterator[Case]:
    name, mean = recorded("mean")
    yield Case(name, mean)
    yield Case(f"{name}, max, discard 0.9", recorded("max")[1], options={"discard_ratio": 0.9}, peers=False)
    yield Case(f"{name}, residual 0", mean, options={"residual": 0.0}, peers=False)
    for last in (2, 3, 4, 6):
        yield Case(f"{name}, last {last}", mean, layers=last, peers=last == 2)
    for sharpness, heads in ((1, 12), (4, 12), (4, 1), (8, 1)):
        yield Case(
            f"random {sharpness}, {heads} heads", drawn(197, sharpness, heads), peers=(sharpness, heads) == (4, 12)
        )
    for tokens in (577, 1370):
        for sharpness, heads in ((1, 4), (4, 4), (4, 1)):
            peers = (sharpness, heads) == (4, 4)
            yield Case(f"random {sharpness}, {heads} heads", drawn(tokens, sharpness, heads), peers=peers)


def default_cases() -> Iterator[Case]:
    """Return the capacities of the default options: the last 4 layers, discard ratio 0.9."""
    entry: dict[str, Any] = {"layers": 4, "options": {"discard_ratio": 0.9}, "peers": False}
    demo = [fused(load_demo_model(), image, "mean", True) for image in list(sample_images())[:2]]
    for number, attention in enumerate(demo, start=1):
        yield Case(f"demo model, image {number}", attention, **entry)
    for pixels, tokens in ((224, 197), (384, 577), (592, 1370)):
        name, _, images = recorder(pixels)
        for image in range(len(images) if name != "real demo model" else 0):
            attention = recorded("mean", pixels=pixels, image=image, weighted=True)[1]
            yield Case(f"{name}, photograph {image + 1}", attention, **entry)
        for sharpness, heads in ((1, 4), (4, 4), (4, 1), (8, 1)):
            yield Case(f"random {sharpness}, {heads} heads", drawn(tokens, sharpness, heads), **entry)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# --- networkx ---------------------------------------------------------------------------------------------------------


def networkx_seconds(case: Case, expected: Tensor, largest: int) -> float:
    """Seconds of one pair of source and sink; 0 if the case is not compared; AssertionError for another value."""
    if not case.peers or case.tokens > largest:
        return 0.0
    import networkx as nx

    sink, graph = case.tokens // 2, graph_of(case.capacities(), 1, [""] * case.tokens)
    started = time.perf_counter()
    value = nx.maximum_flow_value(graph, (case.depth, 0), (0, sink), flow_func=nx.algorithms.flow.preflow_push)
    taken = time.perf_counter() - started
    assert abs(value - expected[sink].item()) <= 1e-9, (value, expected[sink].item())
    return taken


# --- Memory -----------------------------------------------------------------------------------------------------------


def peak_of_largest(layers: int) -> None:
    """Print the peak memory of a process that solves all sinks of 1370 tokens, in GiB (Linux only)."""
    attention = drawn(1370, 4, 1)[-layers:]
    Path("/proc/self/clear_refs").write_text("5")
    attention_flow(attention, discard_ratio=0.9 if layers == 4 else 0.0)
    lines = Path("/proc/self/status").read_text().splitlines()
    print(float(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of forward pass and flow, in turn")
    parser.add_argument("--networkx-tokens", type=int, default=197, help="largest graph for networkx")
    parser.add_argument("--default", action="store_true", help="the graphs of the default map")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        peak_of_largest(given.peak)
        return
    attention_flow(drawn(24, 1, 1))  # compiles, or loads what an earlier run compiled
    print(f"{torch.get_num_threads()} threads; {given.rounds} rounds, the fastest; time of networkx × number of sinks")
    head = ("graph", "size", "saturated", "all sinks", "forward", "ratio", "networkx")
    print("{:32}{:>11}{:>11}{:>12}{:>11}{:>8}{:>22}".format(*head))
    models: dict[str, tuple[torch.nn.Module, Tensor]] = {}
    for case in default_cases() if given.default else cases():
        name = FORWARDS[case.tokens]
        if name not in models:
            models.clear()  # the largest take more than a gigabyte
            model = timm.create_model(name).eval()
            models[name] = model, torch.randn(1, *model.pretrained_cfg["input_size"])
        print(row(case, *models[name], given.rounds, given.networkx_tokens), flush=True)
    layers = 4 if given.default else 12
    command = [sys.executable, "-m", "benchmarks.flow", "--peak", str(layers)]
    peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(f"peak memory of a process that solves {layers} × 1370: {float(peak):.2f} GiB, torch and input included")


def row(case: Case, model: torch.nn.Module, pixels: Tensor, rounds: int, largest: int) -> str:
    """Time one case and write its line."""
    rounds = rounds if case.tokens < 1000 else min(rounds, 2)
    with torch.inference_mode():
        result = case.run()
        model(pixels)
        times = [(seconds(lambda: model(pixels)), seconds(case.run)) for _ in range(rounds)]
    forward, ours = (min(column) for column in zip(*times, strict=True))
    whole = networkx_seconds(case, result.values[0], largest) * case.tokens
    theirs = f"{f'{whole:,.0f} s = {whole / ours:,.0f} ×' if whole else '–':>22}"
    size, share = f"{case.depth} × {case.tokens}", result.saturated_share.item()
    times_and_ratio = f"{ours:>10.4f} s{forward:>9.3f} s{ours / forward:>8.3f}"
    return f"{case.name:32}{size:>11}{share:>11.2f}{times_and_ratio}{theirs}"


if __name__ == "__main__":
    main()
