"""Digests of maps: run this in two versions of vitflow, and compare the output to see if maps are equal, bit for bit.

    python -m benchmarks.same_maps [--model ID --checkpoint FILE --images FOLDER]

Prints one SHA-256 for each method with its defaults and with its published definition, over the maps of the demo
model's sample images, or of the given model and folder. It uses public names alone, so that the file can be run
beside an older version, too. One thread, so that sums are taken in one order.
"""

import argparse
import hashlib
import warnings
from pathlib import Path

import torch

import vitflow
from vitflow.demo import sample_images

# Occlusion of every patch takes a forward pass each: larger ones say as much here.
_OPTIONS = {"occlusion": {"patch_size": 56}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--images", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore", vitflow.VitflowWarning)
    torch.set_num_threads(1)
    images = sorted(given.images.glob("*.[JjPp][PpNn]*")) if given.images else sample_images()
    explainer = vitflow.Explainer(vitflow.load_model(given.model, checkpoint=given.checkpoint))
    for method in vitflow.list_methods():
        for preset in ("", "paper") if method.presets else ("",):
            digest = hashlib.sha256()
            options = {**_OPTIONS.get(method.name, {}), **({"preset": preset} if preset else {})}
            for start in range(0, len(images), 4):
                batch = images[start : start + 4]
                for saliency in explainer.explain_batch(batch, methods=[(method.name, options)]):
                    digest.update(saliency.grid.tobytes())
            label = f"{method.name}:{preset}" if preset else method.name
            print(f"{label:24} {len(images):4} maps  {digest.hexdigest()[:32]}", flush=True)


if __name__ == "__main__":
    main()
