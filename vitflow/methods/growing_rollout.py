"""Attention rollout during text generation: each new token appends one row to every layer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from vitflow.errors import ShapeError
from vitflow.methods.fusion import add_residual, check_fraction, discard_low, residual_shares
from vitflow.methods.tokens import Causal, check_causal, relative_to, uniform_attention

# Minimum number of further tokens to allocate if there are more than expected.
_MORE = 64


class GrowingRollout:
    """The rows of R_l = Â_l ⋯ Â_s of every layer l, for causal attention.

    Row t of R_l requires row t of Â_l and the rows up to t of R_{l−1}. One matrix [tokens, tokens] per layer is stored,
    regardless of the number of heads.

    Args:
        num_tokens: expected number of tokens; more are allowed.
        discard_ratio, residual, start_layer, causal: as for `attention_rollout`.

    >>> grown = GrowingRollout(2, causal="raw")
    >>> grown.append(0, torch.tensor([[[1.0]]]), 1)  # the first token: layer 1, then layer 2
    >>> grown.append(1, torch.tensor([[[1.0]]]), 1)
    >>> grown.append(0, torch.tensor([[[0.5, 0.5]]]), 2)  # the second
    >>> grown.append(1, torch.tensor([[[0.5, 0.5]]]), 2)
    >>> grown.rows(1, 2)[0]
    tensor([[[[0.2500, 0.7500]],
    <BLANKLINE>
             [[0.4375, 0.5625]]]])
    """

    def __init__(
        self,
        num_tokens: int,
        *,
        discard_ratio: float = 0.0,
        residual: float = 0.5,
        start_layer: int = 1,
        causal: Causal = "raw",
    ) -> None:
        check_causal(causal)
        check_fraction("discard_ratio", discard_ratio)
        check_fraction("residual", residual)
        self._room, self._ratio, self._residual, self._first = num_tokens, discard_ratio, residual, start_layer - 1
        self._relative = causal == "receptive_field"
        self._products: list[Tensor] = []  # R_l of each layer, [batch, room, room]
        self._seen: list[Tensor] = []  # visible keys of each query, only relative to the receptive field
        self._lengths: list[int] = []  # rows that each layer has

    def append(self, layer: int, fused: Tensor, num_tokens: int, visible: Tensor | None = None) -> None:
        """Append a layer's attention of the newest tokens; lower layers first.

        Args:
            layer: index of the layer.
            fused: [batch, queries, keys]; the queries are the last of all tokens, and so are the keys (a cache with a
                sliding window has dropped earlier ones). Queries of known tokens are ignored.
            num_tokens: number of tokens so far, including the newest.
            visible: mask of the visible keys, bool [batch or 1, queries, keys]; None for all up to the query's own.

        Raises:
            ShapeError: the attention has another number of new tokens or of texts.
        """
        if layer == len(self._products):
            self._products.append(fused.new_zeros(len(fused), self._room, self._room))
            self._lengths.append(0)
            if self._relative:
                self._seen.append(
                    torch.zeros(len(fused), self._room, self._room, dtype=torch.bool, device=fused.device)
                )
        if num_tokens > self._room:
            self._make_room(num_tokens + max(_MORE, self._room // 2))
        start, keys = self._lengths[layer], slice(num_tokens - fused.shape[-1], num_tokens)
        new = fused[:, start - num_tokens :]  # [batch, new, keys]
        if len(new) != len(self._products[layer]) or new.shape[1] != num_tokens - start:
            raise ShapeError(
                f"Expected attention of {num_tokens - start} new tokens in each of {len(self._products[layer])} texts, "
                f"got shape {tuple(fused.shape)}."
            )
        places = torch.arange(start, num_tokens, device=fused.device)
        if visible is None:
            visible = torch.arange(keys.start, keys.stop, device=fused.device) <= places[:, None]
            visible = visible.unsqueeze(0)
        visible = visible[:, -new.shape[1] :].expand(new.shape)
        if self._relative:
            self._seen[layer][:, start:num_tokens, keys] = visible
        if self._ratio:
            new = discard_low(new, self._ratio, 0, visible)
        kept, passed = residual_shares(new.sum(dim=-1), self._residual)
        mixed = new * passed.unsqueeze(-1)
        mixed[:, places - start, places - keys.start] += kept
        product = self._products[layer]
        self._lengths[layer] = num_tokens
        if layer > self._first:
            below = self._products[layer - 1][:, keys, :num_tokens]
            product[:, start:num_tokens, :num_tokens] = mixed @ below
        elif layer == self._first:
            product[:, start:num_tokens, keys] = mixed
        else:
            product[:, places, places] = 1.0

    def _make_room(self, room: int) -> None:
        for kept in (self._products, self._seen):
            for layer, old in enumerate(kept):  # layer by layer, so that there is never a second copy of all layers
                grown = old.new_zeros(len(old), room, room)
                grown[:, : self._room, : self._room] = old
                kept[layer] = grown
        self._room = room

    def rows(self, start: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Return the rows of the tokens from start to end, among all tokens.

        Returns:
            [batch, layers, rows, tokens]; and relative to the receptive field the raw share of each row's own token,
            [batch, layers, rows], else None.
        """
        length = self._lengths[-1]
        rows = [product[:, start:end, :length] for product in self._products]
        if not self._relative:
            return torch.stack(rows, dim=1), None
        is_self = torch.zeros(end - start, length, dtype=torch.bool, device=rows[0].device)
        is_self[torch.arange(end - start), torch.arange(start, end)] = True
        relative, shares = [], []
        for raw, even in zip(rows, self._reference(length), strict=True):
            relative.append(relative_to(raw, even[:, start:end], is_self).float())
            shares.append((raw * is_self).sum(dim=-1))
        return torch.stack(relative, dim=1), torch.stack(shares, dim=1)

    def _reference(self, length: int) -> Iterator[Tensor]:
        """Yield the product of uniform attention up to each layer, [batch, tokens, tokens]; only two are in memory."""
        product: Tensor | None = None
        for layer, seen in enumerate(self._seen):
            matrix = add_residual(uniform_attention(seen[:, :length, :length]), self._residual)
            if layer < self._first:
                matrix = torch.eye(length, dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
            product = matrix if product is None else matrix @ product
            yield product
