"""Does the map of one region of a dense prediction have its largest mean in that region?

    python -m benchmarks.regions [--model demo] [--checkpoint FILE] [--photographs FOLDER] [--images 15]
    python -m benchmarks.regions --cost [--model vit_small_patch16_224 --untrained]

The model's classification head is applied to its patch tokens. Each image has four questions: the mean logit of the
most probable class over one quarter of the patches. Per method and per readout ("gradient" follows from the question,
"class token" is given by hand) the table shows wins, the share of questions whose quarter has the largest mean of the
four (chance 25 %), and the mean ROC-AUC of the quarter's patches. Without photographs, the images are drawn ones.

With `--cost`, seconds of a map of one region are compared with those of a map of a class, whose readout is the class
token.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import timm
import torch
from torch import Tensor, nn

from vitflow import Explainer, load_model
from vitflow.demo import draw_image
from vitflow.evaluation.measures.localisation import localise
from vitflow.registry.method_table import get_method

# Each as published, and with its defaults, which weight values and spread maps among similar patches.
METHODS = [(name, preset) for name in ("gae", "gradient_rollout", "rollout") for preset in ("paper", "default")]
FIRST_SEED = 800_000  # images that nothing was chosen on


class Dense(nn.Module):
    """A Vision Transformer of timm whose head reads each patch token: logits [batch, patches, classes]."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.backbone.forward_features(pixels)[:, self.backbone.num_prefix_tokens :]
        return self.backbone.head(tokens)


def quarters(side: int) -> Tensor:
    """The patches of each quarter, bool [4, side · side]."""
    half = torch.arange(side) < side / 2
    rows, cols = half.view(-1, 1), half.view(1, -1)
    cells = [rows & cols, rows & ~cols, ~rows & cols, ~rows & ~cols]
    return torch.stack([cell.flatten() for cell in cells])


def explainer_of(name: str, checkpoint: str | None = None) -> Explainer:
    backbone = load_model(name, checkpoint=checkpoint)
    side, config = backbone.patch_embed.grid_size[0], backbone.pretrained_cfg
    cells = quarters(side)

    def outputs(output: Tensor) -> Tensor:
        best = output.mean(dim=1).argmax(dim=1)
        chosen = output[torch.arange(len(output)), :, best]  # [batch, patches]
        return torch.stack([chosen[:, cell].mean(dim=1) for cell in cells], dim=1)

    return Explainer(Dense(backbone), data_config=config, outputs=outputs)


def measure(explainer: Explainer, images: list, methods: list = METHODS) -> dict[tuple[str, str, str], np.ndarray]:
    """Wins and ROC-AUC of each question, [questions, 2], by method, preset and readout."""
    side = explainer.record(images[0]).layout.rows
    cells = quarters(side).numpy()
    class_token = torch.zeros(side * side + 1)
    class_token[0] = 1.0
    scores: dict[tuple[str, str, str], list] = {}
    for image in images:
        for readout in ("gradient", "class token"):
            given = {} if readout == "gradient" else {"readout": class_token}
            for method, preset in methods:
                options = get_method(method).published if preset == "paper" else {}
                maps = explainer.explain_batch([image], methods=[(method, options)], targets=[0, 1, 2, 3], **given)
                for number in range(4):
                    grid = maps[number if len(maps) > 1 else 0].grid
                    means = [grid.flatten()[cell].mean() for cell in cells]
                    wins = float(np.argmax(means) == number and np.ptp(means) > 0)
                    area = localise(grid, cells[number].reshape(grid.shape)).roc_auc
                    scores.setdefault((method, preset, readout), []).append([wins, area])
    return {key: np.array(rows) for key, rows in scores.items()}


def cost(name: str, checkpoint: str | None, *, pretrained: bool, rounds: int) -> None:
    """Print the median seconds of maps of a class and of a region, and their ratio; the two are timed in turn."""
    backbone = load_model(name, checkpoint=checkpoint) if pretrained else timm.create_model(name).eval()
    cells, config = quarters(backbone.patch_embed.grid_size[0]), backbone.pretrained_cfg

    def outputs(output: Tensor) -> Tensor:
        return torch.stack([output[:, cell, 0].mean(dim=1) for cell in cells], dim=1)

    of_class = Explainer(backbone, data_config=config)
    of_region = Explainer(Dense(backbone), data_config=config, outputs=outputs)
    pixels = of_class.pixels(draw_image(FIRST_SEED).image)
    print("| method | class token, ms | region, ms | ratio of medians |\n|---|---|---|---|")
    for method in ("gae", "gradient_rollout", "rollout"):
        seconds: list[list[float]] = [[], []]
        for number in range(rounds + 2):
            for times, explainer in zip(seconds, (of_class, of_region), strict=True):
                started = time.perf_counter()
                explainer.explain(pixels, method=method, target=0)
                if number > 1:  # the first ones observe the head
                    times.append(time.perf_counter() - started)
        ours, theirs = (1e3 * float(np.median(times)) for times in seconds)
        print(f"| {method} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--checkpoint")
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--images", type=int, default=15)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--untrained", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    if given.cost:
        cost(given.model, given.checkpoint, pretrained=not given.untrained, rounds=given.rounds)
        return
    files = [] if given.photographs is None else sorted(given.photographs.glob("*.*g"))[: given.images]
    images = files or [draw_image(FIRST_SEED + number).image for number in range(given.images)]
    actual = measure(explainer_of(given.model, given.checkpoint), images)
    print(f"{given.model}, {len(images)} images, {4 * len(images)} questions\n")
    print("| method | options | readout | wins | ROC-AUC |\n|---|---|---|---|---|")
    for (method, preset, readout), rows in actual.items():
        print(f"| {method} | {preset} | {readout} | {rows[:, 0].mean():.1%} | {rows[:, 1].mean():.3f} |")


if __name__ == "__main__":
    main()
