"""A small ViT with random weights, models of other shapes, and images, for tests."""

from collections.abc import Callable
from importlib import metadata

import numpy as np
import pytest
import timm
import torch
from packaging.version import Version
from torch import nn

CUSTOM = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}
DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 0.9}


def since(package: str, version: str) -> pytest.MarkDecorator:
    """Skip a test, or one of its parameters, with releases of a package before the one that it needs."""
    old = Version(metadata.version(package)) < Version(version)
    return pytest.mark.skipif(old, reason=f"needs {package} {version}")


def custom_model(**options) -> nn.Module:
    torch.manual_seed(0)
    return jitter(timm.models.vision_transformer.VisionTransformer(**{**CUSTOM, **options}), 0.2, by_width=False)


def jitter(model: nn.Module, scale: float = 0.3, by_width: bool = True) -> nn.Module:
    """Attention, norms and heads far from uniform, in evaluation mode."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter) / (parameter.shape[-1] ** 0.5 if by_width else 1))
    return model.eval()


class Custom(nn.Module):
    """A user's module: parts by name, and a forward pass as a function of the module and its inputs."""

    def __init__(self, compute: Callable, **parts) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **options):
        return self.compute(self, *inputs, **options)


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
