"""Similarity of each method's default map and its published definition.

    python -m benchmarks.departures PHOTOS --model ID --checkpoint FILE [--limit 20]

Prints, as a Markdown table, how each default departs from the publication, and the median over the photographs of
Spearman's rank correlation of both maps, with the lowest and the highest. Raw attention has a line for its improved
form, too, and a class-specific method explains the class that the model finds most probable.
"""

import argparse
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vitflow
from vitflow.explaining.captions import departures
from vitflow.files import find_images
from vitflow.methods.similarity import spearman
from vitflow.registry.method_table import get_method, list_methods

# Occlusion and sampling ask many times; what they leave of their publications is told in words.
_IMPROVED: dict[str, dict[str, Any]] = {"attention": {"value_weighted": "output", "refine": 1}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--model", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--limit", type=int, default=20)
    given = parser.parse_args()
    warnings.simplefilter("ignore", vitflow.VitflowWarning)  # the paper's flow is saturated
    torch.set_num_threads(1)
    explainer = vitflow.Explainer(vitflow.load_model(given.model, checkpoint=given.checkpoint))
    images = find_images(given.photos)[: given.limit]
    names = [one.name for one in list_methods() if one.presets and "predict" not in one.needs]
    pairs = [(name, {}) for name in names] + [(name, entry) for name, entry in _IMPROVED.items() if name in names]
    actual: list[list[float | None]] = [[] for _ in pairs]
    for image in images:
        both = chain.from_iterable(((name, entry), (name, {"preset": "paper"})) for name, entry in pairs)
        grids = [one.grid for one in explainer.explain_batch([image], methods=list(both))]
        for values, shown, published in zip(actual, grids[::2], grids[1::2], strict=True):
            values.append(spearman(shown, published))
    print(f"| method | departs from the publication by | median of {len(images)} | lowest | highest |")
    print("|---|---|---|---|---|")
    for (name, entry), values in zip(pairs, actual, strict=True):
        method = get_method(name)
        reported = departures(method, method.complete(entry)) or "nothing"
        defined = np.array([value for value in values if value is not None])
        numbers = " | ".join(f"{value:.2f}" for value in (np.median(defined), defined.min(), defined.max()))
        print(f"| {name} | {reported} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
