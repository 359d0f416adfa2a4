"""Where attention is computed: what a running model does to its tokens, seen as it calls torch's functions.

Attention is made by `scaled_dot_product_attention`, or by a softmax whose result a product applies to the values. What
is recorded is the matrix that is applied: some models mix or re-weigh the softmax before they use it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
# Where only fused matrices are kept, a processor works on at most so many probabilities at a time, for its cache.
_CACHED_PROBABILITIES = 2**20
# One thread takes a picture with at least this part of them by itself, without copies; several share more evenly.
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
        """Whether this call's probabilities are only needed fused, some pictures at a time."""

    def saw(
        self,
        probabilities: Tensor,
        value: Tensor | None,
        mixed: bool = False,
        key: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> None:
        """Take in attention [..., queries, keys] and the values [..., keys, width] that it is applied to.

        It is mixed where it was made of a softmax, instead of being one. The key vectors [..., keys, width] are told
        where they were seen; and, if asked for, which keys each query may see, [batch or 1, queries, keys] or of the
        shape of the attention, where these are not all.
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
    """The attention of some pictures of a batch, or of some queries of one: memory that the next part uses again.

    Attributes:
        pictures, queries: where in the batch, and among the queries.
        probabilities: [pictures · heads, queries, keys].
        mixed: their product with the values, [pictures · heads, queries, width].
    """

    pictures: slice
    queries: slice
    probabilities: Tensor
    mixed: Tensor


class Interception(TorchFunctionMode):
    """Sees every torch function of this thread, and tells a listener of attention where it is made."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener = listener
        # Softmaxes, their scores and the keys of these by module, which no product has applied yet.
        self._pending: dict[str, list[tuple[Tensor, Tensor, Tensor | None]]] = {}
        # The latest product by module, with what stands on its right: scores and keys, where a softmax follows.
        self._products: dict[str, tuple[torch.Size, Tensor]] = {}
        self._within = 0

    def begin(self) -> None:
        """See torch's functions until the `end` of this: a mode costs time for each of them."""
        self._within += 1
        if self._within == 1:
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """The end of the latest `begin`."""
        self._within -= 1
        if self._within == 0:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def end_all(self) -> None:
        """The end of all that began: where a hook itself raised an error, some did not end."""
        if self._within:
            self._within = 0
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _INTERCEPTED or not (name := self.listener.running()):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attend(self.listener, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _attend_with_many_heads(self.listener, func, *args, **kwargs)
        if func in _PRODUCTS:
            if self._pending.get(name) and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
                self._multiplied(name, args[0], args[1])
            output = func(*args, **kwargs)
            if self.listener.wants_keys and len(args) > 1:
                self._products[name] = output.shape, args[1]
            return output
        output = func(*args, **kwargs)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if output.ndim >= 3 and dim in (-1, output.ndim - 1):
            self._pending.setdefault(name, []).append((output, args[0], self._keys_of(name, args[0])))
        return output

    def _keys_of(self, name: str, scores: Tensor) -> Tensor | None:
        """The keys [..., keys, width] of the product that made the scores, as far as their shapes tell."""
        shape, right = self._products.pop(name, (None, scores))
        return right.mT if shape == scores.shape else None

    def _multiplied(self, name: str, first: Tensor, second: Tensor) -> None:
        """Recognise the product that applies a softmax, or what was made of it, to values."""
        probabilities, scores, key = self._pending[name][-1]
        turned = second.ndim >= 2 and second.mT.shape == probabilities.shape
        if turned and (first.shape != probabilities.shape or second.data_ptr() == probabilities.data_ptr()):
            first, second = second.mT, first.mT  # values · attentionᵀ
        if first.shape != probabilities.shape:
            probabilities = probabilities[..., : first.shape[-1]]  # the last column may be a sink that has no value
            if first.shape != probabilities.shape or first.data_ptr() != probabilities.data_ptr():
                return
        del self._pending[name]
        itself = first.data_ptr() == probabilities.data_ptr() or _is_copy(first, probabilities)
        precise = self._precise(first, scores if itself else None)
        visible = self._visible(scores[..., : first.shape[-1]])
        self.listener.saw(precise, second, not itself, key, visible)

    def ended(self, name: str) -> None:
        """A module has run: of a softmax that met no product there, the softmax itself is all that can be told."""
        self._products.pop(name, None)
        for probabilities, scores, key in self._pending.pop(name, ()):
            if probabilities.ndim == 4:
                self.listener.saw(self._precise(probabilities, scores), None, False, key, self._visible(scores))

    def _visible(self, scores: Tensor) -> Tensor | None:
        if not self.listener.wants_visible or scores.ndim not in (3, 4):
            return None
        return _seen_keys(scores) if scores.ndim == 4 else _unmasked(scores)

    def _precise(self, probabilities: Tensor, scores: Tensor | None) -> Tensor:
        """Probabilities in float32 at least, from their scores, if they are plainly the softmax of those.

        A copy in another precision would lie beside the path of the gradients.
        """
        if self.listener.gradients or probabilities.dtype in (torch.float32, torch.float64):
            return probabilities
        if scores is None:
            return probabilities.float()
        return scores.float().softmax(dim=-1)[..., : probabilities.shape[-1]]


def _seen_keys(mask: Tensor) -> Tensor:
    """Which keys each query may see, [batch or 1, queries, keys], by a mask, or by scores that one was added to."""
    return _with_heads(_unmasked(mask)).any(dim=-3)


def _unmasked(mask: Tensor) -> Tensor:
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


def _is_copy(tensor: Tensor, original: Tensor) -> bool:
    """Whether a tensor is another, in another precision: a softmax in float32 that half-precision values follow."""
    return tensor.dtype != original.dtype and torch.equal(tensor, original.to(tensor.dtype))


_INTERCEPTED = {F.scaled_dot_product_attention, F.multi_head_attention_forward, *_SOFTMAX, *_PRODUCTS}


def _attend(
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
    visible = _seen_keys(attn_mask) if listener.wants_visible and attn_mask is not None else None
    if plain and not torch.is_grad_enabled() and listener.streams(query, key):
        output: list[Tensor] = []
        parts = _attend_in_parts(query, key, value, attn_mask, scale, output)
        listener.saw_in_parts(parts, (query, key, value), attn_mask is None, visible)
        return output[0]
    probabilities = _probabilities(query, key, attn_mask, scale, enable_gqa)
    if listener.gradients and not probabilities.requires_grad:
        probabilities = probabilities.detach().requires_grad_()  # a frozen model: the graph begins here
    listener.saw(probabilities, value, False, key, visible)
    if dropout_p == 0.0 and (exact or listener.gradients):
        if enable_gqa:
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
        return probabilities.to(value.dtype) @ value
    if is_causal:
        attn_mask = None
    grouped = {"enable_gqa": True} if enable_gqa else {}  # which torch knows from 2.5 on
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **grouped)


def _attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, output: list[Tensor]
) -> Iterator[Part]:
    """`_attend` for fused matrices alone, in parts that fit a processor's cache: faster, and with less memory.

    A part is some pictures of the batch, one picture, or where that is too much, some of its queries. All parts share
    the memory of one; the output is appended to a list before the first of them.
    """
    (batch, heads, queries, width), keys = query.shape, key.shape[-2]
    size, alone = heads * queries * keys, torch.get_num_threads() == 1
    step = max(1, min(batch, int(_CACHED_PROBABILITIES * (_BY_ITSELF if alone else _SHARED)) // size))
    rows = queries if size <= _CACHED_PROBABILITIES else max(16, _CACHED_PROBABILITIES // (heads * keys))
    if step == 1:  # views, and the output as fused attention lays it out
        output.append(query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2))
        pictures = zip(*(one.unbind(0) for one in (query, key.mT, value, output[0])), strict=True)
    else:
        output.append(query.new_empty(batch, heads, queries, value.shape[-1]))
        all_four = [one.flatten(0, 1) for one in (query, key.mT, value, output[0])]
        pictures = zip(*(one.split(step * heads) for one in all_four), strict=True)
    room = query.new_empty(step * heads, min(rows, queries), keys)
    factor = 1 / math.sqrt(width) if scale is None else scale
    mask = None if mask is None else _with_heads(mask).expand(batch, -1, queries, keys)
    for number, (asked, turned, applied, mixed) in enumerate(pictures):
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


def _attend_with_many_heads(
    listener: Listener,
    func: Callable[..., tuple[Tensor, Tensor | None]],
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
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`multi_head_attention_forward` of torch.nn.MultiheadAttention, whose inner calls no function mode sees.

    As a vision model calls it, on [tokens, batch, width] with one joined projection and no masks, it is written out;
    any other call runs as it is, unseen.
    """
    masked = options.get("key_padding_mask") is not None or options.get("attn_mask") is not None
    training = options.get("training", True) and dropout_p > 0.0
    if query.ndim != 3 or in_proj_weight is None or bias_k is not None or add_zero_attn or masked or training:
        joined = (embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn)
        return func(query, key, value, *joined, dropout_p, out_proj_weight, out_proj_bias, **options)
    width = query.shape[-1]
    biases = in_proj_bias.split(width) if in_proj_bias is not None else (None,) * 3
    heads = [
        F.linear(source, weight, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        for source, weight, bias in zip((query, key, value), in_proj_weight.split(width), biases, strict=True)
    ]  # [batch, heads, tokens, width of a head] each
    output = _attend(listener, *heads).permute(2, 0, 1, 3).flatten(-2)
    weights = None
    if options.get("need_weights", True):
        weights = _probabilities(heads[0], heads[1], None, None, False)
        weights = weights.mean(dim=1) if options.get("average_attn_weights", True) else weights
    return F.linear(output, out_proj_weight, out_proj_bias), weights
