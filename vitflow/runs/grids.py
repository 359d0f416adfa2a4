"""Maps as records: one flat row per picture, its grids in half precision, as Arrow, Parquet, Ray and SQL know them.

A grid of 14 × 14 patches takes 392 bytes. Its values are divided by a power of two, the least that no value exceeds, so
that maps of any scale keep the precision of float16 (`scale_METHOD` times the stored values is the map).
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ShapeError
from vitflow.pictures.geometry import Placement
from vitflow.runs.columns import as_text, kinds_in

Grid = NDArray[np.float32]
AnyGrid = NDArray[np.floating[Any]]

#: Where shards of records lie below an output folder.
SHARDS = "grids"
# The scale of a map with the largest values of float32.
_LARGEST_SCALE = 2.0**128
_SHARD = re.compile(SHARDS + r"/[0-9a-f]{16}\.parquet")


def shard_name(content: bytes) -> str:
    """The path of a shard below the output folder: that of its content."""
    return f"{SHARDS}/{hashlib.sha256(content).hexdigest()[:16]}.parquet"


def is_shard(path: Any) -> bool:
    """Whether a path below an output folder is one that a shard may have."""
    return isinstance(path, str) and _SHARD.fullmatch(path) is not None


def grid_columns(label: str) -> dict[str, str]:
    """The columns that hold one map of a picture: its values, how many rows and columns they are, and their scale."""
    return {f"grid_{label}": "bytes", f"rows_{label}": "whole", f"cols_{label}": "whole", f"scale_{label}": "number"}


def columns_of(labels: Sequence[str]) -> dict[str, str]:
    """The columns of the records of a run with these maps, and what they hold."""
    maps = {name: kind for label in labels for name, kind in grid_columns(label).items()}
    return {"id": "text", **kinds_in("record"), **maps}


def record_of(
    row: Mapping[str, Any], maps: Mapping[str, NDArray[np.floating[Any]]], labels: Sequence[str]
) -> dict[str, Any]:
    """A picture's row and maps as a record; what it does not have is None.

    Args:
        row: as a folder run notes it; its `input` is the record's `id`.
        maps: the unscaled grid of each map, [rows, cols].
        labels: the maps of every record.
    """
    record = {"id": row["input"]} | as_text(row, kinds_in("record"))
    for label in labels:
        values = pack_half(maps[label]) if label in maps else (None,) * 4
        record |= dict(zip(grid_columns(label), values, strict=True))
    return record


def pack_grid(grid: AnyGrid) -> dict[str, Any]:
    """An unscaled grid as a row holds it: its shape, and float32 in base 64."""
    return {"shape": list(grid.shape), "values": base64.b64encode(grid.astype("<f4").tobytes()).decode()}


def unpack_grid(packed: Mapping[str, Any]) -> AnyGrid:
    """The grid that a row holds, float32 [rows, cols]."""
    return np.frombuffer(base64.b64decode(packed["values"]), "<f4").reshape(packed["shape"])


def pack_half(grid: AnyGrid) -> tuple[bytes, int, int, float]:
    """A grid as the bytes of little-endian float16, its rows and columns, and its scale.

    >>> pack_half(np.array([[1.0, 3.0]]))
    (b'\\x004\\x00:', 1, 2, 4.0)
    """
    largest = float(np.abs(grid).max())
    scale = 2.0 ** math.frexp(largest)[1] if largest else 1.0
    rows, cols = grid.shape
    return (grid.astype(np.float64) / scale).astype("<f2").tobytes(), rows, cols, scale


def map_of(record: Mapping[str, Any], label: str) -> tuple[Grid, Placement]:
    """A record's map, float32 [rows, cols], and where it lies on the picture.

    Args:
        record: a row of a `BatchExplainer`, of a shard, or of a table that was made of them.
        label: the map, such as "rollout".

    Raises:
        ShapeError: the record has no such map, as that of a picture which failed, or it is damaged.
    """
    grid = grid_of(record, label)
    try:
        known = json.loads(record["placement"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ShapeError(
            f"Expected the placement of a map as JSON, got {record.get('placement')!r:.80}: it is damaged."
        ) from error
    return grid, placement_of(known)


def grid_of(record: Mapping[str, Any], label: str) -> Grid:
    """A record's map alone; arguments and errors as for `map_of`."""
    found: tuple[Any, ...] = tuple(record.get(name) for name in grid_columns(label))
    values, rows, cols, scale = found
    if not values:
        raise ShapeError(f"Expected a record with a map {label!r}, got {record.get('id')!r}, which has none.")
    sides = all(isinstance(side, int | np.integer) and side > 0 for side in (rows, cols))
    whole = isinstance(values, bytes | bytearray) and sides and len(values) == 2 * rows * cols
    half = np.frombuffer(values, "<f2") if whole else np.empty(0)
    if not whole or not np.isfinite(half).all() or not isinstance(scale, float) or not 0 < scale <= _LARGEST_SCALE:
        raise ShapeError(
            f"Expected the map {label!r} of {record.get('id')!r} as rows × cols finite values in half precision and "
            f"their scale, got {values!r:.40} for {rows!r} × {cols!r} and {scale!r}: it is damaged."
        )
    # The scale of the largest values, and what rounds up to it, are more than float32 holds.
    most = np.finfo(np.float32).max
    return (half.reshape(rows, cols).astype(np.float64) * scale).clip(-most, most).astype(np.float32)


def placement_of(known: Mapping[str, Any]) -> Placement:
    """The placement that `Placement.to_dict` gave.

    Raises:
        ShapeError: it is none.
    """
    try:
        found = {name: value if isinstance(value, str) else tuple(map(int, value)) for name, value in known.items()}
        return Placement(**found)  # type: ignore[arg-type]
    except (AttributeError, TypeError, ValueError) as error:
        raise ShapeError(f"Expected the placement of a map, got {known!r}.") from error
