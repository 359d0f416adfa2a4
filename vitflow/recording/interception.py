"""Where attention is computed: what a running model does to its tokens, seen as it calls torch's functions.

Attention is made by `scaled_dot_product_attention`, or by a softmax whose result a product applies to the values. What
is recorded is the matrix that is applied: some models mix or re-weigh the softmax before they use it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitflow.recording.attending import (
    Listener,
    attend,
    attend_with_many_heads,
    scaled_dot_product_attention,
    seen_keys,
    unmasked,
)

_ATEN = torch.ops.aten
_FUSED: set[Any] = {scaled_dot_product_attention, _ATEN.scaled_dot_product_attention}
_SOFTMAX: set[Any] = {torch.softmax, F.softmax, Tensor.softmax, torch._softmax, torch.special.softmax}
_SOFTMAX |= {_ATEN.softmax, _ATEN._softmax}
for _functions in (_FUSED, _SOFTMAX):  # with their overloads
    _packets = [one for one in _functions if isinstance(one, torch._ops.OpOverloadPacket)]
    _functions |= {getattr(packet, name) for packet in _packets for name in packet.overloads()}
_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)


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
            return attend(self.listener, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            self._applied.add(name)
            both = attend_with_many_heads(self.listener, *args, **kwargs)
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
            of_text = self.listener.wants_visible  # which may attend within a window, by other shapes
            if probabilities.ndim == 4 and (square or of_text or scores.shape in shapes):
                self.listener.saw(self._precise(probabilities, scores), None, False, key, self._visible(scores))

    def _visible(self, scores: Tensor) -> Tensor | None:
        if not self.listener.wants_visible or scores.ndim not in (3, 4):
            return None
        return seen_keys(scores) if scores.ndim == 4 else unmasked(scores)

    def _precise(self, probabilities: Tensor, scores: Tensor | None) -> Tensor:
        """Probabilities in float32 at least, from their scores, if they are plainly the softmax of those.

        A copy in another precision would lie beside the path of the gradients.
        """
        if self.listener.gradients or probabilities.dtype in (torch.float32, torch.float64):
            return probabilities
        if scores is None:
            return probabilities.float()
        return scores.float().softmax(dim=-1)[..., : probabilities.shape[-1]]


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
