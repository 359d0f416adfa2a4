"""Does the map of a region of a dense prediction lie on the object in that region?

    python -m benchmarks.dense [--images 200] [--towers "class token" average registers transformers]

A head made in closed form (ridge regression) on the patch tokens of the demo model's weights predicts the class of each
patch of drawn images, or the background. Each object of an image with several objects has a question: the mean logit of
its class over its patches, `vitflow.masks(mask)`. *Wins* is the share of questions whose map has its largest mean on
this object among the objects of the image; ROC-AUC compares the object's patches with all others. The same questions
with the class token as readout ("class token given") show the maps that do not follow the question. The head is fitted
on other images than the questions are about.
"""

import argparse
import json
from typing import Any

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import vitflow
from vitflow.demo import CLASS_NAMES, draw_image
from vitflow.demo.model import demo_metadata
from vitflow.evaluation.measures.localisation import localise
from vitflow.registry.method_table import get_method

TOWERS = ("class token", "average", "registers", "transformers")
FITTED, FIRST_SEED = 150, 810_000  # no image of these seeds was used for anything else
SIDE, SIZE, WIDTH = 12, 96, 128


def tower(name: str) -> tuple[nn.Module, int]:
    """A tower with the weights of the demo model, and the number of its prefix tokens."""
    demo: Any = vitflow.load_model("demo")
    weights, architecture = demo.state_dict(), json.loads(demo_metadata()["architecture"])
    if name == "class token":
        return demo, 1
    if name == "transformers":
        return transformers_tower(weights), 1
    options = {"global_pool": "avg"} if name == "average" else {"reg_tokens": 4}
    model = VisionTransformer(**architecture, **options)
    if name == "average":
        weights = {
            key.replace("norm.", "fc_norm.") if key.startswith("norm.") else key: weights[key] for key in weights
        }
    else:
        place = weights["pos_embed"]
        weights["pos_embed"] = torch.cat([place[:, :1], torch.zeros(1, 4, WIDTH), place[:, 1:]], dim=1)
    model.load_state_dict(weights, strict=False)
    return model.eval(), model.num_prefix_tokens


def transformers_tower(weights: dict[str, Tensor]) -> nn.Module:
    """The demo model's weights in a ViTModel of transformers 5."""
    import transformers

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}
    config = transformers.ViTConfig(**sizes, image_size=SIZE, patch_size=8, layer_norm_eps=1e-6)
    model = transformers.ViTModel(config, add_pooling_layer=False)
    renamed = {"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj"}
    state = {
        "embeddings.cls_token": weights["cls_token"],
        "embeddings.position_embeddings": weights["pos_embed"],
        "embeddings.patch_embeddings.projection.weight": weights["patch_embed.proj.weight"],
        "embeddings.patch_embeddings.projection.bias": weights["patch_embed.proj.bias"],
        "layernorm.weight": weights["norm.weight"],
        "layernorm.bias": weights["norm.bias"],
    }
    for key, weight in weights.items():
        if not key.startswith("blocks."):
            continue
        _, block, *rest = key.split(".")
        part, kind = ".".join(rest[:-1]), rest[-1]
        if part == "attn.qkv":
            for letter, piece in zip("qkv", weight.chunk(3), strict=True):
                state[f"layers.{block}.attention.{letter}_proj.{kind}"] = piece
        else:
            state[f"layers.{block}.{renamed.get(part, part)}.{kind}"] = weight
    model.load_state_dict(state)
    return model.eval()


class Dense(nn.Module):
    """A tower whose head predicts the class of each patch: logits [batch, classes, rows, cols]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.tower, self.prefix = tower(name)
        self.head = nn.Linear(WIDTH, len(CLASS_NAMES) + 1)

    def tokens(self, pixels: Tensor) -> Tensor:
        features = (
            self.tower.forward_features(pixels) if hasattr(self.tower, "forward_features") else self.tower(pixels)
        )
        features = features if isinstance(features, Tensor) else features.last_hidden_state
        return features[:, self.prefix :]

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.tokens(pixels)).transpose(1, 2).unflatten(2, (SIDE, SIDE))


def per_patch(mask: np.ndarray) -> np.ndarray:
    """Share of each patch that a mask covers, [rows, cols]."""
    return mask.reshape(SIDE, SIZE // SIDE, SIDE, SIZE // SIDE).mean(axis=(1, 3))


def fit(model: Dense, explainer: vitflow.Explainer) -> float:
    """Fit the head by ridge regression on one-hot classes; return the accuracy per patch on other images."""
    rows: list[Tensor] = []
    labels: list[np.ndarray] = []
    for number in range(FITTED + 50):
        drawn = draw_image(FIRST_SEED + number)
        label = np.full((SIDE, SIDE), len(CLASS_NAMES))
        for index in drawn.labels:
            label[per_patch(drawn.mask_of(index)) > 0.5] = index
        with torch.no_grad():
            rows.append(model.tokens(explainer.pixels(drawn.image))[0].double())
        labels.append(label.ravel())
    known = torch.stack(rows)
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(np.stack(labels))).double()
    features = torch.cat([known, torch.ones(*known.shape[:2], 1)], dim=2)
    fitted, others = features[:FITTED].flatten(0, 1), features[FITTED:].flatten(0, 1)
    gram = fitted.T @ fitted + torch.eye(WIDTH + 1, dtype=torch.float64)
    solution = torch.linalg.solve(gram, fitted.T @ one_hot[:FITTED].flatten(0, 1))
    with torch.no_grad():
        model.head.weight.copy_(solution[:-1].T)
        model.head.bias.copy_(solution[-1])
    predicted = (others @ solution).argmax(dim=1)
    return float((predicted == one_hot[FITTED:].flatten(0, 1).argmax(dim=1)).double().mean())


def measure(name: str, images: int) -> None:
    model = Dense(name)
    demo = vitflow.load_model("demo").pretrained_cfg
    config = {"input_size": (3, SIZE, SIZE), "mean": demo["mean"], "std": demo["std"], "crop_pct": 1.0}
    plain = vitflow.Explainer(model, data_config=config, outputs=vitflow.masks())
    accuracy = fit(model, plain)
    class_token = torch.zeros(SIDE * SIDE + model.prefix)
    class_token[0] = 1.0
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
    count, seed = 0, FIRST_SEED + FITTED + 50
    while count < images:
        drawn, seed = draw_image(seed), seed + 1
        masks = {index: drawn.mask_of(index) for index in drawn.labels}
        patches = {index: per_patch(mask) > 0.5 for index, mask in masks.items()}
        if len(masks) < 2 or not all(place.any() for place in patches.values()):
            continue
        count += 1
        for index, mask in masks.items():
            explainer = vitflow.Explainer(model, data_config=config, outputs=vitflow.masks(mask))
            for preset in ("paper", "default"):
                options = get_method("gae").published if preset == "paper" else {}
                for readout, given in (("from the question", {}), ("class token given", {"readout": class_token})):
                    grid = explainer.explain(drawn.image, method="gae", target=index, **options, **given).grid
                    means = {other: grid[place].mean() for other, place in patches.items()}
                    wins = float(
                        max(means, key=lambda other: means[other]) == index and np.ptp(list(means.values())) > 0
                    )
                    rows.setdefault((preset, readout), []).append((wins, localise(grid, patches[index]).roc_auc))
    for (preset, readout), values in rows.items():
        wins, area = np.mean(values, axis=0)
        print(
            f"| {name} | {accuracy:.1%} | gae, {preset} | {readout} | {wins:.1%} | {area:.3f} | {len(values)} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--towers", nargs="+", default=TOWERS, choices=TOWERS)
    given = parser.parse_args()
    print("| tower | patches right | map | readout | wins | ROC-AUC | questions |\n|---|---|---|---|---|---|---|")
    for name in given.towers:
        measure(name, given.images)


if __name__ == "__main__":
    main()
