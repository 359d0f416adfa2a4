"""Outputs of models in words, and the error for an output without logits, with code that reads other numbers."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from vitflow.errors import ModelError

# Numbers of axes, those first that are the most like logits [batch, classes].
_AXES = (2, 1, 4, 3, 5)
_TENSORS_LISTED = 8


def no_logits(output: Any, model: str) -> ModelError:
    """The error for a model whose output has no logits, with an example of `answers` that fits this output."""
    tensors = [(path, one) for path, one in _tensors_by_path(output) if one.is_floating_point() and one.ndim > 0]
    remedy = "Make the model return its logits as a tensor [batch, classes]"
    if tensors:
        path, one = min(tensors, key=lambda found: _AXES.index(min(found[1].ndim, 5)))
        remedy = f"Pass answers= to name the numbers to explain, such as answers=lambda output: output{path}"
        remedy += {1: "[:, None]", 2: "", 3: ".mean(1)"}.get(one.ndim, f".mean({tuple(range(2, one.ndim))})")
    return ModelError(
        f"Expected {model} to return one tensor of logits, or an output with logits, got {in_words(output)}. {remedy}."
    )


def in_words(output: Any) -> str:
    """The type of a model's output and the shapes of its tensors, in words."""
    if isinstance(output, Tensor):
        return f"a tensor {tuple(output.shape)}"
    shapes = [f"{path.lstrip('.')} {tuple(one.shape)}" for path, one in _tensors_by_path(output)]
    more = [f"… ({len(shapes)} tensors)"] if len(shapes) > _TENSORS_LISTED else []
    return f"{type(output).__name__} with {', '.join(shapes[:_TENSORS_LISTED] + more) or 'no tensors'}"


def _tensors_by_path(output: Any, depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an output, each after the code that reads it from there: `["logits"]`, `[0]` or `.logits`."""
    if isinstance(output, Tensor):
        yield "", output
        return
    if depth == 0:
        return
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(output, Mapping):
        parts = ((f'["{name}"]' if isinstance(name, str) else f"[{name!r}]", one) for name, one in output.items())
    elif isinstance(output, list | tuple) and not hasattr(output, "_fields"):
        parts = ((f"[{number}]", one) for number, one in enumerate(output))
    elif not isinstance(output, type | nn.Module):  # a namedtuple, a dataclass with or without slots, or any object
        named = (getattr(output, one, ()) for one in ("_fields", "__dataclass_fields__", "__dict__"))
        fields: Iterable[str] = next(filter(None, named), ())
        parts = ((f".{name}", getattr(output, name, None)) for name in fields if not name.startswith("_"))
    for path, one in parts:
        for further, tensor in _tensors_by_path(one, depth - 1):
            yield path + further, tensor
