"""Interception of attention in the torch functions that a running model calls.

Attention is computed by `scaled_dot_product_attention`, or by a softmax that a matrix product applies to the values.
The recorded matrix is the applied one: some models mix or re-weight the softmax before.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitflow.recording.attending import Attention, Listener, attend, scaled_dot_product_attention, seen_keys, unmasked
from vitflow.recording.attention_kinds import other_attention
from vitflow.recording.isolation import Hook

#: Description of softmaxes over matrices without a batch axis.
ONE_IMAGE = "attention of one image at a time, as matrices [tokens, tokens] that are not recorded"
_SOFTMAX: set[Any] = {torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax}
_MANY_HEADS = signature(F.multi_head_attention_forward)
_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)


class Interception(Listener, TorchFunctionMode):
    """Function mode that observes the attention of a running model; `path` has the running modules, outermost first."""

    def __init__(self) -> None:
        super().__init__()
        self.path: list[tuple[str, nn.Module]] = []
        # By module: softmaxes that no product has applied yet, with their scores and keys.
        self._pending: dict[str, list[tuple[Tensor, Tensor, Tensor | None]]] = {}
        # By module: the latest product and its two factors; if a softmax follows, scores, queries and keys.
        self._products: dict[str, tuple[torch.Size, Tensor, Tensor]] = {}
        self._within = 0
        #: What was computed in place of attention between tokens, in words.
        self.others: set[str] = set()

    def hooks(self, modules: Mapping[str, nn.Module]) -> Iterator[Hook]:
        """Yield hooks that keep the path of the running modules among these."""
        for name, module in modules.items():
            yield Hook(module, partial(self.enter, name, module), before=True)
            yield Hook(module, partial(self._leave, name), before=False, always=True)

    def enter(self, name: str, module: nn.Module, *given: Any) -> None:
        """Add a module that begins to run to the path."""
        self.path.append((name, module))

    def _leave(self, name: str, args: Any, output: Any) -> None:
        self.leave(name, output)

    def begin(self) -> None:
        """Enter the mode until `end`; it slows down each torch function."""
        self._within += 1
        if self._within == 1:
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Undo the latest `begin`."""
        self._within -= 1
        if self._within == 0:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def end_all(self) -> None:
        """Undo every `begin`; some have no `end` if a hook raised an error."""
        while self._within:
            self.end()

    def running(self) -> str | None:
        """Return the path of the running module; None if it computes no attention between tokens."""
        if not self.path:
            return None
        name, module = self.path[-1]
        if (other := other_attention(module)) is not None:
            self.others.add(other)
            return None
        return name

    def leave(self, name: str, output: Any) -> bool:
        """Remove the running module from the path; False if it is another one, as an earlier hook raised an error.

        A softmax that it returns may be applied by the module around it; others, such as those over features, are
        forgotten.
        """
        self._products.pop(name, None)
        pending = self._pending.pop(name, [])
        if not self.path or self.path[-1][0] != name:
            return False
        self.path.pop()
        if pending and self.path and isinstance(output, Tensor):
            returned = [each for each in pending if each[0].data_ptr() == output.data_ptr()]
            self._pending.setdefault(self.path[-1][0], []).extend(returned)
        return True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # flex_attention compiles itself, and torch 2.8 cannot trace what follows.
        if torch.compiler.is_compiling() or func not in _INTERCEPTED or not (name := self.running()):
            return func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            return attend(self, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.attend_with_many_heads(*args, **kwargs)
        if func in _SOFTMAX:
            output = func(*args, **kwargs)
            self._normalised(name, output, *_softmax_of(*args, **kwargs))
            return output
        product = _einsum(*args) if func is torch.einsum else _product(*args, **kwargs)
        if product is None:
            return func(*args, **kwargs)
        first, second, order = product
        replacement = self._multiplied(name, first, second) if self._pending.get(name) else None
        output = func(*args, **kwargs) if replacement is None else replacement.permute(order)
        if self.wants_keys:
            self._products[name] = output.shape, first, second
        return output

    def attend_with_many_heads(self, *args: Any, **kwargs: Any) -> Any:
        """Compute `F.multi_head_attention_forward` with its inner calls intercepted, without dropout.

        The original runs as well for the output with dropout, and for the weights, if requested.
        """
        code, given = F.multi_head_attention_forward, _MANY_HEADS.bind(*args, **kwargs)
        followed = FunctionType(code.__code__, {**vars(F), "has_torch_function": lambda _: False})
        given.apply_defaults()
        dropout = given.arguments["training"] and given.arguments["dropout_p"] > 0.0
        weights = given.arguments["need_weights"]
        given.arguments |= {"training": False, "need_weights": False}
        with self:
            output, _ = followed(*given.args)
        if dropout:
            return code(*args, **kwargs)
        return output, code(*args, **kwargs)[1] if weights else None

    def _normalised(self, name: str, output: Tensor, scores: Tensor, dim: int | None) -> None:
        """Keep a softmax over keys: over the last axis, or the one before it if its transpose is applied."""
        if output.ndim == 2 and output.shape[0] == output.shape[1] > 1:
            self.others.add(ONE_IMAGE)
        if output.ndim < 3 or dim is None:
            return
        query, key = self._factors_of(name, scores)
        if dim in (-1, output.ndim - 1):
            self._pending.setdefault(name, []).append((output, scores, None if key is None else key.mT))
        elif dim in (-2, output.ndim - 2) and output.shape[-1] == output.shape[-2]:
            self._pending.setdefault(name, []).append((output.mT, scores.mT, query))

    def _factors_of(self, name: str, scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the factors of the product that computed the scores, judged by shape."""
        shape, left, right = self._products.pop(name, (None, None, None))
        return (left, right) if shape == scores.shape else (None, None)

    def _multiplied(self, name: str, first: Tensor, second: Tensor) -> Tensor | None:
        """Return the replacement of a product that applies a softmax, or a matrix computed from it, to values."""
        pending = self._pending[name]
        for by_itself in (True, False):  # a matrix computed from a softmax has its shape; another softmax may, too
            for index in reversed(range(len(pending))):
                probabilities, scores, key = pending[index]
                applied = _applied(first, second, probabilities)
                if applied is None or (by_itself and not _is_same(applied[0], probabilities)):
                    continue
                attention, values, transposed = applied
                if by_itself:
                    del pending[index]
                if _is_weight(values, attention):
                    return None
                if not by_itself:
                    pending.clear()
                if by_itself and attention.shape == probabilities.shape:
                    attention = probabilities  # in the autograd graph, unlike a transposed one
                itself = by_itself or _is_copy(attention, probabilities)
                scores = scores.reshape(*attention.shape[:-1], -1)
                precise = self._precise(attention, scores if itself else None)
                visible = self._visible(scores[..., : attention.shape[-1]])
                replacement = self.on_attention(Attention(precise, values, not itself, key, visible))
                return replacement.mT.contiguous() if transposed and replacement is not None else replacement
        return None

    def _visible(self, scores: Tensor) -> Tensor | None:
        if not self.wants_visible or scores.ndim not in (3, 4):
            return None
        return seen_keys(scores) if scores.ndim == 4 else unmasked(scores)

    def _precise(self, probabilities: Tensor, scores: Tensor | None) -> Tensor:
        """Return probabilities at least in float32, recomputed from `scores` if given.

        With gradients they are unchanged, because a copy would not be in the autograd graph.
        """
        if self.gradients or probabilities.dtype in (torch.float32, torch.float64):
            return probabilities
        if scores is None:
            return probabilities.float()
        return scores.float().softmax(dim=-1)[..., : probabilities.shape[-1]]


def _softmax_of(input: Tensor, dim: int | None = None, *more: Any, **options: Any) -> tuple[Tensor, int | None]:
    """Return the input and axis of a softmax call."""
    return input, dim


def _product(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, list[int]] | None:
    """Return both factors of a product call, and the order of its axes; None if the factors are not tensors."""
    first, second = [*args, *(kwargs[name] for name in ("input", "other", "mat2", "tensor2") if name in kwargs)][:2]
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return None
    return first, second, list(range(max(first.ndim, second.ndim)))


def _einsum(equation: Any, *operands: Any) -> tuple[Tensor, Tensor, list[int]] | None:
    """Return an einsum as a product: its factors, and the order of the product's axes in its output; None for others.

    >>> tensors = torch.ones(2, 3, 4, 5), torch.ones(5, 2, 3, 6)
    >>> first, second, order = _einsum("bnij,jbnd->ibnd", *tensors)
    >>> (first @ second).shape, order
    (torch.Size([2, 3, 4, 6]), [2, 0, 1, 3])
    """
    inputs, _, output = str(equation).replace(" ", "").partition("->")
    operands = operands[0] if len(operands) == 1 else operands  # given as a list
    names = inputs.split(",")
    if len(operands) != 2 or len(names) != 2:
        return None
    dots = "0123456789"[: operands[0].ndim - len(names[0].replace("...", ""))]
    names, output = [each.replace("...", dots) for each in names], output.replace("...", dots)
    for first, second in ((0, 1), (1, 0)):  # values may come first
        product = _as_product(names[first], names[second], output)
        if product is not None and operands[second].ndim == len(names[second]):
            order, axes = product
            factor = operands[second] if order == sorted(order) else operands[second].permute(order)
            return operands[first], factor, axes
    return None


def _as_product(first: str, second: str, output: str) -> tuple[list[int], list[int]] | None:
    """Return the order of axes in which a factor is multiplied by the first one, and that of the product's axes."""
    if len(first) < 2:
        return None
    *batch, rows, inner = list(first)
    width = "".join(set(second) - set(first))
    factor, product = [*batch, inner, width], [*batch, rows, width]
    if sorted(second) != sorted(factor) or sorted(output) != sorted(product):
        return None
    return [second.index(name) for name in factor], [product.index(name) for name in output]


def _applied(first: Tensor, second: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """Return attention, values and True if the product is values · attentionᵀ; None for another product.

    The attention has the shape of the softmax, or is a view of it with the same last two axes.
    """
    like = probabilities.shape
    transposed = second.ndim >= 2 and second.mT.shape == like
    transposed = transposed and (first.shape != like or second.data_ptr() == probabilities.data_ptr())
    if transposed:
        first, second = second.mT, first.mT
    if first.shape == like:
        return first, second, transposed
    viewed = first.shape[-2:] == like[-2:] and first.numel() == probabilities.numel()
    # The last column may be an attention sink without a value.
    without_sink = first.ndim == len(like) and first.shape == probabilities[..., : first.shape[-1]].shape
    same = (viewed or without_sink) and first.data_ptr() == probabilities.data_ptr()
    return (first, second, transposed) if same else None


def _is_weight(values: Tensor, attention: Tensor) -> bool:
    """Return True for values that are a parameter, as of experts or prototypes: they are not those of tokens."""
    return values.ndim < attention.ndim or isinstance(values, nn.Parameter) or isinstance(values._base, nn.Parameter)


def _is_same(tensor: Tensor, probabilities: Tensor) -> bool:
    """Return True if a tensor is a view of these probabilities or of some columns, not of their transpose."""
    return tensor.data_ptr() == probabilities.data_ptr() and tensor.stride()[-2:] == probabilities.stride()[-2:]


def _is_copy(tensor: Tensor, original: Tensor) -> bool:
    """Return True if a tensor is the original in another precision, such as a softmax in float32 cast to half."""
    return tensor.dtype != original.dtype and torch.equal(tensor, original.to(tensor.dtype))


_INTERCEPTED = {scaled_dot_product_attention, F.multi_head_attention_forward, *_SOFTMAX, *_PRODUCTS, torch.einsum}
