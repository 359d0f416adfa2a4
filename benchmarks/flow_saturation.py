"""Saturation and localisation of attention flow by the number of layers.

    python -m benchmarks.flow_saturation                     # the demo model on 100 drawn images with exact masks
    python -m benchmarks.flow_saturation --model ID --checkpoint FILE --boxes FOLDER

FOLDER holds photographs and boxes.json: a list of {"file": name, "boxes_xyxy": [[left, top, right, bottom], …]}.
Prints a Markdown table, and draws it to --figure. The ROC-AUC is taken over 56 × 56 points of what the model saw,
without smoothing over images: the share of (object, background) pairs of points that the map ranks rightly.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import vitflow
from vitflow.demo import draw_images
from vitflow.images.preprocessing import upsample
from vitflow.images.reading import read_image

POINTS = 56


def drawn(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for image in draw_images(count, seed=500):
        yield image.image, image.masks.any(axis=0)


def boxed(folder: Path, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for entry in json.loads((folder / "boxes.json").read_text())[:count]:
        image = read_image(folder / entry["file"])
        mask = np.zeros(image.shape[:2], dtype=bool)
        for left, top, right, bottom in entry["boxes_xyxy"]:
            mask[top:bottom, left:right] = True
        yield image, mask


def points(array: np.ndarray, box: tuple[int, int, int, int]) -> np.ndarray:
    left, top, right, bottom = box
    seen = array[top:bottom, left:right].astype(np.float32)
    return cv2.resize(seen, (POINTS, POINTS), interpolation=cv2.INTER_AREA).ravel()


def roc_auc(values: np.ndarray, inside: np.ndarray) -> float:
    """Mann–Whitney: the share of pairs that are ranked rightly, ties half."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positives, negatives = inside.sum(), (~inside).sum()
    return float((ranks[inside].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def measure(explainer: vitflow.Explainer, data: Iterator[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    """Per number of layers: saturated share, ROC-AUC of the paper's flow, and of flow carried on by rollout."""
    key = ("mean", False)
    rows: list[np.ndarray] = []
    for image, mask in data:
        actual = explainer.explain(image, method="centre")  # for the placement
        inside = points(mask, actual.placement.seen_box) > 0.5
        if inside.all() or not inside.any():
            continue
        trace = explainer.record(image, fusions=[key])
        layers, prefix = trace.fused("mean"), trace.layout.num_prefix_tokens
        row = []
        for depth in range(1, len(layers) + 1):
            flow = vitflow.attention_flow(layers, layers=depth, source=trace.readout, num_prefix_tokens=prefix)
            carried = flow.normalized.float()
            if depth < len(layers):
                carried = vitflow.attention_rollout(layers[: len(layers) - depth], readout=carried)
            scores = [
                roc_auc(
                    points(
                        upsample(trace.layout.to_grid(vector)[0].numpy(), actual.placement), actual.placement.seen_box
                    ),
                    inside,
                )
                for vector in (flow.values, carried)
            ]
            row.append([float(flow.saturated_share[0]), *scores])
        rows.append(np.array(row))
    saturated, plain, carried = np.moveaxis(np.mean(rows, axis=0), -1, 0)
    return {"saturated": saturated, "flow": plain, "carried": carried, "images": np.array(len(rows))}


def draw(actual: dict[str, np.ndarray], path: Path, name: str) -> None:
    depths = np.arange(1, len(actual["flow"]) + 1)
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(depths, actual["saturated"], color="#d9d9d9", label="saturated share of the patches")
    axes.plot(depths, actual["flow"], marker="o", color="#c0392b", label="ROC-AUC of the flow")
    axes.plot(depths, actual["carried"], marker="o", color="#1f6fb2", label="ROC-AUC, carried on by rollout")
    axes.axhline(0.5, color="#888888", linewidth=0.8, linestyle=":")
    axes.set(xlabel="layers that the flow runs through, from the top", ylim=(0, 1.02), xticks=depths)
    axes.set_title(f"{name}, {actual['images']} images", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--boxes", type=Path, help="folder with photographs and boxes.json")
    parser.add_argument("--count", type=int, default=100, help="images at most")
    parser.add_argument("--figure", type=Path, default=Path("flow-saturation.png"))
    given = parser.parse_args()
    explainer = vitflow.Explainer(vitflow.load_model(given.model, checkpoint=given.checkpoint))
    data = boxed(given.boxes, given.count) if given.boxes else drawn(given.count)
    actual = measure(explainer, data)
    print("| layers | saturated | ROC-AUC, flow | ROC-AUC, flow + rollout |\n|---|---|---|---|")
    for index, row in enumerate(zip(actual["saturated"], actual["flow"], actual["carried"], strict=True)):
        print(f"| last {index + 1} | {row[0]:.2f} | {row[1]:.2f} | {row[2]:.2f} |")
    draw(actual, given.figure, explainer.model_id)
    print(f"\n{given.figure}")


if __name__ == "__main__":
    main()
