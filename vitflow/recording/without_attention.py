"""Runs of a model without attention: each token is computed from its own place alone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.methods.staged_rollout import LayerTokens
from vitflow.recording.attending import Attention, scaled_dot_product_attention
from vitflow.recording.attention_kinds import may_attend
from vitflow.recording.interception import Interception
from vitflow.recording.isolation import hooked
from vitflow.recording.token_codes import first_of_cells


class WithoutAttention(Interception):
    """Interception that replaces attention by the identity, so that each token is computed from its own place.

    Args:
        located: tokens of the layers of recorded attention modules, by path.
    """

    def __init__(self, model: nn.Module, located: Mapping[str, LayerTokens] = MappingProxyType({})) -> None:
        super().__init__()
        self.attending, self._located = may_attend(model), located

    def running(self) -> str | None:
        """Return the path of the running module; None if it computes no attention between tokens."""
        name = super().running()
        return name if name in self.attending else None

    def layer_of(self, name: str) -> LayerTokens | None:
        """Return the tokens of the layer of a module, which may be one head of a layer."""
        while name and name not in self._located:
            name = name.rpartition(".")[0]
        return self._located.get(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention and self.running():
            query, key, value = [*args, *(kwargs or {}).values()][:3]
            return self._identity((*query.shape[:-1], key.shape[-2]), value)
        return super().__torch_function__(func, types, args, kwargs)

    def on_attention(self, attention: Attention) -> Tensor:
        """Replace attention by the identity."""
        return self._identity(attention.probabilities.shape, attention.value)

    def read(self, name: str, module: nn.Module, value: Tensor, tokens: LayerTokens) -> None:
        """Read the values of a module."""

    def _identity(self, shape: Sequence[int], value: Tensor) -> Tensor:
        """Return the product of values with attention of this shape, as if each token attended to itself.

        If queries are pooled from the keys, they have the value of the first key of their cell, otherwise 0.
        """
        name, module = self.path[-1]
        tokens, (*around, queries, keys) = self.layer_of(name), shape
        if tokens is not None:
            self.read(name, module, value, tokens)
        if len(around) and 1 < value.shape[-3] < around[-1]:  # heads of one group share their values
            value = value.repeat_interleave(around[-1] // value.shape[-3], dim=-3)
        value = value.expand(*torch.broadcast_shapes(around, value.shape[:-2]), *value.shape[-2:])
        if queries == keys:
            return value.clone(memory_format=torch.contiguous_format)
        if tokens is not None and tokens.windows == 1 and keys == tokens.keys.num_tokens:
            first = first_of_cells(tokens.keys, tokens.queries)
            if first is not None and queries == len(first):
                if tokens.key_index is not None and tokens.query_index is not None:  # tokens in another order
                    first = tokens.key_index[0].argsort()[first][tokens.query_index[0]]
                return value[..., first.to(value.device), :]
        return value.new_zeros(*value.shape[:-2], queries, value.shape[-1])


@contextmanager
def without_attention(model: nn.Module) -> Iterator[None]:
    """Run a model with its attention replaced by the identity inside the block."""
    mode = WithoutAttention(model)
    with hooked(mode.hooks(mode.attending)), mode:
        yield
