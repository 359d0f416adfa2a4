"""Localisation of every method with default and published options, against boxes or masks.

    python -m benchmarks.localisation --model ID --checkpoint FILE --boxes DATA [--methods NAME[:paper] …]
    python -m benchmarks.localisation --train FILE --minutes 18
    python -m benchmarks.localisation --swin FILE --boxes demo:100 --metrics roc_auc separation

The second command trains a small Swin on drawn images with one to three objects, and the third measures it. DATA is
whatever `vitflow evaluate` takes, which does the same with `--metric localisation --method NAME:preset=paper`; here
every method with a published definition of its own is measured both ways. Prints means and standard errors as a
Markdown table.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
from timm.models.swin_transformer import SwinTransformer

import vitflow
from benchmarks.estimators import train
from vitflow.demo import CLASS_NAMES
from vitflow.evaluation import evaluate
from vitflow.registry.method_table import list_methods


def swin() -> SwinTransformer:
    """A Swin for images of 64 pixels, with the classes of the drawn objects."""
    sizes = {"patch_size": 4, "window_size": 4, "embed_dim": 48, "depths": (2, 4, 2), "num_heads": (3, 6, 12)}
    return SwinTransformer(img_size=64, **sizes, num_classes=len(CLASS_NAMES), drop_path_rate=0.0)


def trained_swin(weights: Path) -> vitflow.Explainer:
    model = swin()
    model.load_state_dict(torch.load(weights, weights_only=True))
    data_config = {"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    return vitflow.Explainer(model.eval(), data_config=data_config, class_names=list(CLASS_NAMES), name="swin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--swin", type=Path, help="weights of the Swin instead of a model")
    parser.add_argument("--train", type=Path, help="train the Swin, and save its weights")
    parser.add_argument("--minutes", type=float, default=18)
    parser.add_argument("--boxes", default="demo:100")
    parser.add_argument("--metrics", nargs="+", default=["localisation"])
    parser.add_argument("--methods", nargs="+", help="NAME for its defaults, NAME:paper for the published definition")
    given = parser.parse_args()
    if given.train is not None:
        train(swin, given.train, given.minutes)
        return
    warnings.simplefilter("ignore", vitflow.VitflowWarning)  # saturation has a table of its own
    every = [m.name + suffix for m in list_methods() for suffix in ("", ":paper") if not suffix or m.presets]
    names = [name.partition(":") for name in given.methods or every]
    actual = evaluate(
        given.boxes,
        model=trained_swin(given.swin) if given.swin else vitflow.load_model(given.model, checkpoint=given.checkpoint),
        methods=[(name, {"preset": preset}) if preset else name for name, _, preset in names],
        metrics=given.metrics,
        points=6,
        blurred_control=given.swin is None,
        progress=lambda state: print(f"\r{state.done} of {state.total}", end="", file=sys.stderr),
    )
    print(actual.to_markdown())


if __name__ == "__main__":
    main()
