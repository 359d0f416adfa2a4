"""Explain batches of images from Ray Data, Daft, datasets, or a loop."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from torch import nn

from vitflow.errors import OptionError, ShapeError, printable, whole_number
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.targets import Contrast, Target
from vitflow.folder.columns import Grid, Row, grid_columns, kinds_in, pack_half, placement_of, unpack_half
from vitflow.folder.decoders import Decoded, decode, decode_bytes, decode_file
from vitflow.folder.work import Batches, auto_batch, check_target, compute_maps, explainer_for, make_job, parts
from vitflow.images.geometry import Placement
from vitflow.registry.choices import MethodChoice
from vitflow.registry.option_types import MethodOptions

# Missing values by kind, so that the type of a column does not depend on the batch.
_NOTHING: dict[str, Any] = {"text": "", "json": "", "bytes": b"", "whole": -1, "number": float("nan")}


class BatchExplainer:
    """Explain batches given as dicts of columns, with one output row per input row and without files.

    Pickles are small: the model is loaded once, with the first batch, and is not pickled. An image that cannot be read
    or explained gets a row with its error.

    Args:
        model: a model id (see `load_model`), a folder or file of weights, or a function that creates a module or an
            Explainer in the worker process, for another device or `fit`.
        methods: names, or (name, options) pairs; by default gae with a target, otherwise rollout.
        target: class that class-specific methods explain; by default each image's predicted class.
        image: the column of the images: bytes of files, arrays [height, width, 3], paths, PIL images, or dicts with
            `bytes` or `path` as in datasets.
        id: the column of the row ids, returned as `id`.
        batch_size: images per forward pass, halved if memory runs out. By default 64 on a GPU, and on a CPU 32, or 16
            with slow methods and those that compute gradients.
        options: options for every method that supports them.

    Raises:
        OptionError: an option is invalid, or the model is a module or an Explainer.

    >>> from vitflow.demo import sample_images
    >>> explainer = BatchExplainer("demo", ["rollout"], image="path", id="path")
    >>> result = explainer({"path": [str(path) for path in sample_images()[:2]] + ["nowhere.png"]})
    >>> result["status"].tolist(), len(result["grid_rollout"][0])
    (['explained', 'explained', 'failed'], 288)
    >>> grid, placement = explainer.map_of(result, 0, "rollout")
    >>> grid.shape, placement.input_size
    ((12, 12), (96, 96))
    """

    def __init__(
        self,
        model: str | Path | Callable[[], nn.Module | Explainer],
        methods: Sequence[MethodChoice] | None = None,
        *,
        target: Target | Contrast = None,
        image: str = "image",
        id: str = "id",
        batch_size: int | None = None,
        **options: Unpack[MethodOptions],
    ) -> None:
        if isinstance(model, nn.Module | Explainer):
            raise OptionError(
                f"Expected a model id, a path, or a function that creates the model, got {type(model).__name__}, which "
                "would be sent with every batch."
            )
        if batch_size is not None:
            whole_number("batch_size", batch_size, 1)
        self._job = make_job(methods, options, target=target)
        self._named = methods is not None
        self._model = model
        self._image, self._id = image, id
        self._batch_size = batch_size
        self._batches: Batches | None = None

    @property
    def labels(self) -> list[str]:
        """The labels of the maps: the methods, numbered if one is requested twice."""
        return self._job.labels

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batches": None}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Explain a batch.

        Args:
            batch: columns of equal length, including those of the images and the ids.

        Returns:
            A column each for `id` (unchanged), `status` ("explained" or "failed"), `error`, `message`, `width`,
            `height`, `class_index`, `class_name`, `probability`, `target`, `value`, `predicted_index`, `facts` and
            `placement` (JSON); and for each method `grid_METHOD` (float16, little-endian, in bytes), `rows_METHOD`,
            `cols_METHOD` and `scale_METHOD`; the map is the scale times the grid (see `map_of`). Missing values are
            empty text, the integer −1, or the float NaN.

        Raises:
            OptionError: columns are missing or differ in length, or no image can be explained this way.
            ModelError: the model cannot be loaded.
        """
        ids, images = (self._column(batch, name) for name in (self._id, self._image))
        if len(ids) != len(images):
            lengths = f"{len(ids)} in {self._id!r} and {len(images)} in {self._image!r}"
            raise OptionError(f"Columns differ in length: {lengths}.")
        batches = self._loaded()
        records = []
        for part in parts(batches, self._images(ids, images)):
            for row, maps in compute_maps(batches, part, self._job):
                for label, saliency in maps.items():
                    row |= zip(grid_columns(label), pack_half(saliency.grid), strict=True)
                records.append(row)
        kinds = dict(kinds_in("record"))
        for label in self.labels:
            kinds |= grid_columns(label)
        return {"id": np.asarray(ids)} | {name: _column_of(records, name, kind) for name, kind in kinds.items()}

    @staticmethod
    def map_of(result: Mapping[str, Any], row: int, label: str) -> Any:
        """Return a map from the result of a call, float32 [rows, cols], and its placement on its image.

        Raises:
            ShapeError: the image of that row has no such map.
        """
        return map_of({name: values[row] for name, values in result.items()}, label)

    def _loaded(self) -> Batches:
        if self._batches is None:
            explainer = explainer_for(self._model)
            if not self._named and explainer.has_target(None):
                raise OptionError("An explainer of other outputs than classes requires methods=, such as ['gae'].")
            check_target(self._job, explainer)
            self._batches = Batches(explainer, self._batch_size or auto_batch(explainer, self._job))
        return self._batches

    def _column(self, batch: Mapping[str, Any], name: str) -> Any:
        if name not in batch:
            given = ", ".join(map(repr, batch))
            raise OptionError(f"Expected a batch with a column {name!r}, got {given}: set image=… and id=….")
        return batch[name]

    def _images(self, ids: Sequence[Any], images: Sequence[Any]) -> Iterator[Decoded]:
        for image_id, image in zip(ids, images, strict=True):
            name = str(image_id)
            yield decode_given(image, printable(name)).named({"input": name})


def decode_given(image: Any, name: str) -> Decoded:
    """Read an image from a column (see `BatchExplainer`); a failure becomes a failed row.

    >>> decode_given(b"no image", "a.png").row["error"], decode_given(np.zeros((2, 3)), "b").image.shape
    ('UnidentifiedImageError', (2, 3, 3))
    """
    if isinstance(image, Mapping):  # from a dataset without decoding
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    if isinstance(image, str | Path):
        return decode_file(str(image))
    if isinstance(image, bytes | bytearray | memoryview):
        return decode_bytes(bytes(image), name)
    return decode(image, name, {})


def _column_of(records: Sequence[Row], name: str, kind: str) -> np.ndarray[Any, Any]:
    values = [_NOTHING[kind] if record.get(name) is None else record[name] for record in records]
    if kind in ("whole", "number"):
        return np.array(values, np.int64 if kind == "whole" else np.float64)
    column = np.empty(len(values), object)  # NumPy's text and bytes types strip trailing zeros
    column[:] = [json.dumps(value) if isinstance(value, dict) else value for value in values]
    return column


def map_of(record: Mapping[str, Any], label: str) -> tuple[Grid, Placement]:
    """Return a map, float32 [rows, cols], and its placement from a row of a `BatchExplainer`, or of a table of them."""
    values, *others = (record.get(name) for name in grid_columns(label))
    if not values:
        raise ShapeError(f"The record {record.get('id')!r} has no map {label!r}.")
    grid = unpack_half(values, *others)
    if grid is None:
        raise ShapeError(
            f"The map {label!r} of {record.get('id')!r} is damaged: expected finite float16 values and their "
            f"scale, got {values!r:.40} with {others!r}."
        )
    return grid, placement_of(json.loads(record["placement"]), label)
