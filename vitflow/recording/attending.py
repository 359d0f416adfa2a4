"""Attention written out: what torch's fused functions compute, with the probabilities computed once and recorded."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

#: torch's own function, even where `torch.nn.functional` holds a wrapper that somebody put in its place.
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
# Where only fused matrices are kept, a processor works on at most so many probabilities at a time, for its cache.
_CACHED_PROBABILITIES = 2**20
# One thread takes an image with at least this part of them by itself, without copies; several share more evenly.
_BY_ITSELF, _SHARED = 1 / 32, 1 / 2
# A score that lies so far below another of its row has no probability beside it: exp(-746) is 0 in float64.
_FAR_BELOW = 1000.0


class Listener(Protocol):
    """Who is told of the attention of a running model."""

    gradients: bool
    wants_keys: bool
    wants_visible: bool

    def running(self) -> str | None:
        """Name of the module that runs now; None if what it computes is no attention between tokens."""

    def streams(self, query: Tensor, key: Tensor) -> bool:
        """Whether this call's probabilities are only needed fused, some images at a time."""

    def saw(
        self,
        probabilities: Tensor,
        value: Tensor | None,
        mixed: bool = False,
        key: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor | None:
        """Take in attention [..., queries, keys] and the values [..., keys, width] that it is applied to.

        It is mixed where it was made of a softmax, instead of being one. The key vectors [..., keys, width] are told
        where they were seen; and, if asked for, which keys each query may see, [batch or 1, queries, keys] or of the
        shape of the attention, where these are not all.

        Returns:
            What the model gets instead of the product of the attention and the values; None for the product itself.
        """

    def saw_in_parts(
        self, parts: Iterator["Part"], qkv: Sequence[Tensor], normal: bool, visible: Tensor | None
    ) -> None:
        """Take in attention that exists part by part alone: it is computed while the parts are asked for.

        It is made of queries, keys and values, [batch, heads, tokens, width] each, and normal where each query sees
        some key, so that the rows of each head sum to 1.
        """


@dataclass(slots=True)
class Part:
    """The attention of some images of a batch, or of some queries of one: memory that the next part uses again.

    Attributes:
        images, queries: where in the batch, and among the queries.
        probabilities: [images · heads, queries, keys].
        mixed: their product with the values, [images · heads, queries, width].
    """

    images: slice
    queries: slice
    probabilities: Tensor
    mixed: Tensor


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
    """`scaled_dot_product_attention`, with the probabilities computed once: recorded, and used for the output."""
    exact = query.dtype in (torch.float32, torch.float64)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    plain = exact and dropout_p == 0.0 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    visible = seen_keys(attn_mask) if listener.wants_visible and attn_mask is not None else None
    if plain and not torch.is_grad_enabled() and listener.streams(query, key):
        output: list[Tensor] = []
        parts = _attend_in_parts(query, key, value, attn_mask, scale, output)
        listener.saw_in_parts(parts, (query, key, value), attn_mask is None, visible)
        return output[0]
    probabilities = _probabilities(query, key, attn_mask, scale, enable_gqa)
    if listener.gradients and not probabilities.requires_grad:
        probabilities = probabilities.detach().requires_grad_()  # a frozen model: the graph begins here
    replacement = listener.saw(probabilities, value, False, key, visible)
    if replacement is not None:
        return replacement
    if dropout_p == 0.0 and (exact or listener.gradients):
        if enable_gqa:
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
        return probabilities.to(value.dtype) @ value
    if is_causal:
        attn_mask = None
    grouped = {"enable_gqa": True} if enable_gqa else {}  # which torch knows from 2.5 on
    return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **grouped)


def _attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, output: list[Tensor]
) -> Iterator[Part]:
    """`attend` for fused matrices alone, in parts that fit a processor's cache: faster, and with less memory.

    A part is some images of the batch, one image, or where that is too much, some of its queries. All parts share
    the memory of one; the output is appended to a list before the first of them.
    """
    (batch, heads, queries, width), keys = query.shape, key.shape[-2]
    size, alone = heads * queries * keys, torch.get_num_threads() == 1
    step = max(1, min(batch, int(_CACHED_PROBABILITIES * (_BY_ITSELF if alone else _SHARED)) // size))
    rows = queries if size <= _CACHED_PROBABILITIES else max(16, _CACHED_PROBABILITIES // (heads * keys))
    if step == 1:  # views, and the output as fused attention lays it out
        output.append(query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2))
        images = zip(*(one.unbind(0) for one in (query, key.mT, value, output[0])), strict=True)
    else:
        output.append(query.new_empty(batch, heads, queries, value.shape[-1]))
        all_four = [one.flatten(0, 1) for one in (query, key.mT, value, output[0])]
        images = zip(*(one.split(step * heads) for one in all_four), strict=True)
    room = query.new_empty(step * heads, min(rows, queries), keys)
    factor = 1 / math.sqrt(width) if scale is None else scale
    mask = None if mask is None else _with_heads(mask).expand(batch, -1, queries, keys)
    for number, (asked, turned, applied, mixed) in enumerate(images):
        some = slice(number * step, min(number * step + step, batch))
        for top in range(0, queries, rows):
            these = slice(top, min(top + rows, queries))
            own, made = (asked, mixed) if rows >= queries else (asked[:, these], mixed[:, these])
            shape = (*own.shape[:2], keys)
            scores = room if room.shape == shape else room.view(-1)[: math.prod(shape)].view(shape)
            scores.baddbmm_(own, turned, beta=0, alpha=factor)
            if mask is None:
                torch.softmax(scores, dim=-1, out=scores)
            else:
                by_head = scores.unflatten(0, (-1, heads))
                _, unseeing = _mask(by_head, mask[some, :, these], in_place=True)
                torch.softmax(scores, dim=-1, out=scores)
                by_head.masked_fill_(unseeing, 0.0)
            torch.bmm(scores, applied, out=made)
            yield Part(some, these, scores, made)


def _mask(scores: Tensor, mask: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Scores with their mask, and which queries see no key: to these, torch's own function gives zeros."""
    if mask.dtype != torch.bool:
        scores = scores.add_(mask) if in_place else scores + mask
        unseeing = (scores == -math.inf).all(dim=-1, keepdim=True)
        return (scores.masked_fill_ if in_place else scores.masked_fill)(unseeing, 0.0), unseeing
    unseeing = ~mask.any(dim=-1, keepdim=True)
    unseen = ~(mask | unseeing)
    return (scores.masked_fill_ if in_place else scores.masked_fill)(unseen, -math.inf), unseeing


def _probabilities(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None, enable_gqa: bool) -> Tensor:
    """Attention probabilities [batch, heads, queries, keys], in float32 at least."""
    if query.dtype not in (torch.float32, torch.float64):
        query, key = query.float(), key.float()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    kind = query.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
        if mask is None:
            return scores.softmax(dim=-1)
        scores, unseeing = _mask(scores, mask)
        return scores.softmax(dim=-1).masked_fill(unseeing, 0.0)


def attend_with_many_heads(
    listener: Listener,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """`multi_head_attention_forward` of torch.nn.MultiheadAttention, whose inner calls no function mode sees.

    A call on [tokens, batch, width] is written out. Keys that are no tokens (`add_bias_kv`, `add_zero_attn`) are left
    out of what is recorded, whose rows then sum to less than 1.

    Returns:
        None where the call must run as it is: with dropout, recorded without it; or else unseen.
    """
    weights: Sequence[Tensor | None] = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight and in_proj_weight is not None:
        weights = in_proj_weight.chunk(3)
    static = static_k is not None or static_v is not None
    if query.ndim != 3 or static or any(weight is None for weight in weights) or (is_causal and attn_mask is None):
        return None
    biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None,) * 3
    mapped = [
        F.linear(source, weight, bias)  # type: ignore[arg-type]
        for source, weight, bias in zip((query, key, value), weights, biases, strict=True)
    ]
    for number, extra in ((1, bias_k), (2, bias_v)):
        rows = [] if extra is None else [extra.expand(1, *mapped[number].shape[1:])]
        rows += [mapped[number].new_zeros(1, *mapped[number].shape[1:])] if add_zero_attn else []
        mapped[number] = torch.cat([mapped[number], *rows]) if rows else mapped[number]
    heads = [one.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for one in mapped]  # [batch, heads, tokens, width]
    mask: Tensor | None = None
    if is_causal and key_padding_mask is None and not need_weights:
        mask = torch.ones(len(query), len(mapped[1]), dtype=torch.bool, device=query.device).tril()
    else:  # is_causal only says of which kind the mask is
        masks = _as_scores(attn_mask, num_heads), _as_scores(key_padding_mask, None)
        given = [one for one in masks if one is not None]
        if given:
            mask = F.pad(sum(given[1:], given[0]), (0, len(mapped[1]) - len(key))).to(mapped[0].dtype)
    queries, keys, values = heads
    if training and dropout_p > 0.0:
        seen = _probabilities(queries, keys, mask, None, False)[..., : len(key)]
        listener.saw(seen, values[..., : len(key), :], False, keys[..., : len(key), :])
        return None
    if len(mapped[1]) == len(key):
        output = attend(listener, queries, keys, values, mask)
    else:
        output = _attend_to_tokens(listener, queries, keys, values, mask, len(key))
    shown: Tensor | None = None
    if need_weights:
        shown = _probabilities(heads[0], heads[1], mask, None, False).to(query.dtype)
        shown = shown.mean(dim=1) if average_attn_weights else shown
    return F.linear(output.permute(2, 0, 1, 3).flatten(-2), out_proj_weight, out_proj_bias), shown


def _as_scores(mask: Tensor | None, heads: int | None) -> Tensor | None:
    """A mask as torch.nn.MultiheadAttention takes it, as what is added to scores [batch, heads, queries, keys].

    Args:
        mask: true, or −∞, where a query does not see a key: [queries, keys], [batch · heads, queries, keys], or, where
            no heads are given, [batch, keys].
        heads: how many heads it may hold.
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(mask, -math.inf)
    if heads is None:
        return mask[:, None, None]
    return mask.unflatten(0, (-1, heads)) if mask.ndim == 3 else mask


def _attend_to_tokens(
    listener: Listener, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, count: int
) -> Tensor:
    """`attend` where only the first keys, so many, are tokens: what the others add is the same for every image."""
    probabilities = _probabilities(query, key, mask, None, False)
    seen, others = probabilities[..., :count], probabilities[..., count:]
    if listener.gradients and not seen.requires_grad:
        seen = seen.detach().requires_grad_()
    visible = seen_keys(mask[..., :count]) if listener.wants_visible and mask is not None else None
    replacement = listener.saw(seen, value[..., :count, :], False, key[..., :count, :], visible)
    if replacement is not None:
        return replacement
    return seen.to(value.dtype) @ value[..., :count, :] + others.to(value.dtype) @ value[..., count:, :]


def seen_keys(mask: Tensor) -> Tensor:
    """Which keys each query may see, [batch or 1, queries, keys], by a mask, or by scores that one was added to."""
    return _with_heads(unmasked(mask)).any(dim=-3)


def unmasked(mask: Tensor) -> Tensor:
    """Where a mask, or scores that one was added to, lets anything through: bool, of the same shape.

    Some models divide their scores after masking, others add only −10,000: what lies so far below its row's largest has
    a probability of exactly 0 in any precision.
    """
    if mask.dtype == torch.bool or not mask.numel():
        return mask.bool()
    near = mask > mask.amax(dim=-1, keepdim=True) - _FAR_BELOW
    return near & (mask > torch.finfo(mask.dtype).min / 2)


def _with_heads(mask: Tensor) -> Tensor:
    """A mask of any form that torch takes as [batch or 1, heads or 1, queries, keys]."""
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
