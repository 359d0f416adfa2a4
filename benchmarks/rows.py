"""Is rollout as published faster without attention matrices, by rows rᵀA computed from queries and keys?

    python -m benchmarks.rows [--tokens 1370] [--channels 384 768] [--repeats 7]

Milliseconds of one layer: fused attention alone; explicit attention with the mean over heads, as recorded, without and
with a product of layers; fused attention and then the row of rollout, from softmax(QKᵀ) in chunks of queries, or from
the gradient of fused attention with respect to its values. And MiB that are kept for the layer: a matrix (a quarter of
one if layers are multiplied), or queries and keys.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vitflow.methods.rollout import rollout_step
from vitflow.recording.attending import Listener, Part, attend

WIDTH = 64
CHUNK = 2**20  # probabilities


class Mean(Listener):
    """Keeps the mean over heads of the attention of one image, as rollout as published requires it."""

    def accepts_parts(self, query: Tensor) -> bool:
        return True

    def on_attention_parts(self, parts: Iterator[Part], qkv: Any, normal: bool, visible: Tensor | None) -> None:
        heads, tokens = qkv[0].shape[1:3]
        self.matrix = torch.empty(1, tokens, tokens)
        for part in parts:
            rows = self.matrix[:, part.queries]
            torch.bmm(
                torch.full((1, 1, heads), 1 / heads), part.probabilities.view(1, heads, -1), out=rows.view(1, 1, -1)
            )


def chunks(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mean over heads of rᵀA, [tokens], from queries and keys [heads, tokens, width]."""
    heads, tokens, width = query.shape
    result, count = torch.zeros(1, tokens), max(16, CHUNK // (heads * tokens))
    for part, weights in zip(query.split(count, dim=1), (row / heads).split(count), strict=True):
        scores = torch.baddbmm(torch.empty(()), part, key.mT, beta=0, alpha=width**-0.5)
        torch.softmax(scores, dim=-1, out=scores)
        result.addmm_(weights.repeat(1, heads), scores.view(-1, tokens))
    return result[0]


def gradient(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the same as the gradient of fused attention with respect to its values, with upstream gradient r."""
    values, upstream = torch.zeros(1, *query.shape, requires_grad=True), torch.zeros(1, *query.shape)
    upstream[..., 0] = row
    with torch.enable_grad():
        output = scaled_dot_product_attention(query[None], key[None], values)
    return torch.autograd.grad(output, values, upstream)[0][0, :, :, 0].mean(dim=0)


def fastest(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1e3 * min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1370)
    parser.add_argument("--channels", nargs="+", type=int, default=[384, 768])
    parser.add_argument("--repeats", type=int, default=7)
    given, listener = parser.parse_args(), Mean()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {given.tokens} tokens, ms\n")
    print(
        "| channels | fused | recorded | and multiplied | row in chunks | by gradient | matrix, MiB | queries, keys |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for channels in given.channels:
        qkv = torch.randn(3, 1, channels // WIDTH, given.tokens, WIDTH)
        row, (query, key, _) = torch.rand(given.tokens).softmax(dim=0), qkv[:, 0]
        with torch.no_grad():
            attend(listener, *qkv)
            fused = listener.matrix
            for way in (chunks, gradient):
                torch.testing.assert_close(way(row, query, key), row @ fused[0], rtol=1e-4, atol=0)
            every = (
                lambda qkv=qkv: scaled_dot_product_attention(*qkv),
                lambda qkv=qkv: attend(listener, *qkv),
                lambda fused=fused: rollout_step(fused, fused, 0.5, normal=True),
                lambda args=(row, query, key): chunks(*args),
                lambda args=(row, query, key): gradient(*args),
            )
            plain, recorded, product, *rows = (fastest(work, given.repeats) for work in every)
        costs = [plain, recorded, recorded + 0.75 * product, *(plain + each for each in rows)]
        kept = f"{fused.nbytes / 2**20:.1f} | {2 * query.nbytes / 2**20:.1f}"
        print(f"| {channels} | {' | '.join(f'{cost:.0f}' for cost in costs)} | {kept} |", flush=True)


if __name__ == "__main__":
    main()
