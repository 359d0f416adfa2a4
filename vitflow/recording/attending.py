"""Explicit attention: the result of torch's fused functions, with probabilities computed once and recorded."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from vitflow.methods.fusion import fuse_heads
from vitflow.methods.gradients import Values, ValueWeighting

#: The function of torch itself, even if another library has replaced it in `torch.nn.functional`.
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
# The maximum number of probabilities per part on a CPU if only fused matrices are kept, to fit its cache.
_CACHED_PROBABILITIES = 2**20
# Images with at most this fraction of them in total are processed together (single-threaded, multi-threaded); a larger
# image is processed alone, without copies.
_SINGLE_THREAD, _MULTI_THREAD = 1 / 32, 1 / 2
# Scores more than this below the row maximum have probability 0: exp(-746) is 0 in float64.
_FAR_BELOW = 1000.0


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Attention that a module applies to values.

    Attributes:
        probabilities, value: [..., queries, keys] and [..., keys, width].
        mixed: True if the attention was computed from a softmax instead of being one.
        key: the key vectors, [..., keys, width], if observed.
        visible: the requested mask, [batch or 1, queries, keys] or of the shape of the attention; None for all.
    """

    probabilities: Tensor
    value: Tensor
    mixed: bool = False
    key: Tensor | None = None
    visible: Tensor | None = None


class Listener:
    """Receiver of the attention of a running model; the attributes say if gradients, keys or masks are requested."""

    gradients = wants_keys = wants_visible = False

    def accepts_parts(self, query: Tensor) -> bool:
        """Return True if only fused probabilities of this call are needed, so that they can be computed in parts."""
        return False

    def on_attention(self, attention: Attention) -> Tensor | None:
        """Receive attention; return a replacement for its product with the values, or None for the product itself."""
        raise NotImplementedError

    def on_attention_parts(self, parts: Iterator["Part"], qkv: Sequence[Tensor], visible: Tensor | None) -> None:
        """Receive queries, keys and values, [batch, heads, tokens, width], and their attention part by part."""
        raise NotImplementedError


@dataclass(slots=True)
class Part:
    """Attention of some images of a batch, or of some queries of one image; the next part reuses its memory.

    `probabilities` are [images · heads, queries, keys], `value` are [images · heads, keys, width], and `mixed` is their
    product with heads side by side, [images, queries, heads · width].
    """

    images: slice
    queries: slice
    probabilities: Tensor
    value: Tensor
    mixed: Tensor


class PartFusion:
    """Fusion of a layer's heads part by part, in memory that is used again."""

    def __init__(self, values: Values | None) -> None:
        self._values, self._buffer = values, torch.empty(0)
        self._norms: Tensor | None = None

    def mean(self, part: Part, factor: float = 1.0, *, out: Tensor | None = None) -> Tensor:
        """Return the mean over heads times a factor, [images, queries, keys], as a product that reads them once."""
        count = part.images.stop - part.images.start
        every = part.probabilities.view(count, -1, math.prod(part.probabilities.shape[1:]))
        share = every.new_full((1, 1, every.shape[1]), factor / every.shape[1]).expand(count, -1, -1)
        shape = count, *part.probabilities.shape[1:]
        return torch.bmm(share, every, out=None if out is None else out.view(count, 1, -1)).view(shape)

    def __call__(self, part: Part, key: tuple[str, ValueWeighting], *, out: Tensor) -> None:
        """Weight and fuse the heads of a part into `out`, [images, queries, keys]; weighted rows are not normalised."""
        fusion, weighting = key
        if fusion == "mean" and not weighting:
            self.mean(part, out=out)
            return
        heads = (part.images.stop - part.images.start, -1)
        every = part.probabilities.unflatten(0, heads)
        if weighting:
            assert self._values is not None
            if self._buffer.numel() < every.numel():
                self._buffer = torch.empty_like(part.probabilities)
            weighted = self._buffer.view(-1)[: every.numel()].view(part.probabilities.shape)
            if weighting == "output":  # rows that are normalised do not depend on 1/‖o_i‖
                torch.bmm(self._values.along(part.mixed).flatten(0, 1), part.value.mT, out=weighted)
                (weighted.clamp_min_(0.0) if fusion == "mean" else weighted).mul_(part.probabilities)
            else:
                self._norms = self._values.norms() if self._norms is None else self._norms
                torch.mul(part.probabilities, self._norms[part.images].flatten(0, 1).unsqueeze(1), out=weighted)
            every = weighted.unflatten(0, heads)
        fuse_heads(every, fusion, out=out)  # type: ignore[arg-type]
        if weighting == "output" and fusion != "mean":
            out.clamp_min_(0.0)  # as before the fusion, in fewer values


def attend(
    listener: Listener,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `scaled_dot_product_attention` with explicit probabilities, recorded and used for the output."""
    exact = query.dtype in (torch.float32, torch.float64)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    plain = exact and dropout_p == 0.0 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    visible = seen_keys(attn_mask) if listener.wants_visible and attn_mask is not None else None
    if plain and not torch.is_grad_enabled() and listener.accepts_parts(query):
        output: list[Tensor] = []
        parts = _attend_in_parts(query, key, value, attn_mask, scale, output)
        listener.on_attention_parts(parts, (query, key, value), visible)
        return output[0]
    probabilities = _probabilities(query, key, attn_mask, scale, enable_gqa)
    replacement = listener.on_attention(Attention(probabilities, value, False, key, visible))
    if replacement is not None:
        return replacement
    if dropout_p == 0.0 and (exact or listener.gradients):
        if enable_gqa:
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
        return probabilities.to(value.dtype) @ value
    if is_causal:
        attn_mask = None
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, output: list[Tensor]
) -> Iterator[Part]:
    """Compute `attend` in parts that fit the CPU cache, which is faster: several images, or queries of a large image.

    The result is appended to `output` before the first part, with the memory layout of fused attention.
    """
    (batch, heads, queries, width), keys = query.shape, key.shape[-2]
    size, single = heads * queries * keys, torch.get_num_threads() == 1
    step = max(1, min(batch, int(_CACHED_PROBABILITIES * (_SINGLE_THREAD if single else _MULTI_THREAD)) // size))
    rows = queries if size <= _CACHED_PROBABILITIES else max(16, _CACHED_PROBABILITIES // (heads * keys))
    joined = query.new_empty(batch, queries, heads * value.shape[-1])
    result = joined.unflatten(-1, (heads, -1)).transpose(1, 2)
    output.append(result)
    buffer = query.new_empty(step * heads * min(rows, queries) * keys)
    product = None if step == 1 else query.new_empty(step * heads, queries, value.shape[-1])
    factor = 1 / math.sqrt(width) if scale is None else scale
    mask = None if mask is None else _with_heads(mask).expand(batch, -1, queries, keys)
    for first in range(0, batch, step):
        images = slice(first, min(first + step, batch))
        # Views of one image; copies of several.
        q, k, v = (tensor[images].flatten(0, 1) for tensor in (query, key, value))
        for top in range(0, queries, rows):
            in_image = slice(top, min(top + rows, queries))
            part = q if rows >= queries else q[:, in_image]
            shape = (*part.shape[:2], keys)
            scores = buffer[: math.prod(shape)].view(shape)
            scores.baddbmm_(part, k.mT, beta=0, alpha=factor)
            if mask is None:
                torch.softmax(scores, dim=-1, out=scores)
            else:
                by_head = scores.unflatten(0, (-1, heads))
                _, fully_masked = _mask(by_head, mask[images, :, in_image], in_place=True)
                torch.softmax(scores, dim=-1, out=scores)
                by_head.masked_fill_(fully_masked, 0.0)
            place = result[images, :, in_image]
            if product is None:
                torch.bmm(scores, v, out=place[0])
            else:
                torch.bmm(scores, v, out=product[: len(scores)])
                place.copy_(product[: len(scores)].unflatten(0, (-1, heads)))
            yield Part(images, in_image, scores, v, joined[images, in_image])


def _mask(scores: Tensor, mask: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Return masked scores, and the queries that see no key, for which torch's function returns zeros."""
    if mask.dtype != torch.bool:
        scores = scores.add_(mask) if in_place else scores + mask
        fully_masked = (scores == -math.inf).all(dim=-1, keepdim=True)
        return (scores.masked_fill_ if in_place else scores.masked_fill)(fully_masked, 0.0), fully_masked
    fully_masked = ~mask.any(dim=-1, keepdim=True)
    masked = ~(mask | fully_masked)
    return (scores.masked_fill_ if in_place else scores.masked_fill)(masked, -math.inf), fully_masked


def _probabilities(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None, enable_gqa: bool) -> Tensor:
    """Return attention probabilities [batch, heads, queries, keys], at least in float32."""
    if query.dtype not in (torch.float32, torch.float64):
        query, key = query.float(), key.float()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    kind = query.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
        if mask is None:
            return scores.softmax(dim=-1)
        scores, fully_masked = _mask(scores, mask)
        return scores.softmax(dim=-1).masked_fill(fully_masked, 0.0)


def seen_keys(mask: Tensor) -> Tensor:
    """Return which keys each query may see, [batch or 1, queries, keys], from a mask or masked scores."""
    return _with_heads(unmasked(mask)).any(dim=-3)


def unmasked(mask: Tensor) -> Tensor:
    """Return the bool form of a mask or of masked scores: True if visible.

    Models may divide masked scores, or add only −10,000: far below a row's largest, a probability is exactly 0.
    """
    if mask.dtype == torch.bool or not mask.numel():
        return mask.bool()
    near = mask > mask.amax(dim=-1, keepdim=True) - _FAR_BELOW
    return near & (mask > torch.finfo(mask.dtype).min / 2)


def _with_heads(mask: Tensor) -> Tensor:
    """Reshape a mask of any shape that torch supports to [batch or 1, heads or 1, queries, keys]."""
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
