"""Localisation of every method with default and published options, against boxes or masks.

    python -m benchmarks.localisation --model ID --checkpoint FILE --boxes DATA [--methods NAME[:paper] …]
    python -m benchmarks.localisation --train FILE [--kind swin|dinov2] --minutes 18
    python -m benchmarks.localisation --trained FILE [--kind swin|dinov2] --boxes demo:100 --metrics roc_auc separation

The second command trains a small model on drawn images with one to three objects, and the third measures it. DATA is
whatever `vitflow evaluate` takes, which does the same with `--metric localisation --method NAME:preset=paper`; here
every method with a published definition of its own is measured both ways. Prints means and standard errors as a
Markdown table.
"""

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import vitflow
from vitflow.demo import CLASS_NAMES, FIRST_TRAINING_SEED, draw_image
from vitflow.evaluation import evaluate
from vitflow.models.calls import logits_of
from vitflow.registry.method_table import list_methods


def swin() -> SwinTransformer:
    """A Swin for images of 64 pixels, with the classes of the drawn objects."""
    sizes = {"patch_size": 4, "window_size": 4, "embed_dim": 48, "depths": (2, 4, 2), "num_heads": (3, 6, 12)}
    return SwinTransformer(img_size=64, **sizes, num_classes=len(CLASS_NAMES), drop_path_rate=0.0)


def dinov2() -> nn.Module:
    """A DINOv2 of transformers, whose head reads the class token and the mean of the patches."""
    from transformers import Dinov2Config, Dinov2ForImageClassification

    size = {"image_size": 64, "patch_size": 8, "hidden_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4}
    return Dinov2ForImageClassification(
        Dinov2Config(**size, mlp_ratio=3, num_labels=len(CLASS_NAMES), layerscale_value=1.0)
    )


KINDS = {"swin": swin, "dinov2": dinov2}


class Drawn(Dataset):
    """Drawn images and the classes of their objects in equal shares."""

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn, shares = draw_image(FIRST_TRAINING_SEED + 3_000_000 + index, 64), torch.zeros(len(CLASS_NAMES))
        shares[list(drawn.labels)] = 1 / len(drawn.labels)
        return torch.from_numpy(drawn.image).permute(2, 0, 1).float() / 127.5 - 1, shares


def train(
    model: nn.Module, data: Dataset, loss_of: Callable[[Any, Tensor], Tensor], file: Path, minutes: float
) -> None:
    """Train a model with one thread and one process that draws, and save its weights."""
    torch.set_num_threads(1)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, betas=(0.9, 0.98))
    started = time.monotonic()
    for number, (pixels, truth) in enumerate(DataLoader(data, batch_size=32, num_workers=1, prefetch_factor=8)):
        progress = (time.monotonic() - started) / (60 * minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (number + 1) / 200) * (0.01 + 0.495 * (1 + math.cos(math.pi * progress)))
        loss = loss_of(model(pixels), truth)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if number % 200 == 0:
            print(f"{32 * number} drawn, loss {loss.item():.3f}", flush=True)
    torch.save(model.state_dict(), file)


def share_loss(output: Any, shares: Tensor) -> Tensor:
    return -(shares * logits_of(output).log_softmax(-1)).sum(-1).mean()


def trained(kind: str, weights: Path) -> vitflow.Explainer:
    model = KINDS[kind]()
    model.load_state_dict(torch.load(weights, weights_only=True))
    data_config = {"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    return vitflow.Explainer(model.eval(), data_config=data_config, class_names=list(CLASS_NAMES), name=kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--trained", type=Path, help="weights of a trained model instead of --model")
    parser.add_argument("--train", type=Path, help="train a model, and save its weights")
    parser.add_argument("--kind", choices=list(KINDS), default="swin")
    parser.add_argument("--minutes", type=float, default=18)
    parser.add_argument("--boxes", default="demo:100")
    parser.add_argument("--metrics", nargs="+", default=["localisation"])
    parser.add_argument("--methods", nargs="+", help="NAME for its defaults, NAME:paper for the published definition")
    given = parser.parse_args()
    if given.train is not None:
        torch.manual_seed(0)
        train(KINDS[given.kind](), Drawn(), share_loss, given.train, given.minutes)
        return
    warnings.simplefilter("ignore", vitflow.VitflowWarning)  # saturation has a table of its own
    every = [m.name + suffix for m in list_methods() for suffix in ("", ":paper") if not suffix or m.presets]
    names = [name.partition(":") for name in given.methods or every]
    if given.trained is None:
        model = vitflow.load_model(given.model, checkpoint=given.checkpoint)
    else:
        model = trained(given.kind, given.trained)
    actual = evaluate(
        given.boxes,
        model=model,
        methods=[(name, {"preset": preset}) if preset else name for name, _, preset in names],
        metrics=given.metrics,
        points=6,
        progress=lambda state: print(f"\r{state.done} of {state.total}", end="", file=sys.stderr),
    )
    print(actual.to_markdown())


if __name__ == "__main__":
    main()
