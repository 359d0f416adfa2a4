"""Which estimator sampling and consensus use, and with how many masks.

    python -m benchmarks.estimators --checkpoint FILE --boxes DATA --third FILE -o FOLDER [--of sampling]
    python -m benchmarks.estimators --train FILE --minutes 20

The second command trains the third model: a vision transformer of torchvision (64 pixels, 8 × 8 patches, softmax) on
drawn images with one to three objects, so that the predicted class is one of several.

The rule, written down before anything was measured by it:

1. Three models: a trained ViT-Tiny on photographs with boxes and on grids of four of them; the demo model and the third
   model on drawn images that no table shows. Seats: *single* (the gain in ROC-AUC and in deletion AUC, mean over the
   three models), *grids* (the gain in ROC-AUC and in wins), *objects* (the gain in the energy of the target among all
   objects and in its wins, mean over both models on drawn images). Gains are paired differences from the method
   with the mean difference and 256 masks, counted so that more is better.
2. The images are split in halves by the SHA-256 of their names, as for the other defaults: one to choose on, the other
   to report.
3. With 96 masks, on the choosing half: a candidate is out if it loses more than 0.01 ROC-AUC on any of the models. Of
   the others the one with the largest sum of the three seats is chosen. Then the number of masks: the fewest whose
   sum is within 0.01 of that with 256.
4. It holds if, on the reported half, in no measure of no model it is worse than the mean difference with 256 masks by
   more than one standard error of the paired difference, and better in one. Otherwise the estimator stays as it is.
   What came of it: nothing holds in that sense, and the mean difference stays the default. docs/measured.md has the
   table.
5. The mean difference with 256 masks, blurred (Gaussian, one patch), stands beside the candidates: if it is within one
   standard error of the chosen one in every measure, the gain is smoothing, and the estimator stays as it is.
"""

import argparse
import math
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import vitflow
from benchmarks.defaults import CHECKPOINT, choosing, data_parser
from vitflow.demo import CLASS_NAMES, FIRST_TRAINING_SEED, draw_image
from vitflow.evaluation import evaluate
from vitflow.evaluation.results import Evaluation
from vitflow.explaining.maps import Maps
from vitflow.explaining.refining import affinity_of, make_maps
from vitflow.explaining.sampling import geometric_mean, sample
from vitflow.explaining.targeted_trace import TargetedTrace
from vitflow.methods.refinement import Affinity, refine
from vitflow.methods.sampling import mean_differences, regress
from vitflow.registry.method_table import get_method, register_method

SAMPLED = {"keep": 0.3, "cells": 7, "random_seed": 0, "occlusion_batch": 32}
RECORDED = {"value_weighted": "output", "head_fusion": "signed_mean", "refine": 1, "affinity": "both"}
NEEDS = {"heads", "gradients", "predict"}
MEASURES = {
    "photographs": ("roc_auc", "deletion_auc", "energy", "grid_auc", "grid_wins"),
    "demo": ("roc_auc", "deletion_auc", "energy", "separation", "separation_wins"),
    "third": ("roc_auc", "deletion_auc", "energy", "separation", "separation_wins"),
}
SEATS = {"single": ("roc_auc", "deletion_auc"), "grids": ("grid_auc", "grid_wins")}
SEATS["objects"] = ("separation", "separation_wins")
TODAY = 256

#: Candidates of each method: what they estimate the weights with, and with what options.
CANDIDATES: dict[str, list[dict]] = {
    "sampling": [
        {},
        {"blur": 1.0},
        *({"prior": "affinity", "noise": noise} for noise in (4.0, 12.0, 36.0)),
        {"prior": "masks", "noise": 12.0},
        {"prior": "none", "noise": 12.0},
    ],
    "consensus": [
        {},
        {"blur": 1.0},
        *({"prior": "affinity", "noise": noise} for noise in (4.0, 12.0, 36.0)),
        {"prior": "affinity", "noise": 12.0, "weight": 1},
        *({"prior": "gae", "offset": offset, "noise": 12.0} for offset in (0.1, 0.3, 1.0)),
        {"prior": "gae", "offset": 0.3, "noise": 4.0},
        {"prior": "gae", "offset": 0.3, "noise": 36.0},
        {"prior": "gae", "offset": 0.3, "noise": 12.0, "power": 2.0},
        {"prior": "gae", "offset": 0.1, "noise": 36.0},
        {"prior": "gae", "offset": 0.1, "noise": 12.0, "power": 0.5},
        {"prior": "affinity", "noise": 36.0, "weight": 1},
        {"prior": "gae", "offset": 0.1, "noise": 36.0, "weight": 1},
        {"prior": "gae", "offset": 0.1, "noise": 36.0, "weight": 2},
        *({"prior": "mixed", "single": share, "noise": 12.0} for share in (0.3, 1.0, 3.0)),
        *({"prior": "feature", "known": share, "noise": 12.0} for share in (0.3, 1.0, 3.0)),
        {"masks": "whitened"},
        {"prior": "affinity", "noise": 12.0, "masks": "whitened"},
        {"prior": "mixed", "single": 1.0, "noise": 12.0, "masks": "whitened"},
    ],
}


# --- Candidates ------------------------------------------------------------------------------------------------------


def candidate(trace: TargetedTrace, *, of: str, masks: int, entry: tuple, **_: object) -> Maps:
    """The maps of a candidate."""
    options = dict(entry)
    if options.get("masks") == "whitened":
        with mock.patch("vitflow.explaining.sampling.draw_masks", whitened_masks):
            kept, outputs, grid, _ = sample(trace, masks=masks, **{**SAMPLED, "random_seed": 1})
    else:
        kept, outputs, grid, _ = sample(trace, masks=masks, **SAMPLED)
    affinity = affinity_of(trace, "both", grid)
    gae = gae_of(trace) if of == "consensus" else torch.zeros(len(outputs), *grid)
    matrices = affinity.matrix
    grids = []
    for image, (scores, target) in enumerate(zip(outputs, trace.class_indices.tolist(), strict=True)):
        weights = estimate(kept, scores[:, target], matrices[image], gae[image], options).reshape(1, *grid)
        grids.append(refine(weights.clamp_min(0.0), of_image(affinity, image), 1))
    maps = torch.cat(grids)
    if of == "consensus" and (options.get("prior") != "gae" or "weight" in options):
        maps = geometric_mean([gae, maps], [1, options.get("weight", 2)])
    if "blur" in options:
        maps = torch.stack([torch.from_numpy(ndimage.gaussian_filter(one.numpy(), options["blur"])) for one in maps])
    return Maps(maps)


def estimate(kept: Tensor, scores: Tensor, matrix: Tensor, gae: Tensor, options: dict) -> Tensor:
    """The weight of each patch, [patches]."""
    prior = options.get("prior")
    if prior is None:
        return mean_differences(kept, scores)
    if prior == "affinity":
        factor = matrix
    elif prior == "gae":
        share = (gae.flatten() / gae.mean().clamp_min(1e-12)) ** options.get("power", 1.0) + options["offset"]
        factor = share[:, None] * matrix
    elif prior == "masks":
        centred = kept.double() - kept.double().mean(dim=0)
        factor = centred.T
    elif prior == "mixed":  # patches vary with similar ones, and each on its own
        single = torch.eye(len(matrix)) * (options["single"] / math.sqrt(len(matrix)))
        factor = torch.cat([matrix / matrix.norm(), single.to(matrix)], dim=1)
    elif prior == "feature":  # a multiple of GAE, known up to its scale, and what differs from it
        known = gae.flatten().to(matrix)
        known = known * (options["known"] / known.norm().clamp_min(1e-12))
        factor = torch.cat([matrix / matrix.norm(), known[:, None]], dim=1)
    else:
        factor = torch.eye(kept.shape[1])
    return regress(kept, scores, factor, options["noise"]).mean


def whitened_masks(rows: int, cols: int, *, masks: int, keep: float, cells: int, seed: int) -> Tensor:
    """Masks like those of `draw_masks`, from fields whose cells are uncorrelated over the masks."""
    random, height, width = np.random.default_rng(seed), min(cells, rows), min(cells, cols)
    fields = random.standard_normal((masks, height * width))
    left, _, right = np.linalg.svd(fields - fields.mean(axis=0), full_matrices=False)
    white = torch.from_numpy(left @ right).reshape(masks, 1, height, width)
    values = nn.functional.interpolate(white, size=(rows, cols), mode="bicubic", align_corners=False).flatten(1)
    highest = values.topk(round(keep * rows * cols), dim=1).indices
    return torch.zeros(masks, rows * cols, dtype=torch.bool).scatter_(1, highest, True)


def gae_of(trace: TargetedTrace) -> Tensor:
    """GAE with the options of consensus, refined, [batch, rows, cols]."""
    method, defaults = get_method("gae"), get_method("consensus").defaults
    options = {name: value for name, value in defaults.items() if method.accepts(name)}
    return make_maps(method, method.complete(options), trace)[0].grids.detach().double().clamp_min(0.0)


def of_image(affinity: Affinity, image: int) -> Affinity:
    """The affinity of one image of a batch."""

    def one(part):
        return type(part)(*(getattr(part, name)[image : image + 1] for name in ("matrices", "rows", "cols", "rest")))

    return Affinity(
        tuple(one(layer) for layer in affinity.attention), None if not affinity.keys else one(affinity.keys)
    )


def name_of(of: str, entry: dict, masks: int) -> str:
    return "_".join([of, str(masks), *(f"{name}{value}" for name, value in entry.items())]).replace(".", "p")


def register(of: str, entry: dict, masks: int) -> str:
    name = name_of(of, entry, masks)
    register_method(
        name,
        candidate,
        title=name,
        summary="A candidate.",
        question="Which estimator is better?",
        defaults={"of": of, "masks": masks, "entry": tuple(entry.items()), **RECORDED},
        needs=NEEDS,
        class_specific=True,
        refine_stage="inside",
    )
    return name


# --- The third model -------------------------------------------------------------------------------------------------


def third_model(weights: Path | None = None) -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    model = VisionTransformer(64, 8, 5, 4, 128, 384, num_classes=len(CLASS_NAMES))
    if weights is not None:
        model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval()


class Drawn(Dataset):
    """Drawn images and the classes of their objects in equal shares."""

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn, shares = draw_image(FIRST_TRAINING_SEED + 3_000_000 + index, 64), torch.zeros(len(CLASS_NAMES))
        shares[list(drawn.labels)] = 1 / len(drawn.labels)
        return torch.from_numpy(drawn.image).permute(2, 0, 1).float() / 127.5 - 1, shares


def train(file: Path, minutes: float) -> None:
    """Train the third model with one thread and one process that draws."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = third_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, betas=(0.9, 0.98))
    started = time.monotonic()
    for number, (pixels, shares) in enumerate(DataLoader(Drawn(), batch_size=32, num_workers=1, prefetch_factor=8)):
        progress = (time.monotonic() - started) / (60 * minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (number + 1) / 200) * (0.01 + 0.495 * (1 + math.cos(math.pi * progress)))
        loss = -(shares * model(pixels).log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if number % 200 == 0:
            print(f"{32 * number} images, loss {loss.item():.3f}", flush=True)
    torch.save(model.state_dict(), file)


# --- Measuring -------------------------------------------------------------------------------------------------------


def gain(actual: Evaluation, metric: str, first: str, base: str, half: bool) -> np.ndarray:
    """Paired differences on one half of the images, more is better."""
    rows = [number for number, image in enumerate(actual.images) if choosing(image["input"]) is half]
    values = actual.values[metric]
    difference = values[rows, actual.methods.index(first)] - values[rows, actual.methods.index(base)]
    difference = difference[~np.isnan(difference)]
    return -difference if metric == "deletion_auc" else difference


def seats(runs: dict[str, Evaluation], first: str, base: str, half: bool) -> dict[str, float]:
    """The gains in the seats; a model without the measure is left out."""
    gains: dict[str, list[float]] = {seat: [] for seat in SEATS}
    for seat, metrics in SEATS.items():
        for actual in runs.values():
            measured = [gain(actual, metric, first, base, half) for metric in metrics if metric in actual.values]
            gains[seat] += [float(each.mean()) for each in measured if len(each)]
    return {seat: float(np.mean(each)) if each else float("nan") for seat, each in gains.items()}


def table(runs: dict[str, Evaluation], half: bool | None) -> None:
    """The means of all methods."""
    for run, actual in runs.items():
        metrics = [metric for metric in MEASURES[run] if metric in actual.values]
        rows = [n for n, image in enumerate(actual.images) if half is None or choosing(image["input"]) is half]
        print(f"\n{run}: {len(rows)} images\n\n| map | {' | '.join(metrics)} |\n" + "|---" * (len(metrics) + 1) + "|")
        for number, one in enumerate(actual.methods):
            means = (f"{np.nanmean(actual.values[metric][rows, number]):.3f}" for metric in metrics)
            print(f"| {one} | {' | '.join(means)} |")


def choose(runs: dict[str, Evaluation], of: str, entries: list[dict], masks: int, base: str) -> dict:
    """The candidate with the largest sum of seats on the choosing half, and its place on the other one."""
    sums = {}
    print(
        f"\n| {of}, {masks} masks | half | single | grids | objects | sum | largest loss of ROC-AUC |\n"
        + "|---" * 7
        + "|"
    )
    for number, entry in enumerate(entries):
        first = name_of(of, entry, masks)
        for half in (True, False):
            lost = max(-gain(actual, "roc_auc", first, base, half).mean() for actual in runs.values())
            gains = seats(runs, first, base, half)
            if half and lost <= 0.01 and "blur" not in entry:
                sums[number] = float(np.nansum(list(gains.values())))
            words = " | ".join(f"{value:+.3f}" for value in (*gains.values(), np.nansum(list(gains.values()))))
            print(f"| {first} | {'chosen on' if half else 'reported'} | {words} | {lost:+.3f} |")
    return entries[max(sums, key=sums.__getitem__)] if sums else entries[0]


def verdict(runs: dict[str, Evaluation], first: str, base: str) -> None:
    """Each measure of the reported half, with its standard error."""
    print(f"\n| {first} minus {base} | measure | gain | standard error | |\n" + "|---" * 5 + "|")
    for run, actual in runs.items():
        for metric in MEASURES[run]:
            if metric in actual.values and len(gains := gain(actual, metric, first, base, False)):
                error = gains.std(ddof=1) / math.sqrt(len(gains))
                word = "worse" if gains.mean() < -error else "better" if gains.mean() > error else ""
                print(f"| {run} | {metric} | {gains.mean():+.4f} | {error:.4f} | {word} |")


def main() -> None:
    parser = data_parser(__doc__.splitlines()[0])
    parser.add_argument("--of", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--third", type=Path, help="weights of the third model")
    parser.add_argument("--runs", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--entries", type=int, nargs="+", help="measure only these candidates, by their index")
    parser.add_argument("--masks", type=int, nargs="+", default=[96])
    given = parser.parse_args()
    warnings.simplefilter("ignore", vitflow.VitflowWarning)
    chosen, methods = {}, []
    for of in given.of:
        entries = CANDIDATES[of]
        chosen[of] = [entries[index] for index in given.entries] if given.entries else entries
        for entry, masks in [({}, TODAY), ({"blur": 1.0}, TODAY), *((e, m) for m in given.masks for e in chosen[of])]:
            methods += [] if name_of(of, entry, masks) in methods else [register(of, entry, masks)]
    runs = {run: measured(run, given, methods) for run in given.runs}
    for half in (True, False):
        table(runs, half)
    for of, entries in chosen.items():
        base = name_of(of, {}, TODAY)
        for masks in given.masks:
            best = choose(runs, of, entries, masks, base)
            verdict(runs, name_of(of, best, masks), base)


def measured(run: str, given: argparse.Namespace, methods: list[str]) -> Evaluation:
    """Evaluate all candidates on one model."""
    separating = ["grid"] if run == "photographs" else ["separation", "separation_wins"]
    if run == "photographs":
        model: object = vitflow.load_model(CHECKPOINT, checkpoint=given.checkpoint)
    elif run == "third":
        data_config = {"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
        names = list(CLASS_NAMES)
        model = vitflow.Explainer(third_model(given.third), data_config=data_config, class_names=names)
    else:
        model = "demo"
    return evaluate(
        given.boxes if run == "photographs" else given.drawn,
        model=model,
        methods=methods,
        metrics=["roc_auc", "deletion_auc", "energy", *separating],
        points=6,
        blurred_control=False,
        output=given.output / run,
        progress=lambda state: print(f"\r{run}: {state.done} of {state.total}", end="", file=sys.stderr),
    )


if __name__ == "__main__":
    if "--train" in sys.argv:
        train(Path(sys.argv[sys.argv.index("--train") + 1]), float(sys.argv[sys.argv.index("--minutes") + 1]))
    else:
        main()
