"""Run a Vision Transformer on a subset of an image's patches: the other tokens are dropped from the sequence.

A patch under a grey square is still a grey patch for the model. A dropped token has no influence, and attention over
fewer tokens is faster.
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
from vitflow.models.libraries import forward_options, library_blocks, library_pooling
from vitflow.recording.isolation import Hook, evaluating

# Maps the return value of a model to the explained outputs.
Read = Callable[[Any], Tensor | None]


def run_on_patches(
    model: nn.Module,
    pixels: Tensor,
    kept: Tensor,
    *,
    layout: TokenLayout | None = None,
    outputs: Read = logits_of,
) -> Tensor:
    """Return the logits of one image for several subsets of its patches, in one forward pass.

    The whole image is embedded once. Before the first block, each subset selects its tokens, which already have
    position embeddings; prefix tokens are always kept. With RoPE, kept patches keep their rotation. Average pooling is
    over the kept patches. If `droppable_tokens` has found that the model reads only prefix tokens, the last block's MLP
    runs only on these.

    With a convolutional patch embedding, a kept token may depend on pixels of dropped neighbours.

    Args:
        model: a Vision Transformer; its state is restored, also after an exception.
        pixels: the model input of one image, [1, channels, height, width].
        kept: indices of the kept patches in raster order, [choices, patches].
        layout: prefix tokens and patch grid, if the model's layout is unknown.
        outputs: maps the return value of the model to the explained outputs.

    Returns:
        The model's logits, or the result of `outputs`, [choices, classes].

    Raises:
        ShapeError: pixels or kept have the wrong shape.
        OptionError: unknown patch index.
        UnsupportedModelError: the input of the first block is not one sequence of patch tokens.

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
            "Expected pixels [1, channels, height, width] and integer kept [choices, patches], got "
            f"{tuple(pixels.shape)} and {kept.dtype} {tuple(kept.shape)}."
        )
    known = _known(model, pixels, layout, outputs)
    readout_alone = (
        isinstance(known, _Droppable)
        and known.readout_alone
        and not needs_patches(model, known.layout.num_prefix_tokens)  # its pooling may have changed
    )
    return _run(model, pixels, kept.to(pixels.device), layout, outputs, readout_alone)


def droppable_tokens(
    model: nn.Module, pixels: Tensor, layout: TokenLayout | None = None, outputs: Read = logits_of
) -> TokenLayout:
    """Return the layout of the tokens that the model can drop; tested on noise once per input size.

    Args:
        model: any model.
        pixels: model inputs of the requested size, [batch, channels, height, width].
        layout: prefix tokens and patch grid, if the model's layout is unknown.
        outputs: as for `run_on_patches`.

    Raises:
        UnsupportedModelError: the model cannot run on a subset of its patches; the message gives the reason.

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
    """Return True if the model has no output without patches, because it pools patches instead of prefix tokens.

    Args:
        model: a Vision Transformer.
        prefix: the number of its prefix tokens.
    """
    transformer: Any = transformer_of(unwrap(model))
    if prefix == 0:
        return True
    pooling = library_pooling(unwrap(model))
    if pooling is not None:
        return "patches" in pooling
    if hasattr(transformer, "head_dist") or getattr(transformer, "pool_include_prefix", False):
        return False
    pools_patches = getattr(transformer, "global_pool", None) in ("avg", "avgmax", "max", "map")
    return pools_patches or getattr(transformer, "attn_pool", None) is not None


class _Shortening:
    """Hooks that select the kept tokens before the first block, and their rotations (RoPE) before each block.

    If only the readout is needed, the last MLP runs only on prefix tokens, and returns zeros for the others.
    """

    def __init__(self, model: nn.Module, input_size: tuple[int, int], kept: Tensor, layout: TokenLayout | None) -> None:
        self.model, self.input_size, self.kept, self.layout = model, input_size, kept, layout

    def before(self, index: int) -> Callable[..., Any]:
        """Return the pre-forward hook of a block."""

        def shorten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if index == 0:
                args = (self._choose(args[0] if args else None), *args[1:])
            if kwargs.get("rope") is not None:
                kwargs = kwargs | {"rope": self._rotations(kwargs["rope"])}
            return args, kwargs

        return shorten

    def take_prefix(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Reduce the input of the last MLP: [choices, prefix + kept, channels] → [choices, prefix, channels]."""
        assert self.layout is not None
        return (args[0][:, : self.layout.num_prefix_tokens], *args[1:]), kwargs

    def fill_up(self, args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        """Pad the output of the last MLP with zeros for the other tokens; None after an exception."""
        return None if output is None else F.pad(output, (0, 0, 0, self.kept.shape[1]))

    def _choose(self, tokens: Any) -> Tensor:
        """Select the tokens of each subset: [1, tokens, channels] → [choices, prefix + kept, channels]."""
        name = type(transformer_of(self.model)).__name__
        if not isinstance(tokens, Tensor) or tokens.ndim != 3 or len(tokens) != 1:
            raise UnsupportedModelError(f"The input of the first block of {name} is not one sequence of tokens.")
        if self.layout is None:
            try:
                self.layout = read_layout(self.model, self.input_size, tokens.shape[1])
            except (AttributeError, TypeError) as error:
                raise UnsupportedModelError(f"{name} does not say how its tokens are arranged ({error}).") from error
        prefix, count = self.layout.num_prefix_tokens, self.layout.num_patches
        if tokens.shape[1] != prefix + count:
            raise UnsupportedModelError(
                f"Expected {prefix + count} tokens at the first block of {name}, got {tokens.shape[1]}."
            )
        if self.kept.numel() and (int(self.kept.min()) < 0 or int(self.kept.max()) >= count):
            raise OptionError(f"Expected patch indices from 0 to {count - 1}, got {self.kept.tolist()}.")
        before = torch.arange(prefix, device=tokens.device).expand(len(self.kept), -1)
        return tokens[0][torch.cat([before, prefix + self.kept.long()], dim=1)]

    def _rotations(self, rope: Any) -> Tensor:
        """Select rotations: [patches, width] or [heads, patches, width] → [choices, 1 or heads, kept, width]."""
        count = self.layout.num_patches if self.layout is not None else -1
        if not isinstance(rope, Tensor) or rope.ndim not in (2, 3) or rope.shape[-2] != count:
            raise UnsupportedModelError("The rotary position embedding (RoPE) does not have one rotation per patch.")
        chosen = rope[..., self.kept.long(), :].movedim(-3, 0)
        return chosen if chosen.ndim == 4 else chosen.unsqueeze(1)


def _run(
    model: nn.Module, pixels: Tensor, kept: Tensor, layout: TokenLayout | None, outputs: Read, readout_alone: bool
) -> Tensor:
    """Return logits [choices, classes]; with `readout_alone`, the last MLP runs only on prefix tokens."""
    shortening, blocks = _Shortening(model, (pixels.shape[-2], pixels.shape[-1]), kept, layout), _blocks(model)
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.callback(Hook(block, shortening.before(index), before=True).remove)
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


_NO_LOGITS = "It does not return one row of logits per subset of patches."


class _Droppable(NamedTuple):
    """Layout of the tokens that a model can drop; `readout_alone` is True if its output reads only prefix tokens."""

    layout: TokenLayout
    readout_alone: bool


Verdict = _Droppable | str  # or the reason why a model cannot

# By input shape, given layout and owner of `outputs`, while the owner is alive.
_verdicts: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], tuple[ref[Any], Verdict]]] = WeakKeyDictionary()


def _owner(outputs: Read) -> Any:
    return getattr(outputs, "__self__", outputs)  # each access creates a new bound method


def _key(pixels: Tensor, layout: TokenLayout | None, outputs: Read) -> tuple[Any, ...]:
    return tuple(pixels.shape[1:]), layout, id(_owner(outputs))


def _known(model: nn.Module, pixels: Tensor, layout: TokenLayout | None, outputs: Read) -> Verdict | None:
    """Return the cached verdict, if any."""
    owner, verdict = _verdicts.get(model, {}).get(_key(pixels, layout, outputs), (None, None))
    return verdict if owner is not None and owner() is _owner(outputs) else None


def _try(model: nn.Module, pixels: Tensor, layout: TokenLayout | None, outputs: Read) -> Verdict:
    """Compare outputs on noise: without hooks and with all patches kept, and with half the patches in two orders.

    Windows, relative position biases and convolutions between tokens either fail on a shorter sequence, or depend on
    the order of the patches. If each token has its position embedding, the order has no effect. A model that reads only
    prefix tokens must have the same output if the last MLP runs only on these.
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
    except Exception as error:  # a model may fail in any way on an unexpected sequence
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"It fails on half of its patches ({reason})."
    if not isinstance(whole, Tensor) or whole.ndim != 2 or halves.shape != (2, whole.shape[1]):
        return _NO_LOGITS
    if not _agree(whole, kept):
        return "Its output with all patches selected differs from its normal output."
    if not _agree(halves[:1], halves[1:]):
        return "Its output depends on the order of the tokens, not only on their position embeddings."
    return _Droppable(layout, readout_alone)


def _agree(first: Tensor, second: Tensor) -> bool:
    tolerance = 1e-3 if first.dtype.itemsize >= 4 else 5e-2
    difference = (first.double() - second.double()).abs().max()
    return bool(difference <= tolerance * first.double().abs().max())  # False where there is NaN


def _seen_layout(model: nn.Module, pixels: Tensor) -> tuple[Any, TokenLayout]:
    """Return the output of a forward pass over all patches, and the token layout at its first block."""
    seen: list[int] = []

    def count(block: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor) or args[0].ndim != 3:
            raise UnsupportedModelError("The input of the first block is not one sequence of tokens.")
        seen.append(args[0].shape[1])

    handle = _blocks(model)[0].register_forward_pre_hook(count)
    try:
        output = _forward(model, pixels)
    finally:
        handle.remove()
    return output, read_layout(model, (pixels.shape[-2], pixels.shape[-1]), seen[0])
