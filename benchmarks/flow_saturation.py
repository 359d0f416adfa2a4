"""Saturation and localisation of attention flow by the number of layers.

    python -m benchmarks.flow_saturation                     # the demo model on 100 drawn images with exact masks
    python -m benchmarks.flow_saturation --model ID --checkpoint FILE --boxes DATA

DATA is whatever `vitflow evaluate` takes. Prints a Markdown table, and draws it to --figure. The ROC-AUC is that of
the pixels of all objects of an image.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import vitflow
from vitflow.evaluation import Dataset, localise, open_dataset
from vitflow.images.preprocessing import upsample


def measure(explainer: vitflow.Explainer, data: Dataset) -> dict[str, np.ndarray]:
    """Per number of layers: saturated share, ROC-AUC of the paper's flow, and of flow carried on by rollout."""
    rows: list[np.ndarray] = []
    for sample in data.samples:
        drawn = sample.read()
        mask, placement = drawn.union(drawn.regions), explainer.explain(drawn.image, method="centre").placement
        trace = explainer.record(drawn.image, fusions=[("mean", False)])
        layers, prefix = trace.fused("mean"), trace.layout.num_prefix_tokens
        row = []
        for depth in range(1, len(layers) + 1):
            flow = vitflow.attention_flow(layers, layers=depth, source=trace.readout, num_prefix_tokens=prefix)
            carried = flow.normalized.float()
            if depth < len(layers):
                carried = vitflow.attention_rollout(layers[: len(layers) - depth], readout=carried)
            grids = (trace.layout.to_grid(vector)[0].numpy() for vector in (flow.values, carried))
            scores = [localise(upsample(grid, placement), mask) for grid in grids]
            if None not in scores:  # the model saw the object, and not the object alone
                row.append([float(flow.saturated_share[0]), *(score.roc_auc for score in scores)])
        if row:
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
    parser.add_argument("--boxes", default="demo:100:500")
    parser.add_argument("--figure", type=Path, default=Path("flow-saturation.png"))
    given = parser.parse_args()
    explainer = vitflow.Explainer(vitflow.load_model(given.model, checkpoint=given.checkpoint))
    actual = measure(explainer, open_dataset(given.boxes))
    print("| layers | saturated | ROC-AUC, flow | ROC-AUC, flow + rollout |\n|---|---|---|---|")
    for index, row in enumerate(zip(actual["saturated"], actual["flow"], actual["carried"], strict=True)):
        print(f"| last {index + 1} | {row[0]:.2f} | {row[1]:.2f} | {row[2]:.2f} |")
    draw(actual, given.figure, explainer.model_id)
    print(f"\n{given.figure}")


if __name__ == "__main__":
    main()
