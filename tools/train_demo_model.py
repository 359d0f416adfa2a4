"""Train the demo model that vitflow bundles, from nothing but the images that vitflow draws.

The bundled weights come from this command, which takes about half an hour on one busy CPU core:

    python -m tools.train_demo_model --images 50000 --seed 0

The model sees every image once. It learns with half of the patches dropped, which is twice as fast and makes every
part of an object count, and ends with whole images. Before each of the last blocks the class token forgets, now and
then, what it has gathered, so that the model also reads the image late and not only in its first blocks: without
this, the attention of the last blocks says little. One thread computes, one process draws.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, Dataset
from torch.utils.hooks import RemovableHandle

from vitflow.demo.drawing import CLASS_NAMES, FIRST_TRAINING_SEED, DemoImage, draw_image
from vitflow.demo.model import DEMO_WEIGHTS

ARCHITECTURE: dict[str, Any] = {
    "img_size": 96,
    "patch_size": 8,
    "embed_dim": 128,
    "depth": 6,
    "num_heads": 4,
    "num_classes": len(CLASS_NAMES),
}
MEAN = STD = 0.5
EVALUATION_IMAGES = 2000  # of the seeds 0, 1, …, all below FIRST_TRAINING_SEED
DROPPED_PATCHES = 0.5
WHOLE_SHARE = 0.15  # of the images, at the end, are seen whole
FORGETFUL_BLOCKS = 3
FORGOTTEN_SHARE = 0.3  # of the images, before each of these last blocks


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    started = time.monotonic()
    model = train(options)
    weights = {name: value.half() for name, value in model.state_dict().items()}
    accuracy, exact = evaluate(weights, options.evaluation_images)
    metadata = {
        "class_names": json.dumps(CLASS_NAMES),
        "architecture": json.dumps(ARCHITECTURE),
        "input_size": json.dumps([3, ARCHITECTURE["img_size"], ARCHITECTURE["img_size"]]),
        "mean": json.dumps([MEAN] * 3),
        "std": json.dumps([STD] * 3),
        "interpolation": "bicubic",
        "crop_pct": "1.0",
        "activation": "sigmoid",
        "trained_by": command(options),
        "images": str(options.images),
        "accuracy": f"{accuracy:.5f}",
        "accuracy_of": f"single labels of {options.evaluation_images} fresh images, after rounding to float16",
        "images_all_right": f"{exact:.5f}",
        "license": "MIT",
    }
    write(weights, metadata, options.output)
    print(f"{accuracy:.3%} of labels and {exact:.2%} of images right, {time.monotonic() - started:.0f} s")
    print(options.output)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000, help="how many images to learn from")
    parser.add_argument("--minutes", type=float, help="end earlier, after so many minutes (then not reproducible)")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the images")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--evaluation-images", type=int, default=EVALUATION_IMAGES)
    parser.add_argument("--workers", type=int, default=1, help="drawing processes; 0 draws between the steps")
    parser.add_argument("--output", type=Path, default=DEMO_WEIGHTS)
    options = parser.parse_args(arguments)
    if not 0 < options.images <= FIRST_TRAINING_SEED:
        parser.error(f"expected 1 to {FIRST_TRAINING_SEED} images, got {options.images}")
    return options


def command(options: argparse.Namespace) -> str:
    """The command that trains the same model again: what matters, and what differs from the defaults."""
    words = ["python -m tools.train_demo_model", f"--images {options.images}", f"--seed {options.seed}"]
    default = parse([])
    for name in ("minutes", "batch_size", "learning_rate", "weight_decay"):
        value = getattr(options, name)
        words += [] if value == getattr(default, name) else [f"--{name.replace('_', '-')} {value:g}"]
    return " ".join(words)


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images of consecutive seeds, drawn when asked for: uint8 [3, height, width] and targets float [classes]."""

    def __init__(self, first_seed: int, count: int) -> None:
        self.first_seed, self.count = first_seed, count

    def __len__(self) -> int:
        """Return the number of images."""
        return self.count

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Draw one image."""
        return as_tensors(draw_image(self.first_seed + number, ARCHITECTURE["img_size"]))


def as_tensors(image: DemoImage) -> tuple[Tensor, Tensor]:
    target = torch.zeros(len(CLASS_NAMES))
    target[list(image.labels)] = 1.0
    return torch.from_numpy(image.image).permute(2, 0, 1), target


def normalize(images: Tensor) -> Tensor:
    return (images.float() / 255.0 - MEAN) / STD


def one_thread(_: int) -> None:
    cv2.setNumThreads(1)


def train(options: argparse.Namespace) -> VisionTransformer:
    model = VisionTransformer(**ARCHITECTURE, patch_drop_rate=DROPPED_PATCHES).train()
    hooks = make_forgetful(model)
    decayed = [value for value in model.parameters() if value.ndim > 1]
    plain = [value for value in model.parameters() if value.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.98),
    )
    # A million seeds for each training seed, so that no two trainings and no evaluation share an image.
    photos = Images(FIRST_TRAINING_SEED * (1 + options.seed), options.images)
    loader = DataLoader(photos, options.batch_size, num_workers=options.workers, worker_init_fn=one_thread)
    started, seen, running = time.monotonic(), 0, 0.7
    for step, (images, targets) in enumerate(loader):
        elapsed = time.monotonic() - started
        progress = max(seen / options.images, elapsed / (60.0 * options.minutes) if options.minutes else 0.0)
        if progress >= 1.0:
            break
        if progress >= 1.0 - WHOLE_SHARE:
            model.patch_drop.prob = 0.0
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * learning_rate_share(step, progress)
        loss = binary_cross_entropy_with_logits(model(normalize(images)), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += len(images)
        running += 0.02 * (loss.item() - running)
        if step % 100 == 0:
            print(f"{seen:>8} images  loss {running:.4f}  {seen / (elapsed + 1e-9):.0f}/s  {elapsed:.0f} s", flush=True)
    for hook in hooks:
        hook.remove()
    return model.eval()


def make_forgetful(model: VisionTransformer) -> list[RemovableHandle]:
    """Let the class token of some images start again from its first value before each of the last blocks."""

    def forget(_: Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens = inputs[0]  # [batch, tokens, channels]
        first = (model.cls_token + model.pos_embed[:, :1]).expand(len(tokens), -1, -1)
        forgotten = torch.rand(len(tokens), 1, 1) < FORGOTTEN_SHARE
        return (torch.cat([torch.where(forgotten, first, tokens[:, :1]), tokens[:, 1:]], dim=1), *inputs[1:])

    return [block.register_forward_pre_hook(forget) for block in model.blocks[-FORGETFUL_BLOCKS:]]


def learning_rate_share(step: int, progress: float, warmup: int = 150) -> float:
    """Rise over the first steps, then fall along a cosine to 1 %."""
    return min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0))))


@torch.inference_mode()
def evaluate(weights: dict[str, Tensor], count: int) -> tuple[float, float]:
    """The share of labels and of whole images that rounded weights get right, on images that were never seen."""
    model = VisionTransformer(**ARCHITECTURE).eval()
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    right = torch.cat(
        [
            (model(normalize(images)) > 0) == (targets > 0.5)
            for images, targets in DataLoader(Images(0, count), batch_size=50)
        ]
    )
    return right.float().mean().item(), right.all(dim=1).float().mean().item()


def write(weights: dict[str, Tensor], metadata: dict[str, str], output: Path) -> None:
    """Write beside the target and then rename, so that the target is always whole."""
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f"{output.name}.{os.getpid()}.part")
    try:
        save_file({name: value.contiguous() for name, value in weights.items()}, part, metadata=metadata)
        part.chmod(0o644)  # the writer leaves it to its owner alone
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
