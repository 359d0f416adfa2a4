"""Heads that are modules of their own are one layer, as if all heads of an attention were computed in one module."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.small import Custom, jitter
from vitflow import Explainer, record_attention
from vitflow.errors import UnsupportedModelError, ValueNormsError
from vitflow.methods import TokenLayout

HEADS, WIDTH = 4, 32
DATA = {"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3}
METHODS = [
    ("rollout", {"preset": "paper"}),
    ("rollout", {"head_fusion": "max", "value_weighted": False}),
    ("rollout", {"value_weighted": True}),
    ("attention", {"head": 2}),
    ("gae", {"value_weighted": True}),
    ("gae", {"value_weighted": False}),
    ("flow", {}),
]


def head(width: int = WIDTH // HEADS, attend=None) -> nn.Module:
    """One head with its own projections, as a module."""

    def softmax(q, k, v):
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    attend = attend or softmax
    parts = {name: nn.Linear(WIDTH, width) for name in "qkv"}
    return Custom(lambda self, x: attend(self.q(x), self.k(x), self.v(x)), **parts)


def join(self, results):
    return self.proj(torch.cat(list(results), -1))


def in_buffer(self, x):
    result = torch.empty_like(x)
    for index, each in enumerate(self.heads):
        result[..., index * WIDTH // HEADS : (index + 1) * WIDTH // HEADS] = each(x)
    return self.proj(result)


def listed(forward, **options):
    return Custom(forward, heads=nn.ModuleList(head(**options) for _ in range(HEADS)), proj=nn.Linear(WIDTH, WIDTH))


# Attention of a block, with all heads of a layer as modules.
JOINED = {
    "list": lambda: listed(lambda self, x: join(self, (each(x) for each in self.heads))),
    "fused": lambda: listed(
        lambda self, x: join(self, (each(x) for each in self.heads)), attend=F.scaled_dot_product_attention
    ),
    "buffer": lambda: listed(in_buffer),
    "sum": lambda: listed(lambda self, x: self.proj(sum(each(x) for each in self.heads)), width=WIDTH),
}


def block(attention: nn.Module) -> nn.Module:
    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    parts = {"norm1": nn.LayerNorm(WIDTH), "norm2": nn.LayerNorm(WIDTH), "mlp": nn.Linear(WIDTH, WIDTH)}
    return Custom(forward, attn=attention, **parts)


def model_of(attention, depth: int = 3) -> nn.Module:
    """A ViT with a class token; `attention` makes the attention of each block."""

    def forward(self, pixels):
        patches = self.embed(pixels).flatten(2).mT
        tokens = torch.cat([self.token(pixels.new_zeros(len(pixels), 1, 1)), patches], 1)
        return self.head(self.norm(self.blocks(tokens + self.position))[:, 0])

    torch.manual_seed(0)
    parts = {
        "embed": nn.Conv2d(3, WIDTH, 16, 16),
        "token": nn.Linear(1, WIDTH),
        "blocks": nn.Sequential(*(block(attention()) for _ in range(depth))),
        "norm": nn.LayerNorm(WIDTH),
        "head": nn.Linear(WIDTH, 5),
        "position": nn.Parameter(torch.randn(1, 17, WIDTH)),
    }
    return jitter(Custom(forward, **parts), 1.0)


def in_one_module(model: nn.Module) -> nn.Module:
    """The same model with all heads of a layer in one module, by torch's fused attention of [batch, heads, …]."""

    def forward(self, x):
        each = [[getattr(one, name)(x) for one in self.parts] for name in "qkv"]
        mixed = F.scaled_dot_product_attention(*(torch.stack(tensors, 1) for tensors in each))
        return self.proj(mixed.sum(1) if self.sums else mixed.transpose(1, 2).flatten(2))

    model = copy.deepcopy(model)
    for each in model.blocks:
        heads = [part for part in each.attn.modules() if hasattr(part, "q")]
        one = Custom(forward, proj=each.attn.proj, sums=heads[0].q.out_features == WIDTH)
        object.__setattr__(one, "parts", heads)
        each.attn = one
    return model


def maps(model: nn.Module, pixels: torch.Tensor, method: str, options: dict) -> torch.Tensor:
    explainer = Explainer(model, data_config=DATA, layout=TokenLayout(1, 4, 4))
    saliencies = explainer.explain_batch(pixels, method=method, target=1 if method == "gae" else None, **options)
    return torch.stack([torch.as_tensor(saliency.grid) for saliency in saliencies])


@pytest.mark.parametrize("kind", JOINED)
def test_heads_as_modules_have_the_maps_of_heads_in_one_module(kind):
    model, pixels = model_of(JOINED[kind]), torch.rand(HEADS, 3, 64, 64) - 0.5
    whole = in_one_module(model)
    torch.testing.assert_close(model(pixels), whole(pixels))
    for method, options in METHODS:
        if kind == "sum" and options.get("value_weighted", "preset" not in options):
            continue  # the weight of a sum has no columns for each head
        actual, expected = (maps(each, pixels, method, options) for each in (model, whole))
        assert (actual - expected).abs().max() < 1e-5 * expected.abs().max(), (method, options)


def test_a_model_that_counts_its_passes_is_repeated_once():
    model, pixels = model_of(next(iter(JOINED.values()))), torch.rand(1, 3, 64, 64)
    counted = Custom(lambda self, x: setattr(self, "calls", getattr(self, "calls", 0) + 1) or self.vit(x), vit=model)
    with torch.no_grad(), record_attention(counted, layout=TokenLayout(1, 4, 4)) as trace:
        counted(pixels)
    assert counted.calls == 2 and len(trace.layers) == len(model.blocks)
    assert trace.attentions[0].shape[1] == HEADS


def test_heads_that_are_summed_before_their_projection_are_not_weighted():
    model, pixels = model_of(JOINED["sum"]), torch.rand(2, 3, 64, 64) - 0.5
    with pytest.raises(ValueNormsError, match=r"blocks\.0\.attn\.heads\.0"), torch.no_grad():
        with record_attention(model, values=True, layout=TokenLayout(1, 4, 4)):
            model(pixels)


def test_heads_in_a_loop_are_not_taken_for_images():
    def forward(self, x):
        pieces = zip(*(part.chunk(HEADS, -1) for part in self.qkv(x).chunk(3, -1)), strict=True)
        return self.proj(torch.cat([(q @ k.mT).softmax(-1) @ v for q, k, v in pieces], -1))

    model = model_of(lambda: Custom(forward, qkv=nn.Linear(WIDTH, 3 * WIDTH), proj=nn.Linear(WIDTH, WIDTH)))
    pixels = torch.rand(HEADS, 3, 64, 64) - 0.5
    one_by_one = torch.cat([maps(model, each[None], *METHODS[0]) for each in pixels])
    torch.testing.assert_close(maps(model, pixels, *METHODS[0]), one_by_one)


def apart(self, x):
    """Two streams that meet after two layers each."""
    first, second = (x + each(x) for each in (self.a, self.b))
    return first + self.c(first) + self.d(second)


REFUSED = {
    "other inputs": lambda: Custom(
        lambda self, x: join(self, (each(norm(x)) for norm, each in zip(self.norms, self.heads, strict=True))),
        norms=nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(HEADS)),
        heads=nn.ModuleList(head() for _ in range(HEADS)),
        proj=nn.Linear(WIDTH, WIDTH),
    ),
    "quarters of the tokens": lambda: Custom(
        lambda self, x: torch.cat(
            [x[:, :1], *(each(part) for part, each in zip(x[:, 1:].chunk(4, 1), self.heads, strict=True))], 1
        ),
        heads=nn.ModuleList(head(WIDTH) for _ in range(4)),
    ),
    "an unread head": lambda: Custom(
        lambda self, x: [each(x) for each in self.heads].pop(), heads=nn.ModuleList(head(WIDTH) for _ in range(2))
    ),
    "streams": lambda: Custom(apart, **{name: head(WIDTH) for name in "abcd"}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_parallel_attention_that_is_no_layer_is_refused(kind):
    model = model_of(REFUSED[kind])
    with pytest.raises(UnsupportedModelError, match="does not read the result"):
        maps(model, torch.rand(2, 3, 64, 64) - 0.5, *METHODS[0])


def test_attention_of_attention_in_one_module_is_refused():
    def agents(self, x):
        few = x[:, ::4]
        return (x @ few.mT).softmax(-1) @ ((few @ x.mT).softmax(-1) @ self.v(x))

    with pytest.raises(UnsupportedModelError, match="step by step"):
        maps(model_of(lambda: Custom(agents, v=nn.Linear(WIDTH, WIDTH))), torch.rand(2, 3, 64, 64) - 0.5, *METHODS[0])


def test_heads_without_a_module_around_them_are_refused():
    model = model_of(JOINED["list"], depth=1)
    model.blocks = nn.ModuleList(nn.ModuleList(head() for _ in range(HEADS)) for _ in range(3))

    def forward(self, pixels):
        tokens = F.pad(self.embed(pixels).flatten(2).mT, (0, 0, 1, 0)) + self.position
        for heads in self.blocks:
            tokens = tokens + torch.cat([each(tokens) for each in heads], -1)
        return self.head(self.norm(tokens)[:, 0])

    model.compute = forward
    with pytest.raises(UnsupportedModelError, match="no module around"):
        maps(model.eval(), torch.rand(2, 3, 64, 64) - 0.5, *METHODS[0])
