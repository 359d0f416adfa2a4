"""Window partition of a model, traced in one forward pass.

It is independent of the model family: the model runs once on random pixels, and each window's values are matched bit
by bit with the tokens that they were computed from.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import layout_of_count
from vitflow.models.parts import module_paths
from vitflow.recording.attending import Listener
from vitflow.recording.attention_kinds import arrangement
from vitflow.recording.interception import Interception
from vitflow.recording.isolation import Hook, hooked, trial

Size = tuple[int, int]
# By module path: patch index of each window's keys, [windows, keys], −1 for padding; and the patch grid.
Windows = dict[str, tuple[Tensor, TokenLayout]]

_windows: WeakKeyDictionary[nn.Module, dict[Size, Windows]] = WeakKeyDictionary()


def find_windows(model: nn.Module, pixels: Tensor) -> Windows:
    """Find the windows of each windowed layer for images of this size.

    The model runs once per size, in eval mode and with the random state restored, so that running statistics and the
    caller's random numbers do not change.
    """
    size = (pixels.shape[-2], pixels.shape[-1])
    by_size = _windows.setdefault(model, {})
    if size not in by_size:
        noise = torch.randn(1, *pixels.shape[1:], generator=torch.Generator().manual_seed(0))
        probe = _Probe(model, size)
        with trial(model, pixels.device), hooked(probe.hooks()), probe.interception:
            model(noise.to(pixels))
        by_size[size] = probe.windows
    return by_size[size]


def token_orders(model: nn.Module, size: Size) -> dict[int, Tensor]:
    """Return the raster index of each token by token count, for models that do not use raster order.

    Hiera unrolls its tokens once, so that tokens that later stages pool together are `num_pooled` apart.
    """
    unroll: Any = getattr(model, "unroll", None)
    if unroll is None:
        return {}
    rows, cols = (int(side) // int(stride) for side, stride in zip(size, _strides(model), strict=True))
    order = unroll(torch.arange(rows * cols, dtype=torch.float32).reshape(1, -1, 1)).long().flatten()
    orders = {len(order): order}
    while rows % 2 == 0 and cols % 2 == 0 and rows * cols > 4:
        children = order[: len(order) // 4]
        order = children // cols // 2 * (cols // 2) + children % cols // 2
        rows, cols = rows // 2, cols // 2
        orders[len(order)] = order
    return orders


def _strides(model: Any) -> Sequence[int]:
    return tuple(model.patch_embed.proj.stride)[-2:]


class _Probe(Listener):
    """Traces the tokens of one random image through a model."""

    def __init__(self, model: nn.Module, size: Size) -> None:
        super().__init__()
        self.interception = _ProbeInterception(self)
        self._model, self._size = model, size
        self.windows: Windows = {}
        self._given: list[Tensor | None] = []  # inputs of the modules of the path
        self._images: list[Tensor] = []  # the latest tensors with tokens in raster order
        self._made: list[tuple[Tensor, Tensor]] = []  # inputs and outputs of the latest linear layers
        self._rows: list[tuple[Tensor, Tensor]] = []  # inputs and outputs of the latest norms and sums
        self._last: tuple[torch.Size, Tensor, TokenLayout] | None = None
        self._orders = token_orders(model, size)

    def hooks(self) -> Iterator[Hook]:
        """Yield the hooks of a forward pass."""
        for name, module in module_paths(self._model):
            yield Hook(module, partial(self._enter, name, module), before=True, while_unrecorded=True)
            yield Hook(module, partial(self._leave, name), before=False, always=True, while_unrecorded=True)

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if any(True for _ in module.children()):
            self.path.append((name, module))
            self._given.append(given)
        if given is not None:
            self.note(given)

    def _leave(self, name: str, args: Any, output: Any) -> None:
        if self.path and self.path[-1][0] == name:
            self.interception.ended(name)
            self.path.pop()
            self._given.pop()
        if isinstance(output, Tensor):
            self.note(output)

    def note(self, tensor: Tensor) -> None:
        """Keep a tensor if it has all tokens of the image in raster order."""
        known = any(tensor is image for image in self._images)
        if not known and _tokens_in_order(tensor, self._model, self._size) is not None:
            self._images = [tensor, *self._images[:23]]

    def kept(self, given: Tensor, output: Tensor) -> None:
        """Keep the input and output of a row-wise operation."""
        self._rows = [(given, output), *self._rows[:7]]

    def mapped(self, given: Tensor, output: Tensor) -> None:
        """Keep the input and output of a linear layer."""
        self._made = [(given, output), *self._made[:7]]
        self.note(output)

    def on_attention(
        self,
        probabilities: Tensor,
        value: Tensor | None,
        mixed: bool = False,
        key: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> None:
        """Find the tokens that a module's values were computed from."""
        name, module = self.path[-1]
        if value is None or name in self.windows:
            return
        arrange = arrangement(module, probabilities, 1)
        value = value if arrange is None else arrange(value)
        if len(value) < 2:
            return  # one window of all tokens
        for source, output in self._made:
            rows = _find(value[:, 0], output)  # [windows, keys]
            if rows is None:
                continue
            traced = self._trace(source, rows, self._given[-1])
            if traced is not None:
                self.windows[name] = traced
            return

    def _trace(self, source: Tensor, rows: Tensor, given: Tensor | None) -> tuple[Tensor, TokenLayout] | None:
        """Convert rows of a linear layer's input to indices on a patch grid."""
        direct = _tokens_in_order(source, self._model, self._size)
        if direct is not None and source.ndim <= 4:
            return self._ordered(rows, direct[1])
        for tensor in (*self._origins(source), *(() if given is None else self._origins(given))):
            if tensor.shape[:-1].numel() != source.shape[:-1].numel():
                continue
            for image in self._images:
                known = _tokens_in_order(image, self._model, self._size)
                assert known is not None
                tokens, layout = known
                matched = _match(tensor.flatten(0, -2), tokens, unique=True)
                if matched is not None:
                    index, layout = self._ordered(matched, layout)
                    self._last = (source.shape[:-1], index, layout)
                    return _indices_at(rows, index), layout
        if self._last is not None and self._last[0] == source.shape[:-1]:
            _, index, layout = self._last  # the same windows as in the previous layer
            return _indices_at(rows, index), layout
        return None

    def _origins(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield a tensor and its row-wise origins, latest first."""
        yield tensor
        for given, output in self._rows:
            if output is tensor:
                tensor = given
                yield tensor

    def _ordered(self, rows: Tensor, layout: TokenLayout) -> tuple[Tensor, TokenLayout]:
        order = self._orders.get(layout.num_patches)
        return (rows if order is None else _indices_at(rows, order)), layout


def _indices_at(rows: Tensor, index: Tensor) -> Tensor:
    """Return the entries of an index at these rows, −1 for padding."""
    return torch.where(rows < 0, -1, index[rows.clamp_min(0)])


_ROW_BY_ROW = (F.layer_norm, torch.add, Tensor.add, Tensor.__add__)


class _ProbeInterception(Interception):
    """Interception that also records linear layers, norms and sums."""

    listener: _Probe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(func, types, args, kwargs)
        if func in (F.linear, F.conv2d, torch.conv2d):
            self.listener.mapped(args[0], output)
        elif func in _ROW_BY_ROW and output.shape == args[0].shape:
            self.listener.kept(args[0], output)
        return output


def _tokens_in_order(tensor: Tensor, model: nn.Module, size: Size) -> tuple[Tensor, TokenLayout] | None:
    """Return the tokens [tokens, channels] and layout of a tensor with one whole image in raster order, or None."""
    if tensor.ndim not in (3, 4) or len(tensor) != 1 or not tensor.is_floating_point():
        return None
    if tensor.ndim == 3:
        layout = layout_of_count(model, size, tensor.shape[1])
        return None if layout is None or layout.num_prefix_tokens else (tensor[0], layout)
    for rows, cols, tokens in (
        (tensor.shape[1], tensor.shape[2], tensor[0].flatten(0, 1)),
        (tensor.shape[2], tensor.shape[3], tensor[0].flatten(1).T),
    ):
        if is_grid(rows, cols, size):
            return tokens, TokenLayout(0, rows, cols)
    return None


def is_grid(rows: int, cols: int, size: Size) -> bool:
    """Return True if patches of this grid on an image of (height, width) are about square, and not single pixels."""
    tall, wide = size[0] / rows, size[1] / cols  # of a patch, in pixels
    return rows * cols > 1 and max(tall, wide) < 1.2 * min(tall, wide) and min(tall, wide) >= 1.5


def _bytes(rows: Tensor) -> list[bytes]:
    array = rows.detach().cpu().contiguous()
    raw = array.view(torch.uint8).reshape(len(array), -1).numpy()
    return [row.tobytes() for row in raw]


def _match(rows: Tensor, tokens: Tensor, *, unique: bool = False) -> Tensor | None:
    """Return the index of the first token that each row equals bit by bit, −1 for padding.

    None if a row equals no token, or if tokens are equal although they must be unique.
    """
    if rows.shape[-1] != tokens.shape[-1] or rows.dtype != tokens.dtype:
        return None
    known: dict[bytes, int] = {}
    for index, token in enumerate(_bytes(tokens)):
        known.setdefault(token, index)
    flat = rows.flatten(0, -2)
    indices = torch.tensor([known.get(row, -1) for row in _bytes(flat)])
    missing, padding = indices < 0, (flat == 0).all(dim=-1).cpu()
    if (unique and len(known) < len(tokens)) or missing.all() or (missing & ~padding).any():
        return None
    return indices.reshape(rows.shape[:-1])


def _find(value: Tensor, output: Tensor) -> Tensor | None:
    """Return the row of a linear layer's output that has each value [windows, keys, width] as a channel slice."""
    width = value.shape[-1]
    for rows in _as_rows(output):
        if rows.shape[-1] % width:
            continue
        for start in reversed(range(0, rows.shape[-1], width)):
            indices = _match(value, rows[:, start : start + width])
            if indices is not None:
                return indices
    return None


def _as_rows(output: Tensor) -> list[Tensor]:
    """Flatten a linear layer's output to rows of channels: channels last, for images also channels first."""
    views = [output.flatten(0, -2)]
    if output.ndim == 4:
        views.append(output.flatten(2).transpose(1, 2).flatten(0, 1))
    return views
