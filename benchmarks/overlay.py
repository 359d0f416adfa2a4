"""Share of an overlay's colours that comes from the map, on photographs, before and now.

    python -m benchmarks.overlay PHOTOS --model ID --checkpoint FILE [--count N] [--methods …] [--sheet FILE]

**The map's share.** An overlay gives a colour to a photograph's pixel and a map's value. For one image let every
pixel p that the model saw lend its own colour and every pixel q, independently, its value: c(p, q) is the colour of
that pair, in CIELAB (D65), where distances are about as large as they look. The share is

    Σ over L*, a*, b* of Var_q(mean_p c)  /  Σ over L*, a*, b* of Var_pq(c)

that part of all variation in colour which a value brings whatever it lies on. It is 0 where nothing of the map shows
and 1 where nothing of the photograph does. Pixels and values are paired independently, so that a yellow flower below
the highest values counts for the photograph. 300 pixels and 300 values of each image, by a fixed seed, stand for all.

**The rule for choosing.** An opaque map would have a share of 1, so there are conditions: of the ways to draw that

- keep at least half of the photograph's contrast in lightness (the deviation over p of mean_q L*, beside that of the
  photograph itself) and 0.3 of it where the map is highest (its highest tenth), in the mean over maps,
- draw no higher value fainter: the distance in colour from the bare background does not fall from one twentieth of the
  values to the next by more than 0.5 (less than that cannot be seen), in the mean over maps,
- draw no hundredth of an image, or more, in one flat colour at the top,

take the one whose share is the largest for the kind of sight for which it is the least: normal, without red cones, or
without green ones (as simulated by Machado, Oliveira & Fernandes 2009, severity 1). Maps with two signs are judged
apart from the others, with one condition more: red is above 0 and blue below it. The choice is made on the
first half of the photographs, and the other half is told beside it.

--sheet draws each photograph with each map, before and after, side by side.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image

import vitflow
from vitflow.explaining.saliency import Saliency
from vitflow.files import find_images
from vitflow.images.overlay import blend, has_two_sides, is_soft, scale_range
from vitflow.images.preprocessing import upsample

METHODS = ("rollout", "attention", "gae", ("occlusion", {"preset": "paper"}))
PAIRED = 300

# (image, heatmap, lowest limit, highest limit) → overlay.
Drawing = Callable[[NDArray[np.uint8], NDArray[np.float32], float, float], NDArray[np.uint8]]

#: What linear RGB becomes for who lacks a kind of cones.
SIGHT = {
    "normal": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
_TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
_WHITE = np.array([0.95047, 1.0, 1.08883])


def to_lab(colors: NDArray[np.uint8], sight: str = "normal") -> NDArray[np.float64]:
    """The CIELAB values of sRGB [..., 3] of 8 bits, by the white of D65, as it looks to a kind of sight."""
    encoded = colors / 255.0
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ SIGHT[sight].T, 0, 1) @ _TO_XYZ.T / _WHITE
    f = np.where(seen > (6 / 29) ** 3, np.cbrt(seen), seen / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], axis=-1)


def share_of_map(lab: NDArray[np.float64]) -> float:
    """The map's share of the variation of colours [pixels, values, 3]; 0 where they do not vary."""
    whole = lab.var(axis=(0, 1)).sum()
    return float(lab.mean(axis=0).var(axis=0).sum() / whole) if whole > 0 else 0.0


def draw_before(image: NDArray[np.uint8], heatmap: NDArray[np.float32], low: float, high: float) -> NDArray[np.uint8]:
    """The photograph as it is below turbo, or bwr around 0, cut at the limits, the highest value the most opaque."""
    if has_two_sides(low, high):
        side = np.clip(np.where(heatmap < 0, heatmap / -low, heatmap / high), -1, 1)
        place, opacity, cmap = (side + 1) / 2, np.abs(side), "bwr"
    else:
        place = np.clip((heatmap - low) / (high - low), 0, 1) if high > low else np.zeros_like(heatmap)
        opacity, cmap = place, "turbo"
    opacity = 0.6 * opacity[..., None]
    return np.rint(image * (1 - opacity) + matplotlib.colormaps[cmap](place)[..., :3] * 255 * opacity).astype(np.uint8)


def draw_now(**options: Any) -> Drawing:
    """Overlays as the library draws them, by default or otherwise."""

    def draw(image: NDArray[np.uint8], heatmap: NDArray[np.float32], low: float, high: float) -> NDArray[np.uint8]:
        soft = is_soft(None, None, options.get("robust", True))
        return blend(image, heatmap, **{"vmin": low, "vmax": high, "soft": soft, "mark_unseen": False, **options})

    return draw


# How to draw, and how patches become pixels.
WAYS: dict[str, tuple[Drawing, str]] = {
    "before": (draw_before, "linear"),
    "now": (draw_now(), "smooth"),
    "now, --background dim": (draw_now(background="dim"), "smooth"),
    "now, --background photo": (draw_now(background="photo"), "smooth"),
    "now, but cut at the 98th percentile": (draw_now(soft=False), "smooth"),
    "now, but turbo": (draw_now(cmap="turbo"), "smooth"),
    "now, but viridis": (draw_now(cmap="viridis"), "smooth"),
    "now, but inferno": (draw_now(cmap="inferno"), "smooth"),
    "now, but hot": (draw_now(cmap="hot"), "smooth"),
    "now, but bwr": (draw_now(cmap="bwr"), "smooth"),
    "now, but seismic": (draw_now(cmap="seismic"), "smooth"),
    "now, but PuOr_r": (draw_now(cmap="PuOr_r"), "smooth"),
    "now, but RdBu_r": (draw_now(cmap="RdBu_r"), "smooth"),
}
_TWO_SIDED = ("bwr", "seismic", "PuOr_r", "RdBu_r")


def judge(saliency: Saliency, way: tuple[Drawing, str], paired: int = PAIRED) -> dict[str, float]:
    """The numbers of one map drawn in one way."""
    draw, interpolation = way
    left, top, right, bottom = saliency.placement.seen_box
    heatmap = upsample(saliency.grid, saliency.placement, interpolation=interpolation)[top:bottom, left:right]
    photograph = saliency.image[top:bottom, left:right]
    low, high = scale_range(saliency.grid)
    random = np.random.default_rng(0)
    pixels = photograph.reshape(-1, 3)[random.choice(heatmap.size, paired, replace=heatmap.size < paired)]
    values = heatmap.ravel()[random.choice(heatmap.size, paired, replace=heatmap.size < paired)]
    values = values[np.argsort(np.abs(values) if has_two_sides(low, high) else values)]
    every = np.repeat(pixels[:, None], paired, axis=1)
    colors = draw(every, np.tile(values, (paired, 1)), low, high)
    bare = draw(every[:, :1], np.full((paired, 1), 0.0 if has_two_sides(low, high) else low, np.float32), low, high)
    lab, entry = to_lab(colors), to_lab(pixels)[:, 0].std()
    away = np.linalg.norm(lab - to_lab(bare), axis=-1).mean(axis=0)
    drawn = draw(np.zeros_like(photograph), heatmap, low, high).reshape(-1, 3)
    return {name: share_of_map(to_lab(colors, name)) for name in SIGHT} | {
        "contrast kept": lab[..., 0].mean(axis=1).std() / entry,
        "at the top": lab[:, -(paired // 10) :, 0].mean(axis=1).std() / entry,
        "largest fall": max(0.0, -np.diff([part.mean() for part in np.array_split(away, 20)]).min()),
        "flat": float((drawn == drawn[np.abs(heatmap).argmax()]).all(axis=1).mean()),
    }


def print_table(title: str, maps: Sequence[Saliency], ways: Sequence[str]) -> None:
    """Means over maps: a row for each way to draw."""
    print(f"{title}: means over {len(maps)} maps\n")
    actual = {way: [judge(one, WAYS[way]) for one in maps] for way in ways}
    columns = list(actual["before"][0])
    print(f"| drawn | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for way, rows in actual.items():
        print(f"| {way} | {' | '.join(f'{np.mean([row[name] for row in rows]):.3f}' for name in columns)} |")
    print(flush=True)


def draw_sheet(images: Sequence[Sequence[Saliency]], path: Path, gap: int = 6) -> None:
    """A row for each image: the photograph, then each map before and after, in the photograph's first row's size."""
    rows = []
    for maps in images:
        cells = [maps[0].image]
        for one in maps:
            limits = scale_range(one.grid)
            for draw, interpolation in (WAYS["before"], WAYS["now"]):
                heatmap = upsample(one.grid, one.placement, interpolation=interpolation)
                overlay = one.image.copy()
                seen = ~np.isnan(heatmap)
                overlay[seen] = draw(one.image, np.nan_to_num(heatmap), *limits)[seen]
                cells.append(overlay)
        sized = [np.asarray(Image.fromarray(cell).resize((240, 240))) for cell in cells]
        rows.append(
            np.concatenate([np.pad(cell, ((gap, 0), (gap, 0), (0, 0)), constant_values=255) for cell in sized], 1)
        )
    Image.fromarray(np.concatenate(rows)).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--model", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=20, help="photographs, the first by their names")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--sheet", type=Path, help="also draw them all before and after: .png or .jpg")
    given = parser.parse_args()
    warnings.simplefilter("ignore", vitflow.VitflowWarning)
    explainer = vitflow.Explainer(vitflow.load_model(given.model, checkpoint=given.checkpoint))
    files = find_images(given.photographs)[: given.count]
    images = [explainer.explain_batch([file], methods=given.methods) for file in files]
    half = len(images) // 2
    for title, part in (("chosen on", images[:half]), ("the others", images[half:])):
        maps = [one for image in part for one in image]
        signed = [has_two_sides(*scale_range(one.grid)) for one in maps]
        plain = [way for way in WAYS if not way.endswith(_TWO_SIDED)]
        print_table(f"{title}, one side", [one for one, two in zip(maps, signed, strict=True) if not two], plain)
        two_sided = [way for way in WAYS if way not in plain or "but" not in way or "98th" in way]
        print_table(f"{title}, two sides", [one for one, two in zip(maps, signed, strict=True) if two], two_sided)
    if given.sheet:
        draw_sheet(images, given.sheet)


if __name__ == "__main__":
    main()
