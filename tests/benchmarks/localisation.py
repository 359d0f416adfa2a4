"""Where the maps of every method lie, against boxes: ROC-AUC, pointing game, energy in the box.

    python -m tests.benchmarks.localisation --model ID --checkpoint FILE --boxes FOLDER [--methods NAME[:paper] …]

FOLDER holds photographs and boxes.json: a list of {"file": name, "label_index": class, "boxes_xyxy": [[left, top,
right, bottom], …]}. Class-specific methods are asked for the label. Over the pixels that the model saw: the ROC-AUC of
the map against the boxes (ties averaged), whether the brightest pixel (the centroid of ties) lies in a box, and the
share of the map's mass above its minimum that lies in a box. Prints means and standard errors as a Markdown table.
"""

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

import vitflow
from vitflow.methods import list_methods


def score(heatmap: np.ndarray, inside: np.ndarray) -> tuple[float, float, float] | None:
    """ROC-AUC, pointing game and energy of one map; None where the model saw only box or no box."""
    seen = np.isfinite(heatmap)
    target, values = inside[seen], heatmap[seen].astype(np.float64)
    if target.all() or not target.any():
        return None
    positives, negatives = target.sum(), (~target).sum()
    auc = (rankdata(values)[target].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    peak = np.argwhere(np.where(seen, heatmap, -np.inf) == values.max()).mean(0).round().astype(int)
    mass = values - values.min()
    energy = mass[target].sum() / mass.sum() if mass.sum() > 0 else target.mean()
    return float(auc), float(inside[tuple(peak)]), float(energy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--boxes", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", help="NAME for its defaults, NAME:paper for the published definition")
    given = parser.parse_args()
    warnings.simplefilter("ignore", vitflow.VitflowWarning)  # saturation has a table of its own
    every = [m.name + suffix for m in list_methods() for suffix in ("", ":paper") if not suffix or m.presets]
    names = given.methods or every
    methods = [(n.partition(":")[0], {"preset": n.partition(":")[2]} if ":" in n else {}) for n in names]
    explainer = vitflow.Explainer(vitflow.load_model(given.model, checkpoint=given.checkpoint))
    rows = []
    for entry in json.loads((given.boxes / "boxes.json").read_text()):
        found = explainer.explain_batch(
            [given.boxes / entry["file"]], methods=methods, targets=int(entry["label_index"])
        )
        inside = np.zeros(found[0].image.shape[:2], dtype=bool)
        for left, top, right, bottom in entry["boxes_xyxy"]:
            inside[top:bottom, left:right] = True
        scores = [score(saliency.heatmap, inside) for saliency in found]
        if None not in scores:
            rows.append(scores)
    values = np.array(rows)  # [pictures, methods, metrics]
    means, errors = values.mean(0), values.std(0, ddof=1) / np.sqrt(len(values))
    print(f"{len(values)} pictures, {explainer.model_id}\n")
    print("| method | ROC-AUC | pointing game | energy in box |\n|---|---|---|---|")
    for name, mean, error in zip(names, means, errors, strict=True):
        cells = " | ".join(f"{m:.3f} ± {e:.3f}" for m, e in zip(mean, error, strict=True))
        print(f"| {name} | {cells} |")


if __name__ == "__main__":
    main()
