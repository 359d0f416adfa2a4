"""Explain images with Ray Data: an actor pool, one model an actor, the maps as Parquet.

    pip install 'vitflow[ray]'
    python examples/ray_data.py photographs/ maps/ --model vit_small_patch16_224.augreg_in21k_ft_in1k

`vitflow folder --engine ray` does the same with a manifest, resume and overlays; this is for pipelines of your own.
"""

import argparse

import ray
from ray.data import ActorPoolStrategy

from vitflow.folder import BatchExplainer


def explain(images: str, output: str, model: str, actors: int = 1) -> None:
    actual = ray.data.read_binary_files(images, include_paths=True).map_batches(
        BatchExplainer,  # the class: each actor makes one, and loads the model once
        fn_constructor_args=(model, ["rollout"]),
        fn_constructor_kwargs={"image": "bytes", "id": "path"},
        compute=ActorPoolStrategy(size=actors),
        num_gpus=1 if ray.cluster_resources().get("GPU") else 0,
        batch_size=64,
    )
    actual.write_parquet(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images")
    parser.add_argument("output")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--actors", type=int, default=1)
    given = parser.parse_args()
    explain(given.images, given.output, given.model, given.actors)


if __name__ == "__main__":
    main()
