"""Where attention is computed: what a running model does to its tokens, seen as it calls torch's functions.

Attention is made by `scaled_dot_product_attention`, or by a softmax whose result a product applies to the values. What
is recorded is the matrix that is applied: some models mix or re-weigh the softmax before they use it.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# torch's own functions, even where `torch.nn.functional` holds a wrapper that somebody put in their place.
_ATEN = torch.ops.aten
_scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
_FUSED: set[Any] = {_scaled_dot_product_attention, _ATEN.scaled_dot_product_attention}
_SOFTMAX: set[Any] = {torch.softmax, F.softmax, Tensor.softmax, torch._softmax, torch.special.softmax}
_SOFTMAX |= {_ATEN.softmax, _ATEN._softmax}
for _functions in (_FUSED, _SOFTMAX):  # with their overloads
    _packets = [one for one in _functions if isinstance(one, torch._ops.OpOverloadPacket)]
    _functions |= {getattr(packet, name) for packet in _packets for name in packet.overloads()}
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
        # The latest product by module, with its two factors: scores, queries and keys, where a softmax follows.
        self._products: dict[str, tuple[torch.Size, Tensor, Tensor]] = {}
        # The shapes of the products of each module, which its scores are among.
        self._shapes: dict[str, set[torch.Size]] = {}
        # Modules whose attention was applied to values in the call that runs.
        self._applied: set[str] = set()
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
        if func in _FUSED:
            self._applied.add(name)
            return _attend(self.listener, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            self._applied.add(name)
            both = _attend_with_many_heads(self.listener, *args, **kwargs)
            return func(*args, **kwargs) if both is None else both
        if func in _SOFTMAX:
            output = func(*args, **kwargs)
            self._normalised(name, output, *_softmax_of(*args, **kwargs))
            return output
        if func is torch.einsum:
            output = func(*args, **kwargs)
            self._shapes.setdefault(name, set()).add(output.shape)
            return output
        factors = _factors(*args, **kwargs)
        replacement = self._multiplied(name, *factors) if self._pending.get(name) and factors else None
        output = func(*args, **kwargs) if replacement is None else replacement
        self._shapes.setdefault(name, set()).add(output.shape)
        if self.listener.wants_keys and factors:
            self._products[name] = output.shape, *factors
        return output

    def _normalised(self, name: str, output: Tensor, scores: Tensor, dim: int | None) -> None:
        """Keep a softmax over the keys: over the last axis, or over the one before it if its transpose is applied."""
        if output.ndim < 3 or dim is None:
            return
        query, key = self._factors_of(name, scores)
        if dim in (-1, output.ndim - 1):
            self._pending.setdefault(name, []).append((output, scores, None if key is None else key.mT))
        elif dim in (-2, output.ndim - 2) and output.shape[-1] == output.shape[-2]:
            self._pending.setdefault(name, []).append((output.mT, scores.mT, query))

    def _factors_of(self, name: str, scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The factors of the product that made the scores, as far as their shapes tell."""
        shape, left, right = self._products.pop(name, (None, None, None))
        return (left, right) if shape == scores.shape else (None, None)

    def _multiplied(self, name: str, first: Tensor, second: Tensor) -> Tensor | None:
        """Recognise the product that applies a softmax, or what was made of it, to values.

        Returns:
            What the listener puts in the place of the product, if anything.
        """
        pending = self._pending[name]
        for by_itself in (True, False):  # what was made of a softmax has its shape; so may another softmax
            for number in reversed(range(len(pending))):
                probabilities, scores, key = pending[number]
                applied = _applied(first, second, probabilities)
                if applied is None or (by_itself and not _is_same(applied[0], probabilities)):
                    continue
                if by_itself:
                    del pending[number]
                else:
                    pending.clear()
                self._applied.add(name)
                attention, values, turned = applied
                itself = by_itself or _is_copy(attention, probabilities)
                scores = scores.reshape(*attention.shape[:-1], -1)
                precise = self._precise(attention, scores if itself else None)
                visible = self._visible(scores[..., : attention.shape[-1]])
                replacement = self.listener.saw(precise, values, not itself, key, visible)
                return replacement.mT if turned and replacement is not None else replacement
        return None

    def ended(self, name: str) -> None:
        """A module has run: of a softmax that met no product there, the softmax itself is all that can be told.

        Where the module applied attention, or where no product has the shape of the scores, it is taken for one over
        features.
        """
        self._products.pop(name, None)
        shapes, left = self._shapes.pop(name, set()), self._pending.pop(name, ())
        if name in self._applied:
            self._applied.discard(name)
            return
        for probabilities, scores, key in left:
            square = probabilities.shape[-1] == probabilities.shape[-2]
            if probabilities.ndim == 4 and (square or scores.shape in shapes):
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


def is_softmax(func: Any) -> bool:
    """Whether a function of torch is a softmax."""
    return func in _SOFTMAX


def _softmax_of(input: Tensor, dim: int | None = None, *more: Any, **options: Any) -> tuple[Tensor, int | None]:
    """What a softmax is taken of, and over which axis, however these arguments are passed."""
    return input, dim


def _factors(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor] | None:
    """Both factors of a product, however they are passed; None where they are no tensors."""
    first, second = [*args, *(kwargs[name] for name in ("input", "other", "mat2", "tensor2") if name in kwargs)][:2]
    return (first, second) if isinstance(first, Tensor) and isinstance(second, Tensor) else None


def _applied(first: Tensor, second: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """The attention and the values of a product, and whether it is values · attentionᵀ; None if it is no such product.

    The attention is a softmax, of its shape, or a view of it whose last two axes are those of the softmax.
    """
    like = probabilities.shape
    turned = second.ndim >= 2 and second.mT.shape == like
    turned = turned and (first.shape != like or second.data_ptr() == probabilities.data_ptr())
    if turned:
        first, second = second.mT, first.mT
    if first.shape == like:
        return first, second, turned
    viewed = first.shape[-2:] == like[-2:] and first.numel() == probabilities.numel()
    # The last column may be a sink that has no value.
    without_sink = first.ndim == len(like) and first.shape == probabilities[..., : first.shape[-1]].shape
    same = (viewed or without_sink) and first.data_ptr() == probabilities.data_ptr()
    return (first, second, turned) if same else None


def _is_same(tensor: Tensor, probabilities: Tensor) -> bool:
    """Whether a tensor holds these probabilities, or some columns of them, and not their transpose."""
    return tensor.data_ptr() == probabilities.data_ptr() and tensor.stride()[-2:] == probabilities.stride()[-2:]


def _is_copy(tensor: Tensor, original: Tensor) -> bool:
    """Whether a tensor is another, in another precision: a softmax in float32 that half-precision values follow."""
    return tensor.dtype != original.dtype and torch.equal(tensor, original.to(tensor.dtype))


_INTERCEPTED = {*_FUSED, F.multi_head_attention_forward, *_SOFTMAX, *_PRODUCTS, torch.einsum}


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
    return _scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **grouped)


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
        output = _attend(listener, queries, keys, values, mask)
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
    """`_attend` where only the first keys, so many, are tokens: what the others add is the same for every picture."""
    probabilities = _probabilities(query, key, mask, None, False)
    seen, others = probabilities[..., :count], probabilities[..., count:]
    if listener.gradients and not seen.requires_grad:
        seen = seen.detach().requires_grad_()
    visible = _seen_keys(mask[..., :count]) if listener.wants_visible and mask is not None else None
    replacement = listener.saw(seen, value[..., :count, :], False, key[..., :count, :], visible)
    if replacement is not None:
        return replacement
    return seen.to(value.dtype) @ value[..., :count, :] + others.to(value.dtype) @ value[..., count:, :]
