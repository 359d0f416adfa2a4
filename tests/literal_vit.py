"""A tiny Vision Transformer written out by hand, one image and one head at a time: no timm, no hooks, no patches.

It takes its weights from the `state_dict` of a timm model, and keeps every attention matrix on the path to the logits,
so that `torch.autograd.grad` alone says what the gradients of the probabilities are. And the class-specific methods
written out slowly over what it gives.
"""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import timm
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from tests import references

Array = NDArray[np.float64]

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}
HEADS, PATCH = 3, 8

# Ways to read the answer out: options for timm, and prefix tokens.
READOUTS = {
    "class token": ({}, 1),
    "class token and registers": ({"reg_tokens": 3}, 4),
    "distilled": ({"distilled": True}, 2),
    "average": ({"class_token": False, "global_pool": "avg"}, 0),
    "average beside a class token": ({"global_pool": "avg"}, 1),
    "attention pooling": ({"class_token": False, "global_pool": "map"}, 0),
}
if hasattr(timm.layers, "AttentionPoolPrr"):  # later than the oldest timm
    READOUTS["refining pooling"] = ({"class_token": False, "global_pool": "prr"}, 0)


def timm_model(readout: str = "class token", seed: int = 0, **options) -> nn.Module:
    """A timm model in float64 whose attention and gradients are far from uniform."""
    torch.manual_seed(seed)
    chosen = {**TINY, **READOUTS[readout][0], **options}
    model = (VisionTransformerDistilled if chosen.pop("distilled", False) else VisionTransformer)(**chosen).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model.eval()


@dataclass
class Pass:
    """Recorded tensors of one image's forward pass, all on the path to the logits."""

    logits: Tensor
    tokens: Tensor = field(default_factory=lambda: torch.empty(0))  # that the head reads, [tokens, channels]
    blocks: list[Tensor] = field(default_factory=list)  # [layers] of outputs, [tokens, channels]
    attention: list[list[Tensor]] = field(default_factory=list)  # [layers][heads] of [tokens, tokens]
    norm1: list[Tensor] = field(default_factory=list)  # [layers] of [tokens, channels]
    values: list[list[Tensor]] = field(default_factory=list)  # [layers][heads] of [tokens, width]
    pooling: list[Tensor] = field(default_factory=list)  # [heads] of the pooling queries' attention, [queries, tokens]


def run(model: nn.Module, pixels: Tensor, depth: int = TINY["depth"], mean: bool = False, frozen: bool = False) -> Pass:
    """Run one image [3, height, width] with the model's weights.

    With fewer blocks the answer is that of the last one's tokens; with `mean` class tokens hold the mean of all tokens.
    With `frozen`, attention, deviations of norms and gelu(x) / x are constants of the graph.
    """
    weights = dict(model.state_dict())

    def constant(x: Tensor) -> Tensor:
        return x.detach() if frozen else x

    def gelu(x: Tensor) -> Tensor:
        return x * (F.gelu(x) / x).detach() if frozen else F.gelu(x)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / constant((centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt())
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    actual = Pass(torch.empty(0))
    _, height, width = pixels.shape
    tokens = []
    kernel = weights["patch_embed.proj.weight"].flatten(1)
    for top in range(0, height, PATCH):
        for left in range(0, width, PATCH):
            patch = pixels[:, top : top + PATCH, left : left + PATCH].flatten()
            tokens.append(kernel @ patch + weights["patch_embed.proj.bias"])
    prefix = [weights[name][0] for name in ("cls_token", "dist_token", "reg_token") if name in weights]
    x = torch.cat([*prefix, torch.stack(tokens)]) + weights["pos_embed"][0]

    for layer in range(depth):
        block = f"blocks.{layer}"
        y = norm(f"{block}.norm1", x)
        actual.norm1.append(y)
        query, key, value = linear(f"{block}.attn.qkv", y).chunk(3, dim=-1)
        size = query.shape[-1] // HEADS
        outputs, matrices, values = [], [], []
        for head in range(HEADS):
            entry = slice(head * size, (head + 1) * size)
            matrices.append(constant((query[:, entry] @ key[:, entry].T / size**0.5).softmax(-1)))
            values.append(value[:, entry])
            outputs.append(matrices[-1] @ value[:, entry])
        actual.attention.append(matrices)
        actual.values.append(values)
        x = x + linear(f"{block}.attn.proj", torch.cat(outputs, dim=-1))
        x = x + linear(f"{block}.mlp.fc2", gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x))))
        actual.blocks.append(x)
    if mean and "cls_token" in weights and model.global_pool == "token":
        read = 2 if "head_dist.weight" in weights else 1
        x = torch.cat([*[x.mean(0, keepdim=True)] * read, x[read:]])
    if "norm.weight" in weights:
        x = norm("norm", x)
    actual.tokens = x

    if "head_dist.weight" in weights:
        actual.logits = (linear("head", x[0]) + linear("head_dist", x[1])) / 2
    elif "attn_pool.latent" in weights:
        query = linear("attn_pool.q", weights["attn_pool.latent"][0])
        key, value = linear("attn_pool.kv", x).chunk(2, dim=-1)
        size = query.shape[-1] // HEADS
        parts = [slice(head * size, (head + 1) * size) for head in range(HEADS)]
        rows = [constant((query[:, entry] @ key[:, entry].T / size**0.5).softmax(-1)) for entry in parts]
        pooled = torch.cat([row @ value[:, entry] for row, entry in zip(rows, parts, strict=True)], dim=-1)
        pooled = linear("attn_pool.proj", pooled)
        hidden = gelu(linear("attn_pool.mlp.fc1", norm("attn_pool.norm", pooled)))
        pooled = pooled + linear("attn_pool.mlp.fc2", hidden)
        actual.logits = linear("head", pooled[0])
        actual.pooling = rows
    elif model.global_pool == "prr":
        parts = x.split(x.shape[-1] // HEADS, dim=-1)
        rows = [constant((part @ part.T / part.shape[-1] ** 0.5).softmax(-1)) for part in parts]
        refined = torch.cat([row @ part for row, part in zip(rows, parts, strict=True)], dim=-1)
        actual.logits = linear("head", refined.mean(0))
        actual.pooling = rows
    elif model.global_pool == "avg":
        pooled = x[len(x) - len(tokens) :].mean(0)
        actual.logits = linear("head", norm("fc_norm", pooled) if "fc_norm.weight" in weights else pooled)
    else:
        actual.logits = linear("head", x[0])
    return actual


@dataclass(eq=False)
class Explained:
    """One image with its target: attention, gradients and values as arrays [layers][heads, tokens, …]."""

    attention: list[Array]
    gradients: list[Array]
    norm1: list[Array]
    norm1_gradients: list[Array]
    pixel_gradients: Array
    values: list[Array]
    projections: list[Array]  # W_O, [out, heads * width]
    readout: Array
    pooling: Array | None  # (A ⊙ ∇A)⁺ of the pooling queries, [heads, queries, tokens]
    prefix: int

    @cache  # noqa: B019 - a test's worth of images
    def weighted(self, how: bool | str) -> list[Array]:
        """Each layer's heads, weighted."""
        return [weigh(*layer, how) for layer in zip(self.attention, self.values, self.projections, strict=True)]


def differentiate(model: nn.Module, pixels: Tensor, target: int, readout: str) -> Explained:
    """The gradients of one logit of one image, by torch.autograd.grad and nothing else."""
    pixels = pixels.clone().requires_grad_()
    seen = run(model, pixels)
    heads = [matrix for layer in seen.attention for matrix in layer]
    sources = [*heads, *seen.norm1, *seen.pooling, seen.tokens, pixels]
    gradients = torch.autograd.grad(seen.logits[target], sources)
    of_heads, of_norms = gradients[: len(heads)], gradients[len(heads) : len(heads) + len(seen.norm1)]
    of_pooling = [
        np.maximum((row.detach() * gradient).numpy(), 0.0)
        for row, gradient in zip(seen.pooling, gradients[-2 - len(seen.pooling) : -2], strict=True)
    ]

    def layers(matrices: list[Tensor]) -> list[Array]:
        arrays = [matrix.detach().numpy() for matrix in matrices]
        return [np.stack(arrays[start : start + HEADS]) for start in range(0, len(arrays), HEADS)]

    return Explained(
        attention=layers(heads),
        gradients=layers(list(of_heads)),
        norm1=[x.detach().numpy() for x in seen.norm1],
        norm1_gradients=[x.numpy() for x in of_norms],
        pixel_gradients=gradients[-1].numpy(),
        values=layers([value for layer in seen.values for value in layer]),
        projections=[model.blocks[layer].attn.proj.weight.detach().numpy() for layer in range(TINY["depth"])],
        readout=(norms := gradients[-2].norm(dim=-1).numpy()) / norms.sum(),
        pooling=np.stack(of_pooling) if of_pooling else None,
        prefix=READOUTS[readout][1],
    )


def moved_values(values: Array, projection: Array) -> Array:
    """v_j W_O[h]: each value vector times its head's slice of the output projection; [heads, tokens, out]."""
    heads, tokens, width = values.shape
    moved = np.zeros((heads, tokens, len(projection)))
    for h in range(heads):
        for j in range(tokens):
            moved[h, j] = projection[:, h * width : (h + 1) * width] @ values[h, j]
    return moved


def value_norms(values: Array, projection: Array) -> Array:
    """‖v_j W_O[h]‖, [heads, tokens]."""
    return np.array(
        [[np.sqrt(sum(x * x for x in vector)) for vector in head] for head in moved_values(values, projection)]
    )


def weigh(attention: Array, values: Array, projection: Array, how: bool | str) -> Array:
    """Attention [heads, tokens, tokens] weighted by its values, entry by entry."""
    if how is False:
        return attention
    heads, tokens, _ = values.shape
    moved, norms = moved_values(values, projection), value_norms(values, projection)
    result = np.zeros_like(attention)
    for i in range(tokens):
        output = sum(attention[h, i, j] * moved[h, j] for h in range(heads) for j in range(tokens))
        length = np.linalg.norm(output)
        for h in range(heads):
            for j in range(tokens):
                factor = max(0.0, moved[h, j] @ output / length) if how == "output" else norms[h, j]
                result[h, i, j] = attention[h, i, j] * factor
    return result


def fused_values(actual: Explained, how: bool | str, fusion: str) -> list[Array]:
    """Each layer's heads weighted and fused, rows normalised to 1."""
    layers = []
    for heads in actual.weighted(how):
        fused = references.fuse(heads, fusion)
        layers.append(fused / fused.sum(1, keepdims=True))
    return layers


def _for_the_class(actual: Explained, how: bool | str) -> list[Array]:
    return [
        np.maximum(heads * gradient, 0.0)
        for heads, gradient in zip(actual.weighted(how), actual.gradients, strict=True)
    ]


def _readout_for_the_class(actual: Explained, fusion: str) -> Array:
    """Return the attention of the pooling query for the class, if there is one; its sum is 1."""
    if actual.pooling is None:
        return actual.readout
    fused = {"mean": np.mean, "max": np.max}[fusion](actual.pooling, axis=0).mean(axis=0)
    return fused / fused.sum()


def gae(actual: Explained, how: bool | str = False, fusion: str = "mean", start: int = 1) -> Array:
    """R ← R + W R from the first layer on, whole matrices; then the readout's row, patches only."""
    relevance = np.eye(len(actual.readout))
    for positive in _for_the_class(actual, how)[start - 1 :]:
        relevance = relevance + references.fuse(positive, fusion) @ relevance
    return (_readout_for_the_class(actual, fusion) @ relevance)[actual.prefix :]


def gradient_rollout(actual: Explained, how: bool | str = False, fusion: str = "mean", **options) -> Array:
    """Rollout over (A ⊙ ∇A)⁺; then the readout's row, patches only."""
    layers = _for_the_class(actual, how)
    rolled = references.rollout(layers, how=fusion, prefix=actual.prefix, **options)
    return (_readout_for_the_class(actual, fusion) @ rolled)[actual.prefix :]


def grad_cam(actual: Explained, layer: int = -1) -> Array:
    """Channel weights from the patches' gradients, one channel after the other; patches only."""
    features, gradients = actual.norm1[layer][actual.prefix :], actual.norm1_gradients[layer][actual.prefix :]
    total = np.zeros(len(features))
    for channel in range(features.shape[1]):
        total += gradients[:, channel].mean() * features[:, channel]
    return np.maximum(total, 0.0)


def frozen_gradient(model: nn.Module, pixels: Tensor, target: int, layers: list[int], prefix: int) -> Array:
    """Tokens times gradients of the log-odds after some layers, patches only: the mean of their shares."""
    seen = run(model, pixels.clone().requires_grad_(), depth=len(model.blocks), frozen=True)
    others = [index for index in range(len(seen.logits)) if index != target]
    rest = seen.logits[others].detach().softmax(0)
    log_odds = seen.logits[target] - sum(share * seen.logits[k] for share, k in zip(rest, others, strict=True))
    total = np.zeros(len(seen.blocks[0]) - prefix)
    for layer in layers:
        tokens = seen.blocks[layer - 1]
        [gradient] = torch.autograd.grad(log_odds, [tokens], retain_graph=True)
        parts = np.array([float(x @ g) for x, g in zip(tokens.detach(), gradient, strict=True)])[prefix:]
        total += parts / np.abs(parts).sum()
    return total / len(layers)
