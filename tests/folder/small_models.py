"""Small models with fixed weights; processes of a test import no more than this."""

import os
import signal

import torch
from timm.models.vision_transformer import VisionTransformer

from vitflow import Explainer, explain_folder


def tiny_model(kind=VisionTransformer) -> torch.nn.Module:
    torch.manual_seed(0)
    model = kind(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=5)
    model.pretrained_cfg = {
        "architecture": "tiny",
        "input_size": (3, 32, 32),
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "crop_mode": "center",
        "num_classes": 5,
    }
    return model.eval()


class Deadly(VisionTransformer):
    """A model that kills its process when it sees a white image."""

    def forward(self, pixels):
        if (pixels.flatten(1).amin(dim=1) > 0.99).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(pixels)


def plain():
    return Explainer(tiny_model())


def deadly():
    return Explainer(tiny_model(Deadly))


def broken():
    raise ValueError("this model cannot be made")


def drive(address, source, out):
    """Be the driver of a run on a cluster."""
    explain_folder(source, out, model=plain, batch_size=1, engine="ray", actors=1, address=address)
