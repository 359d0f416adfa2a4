"""Time and memory of a few maps, relative to the plain pass and to rollout as a user would write it by hand.

All are run in turn, round by round, so that a noisy machine meets them alike. Rollout by hand is the usual script of
twenty lines: a forward hook in each layer, fused attention switched off, the mean over heads, and a loop of products.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Work = Callable[[nn.Module, Tensor], object]


def rollout(model: nn.Module, pixels: Tensor) -> Tensor:
    """Rollout of the class token of a timm ViT, [batch, tokens]."""
    kept: list[Tensor] = []
    layers: list[nn.Module] = [block.attn for block in model.blocks]  # type: ignore[union-attr]
    fused = [layer.fused_attn for layer in layers]
    for layer in layers:
        layer.fused_attn = False  # type: ignore[assignment]
    hooks = [layer.attn_drop.register_forward_hook(lambda *call: kept.append(call[2].mean(1))) for layer in layers]  # type: ignore[union-attr, operator]
    try:
        with torch.no_grad():
            model(pixels)
    finally:
        for layer, before, hook in zip(layers, fused, hooks, strict=True):
            layer.fused_attn = before
            hook.remove()
    same = torch.eye(kept[0].shape[-1])
    result = same.expand_as(kept[0])
    for attention in kept:
        matrix = attention + same
        result = (matrix / matrix.sum(dim=-1, keepdim=True)) @ result
    return result[:, 0]


def forward_and_backward(model: nn.Module, pixels: Tensor) -> None:
    """Run a model and differentiate its largest logits, without recording anything."""
    with torch.inference_mode(False), torch.enable_grad():
        given = pixels.clone().requires_grad_()
        torch.autograd.grad(model(given).amax(dim=1).sum(), given)


def peer_grad_cam() -> Work | None:
    """Return Grad-CAM of pytorch-grad-cam, if it is installed."""
    try:
        from pytorch_grad_cam import GradCAM
    except ImportError:
        return None

    def patches(tokens: Tensor) -> Tensor:
        side = round((tokens.shape[1] - 1) ** 0.5)
        return tokens[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)

    def run(model: nn.Module, pixels: Tensor) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            layer = model.blocks[-1].norm1  # type: ignore[index, union-attr]
            with GradCAM(model=model, target_layers=[layer], reshape_transform=patches) as cam:
                cam(pixels.clone(), None)  # of the largest logit

    return run


def seconds_of(works: Mapping[str, Work], model: nn.Module, pixels: Tensor, repeats: int) -> dict[str, list[float]]:
    """Seconds of each work in each round, after one round that is not counted, with its experiments."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    with torch.inference_mode():
        for work in works.values():
            work(model, pixels)
            work(model, pixels)  # the second pass of a model may leave out what the first has verified
        for _ in range(repeats):
            for name, work in works.items():
                started = time.perf_counter()
                work(model, pixels)
                seconds[name].append(time.perf_counter() - started)
    return seconds


def print_rows(label: str, seconds: Mapping[str, list[float]], peaks: Mapping[str, float]) -> None:
    """Print a row for each work: the ratio of the fastest rounds, and the median of the rounds' own ratios."""
    plain, script = (seconds[name] for name in ("plain", "by hand"))
    for name, own in seconds.items():
        ratios = []
        for base in (plain, script):
            median = statistics.median(one / other for one, other in zip(own, base, strict=True))
            ratios.append(f"{min(own) / min(base):.2f} ({median:.2f})")
        memory = f"{peaks[name]:.0f} | {peaks[name] / peaks['plain']:.2f}" if peaks else "|"
        print(f"| {label} | {name} | {1e3 * min(own):.1f} | {' | '.join(ratios)} | {memory} |", flush=True)
