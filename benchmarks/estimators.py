"""Which estimator sampling and consensus use, with which prior mean, and with how many masks.

    python -m benchmarks.estimators --checkpoint FILE --boxes DATA --third FILE -o FOLDER [--of sampling]
    python -m benchmarks.estimators --train FILE --minutes 30

The second command trains the third model: DINOv2 of transformers (64 pixels, 8 × 8 patches; its head reads
the class token and the mean of the patches, softmax) on drawn images with one to three objects, so that the predicted
class is one of several.

The rule, written down before anything was measured by it:

1. Three models: a trained ViT-Tiny on photographs with boxes and on grids of four of them; the demo model and the third
   model on drawn images that no table shows. Seats of equal weight: *single* (ROC-AUC and pointing game), *deletion*
   (deletion AUC), *grids* (ROC-AUC and wins on grids), *objects* (the energy of the target among all objects, and its
   wins, on drawn images). A gain is the mean paired difference from the method with the mean difference and 256 masks,
   counted so that more is better; a seat of a model is the mean gain of its measures, a seat is the mean over models.
2. The images are split in halves by the SHA-256 of their names, as for the other defaults: one to choose on, the other
   to report.
3. On the choosing half, for each number of masks: a candidate is out if it loses more than 0.01 in a seat of a model.
   Of the others the one with the largest sum of the four seats is chosen.
4. With 96 masks the chosen candidate becomes the default if, on the reported half, it is within 0.005 of the mean
   difference with 256 masks in every seat of two models, and within 0.01 on the remaining one. With 48 masks it is
   documented as the economical setting if it is within 0.02 in every seat of every model.
5. The mean difference with 256 masks, blurred (Gaussian, one patch), is measured as well: if it is within one standard
   error of the chosen candidate in every measure, the gain is smoothing, and the estimator stays as it is.
"""

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

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
from vitflow.explaining.applying import affinity_of, make_maps
from vitflow.explaining.maps import Maps, TargetedTrace
from vitflow.explaining.sampling import geometric_mean, sample
from vitflow.methods.refinement import Affinity, refine
from vitflow.methods.sampling import SMOOTHING, mean_differences, regress
from vitflow.models.calls import logits_of
from vitflow.registry.method_table import get_method, register_method

SAMPLED = {"keep": 0.3, "cells": 7, "random_seed": 0, "occlusion_batch": 32}
RECORDED = {"value_weighted": "output", "head_fusion": "signed_mean", "refine": 1, "affinity": "both"}
NEEDS = {"heads", "gradients", "predict"}
_SINGLE = ("roc_auc", "pointing_game", "deletion_auc")
MEASURES = {
    "photographs": (*_SINGLE, "grid_auc", "grid_wins"),
    "grids": ("grid_auc", "grid_wins"),
    "demo": (*_SINGLE, "separation", "separation_wins"),
    "third": (*_SINGLE, "separation", "separation_wins"),
}
SEATS = {"single": ("roc_auc", "pointing_game"), "deletion": ("deletion_auc",), "grids": ("grid_auc", "grid_wins")}
SEATS["objects"] = ("separation", "separation_wins")
TODAY = 256

#: Candidates of each method. `similar`: masks in which similar patches stay together; `noise`: of the regression (0:
#: estimated); `mean`: its prior mean; `times`: the map that it is multiplied with; `power`: its own exponent.
EARLIER: dict = {"estimate": "regression"}
REGRESSION: dict = EARLIER | {"similar": True}
CANDIDATES: dict[str, list[dict]] = {
    "sampling": [REGRESSION, EARLIER, *(REGRESSION | {"mean": mean} for mean in ("gae", "frozen", "both"))],
    "consensus": [
        *(each | {"times": "gae", "power": 2} for each in (REGRESSION, EARLIER)),
        *(REGRESSION | {"noise": noise, "times": "gae", "power": 2} for noise in (12.0, 3.0, 0.0)),
        *(REGRESSION | {"mean": mean, "times": "gae", "power": 2} for mean in ("gae", "frozen", "both")),
        REGRESSION | {"mean": "both"},
        REGRESSION | {"mean": "gae", "times": "both", "power": 1},
        REGRESSION | {"mean": "both", "times": "both", "power": 1},
    ],
}
BASES: dict[str, dict] = {"sampling": {}, "consensus": {"times": "gae", "power": 2}}


# --- Candidates ------------------------------------------------------------------------------------------------------


def candidate(trace: TargetedTrace, *, masks: int, entry: tuple, **_: object) -> Maps:
    """The maps of a candidate."""
    options = dict(entry)
    sampled = sample(trace, masks=masks, affinity="both" if "similar" in options else None, **SAMPLED)
    affinity = affinity_of(trace, "both", sampled.grid)
    known = {name: gradient_map(trace, name) for name in {options.get("mean"), options.get("times")} - {None}}
    grids = []
    for image, target in enumerate(trace.class_indices.tolist()):
        kept, scores = sampled.kept[image], sampled.scores[image][:, target]
        if "estimate" in options:
            mean = known[options["mean"]][image].flatten() if "mean" in options else None
            factor = affinity.matrix[image]
            noise = options.get("noise", SMOOTHING) or None
            weights = regress(kept, scores, factor, noise=noise, prior_mean=mean).mean
        else:
            weights = mean_differences(kept, scores)
        grids.append(refine(weights.clamp_min(0.0).reshape(1, *sampled.grid), of_image(affinity, image), 1))
    maps = torch.cat(grids)
    if "times" in options:
        maps = geometric_mean([known[options["times"]], maps], [1, options["power"]])
    if "blur" in options:
        maps = torch.stack([torch.from_numpy(ndimage.gaussian_filter(one.numpy(), options["blur"])) for one in maps])
    return Maps(maps)


def gradient_map(trace: TargetedTrace, name: str) -> Tensor:
    """GAE, the frozen gradient, or the geometric mean of both, refined, [batch, rows, cols]; computed once a trace."""
    if (key := ("gradient map", name, *trace.class_indices.tolist())) not in trace.cached_outputs:
        if name == "both":
            maps = geometric_mean([gradient_map(trace, each) for each in ("gae", "frozen")], [1, 1])
        else:
            method = get_method({"gae": "gae", "frozen": "frozen_gradient"}[name])
            options = {name: value for name, value in RECORDED.items() if method.accepts(name)}
            maps = make_maps(method, method.complete(options), trace)[0].grids.detach().double().clamp_min(0.0)
        trace.cached_outputs[key] = maps
    return trace.cached_outputs[key]


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
        defaults={"masks": masks, "entry": tuple(entry.items()), **RECORDED},
        needs=NEEDS,
        class_specific=True,
        refine_stage="inside",
    )
    return name


# --- The third model -------------------------------------------------------------------------------------------------


def third_model(weights: Path | None = None) -> nn.Module:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    size = {"image_size": 64, "patch_size": 8, "hidden_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4}
    model = Dinov2ForImageClassification(
        Dinov2Config(**size, mlp_ratio=3, num_labels=len(CLASS_NAMES), layerscale_value=1.0)
    )
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


def train(build: Callable[[], nn.Module], file: Path, minutes: float) -> None:
    """Train a model on drawn images with one thread and one process that draws."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, betas=(0.9, 0.98))
    started = time.monotonic()
    for number, (pixels, shares) in enumerate(DataLoader(Drawn(), batch_size=32, num_workers=1, prefetch_factor=8)):
        progress = (time.monotonic() - started) / (60 * minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (number + 1) / 200) * (0.01 + 0.495 * (1 + math.cos(math.pi * progress)))
        loss = -(shares * logits_of(model(pixels)).log_softmax(-1)).sum(-1).mean()
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


def seats(actual: Evaluation, first: str, base: str, half: bool) -> dict[str, float]:
    """The gains of one model in its seats."""
    gains = {}
    for seat, metrics in SEATS.items():
        each = [gain(actual, metric, first, base, half) for metric in metrics if metric in actual.values]
        if each := [one for one in each if len(one)]:
            gains[seat] = float(np.mean([one.mean() for one in each]))
    return gains


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
    """Return the candidate with the largest sum of seats on the choosing half; print all of them on both halves."""
    sums = {}
    print(f"\n| {of}, {masks} masks | half | {' | '.join(SEATS)} | sum | largest loss in a seat of each model |")
    print("|---" * (len(SEATS) + 4) + "|")
    for number, entry in enumerate(entries):
        first = name_of(of, entry, masks)
        for half in (True, False):
            models = {run: seats(actual, first, base, half) for run, actual in runs.items()}
            means = [np.mean([gains[seat] for gains in models.values() if seat in gains] or [0.0]) for seat in SEATS]
            lost = {run: max(0.0, -min(gains.values(), default=0.0)) for run, gains in models.items()}
            if half and max(lost.values()) <= 0.01:
                sums[number] = float(sum(means))
            words = " | ".join(f"{value:+.3f}" for value in (*means, sum(means)))
            losses = ", ".join(f"{run} {value:.3f}" for run, value in lost.items())
            print(f"| {first} | {'chosen on' if half else 'reported'} | {words} | {losses} |")
    print(f"\n{len(sums)} of {len(entries)} candidates lose at most 0.01 in each seat on the choosing half.")
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
    parser.add_argument("--grids", help="further photographs with classes, for the run of this name")
    parser.add_argument("--runs", nargs="+", choices=list(MEASURES), default=["photographs", "demo", "third"])
    parser.add_argument("--entries", type=int, nargs="+", help="measure only these candidates, by their index")
    parser.add_argument("--masks", type=int, nargs="+", default=[96, 48])
    given = parser.parse_args()
    warnings.simplefilter("ignore", vitflow.VitflowWarning)
    chosen, methods = {}, []
    for of in given.of:
        entries, base = CANDIDATES[of], BASES[of]
        chosen[of] = [entries[index] for index in given.entries] if given.entries else entries
        for entry, masks in [(base, TODAY), (base | {"blur": 1.0}, TODAY)]:
            methods.append(register(of, entry, masks))
        methods += [register(of, entry, masks) for masks in given.masks for entry in chosen[of]]
    runs = {run: measured(run, given, methods) for run in given.runs}
    for half in (True, False):
        table(runs, half)
    for of, entries in chosen.items():
        base = name_of(of, BASES[of], TODAY)
        for masks in given.masks:
            verdict(runs, name_of(of, choose(runs, of, entries, masks, base), masks), base)


def measured(run: str, given: argparse.Namespace, methods: list[str]) -> Evaluation:
    """Evaluate all candidates on one model."""
    separating = ["separation", "separation_wins"] if run in ("demo", "third") else ["grid"]
    if run in ("photographs", "grids"):
        model: object = vitflow.load_model(CHECKPOINT, checkpoint=given.checkpoint)
    elif run == "third":
        data_config = {"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
        names = list(CLASS_NAMES)
        model = vitflow.Explainer(third_model(given.third), data_config=data_config, class_names=names)
    else:
        model = "demo"
    return evaluate(
        {"photographs": given.boxes, "grids": given.grids}.get(run, given.drawn),
        model=model,
        methods=methods,
        metrics=separating if run == "grids" else [*_SINGLE, *separating],
        points=6,
        blurred_control=False,
        output=given.output / run,
        progress=lambda state: print(f"\r{run}: {state.done} of {state.total}", end="", file=sys.stderr),
    )


if __name__ == "__main__":
    if "--train" in sys.argv:
        file, minutes = (sys.argv[sys.argv.index(name) + 1] for name in ("--train", "--minutes"))
        train(third_model, Path(file), float(minutes))
    else:
        main()
