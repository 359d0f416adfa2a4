"""Types of the options of methods, for type checkers.

Generated from the option table by `python -m tools.option_types --write`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class LayerMapOptions(TypedDict, total=False):
    """Options of `layer_maps`, which selects layers and heads itself."""

    head_fusion: Literal["mean", "max", "min", "signed_mean"] | None
    discard_ratio: float | None
    residual: float | None
    value_weighted: bool | Literal["on", "off", "output"] | None
    patch: tuple[int, int] | None
    box: tuple[float, float, float, float] | None
    patch_size: int | None
    occlusion_batch: int | None
    score: Literal["log-odds", "probability"] | None
    peer_options: Mapping[str, Any] | None
    masks: int | None
    random_seed: int | None
    layers: int | str | Sequence[int] | None
    below: Literal["rollout", "none"] | None
    refine: int | None
    affinity: Literal["attention", "keys", "both"] | None
    preset: Literal["paper"] | None


class MethodOptions(LayerMapOptions, total=False):
    """Options of the methods for images."""

    start_layer: int | Literal["middle"] | None
    end_layer: int | None
    layer: int | None
    head: int | None


class TextOptions(TypedDict, total=False):
    """Options of the methods for texts."""

    head_fusion: Literal["mean", "max", "min", "signed_mean"] | None
    discard_ratio: float | None
    residual: float | None
    start_layer: int | Literal["middle"] | None
    layer: int | None
    value_weighted: bool | Literal["on", "off", "output"] | None
    layers: int | str | Sequence[int] | None
    below: Literal["rollout", "none"] | None
    causal: Literal["raw", "receptive_field"] | None
