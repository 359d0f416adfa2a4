"""Distance of high and low values on thumbnails: python -m benchmarks.thumbnails PHOTOS --checkpoint FILE.

**The rule for choosing**, written before the first measurement, except for the last decision. Every overlay of the
photographs, by GAE and rollout, is shrunk to 96 × 96 pixels. Its *distance* is the one in CIELAB between the mean
colour where the map is highest (its highest tenth) and the mean colour where it is lowest (its lower half): the
smallest of three kinds of sight, normal, without red cones and without green ones. Of the ways to draw that keep at
least half of the contrast of a grey ramp in lightness over all values of a map, and a fifth of it at the highest, take
the one with the largest distance on the worst tenth of the photographs. Every second photograph is chosen on, the
others are reported next to it.

Ways within 2 of the largest are tied. A tie was first to be decided by the larger chroma at the highest values. That
was changed after the numbers were seen, to the map's share by `benchmarks.overlay`, which had its rule already:
by chroma inferno, or half of the photograph's colour, would have been taken. The ways with three quarters of the
brightness were added after a first sheet, on which the others with more opacity kept too little of the contrast.
"""

import argparse
from pathlib import Path

import cv2
import numpy as np

import vitflow
from benchmarks.overlay import SIGHT, to_lab
from vitflow.files import find_images
from vitflow.images import overlay
from vitflow.images.preprocessing import upsample

#: Colour map, opacity of the highest value, and what the background keeps: of its brightness, and of its colour.
WAYS = {
    "before: plasma 0.6, grey 5/8": ("plasma", 0.6, (0.625, 0.0)),
    "plasma 0.75, grey 5/8": ("plasma", 0.75, (0.625, 0.0)),
    "plasma 0.7, grey 3/4": ("plasma", 0.7, (0.75, 0.0)),
    "now: plasma 0.75, grey 3/4": ("plasma", 0.75, (0.75, 0.0)),
    "plasma 0.75, half colour 3/4": ("plasma", 0.75, (0.75, 0.5)),
    "inferno 0.75, grey 3/4": ("inferno", 0.75, (0.75, 0.0)),
    "viridis 0.75, grey 3/4": ("viridis", 0.75, (0.75, 0.0)),
}
SIDE = 96


def measure(saliency: vitflow.Saliency, cmap: str, alpha: float) -> tuple[float, float, float, float]:
    """Return the distance, the chroma at the highest values, and the contrast kept over all and at the highest."""
    left, top, right, bottom = saliency.placement.seen_box
    heatmap = upsample(saliency.grid, saliency.placement, interpolation="smooth")[top:bottom, left:right]
    low, high = overlay.scale_range(saliency.grid)
    drawing = {"vmin": low, "vmax": high, "soft": True, "cmap": cmap, "alpha": alpha}
    drawn = overlay.blend(np.ascontiguousarray(saliency.image[top:bottom, left:right]), heatmap, **drawing)
    small, values = (cv2.resize(each, (SIDE, SIDE), interpolation=cv2.INTER_AREA) for each in (drawn, heatmap))
    highest, lowest = values >= np.quantile(values, 0.9), values <= np.median(values)
    labs = [to_lab(small, sight) for sight in SIGHT]
    distance = min(float(np.linalg.norm(lab[highest].mean(axis=0) - lab[lowest].mean(axis=0))) for lab in labs)
    ramp = np.repeat(np.linspace(0, 255, 9).astype(np.uint8)[:, None, None], 3, axis=2)

    def kept(value: float) -> float:
        flat = overlay.blend(ramp, np.full((9, 1), value), **drawing)
        return float(to_lab(flat)[..., 0].std() / to_lab(ramp)[..., 0].std())

    overall = float(np.mean([kept(value) for value in np.quantile(heatmap, [0.05, 0.25, 0.5, 0.75, 0.95])]))
    return distance, float(np.hypot(*labs[0][highest].mean(axis=0)[1:])), overall, kept(high)


def main() -> None:
    """Print a table for the photographs chosen on, and one for the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--model", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    parser.add_argument("--checkpoint", type=Path)
    given = parser.parse_args()
    explainer = vitflow.Explainer(vitflow.load_model(given.model, checkpoint=given.checkpoint))
    files = find_images(given.photographs)
    maps = [explainer.explain(file, method=method) for file in files for method in ("gae", "rollout")]
    chosen_on = np.arange(len(maps)) // 2 % 2 == 0
    print("| drawn | worst tenth, chosen on | the others | median | chroma | contrast kept | at the highest |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, (cmap, alpha, background) in WAYS.items():
        overlay.KEPT["grey"] = background
        rows = np.array([measure(one, cmap, alpha) for one in maps])
        worst = [np.quantile(rows[part, 0], 0.1) for part in (chosen_on, ~chosen_on)]
        means = f"{np.median(rows[:, 1]):.1f} | {rows[:, 2].mean():.2f} | {rows[:, 3].mean():.2f}"
        print(f"| {name} | {worst[0]:.1f} | {worst[1]:.1f} | {np.median(rows[:, 0]):.1f} | {means} |")


if __name__ == "__main__":
    main()
