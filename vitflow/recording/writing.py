"""Attention rollout during text generation: each step extends the rollout, and its attention is discarded."""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import nn

from vitflow.methods.fusion import HeadFusion
from vitflow.methods.gradients import ValueWeighting
from vitflow.methods.growing_rollout import GrowingRollout
from vitflow.models.languages import decoder_path, reads_cache, reads_text
from vitflow.recording.isolation import Hook
from vitflow.recording.layers import AttentionLayer
from vitflow.recording.recorder import record_attention


class follow_writing:
    """Extend a rollout while a model generates text inside the `with` block, with or without a KV cache.

    Args:
        model: a transformers decoder.
        grown: receives the attention of each layer.
        head_fusion, value_weighted: how the heads of a layer are fused.
        visible: also pass on which keys each query may see.
        progress: called with 1 after each forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        grown: GrowingRollout,
        *,
        head_fusion: HeadFusion = "mean",
        value_weighted: ValueWeighting = False,
        visible: bool = True,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self._model, self._grown, self._progress = model, grown, progress
        self._layer = self._tokens = 0  # of the current forward pass
        self._recorder = record_attention(
            model,
            fusions=[(head_fusion, value_weighted)],
            visible=visible,
            on_layer=self._take,
            within=decoder_path(model),
        )

    def __enter__(self) -> GrowingRollout:
        with ExitStack() as stack:
            stack.enter_context(self._recorder)
            stack.callback(Hook(self._model, self._begin, before=True).remove)
            self._stack = stack.pop_all()
        return self._grown

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        self._ended()

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward pass over all tokens, or only the new ones if there is a cache."""
        text, cache = reads_text(args, kwargs), reads_cache(kwargs)
        self._ended()
        self._tokens = (0 if cache is None else int(cache.get_seq_length())) + (0 if text is None else text.shape[1])

    def _ended(self) -> None:
        if self._layer and self._progress is not None:
            self._progress(1)
        self._layer = 0

    def _take(self, layer: AttentionLayer) -> None:
        self._grown.append(self._layer, layer.example, self._tokens, layer.visible)
        self._layer += 1
