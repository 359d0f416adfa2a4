"""Experiments with changed tokens of an image: some patches are dropped, or a module's output is replaced.

A patch under a grey square is still a grey patch for the model. A dropped token has no influence, and attention over
fewer tokens is faster.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import OptionError, ShapeError, UnsupportedModelError
from vitflow.methods.sampling import KEPT
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import forward_options, read_layout, transformer_of
from vitflow.models.blocks import first_stack
from vitflow.models.calls import logits_of, with_tokens
from vitflow.models.parts import ModelState, output_cache, unwrap
from vitflow.recording.experiment import Call
from vitflow.recording.isolation import ContiguousNorms, Hook, evaluating, hooked
from vitflow.recording.places import find_extents
from vitflow.recording.readout import Read

_NO_LOGITS = "It does not return one row of logits per subset of patches."


def run_on_patches(
    model: nn.Module, pixels: Tensor, kept: Tensor, *, layout: TokenLayout | None = None, outputs: Read = logits_of
) -> Tensor:
    """Return the logits of one image for several subsets of its patches, in one forward pass.

    The whole image is embedded once. Before the first block, each subset selects its tokens, which already have
    position embeddings; prefix tokens are always kept. With RoPE, kept patches keep their rotation. Average pooling is
    over the kept patches.

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
    return _run(model, pixels, kept, layout, outputs)[0]


def droppable_tokens(
    model: nn.Module, pixels: Tensor, layout: TokenLayout | None = None, outputs: Read = logits_of
) -> TokenLayout:
    """Return the layout of the tokens that a model can drop; tested on noise once per input size.

    Raises UnsupportedModelError with the reason if it cannot drop any.
    """
    model = unwrap(model)
    known, key = output_cache(model, outputs), (run_on_patches, tuple(pixels.shape[1:]), layout)
    if key not in known:
        known[key] = _try(model, pixels, layout, outputs)
    verdict: TokenLayout | str = known[key]
    if isinstance(verdict, str):
        raise UnsupportedModelError(verdict)
    return verdict


def _run(
    model: nn.Module, pixels: Tensor, kept: Tensor | None, layout: TokenLayout | None, outputs: Read
) -> tuple[Tensor, TokenLayout]:
    """Return logits [choices, classes] and the token layout at the first block; None keeps every token."""
    size, blocks, runs = (pixels.shape[-2], pixels.shape[-1]), _blocks(model), 0
    chosen = None if kept is None else kept.to(pixels.device)

    def enter(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal layout, runs
        if index == 0:
            runs += 1
            tokens = args[0] if args else None
            if not isinstance(tokens, Tensor) or tokens.ndim != 3 or len(tokens) != 1:
                raise UnsupportedModelError("The input of the first block is not one sequence of tokens.")
            layout = layout or read_layout(model, size, tokens.shape[1])
            if kept is not None and kept.numel() and not 0 <= kept.min() <= kept.max() < layout.num_patches:
                count = layout.num_patches
                raise OptionError(f"Expected patch indices from 0 to {count - 1}, got {kept.tolist()}.")
            args = (tokens if chosen is None else _choose(tokens, chosen, layout), *args[1:])
        if chosen is not None and layout is not None and kwargs.get("rope") is not None:
            kwargs = kwargs | {"rope": _rotations(kwargs["rope"], chosen, layout)}
        return args, kwargs

    with hooked(Hook(block, partial(enter, index), before=True) for index, block in enumerate(blocks)):
        logits = outputs(model(pixels.clone(), **forward_options(model, size)))
    if runs > 1:
        raise UnsupportedModelError("It runs its blocks several times for an image.")
    if logits is None or layout is None:
        raise UnsupportedModelError(_NO_LOGITS)
    return logits, layout


def _choose(tokens: Tensor, kept: Tensor, layout: TokenLayout) -> Tensor:
    """Select the tokens of each subset: [1, tokens, channels] → [choices, prefix + kept + suffix, channels]."""
    if tokens.shape[1] != layout.num_tokens:
        raise UnsupportedModelError(f"Expected {layout.num_tokens} tokens at the first block, got {tokens.shape[1]}.")
    every = torch.arange(layout.num_tokens, device=tokens.device).expand(len(kept), -1)
    start, stop = layout.patches.start, layout.patches.stop
    return tokens[0][torch.cat([every[:, :start], start + kept.long(), every[:, stop:]], dim=1)]


def _rotations(rope: Any, kept: Tensor, layout: TokenLayout) -> Tensor:
    """Select rotations: [patches, width] or [heads, patches, width] → [choices, 1 or heads, kept, width]."""
    if not isinstance(rope, Tensor) or rope.ndim not in (2, 3) or rope.shape[-2] != layout.num_patches:
        raise UnsupportedModelError("The rotary position embedding (RoPE) does not have one rotation per patch.")
    chosen = rope[..., kept.long(), :].movedim(-3, 0)
    return chosen if chosen.ndim == 4 else chosen.unsqueeze(1)


def _blocks(model: nn.Module) -> nn.Sequential | nn.ModuleList:
    if getattr(model, "divided", False):
        raise UnsupportedModelError("It attends over time and space in separate layers.")
    if (blocks := first_stack(model)) is None:
        raise UnsupportedModelError(f"{type(transformer_of(model)).__name__} has no sequence of blocks.")
    return blocks


def _try(model: nn.Module, pixels: Tensor, layout: TokenLayout | None, outputs: Read) -> TokenLayout | str:
    """Return the layout of the tokens that a model can drop, or the reason why it cannot.

    Windows, relative position biases and convolutions between tokens either fail on some of the patches, or depend on
    their order, which has no effect if each token has its position embedding. The trial keeps as many as sampling does.
    """
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(1, *pixels.shape[1:], generator=random).to(pixels)
    call = Call(ModelState(model), (noise,), forward_options(model, (noise.shape[-2], noise.shape[-1])), noise)
    try:
        with call.experiment():
            whole, layout = _run(model, noise, None, layout, outputs)
            first = _blocks(model)[0]
            block = next(path for path, module in call.state.modules.items() if module is first)
            if (refusal := find_extents(call, {block: (layout,)})[1]) is not None:
                return refusal
            order = torch.randperm(layout.num_patches, generator=random).to(noise.device)
            some = order[: max(round(KEPT * layout.num_patches), 1)]
            every, _ = _run(model, noise, order.sort().values[None], layout, outputs)
            parts, _ = _run(model, noise, torch.stack([some, some.flip(0)]), layout, outputs)
    except torch.OutOfMemoryError:
        raise
    except UnsupportedModelError as error:
        return str(error)
    except Exception as error:  # a model may fail in any way on an unexpected sequence
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"It fails on {KEPT:.0%} of its patches ({reason})."
    if not isinstance(whole, Tensor) or whole.ndim != 2 or parts.shape != (2, whole.shape[1]):
        return _NO_LOGITS
    if not _agree(whole, every):
        return "Its output with all patches selected differs from its normal output."
    if not _agree(parts[:1], parts[1:]):
        return "Its output depends on the order of the tokens, not only on their position embeddings."
    return layout


def _agree(first: Tensor, second: Tensor) -> bool:
    tolerance = 1e-3 if first.dtype.itemsize >= 4 else 5e-2
    difference = (first.double() - second.double()).abs().max()
    return bool(difference <= tolerance * first.double().abs().max())  # False if there is NaN


def output_from_tokens(model: nn.Module, pixels: Tensor, path: str, tokens: Tensor) -> Any:
    """Return a model's output with the output of one module replaced by these tokens, differentiable by them."""

    def give(args: Any, output: Any) -> Any:
        torch.set_grad_enabled(True)  # until torch.no_grad() below ends
        return with_tokens(output, tokens)

    hook = Hook(model.get_submodule(path), give, before=False)
    with hooked([hook]), torch.inference_mode(False), evaluating(model), torch.no_grad(), ContiguousNorms():
        return model(pixels.detach().clone(), **forward_options(model, (pixels.shape[-2], pixels.shape[-1])))
