"""Attention rollout during text generation: each step extends the rollout, and its attention is discarded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from vitflow.methods.fusion import HeadFusion
from vitflow.methods.gradients import ValueWeighting
from vitflow.methods.growing_rollout import GrowingRollout
from vitflow.models.languages import decoder_path, reads_cache, reads_text
from vitflow.recording.isolation import Hook, hooked
from vitflow.recording.layers import AttentionLayer
from vitflow.recording.recorder import record_attention


@contextmanager
def follow_writing(
    model: nn.Module,
    grown: GrowingRollout,
    *,
    head_fusion: HeadFusion = "mean",
    value_weighted: ValueWeighting = False,
    visible: bool = True,
    progress: Callable[[int], object] | None = None,
) -> Iterator[GrowingRollout]:
    """Extend a rollout while a model generates text inside the `with` block, with or without a KV cache.

    Args:
        model: a transformers decoder.
        grown: receives the attention of each layer.
        head_fusion, value_weighted: how the heads of a layer are fused.
        visible: also pass on which keys each query may see.
        progress: called with 1 after each forward pass.
    """
    layers = tokens = 0  # of the current forward pass

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward pass over all tokens, or only the new ones if there is a cache."""
        nonlocal layers, tokens
        text, cache = reads_text(args, kwargs), reads_cache(kwargs)
        layers, tokens = (
            0,
            (0 if cache is None else int(cache.get_seq_length())) + (0 if text is None else text.shape[1]),
        )

    def take(layer: AttentionLayer) -> None:
        nonlocal layers
        grown.append(layers, layer.example, tokens, layer.visible)
        layers += 1

    def end(args: Any, output: Any) -> None:
        if progress is not None:
            progress(1)

    fusions, within = [(head_fusion, value_weighted)], decoder_path(model)
    with (
        record_attention(model, fusions=fusions, visible=visible, on_layer=take, within=within),
        hooked([Hook(model, begin, before=True), Hook(model, end, before=False)]),
    ):
        yield grown
