"""Run a Vision Transformer on some of an image's patches: the others leave the sequence, and cost nothing.

A patch that is hidden by a grey square is still seen as a grey square. A patch whose token is dropped is not there at
all, and the attention over fewer tokens is faster.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitflow.errors import OptionError, ShapeError, UnsupportedModelError
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import logits_of, read_layout, transformer_of, unwrap
from vitflow.models.libraries import forward_options, library_blocks, library_readout
from vitflow.recording.isolation import Hook, evaluating

# Maps what a model returns to the numbers that are asked for.
Read = Callable[[Any], Tensor | None]


def run_on_patches(
    model: nn.Module,
    pixels: Tensor,
    kept: Tensor,
    *,
    layout: TokenLayout | None = None,
    outputs: Read = logits_of,
) -> Tensor:
    """Logits of one image for several choices of its patches, in one forward pass.

    The image is embedded once, whole. Before the first block every choice takes its own tokens, which carry their
    position already; prefix tokens are always kept. Where the model rotates queries and keys by position (RoPE), the
    kept patches keep their rotation. Average pooling then averages over the kept patches. Of a model of which
    `droppable_tokens` found that it reads prefix tokens alone, the last block's MLP runs on these alone.

    With a convolutional patch embedding, a kept token may have seen pixels of its dropped neighbours.

    Args:
        model: a Vision Transformer; it is left as it was, also after an exception.
        pixels: the model input of one image, [1, channels, height, width].
        kept: numbers of the patches that stay, 0 for the top left, in raster order, [choices, patches].
        layout: prefix tokens and patch grid, for a model that does not tell its own.
        outputs: maps what the model returns to the numbers that are asked for.

    Returns:
        The model's logits, or what `outputs` makes of its output, [choices, classes].

    Raises:
        ShapeError: pixels or kept have the wrong shape.
        OptionError: there is no such patch.
        UnsupportedModelError: the tokens before the model's first block are not one sequence of patches.

    >>> import timm
    >>> model = timm.create_model("test_vit").eval()
    >>> kept = torch.tensor([[0, 1, 2], [97, 98, 99]])
    >>> with torch.no_grad():
    ...     run_on_patches(model, torch.zeros(1, 3, 160, 160), kept).shape
    torch.Size([2, 1000])
    """
    model = unwrap(model)
    if pixels.ndim != 4 or len(pixels) != 1 or kept.ndim != 2 or kept.dtype.is_floating_point:
        raise ShapeError(
            "Expected pixels [1, channels, height, width] and whole numbers kept [choices, patches], got "
            f"{tuple(pixels.shape)} and {kept.dtype} {tuple(kept.shape)}."
        )
    known = _known(model, pixels, layout, outputs)
    readout_alone = (
        isinstance(known, _Droppable)
        and known.readout_alone
        and not needs_patches(model, known.layout.num_prefix_tokens)  # it may pool otherwise by now
    )
    return _run(model, pixels, kept.to(pixels.device), layout, outputs, readout_alone)


def droppable_tokens(
    model: nn.Module, pixels: Tensor, layout: TokenLayout | None = None, outputs: Read = logits_of
) -> TokenLayout:
    """The layout of the tokens that the model can do without; it is tried once for each size of input, on noise.

    Args:
        model: any model.
        pixels: model inputs of the size that counts, [batch, channels, height, width].
        layout: prefix tokens and patch grid, for a model that does not tell its own.
        outputs: as for `run_on_patches`.

    Raises:
        UnsupportedModelError: the model cannot run on some of its patches; the message says why.

    >>> import timm
    >>> droppable_tokens(timm.create_model("test_vit"), torch.zeros(1, 3, 160, 160)).rows
    10
    """
    model = unwrap(model)
    verdict = _known(model, pixels, layout, outputs)
    if verdict is None:
        verdict = _try(model, pixels, layout, outputs)
        verdicts = _verdicts.setdefault(model, {})
        for given in {layout, layout if isinstance(verdict, str) else verdict.layout}:
            verdicts[_key(pixels, given, outputs)] = ref(_owner(outputs)), verdict
    if isinstance(verdict, str):
        raise UnsupportedModelError(verdict)
    return verdict.layout


def needs_patches(model: nn.Module, prefix: int) -> bool:
    """Whether nothing is left to answer from when every patch is dropped: the model pools patches, not prefix tokens.

    Args:
        model: a Vision Transformer.
        prefix: its number of prefix tokens.
    """
    transformer: Any = transformer_of(unwrap(model))
    if prefix == 0:
        return True
    own = library_readout(unwrap(model), TokenLayout(prefix, 1, 1))
    if own is not None:
        return bool(own[0][0, prefix:].any())
    if hasattr(transformer, "head_dist") or getattr(transformer, "pool_include_prefix", False):
        return False
    pools_patches = getattr(transformer, "global_pool", None) in ("avg", "avgmax", "max", "map")
    return pools_patches or getattr(transformer, "attn_pool", None) is not None


class _Shortening:
    """Takes the kept tokens before the first block, and their rotations before every block that is given any.

    Where the readout alone is needed, the last MLP is given prefix tokens alone, and what others would add is nothing.
    """

    def __init__(self, model: nn.Module, input_size: tuple[int, int], kept: Tensor, layout: TokenLayout | None) -> None:
        self.model, self.input_size, self.kept, self.layout = model, input_size, kept, layout

    def before(self, number: int) -> Callable[..., Any]:
        """What is done to the input of one block, 0 for the first."""

        def shorten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if number == 0:
                args = (self._choose(args[0] if args else None), *args[1:])
            if kwargs.get("rope") is not None:
                kwargs = kwargs | {"rope": self._rotations(kwargs["rope"])}
            return args, kwargs

        return shorten

    def take_prefix(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the last MLP is given, [choices, prefix + kept, channels] → [choices, prefix, channels]."""
        assert self.layout is not None
        return (args[0][:, : self.layout.num_prefix_tokens], *args[1:]), kwargs

    def fill_up(self, args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        """What it gives, with zeros for the other tokens; None where an exception passes through."""
        return None if output is None else F.pad(output, (0, 0, 0, self.kept.shape[1]))

    def _choose(self, tokens: Any) -> Tensor:
        """[1, tokens, channels] → [choices, prefix + kept, channels]."""
        name = type(transformer_of(self.model)).__name__
        if not isinstance(tokens, Tensor) or tokens.ndim != 3 or len(tokens) != 1:
            raise UnsupportedModelError(f"The first block of {name} is not given one sequence of tokens.")
        if self.layout is None:
            try:
                self.layout = read_layout(self.model, self.input_size, tokens.shape[1])
            except (AttributeError, TypeError) as error:
                raise UnsupportedModelError(f"{name} does not say how its tokens are arranged ({error}).") from error
        prefix, count = self.layout.num_prefix_tokens, self.layout.num_patches
        if tokens.shape[1] != prefix + count:
            raise UnsupportedModelError(
                f"The first block of {name} is given {tokens.shape[1]} tokens, expected {prefix + count}."
            )
        if self.kept.numel() and (int(self.kept.min()) < 0 or int(self.kept.max()) >= count):
            raise OptionError(f"Expected numbers of patches from 0 to {count - 1}, got {self.kept.tolist()}.")
        before = torch.arange(prefix, device=tokens.device).expand(len(self.kept), -1)
        return tokens[0][torch.cat([before, prefix + self.kept.long()], dim=1)]

    def _rotations(self, rope: Any) -> Tensor:
        """[patches, width] or [heads, patches, width] → [choices, 1 or heads, kept, width]."""
        count = self.layout.num_patches if self.layout is not None else -1
        if not isinstance(rope, Tensor) or rope.ndim not in (2, 3) or rope.shape[-2] != count:
            raise UnsupportedModelError("The rotations by position do not belong to the patches one by one.")
        chosen = rope[..., self.kept.long(), :].movedim(-3, 0)
        return chosen if chosen.ndim == 4 else chosen.unsqueeze(1)


def _run(
    model: nn.Module, pixels: Tensor, kept: Tensor, layout: TokenLayout | None, outputs: Read, readout_alone: bool
) -> Tensor:
    """Logits [choices, classes]; `readout_alone` leaves out of the last MLP what the readout does not need."""
    shortening, blocks = _Shortening(model, (pixels.shape[-2], pixels.shape[-1]), kept, layout), _blocks(model)
    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.callback(Hook(block, shortening.before(number), before=True).remove)
        if readout_alone:
            mlp: Any = blocks[-1].mlp
            stack.callback(Hook(mlp, shortening.take_prefix, before=True).remove)
            stack.callback(Hook(mlp, shortening.fill_up, before=False).remove)
        logits = outputs(_forward(model, pixels))
    if logits is None:
        raise UnsupportedModelError(_NO_LOGITS)
    return logits


def _forward(model: nn.Module, pixels: Tensor) -> Any:
    return model(pixels, **forward_options(model, (pixels.shape[-2], pixels.shape[-1])))


def _blocks(model: nn.Module) -> nn.Sequential | nn.ModuleList:
    transformer = transformer_of(model)
    blocks = getattr(transformer, "blocks", None) or next(iter(library_blocks(model).values()), None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList) or not len(blocks):
        raise UnsupportedModelError(f"{type(transformer).__name__} has no sequence of blocks.")
    return blocks


_NO_LOGITS = "It does not return one row of logits for each choice of patches."


class _Droppable(NamedTuple):
    """The layout of the tokens that a model can drop, and whether its answer reads nothing but prefix tokens."""

    layout: TokenLayout
    readout_alone: bool


Verdict = _Droppable | str  # or why a model cannot

# By the shape of a model's input, the given layout and whose answers are read, as long as that is there.
_verdicts: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], tuple[ref[Any], Verdict]]] = WeakKeyDictionary()


def _owner(outputs: Read) -> Any:
    return getattr(outputs, "__self__", outputs)  # a method is made anew each time


def _key(pixels: Tensor, layout: TokenLayout | None, outputs: Read) -> tuple[Any, ...]:
    return tuple(pixels.shape[1:]), layout, id(_owner(outputs))


def _known(model: nn.Module, pixels: Tensor, layout: TokenLayout | None, outputs: Read) -> Verdict | None:
    """The verdict of before, if there is one."""
    owner, verdict = _verdicts.get(model, {}).get(_key(pixels, layout, outputs), (None, None))
    return verdict if owner is not None and owner() is _owner(outputs) else None


def _try(model: nn.Module, pixels: Tensor, layout: TokenLayout | None, outputs: Read) -> Verdict:
    """Run noise whole and with all patches kept, and half the patches in two orders: each pair must agree.

    Windows, relative position biases and convolutions between tokens either refuse a shorter sequence or, with the
    patches in another order, see other neighbours. Where tokens carry their position themselves, the order is nothing.
    A model that reads prefix tokens alone must answer the same without the others' part of the last MLP.
    """
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(1, *pixels.shape[1:], generator=random).to(pixels)
    readout_alone = False
    try:
        with torch.no_grad(), evaluating(model):
            output, seen = _seen_layout(model, noise)
            whole = outputs(output)
            layout = layout or seen
            every = torch.randperm(layout.num_patches, generator=random)
            half = every[: max(layout.num_patches // 2, 1)].to(noise.device)
            every = every.sort().values[None].to(noise.device)
            kept = _run(model, noise, every, layout, outputs, False)
            halves = _run(model, noise, torch.stack([half, half.flip(0)]), layout, outputs, False)
            if hasattr(_blocks(model)[-1], "mlp") and not needs_patches(model, layout.num_prefix_tokens):
                with suppress(RuntimeError):  # an MLP may need all tokens
                    readout_alone = _agree(kept, _run(model, noise, every, layout, outputs, True))
    except torch.OutOfMemoryError:
        raise
    except UnsupportedModelError as error:
        return str(error)
    except Exception as error:  # a model may fail in any way over a sequence that it was not made for
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"It fails on half of its patches ({reason})."
    if not isinstance(whole, Tensor) or whole.ndim != 2 or halves.shape != (2, whole.shape[1]):
        return _NO_LOGITS
    if not _agree(whole, kept):
        return "With all of its patches chosen one by one it answers otherwise than by itself."
    if not _agree(halves[:1], halves[1:]):
        return "Its answer depends on the order of the tokens, and not only on the positions that they carry."
    return _Droppable(layout, readout_alone)


def _agree(first: Tensor, second: Tensor) -> bool:
    tolerance = 1e-3 if first.dtype.itemsize >= 4 else 5e-2
    difference = (first.double() - second.double()).abs().max()
    return bool(difference <= tolerance * first.double().abs().max())  # False where there is NaN


def _seen_layout(model: nn.Module, pixels: Tensor) -> tuple[Any, TokenLayout]:
    """The output of a forward pass over all patches, and the layout that its first block was given."""
    seen: list[int] = []

    def count(block: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor) or args[0].ndim != 3:
            raise UnsupportedModelError("The first block is not given one sequence of tokens.")
        seen.append(args[0].shape[1])

    handle = _blocks(model)[0].register_forward_pre_hook(count)
    try:
        output = _forward(model, pixels)
    finally:
        handle.remove()
    return output, read_layout(model, (pixels.shape[-2], pixels.shape[-1]), seen[0])
