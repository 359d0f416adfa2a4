"""Gradients to the pixels of a single image equal directional derivatives."""

import pytest
import timm
import torch
from torch import nn

from tests.small import Custom, jitter
from vitflow import record_attention


def _levit() -> nn.Module:
    options = {"embed_dim": (16, 24, 32), "key_dim": 8, "depth": (1, 1, 1), "num_heads": (2, 3, 4)}
    return timm.models.levit.Levit(img_size=64, num_classes=3, **options)


def _levit_of_transformers() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    options = {"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "key_dim": [8, 8, 8]}
    config = transformers.LevitConfig(image_size=64, depths=[1, 1, 1], num_labels=3, **options)
    return transformers.LevitForImageClassification(config)


def _instance_norm() -> nn.Module:
    parts = {"stem": nn.Conv2d(3, 8, 16, 16), "norm": nn.InstanceNorm2d(8), "head": nn.Linear(8, 3)}
    return Custom(lambda m, x: m.head(m.norm(m.stem(x)).flatten(2).transpose(1, 2).tanh().square().mean(1)), **parts)


def _norm_of_tokens() -> nn.Module:
    def compute(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tokens = model.stem(x).flatten(2).transpose(1, 2).contiguous()
        cells = model.norm(tokens.transpose(1, 2).unflatten(2, (4, 4)))
        return model.head(cells.contiguous().tanh().flatten(2).sum(2))

    return Custom(compute, stem=nn.Conv2d(3, 8, 16, 16), norm=nn.BatchNorm2d(8), head=nn.Linear(8, 3))


MODELS = {
    "XCiT": lambda: timm.models.xcit.Xcit(img_size=64, embed_dim=16, depth=1, num_heads=2, num_classes=3),
    "LeViT": _levit,
    "LeViT of transformers": _levit_of_transformers,
    "EfficientFormer": lambda: timm.models.efficientformer.EfficientFormer(
        depths=(1, 1, 1, 2), embed_dims=(8, 8, 8, 16), num_classes=3, num_vit=1
    ),
    "instance norm": _instance_norm,
    "batch norm of tokens": _norm_of_tokens,
}


@pytest.mark.parametrize("name", MODELS)
def test_gradient_of_one_image_is_its_directional_derivative(name):
    torch.manual_seed(0)
    model = jitter(MODELS[name](), 0.5).double()
    side = 224 if name == "EfficientFormer" else 64
    pixels = torch.randn(1, 3, side, side, dtype=torch.float64)
    with record_attention(model, gradients=True, attention=False) as trace:
        model(pixels)
    gradient = trace.backward(torch.tensor([1])).pixels
    direction, step = gradient + gradient.std() * torch.randn_like(gradient), 1e-6 / gradient.abs().max()
    with torch.no_grad():
        outputs = [model(pixels + sign * step * direction) for sign in (1, -1)]
    after, before = (getattr(output, "logits", output)[0, 1] for output in outputs)
    assert (gradient * direction).sum() == pytest.approx(float((after - before) / (2 * step)), rel=1e-4)
