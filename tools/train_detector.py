"""Train a small detector: queries with cross-attention over the patch tokens of the demo model, which stays fixed.

    python -m tools.train_detector [--images 4000] [--minutes 5] [--output detector.pt]
    python -m tools.train_detector --only-measure --output detector.pt

It is a test object for `vitflow.boxes`, and is not shipped. The table shows, for boxes of drawn images that the
detector has not seen, how often the map of the named box has its largest mean inside its own object (`wins`, among the
objects of the image), for images with at least two objects.
"""

import argparse
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, scaled_dot_product_attention

import vitflow
from vitflow.demo import CLASS_NAMES, draw_image
from vitflow.evaluation.measures.localisation import localise
from vitflow.images.figures import figure_bytes

CLASSES, QUERIES, SIZE = 8, 10, 96
FIRST_SEED = 900_000  # no image of these seeds was used to train the demo model


class Attention(nn.Module):
    """Attention of queries [batch, queries, width] to keys [batch, keys, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Weighted mean of the values of the keys for each query."""
        parts = (self.queries(queries), *self.keys(keys).chunk(2, dim=-1))
        split = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        return self.out(scaled_dot_product_attention(*split).transpose(1, 2).flatten(2))


class Cross(nn.Module):
    """A layer of the decoder: attention of the queries to each other and to the patches, then a small network."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.among, self.across = Attention(width, heads), Attention(width, heads)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, states: Tensor, places: Tensor, patches: Tensor) -> Tensor:
        """States of the queries after this layer."""
        queries = self.norms[0](states) + places
        states = states + self.among(queries, queries)
        states = states + self.across(self.norms[1](states) + places, patches)
        return states + self.mlp(self.norms[2](states))


class Detector(nn.Module):
    """A detector in the format of DETR: logits of classes and "no object", and boxes, for each query."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.backbone: Any = vitflow.load_model("demo")
        for weight in self.backbone.parameters():
            weight.requires_grad_(False)
        self.project = nn.Linear(self.backbone.num_features, width)
        self.position = nn.Parameter(0.1 * torch.randn(1, self.backbone.patch_embed.num_patches, width))
        self.places = nn.Parameter(torch.randn(1, QUERIES, width))
        self.decoder = nn.ModuleList(Cross(width) for _ in range(layers))
        self.norm, self.classes = nn.LayerNorm(width), nn.Linear(width, CLASSES + 1)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4))

    def tokens(self, pixels: Tensor) -> Tensor:
        """Patch tokens of the demo model, [batch, patches, channels]."""
        return self.backbone.forward_features(pixels)[:, self.backbone.num_prefix_tokens :]

    def decode(self, tokens: Tensor) -> dict[str, Tensor]:
        """Detections from patch tokens."""
        patches = self.project(tokens) + self.position
        states = self.places.expand(len(tokens), -1, -1)
        for layer in self.decoder:
            states = layer(states, self.places, patches)
        states = self.norm(states)
        return {"pred_logits": self.classes(states), "pred_boxes": self.boxes(states).sigmoid()}

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Detections of a batch of images [batch, 3, height, width]."""
        return self.decode(self.tokens(pixels))


def edges(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of an object, in pixels."""
    rows, cols = mask.any(axis=1).nonzero()[0], mask.any(axis=0).nonzero()[0]
    return int(cols[0]), int(rows[0]), int(cols[-1]) + 1, int(rows[-1]) + 1


def objects_of(seed: int) -> tuple[np.ndarray, list[tuple[int, tuple[int, int, int, int], np.ndarray]]]:
    """A drawn image with the class, box and mask of each object."""
    drawn = draw_image(seed)
    masks = [(label, drawn.mask_of(label)) for label in drawn.labels]
    return drawn.image, [(label, edges(mask), mask) for label, mask in masks if mask.any()]


def loss_of(output: dict[str, Tensor], truth: list[tuple[Tensor, Tensor]]) -> Tensor:
    """DETR's loss with the best assignment of queries to objects; boxes by their L1 distance."""
    logits, boxes = output["pred_logits"], output["pred_boxes"]
    wanted = torch.full(logits.shape[:2], CLASSES)
    apart = []
    for index, (labels, given) in enumerate(truth):
        cost = 5.0 * torch.cdist(boxes[index], given, p=1) - logits[index].softmax(dim=-1)[:, labels]
        rows, cols = linear_sum_assignment(cost.detach().numpy())
        wanted[index, rows] = labels[cols]
        apart.append((boxes[index, rows] - given[cols]).abs().sum(dim=1))
    weight = 1.0 - 0.7 * one_hot(torch.tensor(CLASSES), CLASSES + 1).float()
    return cross_entropy(logits.flatten(0, 1), wanted.flatten(), weight) + 5.0 * torch.cat(apart).mean()


def train(detector: Detector, images: int, minutes: float) -> None:
    """Train the decoder on drawn images; the tokens of the fixed tower are computed once."""
    explainer = vitflow.Explainer(detector.backbone)
    tokens, truth, started = [], [], time.monotonic()
    for seed in range(FIRST_SEED, FIRST_SEED + images):
        image, objects = objects_of(seed)
        with torch.no_grad():
            tokens.append(detector.tokens(explainer.pixels(image)))
        edge = torch.tensor([box for _, box, _ in objects], dtype=torch.float32) / SIZE
        middle, side = (edge[:, :2] + edge[:, 2:]) / 2, edge[:, 2:] - edge[:, :2]
        truth.append((torch.tensor([label for label, *_ in objects]), torch.cat([middle, side], dim=1)))
    known = torch.cat(tokens)
    print(f"{images} images in {time.monotonic() - started:.0f} s", flush=True)
    learned = [weight for weight in detector.parameters() if weight.requires_grad]
    optimizer, started, step = torch.optim.AdamW(learned, lr=0.0, weight_decay=0.01), time.monotonic(), 0
    while (progress := (time.monotonic() - started) / (60 * minutes)) < 1.0:
        chosen = np.random.default_rng(step).integers(images, size=32)
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * (1.0 - progress))
        loss = loss_of(detector.decode(known[chosen]), [truth[index] for index in chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"{step:>6} steps  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s", flush=True)
        step += 1


def measure(detector: Detector, boxes: int, methods: list[str]) -> None:
    """Print, for boxes of new images with several objects, how well maps and detections lie on their objects."""
    tower = vitflow.Explainer(detector.backbone)
    config = {"input_size": (3, SIZE, SIZE), "mean": tower.spec.mean, "std": tower.spec.std, "crop_pct": 1.0}
    rows: dict[str, list[tuple[float, float, float]]] = {}
    right, count, seed = [], 0, 0
    question = vitflow.Explainer(detector, data_config=config, class_names=CLASS_NAMES, outputs=vitflow.boxes())
    while count < boxes:
        seed += 1
        image, objects = objects_of(seed)
        for label, box, mask in objects if len(objects) > 1 else []:
            question.regions.question = vitflow.boxes(box)
            maps = question.explain_batch([image], methods=methods)
            right.append([maps[0].target == label, maps[0].facts["detection"]["iou"]])
            for each in maps:
                means = [each.heatmap[other].mean() for _, _, other in objects]
                place = [label for label, *_ in objects].index(label)
                wins = float(int(np.argmax(means)) == place and np.ptp(means) > 0)
                rows.setdefault(each.method, []).append((wins, localise(each.heatmap, mask).roc_auc, 1 / len(objects)))
            count += 1
    known = np.array(right, dtype=float)
    print(f"{count} boxes; class right {known[:, 0].mean():.1%}, IoU {known[:, 1].mean():.2f}\n")
    print("| method | wins | ROC-AUC | chance |\n|---|---|---|---|")
    for method, values in rows.items():
        wins, area, chance = np.mean(values, axis=0)
        print(f"| {method} | {wins:.1%} | {area:.3f} | {chance:.1%} |")


def draw(detector: Detector, path: Path, seed: int = 35) -> None:
    """Draw the maps of the most probable detections of one image."""
    config = {"input_size": (3, SIZE, SIZE), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    question = {"outputs": vitflow.boxes(), "class_names": CLASS_NAMES, "name": "a small detector"}
    explainer = vitflow.Explainer(detector, data_config=config, **question)
    image, _ = objects_of(seed)
    figure = vitflow.compare(image, model=explainer, methods=["gae", "sampling", "occlusion"], targets="top3").figure()
    resized = Image.open(io.BytesIO(figure_bytes(figure, ".png"))).convert("RGB")
    resized.resize((2 * resized.width // 3, 2 * resized.height // 3)).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--boxes", type=int, default=200)
    parser.add_argument("--methods", nargs="+", default=["gae", "gradient_rollout", "rollout"])
    parser.add_argument("--figure", type=Path, help="also draw the maps of one image here")
    parser.add_argument("--only-measure", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("detector.pt"))
    given = parser.parse_args()
    torch.manual_seed(0)
    detector = Detector().eval()
    if not given.only_measure:
        train(detector, given.images, given.minutes)
        torch.save(detector.state_dict(), given.output)
    detector.load_state_dict(torch.load(given.output))
    if given.figure:
        draw(detector, given.figure)
    measure(detector, given.boxes, given.methods)


if __name__ == "__main__":
    main()
