"""Attention in every way that a model may compute it: recorded as it is, or refused in one sentence, never left out."""

import copy
import math
import threading
import warnings

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.recording.test_recorder import generators, state_of
from vitflow import Explainer, record_attention
from vitflow.errors import NoAttentionError, OptionError, UnsupportedModelError
from vitflow.recording import unseen

HEADS, WIDTH, CLASSES = 3, 48, 5


def build(**options) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "num_heads": HEADS, "depth": 3, "num_classes": CLASSES}
    model = timm.models.vision_transformer.VisionTransformer(**{**sizes, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


class Own(nn.Module):
    """An attention module of somebody's own, with the weights of timm's."""

    def __init__(self, attention: nn.Module, how) -> None:
        super().__init__()
        self.qkv, self.proj, self.how, self.num_heads = attention.qkv, attention.proj, how, HEADS

    def forward(self, x: Tensor, **options) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        made = self.how(q * (width // HEADS) ** -0.5, k, v)
        return self.proj(made.transpose(1, 2).reshape(batch, tokens, width))


def with_own(how, blocks=(2,)) -> nn.Module:
    model = build()
    for number in blocks:
        model.blocks[number].attn = Own(model.blocks[number].attn, how)
    return model


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).exp()
    return (weights / weights.sum(dim=-1, keepdim=True)) @ v


def by_logarithm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).log_softmax(dim=-1).exp() @ v


def three_axes_in_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q3, k3, v3 = (one.flatten(0, 1) for one in (q, k, v))
    return torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", q3, k3).softmax(dim=-1), v3).view(q.shape)


def flexible(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        return flex(q, k, v, scale=1.0)


def script(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v


def scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(script)(q, k, v)


def stray_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q + 0 * q.softmax(dim=-1), k, v, scale=1.0)


def stray_within(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention = (q @ k.mT).softmax(dim=-1)
    return attention @ (v + 0 * v.softmax(dim=-1))


def in_keywords(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(input=torch.matmul(q, other=k.mT), dim=-1), other=v)


def in_more_keywords(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(input=torch.softmax(dim=-1, input=torch.matmul(q, other=k.mT)), other=v)


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.mT).softmax(dim=-2).mT @ v


def over_queries_turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (v.mT @ (k @ q.mT).softmax(dim=-2)).mT


def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(dim=-1).flatten(0, 1) @ v.flatten(0, 1)).view(q.shape)


RECORDED = {
    "keywords": in_keywords,
    "more keywords": in_more_keywords,
    "a softmax over the queries": over_queries,
    "the same, transposed": over_queries_turned,
    "torch._softmax": lambda q, k, v: torch._softmax(q @ k.mT, -1, False) @ v,
    "torch.special.softmax": lambda q, k, v: torch.special.softmax(q @ k.mT, -1) @ v,
    "torch.ops.aten": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v, scale=1.0),
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", (q @ k.mT).softmax(dim=-1), v),
    "a view": viewed,
    "a softmax over features before": stray_before,
    "a softmax over features between": stray_within,
}
UNSEEN = {
    "exp and sum": by_hand,
    "log_softmax": by_logarithm,
    "einsum of three axes": three_axes_in_einsum,
    "flex_attention": flexible,
    "torch.jit.script": scripted,
}


def agree(model: nn.Module, pixels: Tensor, layer: int = 2) -> None:
    """The recorded layer is timm's, whose weights the module has, and the logits are those of the untouched model."""
    with torch.no_grad():
        plain = model(pixels)
        with record_attention(model) as trace:
            logits = model(pixels)
        with record_attention(build()) as literal:
            trace_of = literal
            build_logits = literal.model(pixels)
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(build_logits, plain, rtol=1e-4, atol=1e-4)
    assert len(trace.attentions) == 3
    torch.testing.assert_close(trace.attentions[layer], trace_of.attentions[layer], rtol=1e-4, atol=1e-5)
    assert trace.readout[0, 0] == 1


@pytest.mark.parametrize("how", RECORDED.values(), ids=RECORDED)
@pytest.mark.parametrize("batch", [1, 2])
def test_attention_is_recorded_however_it_is_called(how, batch):
    agree(with_own(how), torch.randn(batch, 3, 32, 32))


@pytest.mark.parametrize("how", UNSEEN.values(), ids=UNSEEN)
def test_a_layer_that_is_not_seen_is_refused_by_its_name(how):
    model, pixels = with_own(how), torch.randn(1, 3, 32, 32)
    before = state_of(model), generators()
    with torch.no_grad():
        plain = model(pixels)
        with record_attention(model, head_fusion="mean") as trace:
            logits = model(pixels)
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)
    assert (state_of(model), generators()) == before
    with pytest.raises(UnsupportedModelError, match=r"Own \(blocks\.2\.attn\) .* sampling, occlusion, gradcam") as error:
        _ = trace.readout
    assert "\n" not in str(error.value)
    assert len(trace.attentions) == 2  # what was seen is at hand
