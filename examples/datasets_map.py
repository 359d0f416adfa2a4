"""Explain a dataset of the Hugging Face hub, streamed: nothing is downloaded but what is looked at.

    pip install vitflow datasets
    python examples/datasets_map.py --dataset uoft-cs/cifar10 --split test --image img --limit 32 -o maps.parquet

Each row keeps its columns and gets those of the explanation; an image that cannot be read is a row with its error.
"""

import argparse

import datasets

from vitflow.folder import BatchExplainer

Rows = datasets.Dataset | datasets.IterableDataset


def explain(rows: Rows, model: str, image: str = "image", batch_size: int = 16) -> Rows:
    explainer = BatchExplainer(model, ["rollout"], image=image, batch_size=batch_size)
    # Undecoded, so that a damaged image fails alone, and not the batch that it is in.
    rows = rows.cast_column(image, datasets.Image(decode=False))
    return rows.map(explainer, batched=True, batch_size=batch_size, remove_columns=[image])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--image", default="image", help="the column of the images")
    parser.add_argument("--model", default="vit_small_patch16_224.augreg_in21k_ft_in1k")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("-o", "--output", default="maps.parquet")
    given = parser.parse_args()
    rows = datasets.load_dataset(given.dataset, split=given.split, streaming=True).take(given.limit)
    rows = rows.map(lambda row, number: row | {"id": number}, with_indices=True)
    explain(rows, given.model, given.image).to_parquet(given.output)


if __name__ == "__main__":
    main()
