"""A small ViT with random weights, and images, for tests."""

import numpy as np
import timm
import torch
from torch import nn

CUSTOM = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}
DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 0.9}


def custom_model(**options) -> nn.Module:
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(**{**CUSTOM, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
