"""What a model answers: k numbers a picture, each with a name, and a way to read them. Its classes are one case."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from vitflow.errors import ModelError, OptionError, VitflowError, check_known
from vitflow.models.anatomy import logits_of, tensors_in
from vitflow.models.checkpoints import code_sha256, source_of, weights_sha256

#: How numbers are read: as probabilities that sum to 1, as one probability each, as cosines, or as they are.
READINGS = ("softmax", "sigmoid", "cosine", "value")

_NO_REST = "Expected several answers to set one against the rest, got one: leave out against."


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Answers:
    """What a picture can be asked about: numbers that are computed from what a model returns.

    Attributes:
        function: maps the output of the model to numbers [batch, k], through which gradients pass; None for the logits
            that it returns.
        names: of the k answers; None where they are not known.
        count: k; 0 where the model ends in features, None where that is not known before it runs.
        reading: one of `READINGS`; a softmax of one number is read as a sigmoid.
        unit: of numbers that are read as they are, such as "years".
        scale: what cosines were multiplied by to become the numbers.
        made_of: what the numbers come from, beside the model, ready for JSON: other results come of another one.
        rest: maps the output to what stands against each answer, [batch, k] or [batch, 1]; None for the mean of the
            other answers.
        against: what that is, in words.
        pictures: what each answer compares with, uint8 RGB [height, width, 3], to be shown beside the map.
        apart: whether maps are of each answer less what stands against it, where nothing else is asked for.

    >>> answers = Answers(lambda output: output[:, :2] - output[:, 2:], ("left", "right"), 2)
    >>> answers.numbers(torch.tensor([[1.0, 2.0, 3.0, 5.0]]))
    tensor([[-2., -3.]])
    """

    function: Callable[[Any], Tensor] | None = None
    names: tuple[str, ...] | None = None
    count: int | None = None
    reading: str = "value"
    unit: str = ""
    scale: float = 1.0
    made_of: Mapping[str, Any] = field(default_factory=dict)
    rest: Callable[[Any], Tensor] | None = None
    against: str = "the mean of the other classes"
    pictures: tuple[NDArray[np.uint8], ...] = ()
    apart: bool = False

    def __post_init__(self) -> None:
        check_known("reading (activation)", self.reading, READINGS)
        if self.count == 1 and self.reading == "softmax":  # which would be 100 % for every image
            object.__setattr__(self, "reading", "sigmoid")

    def numbers(self, output: Any) -> Tensor | None:
        """The numbers [batch, k] of what a model returned; of its own classes what it returned, which may be None.

        Raises:
            ModelError: the function failed, or gave something else than k numbers a picture that gradients pass.
        """
        if self.function is None:
            return logits_of(output)
        try:
            found = self.function(output)
        except VitflowError:
            raise
        except Exception as error:  # a caller's function may fail in any way
            raise ModelError(
                f"The function of the answers failed on what the model returned ({_kind(output)}): "
                f"{type(error).__name__}: {error}"
            ) from error
        k = "answers" if self.count is None else f"{self.count}, one for each name" if self.names else str(self.count)
        if not isinstance(found, Tensor) or found.ndim != 2 or self.count not in (None, found.shape[1]):
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.60}"
            raise ModelError(
                f"Expected the function of the answers to give a tensor [pictures, {k}] of what the model returned "
                f"({_kind(output)}), got {got}."
            )
        if not found.is_floating_point():
            raise ModelError(f"Expected floating-point numbers from the function of the answers, got {found.dtype}.")
        if torch.is_grad_enabled() and not found.requires_grad and any(one.requires_grad for one in tensors_in(output)):
            raise ModelError(
                "No gradient passes the function of the answers: leave out detach(), torch.no_grad(), NumPy, argmax "
                "and comparisons, or use methods that need no gradient, such as rollout or occlusion."
            )
        return found

    @property
    def read(self) -> Callable[[Any], Tensor | None]:
        """`numbers`; of a model's own classes what they are read by for every model."""
        return logits_of if self.function is None else self.numbers

    def against_rest(self) -> "Answers":
        """The same answers, each less what stands against it: the mean of the others, unless something else is told.

        Raises:
            OptionError: there is one answer, and nothing stands against it.
        """
        if self.rest is None and self.count in (0, 1):
            raise OptionError(_NO_REST)
        return replace(self, function=self._less_the_rest, reading="value", rest=None)

    def _less_the_rest(self, output: Any) -> Tensor:
        numbers = self.numbers(output)
        if numbers is None or numbers.ndim != 2:
            raise OptionError("This model has no classes, so none can be set against the rest.")
        if self.rest is not None:
            return numbers - self.rest(output)
        if numbers.shape[1] == 1:
            raise OptionError(_NO_REST)
        return numbers - (numbers.sum(dim=1, keepdim=True) - numbers) / (numbers.shape[1] - 1)

    def told(self, numbers: Tensor) -> Tensor:
        """The numbers [..., k] as they are told: probabilities, cosines, or as they are; float64 on the CPU."""
        return activate(numbers, self.reading) / (self.scale if self.reading == "cosine" else 1.0)

    def tried(self, numbers: Tensor | None) -> "Answers":
        """The same with their count, known from the numbers for two pictures.

        Raises:
            ModelError: they are not as many as the pictures.
        """
        rows, count = (0, 0) if numbers is None else numbers.shape
        if rows != 2:
            raise ModelError(f"Expected a row of answers for each picture, got {rows} for 2 pictures.")
        return replace(self, count=count)


def answers_of(function: Callable[[Any], Tensor], names: tuple[str, ...] | None, reading: str | None) -> Answers:
    """The answers that a caller's function makes of the output of a model.

    Raises:
        OptionError: it is no function.
    """
    count = None if names is None else len(names)
    return Answers(
        function, names, count, reading or "value", made_of=_made_of(function), against="the mean of the other answers"
    )


def likeness(vectors: Tensor, names: Sequence[str], pictures: Sequence[NDArray[np.uint8]]) -> Answers:
    """The cosines of a picture's features to those of reference pictures.

    Args:
        vectors: features of the references, [pictures, width].
        names: of the references.
        pictures: themselves, uint8 RGB [height, width, 3].
    """
    called = [name if list(names).count(name) == 1 else f"{name} ({n})" for n, name in enumerate(names, start=1)]
    units = normalize(vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32)).cpu(), dim=-1)
    return Answers(
        lambda output: cosines(features_of(output), units),
        tuple(called),
        len(called),
        "cosine",
        made_of={"like": [hashlib.sha256(one.tobytes()).hexdigest() for one in pictures]},
        against="the mean of the other pictures",
        pictures=tuple(pictures),
    )


def features_of(output: Any) -> Tensor:
    """The features [batch, width] of a model that ends in them; of one that pools no tokens, those of its first token.

    Raises:
        ModelError: it returns none.
    """
    found = logits_of(output)
    if found is None or found.ndim not in (2, 3):
        raise ModelError(f"Expected a model that ends in features [batch, width], got {_kind(output)}.")
    return found if found.ndim == 2 else found[:, 0]


def cosines(features: Any, vectors: Tensor) -> Tensor:
    """The cosines [batch, vectors] of features [batch, width] and unit vectors [vectors, width], float32 at least."""
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    return normalize(wide, dim=-1) @ vectors.to(wide).mT


def _made_of(function: Any) -> dict[str, Any]:
    """A function by its name and the hash of its source; a module by the hash of its weights, too."""
    if not callable(function):
        raise OptionError(f"Expected answers as a function of the model's output, or Answers, got {function!r:.80}.")
    if isinstance(function, nn.Module):
        return {"function": type(function).__qualname__, "weights_sha256": weights_sha256(function)} | {
            "code_sha256": code_sha256(function)
        }
    named = function if hasattr(function, "__qualname__") else type(function)
    return {"function": named.__qualname__, "code_sha256": hashlib.sha256(source_of(named)).hexdigest()}


def no_logits(output: Any, model: str) -> ModelError:
    """The error for a model whose output has no logits, with an example of `answers` that fits this output."""
    tensors = [(path, one) for path, one in _tensors_by_path(output) if one.is_floating_point() and one.ndim > 0]
    remedy = "Make the model return its logits as a tensor [batch, classes]"
    if tensors:
        path, one = min(tensors, key=lambda found: _AXES.index(min(found[1].ndim, 5)))
        remedy = f"Pass answers= to name the numbers to explain, such as answers=lambda output: output{path}"
        remedy += {1: "[:, None]", 2: "", 3: ".mean(1)"}.get(one.ndim, f".mean({tuple(range(2, one.ndim))})")
    return ModelError(
        f"Expected {model} to return one tensor of logits, or an output with logits, got {_kind(output)}. {remedy}."
    )


# Numbers of axes, those first that are the most like logits [batch, classes].
_AXES = (2, 1, 4, 3, 5)
_TENSORS_LISTED = 8


def _kind(output: Any) -> str:
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


def activate(logits: Tensor, reading: str) -> Tensor:
    """The numbers [..., answers] as they are read, float64 on the CPU: logits as probabilities, others as they are.

    A single logit is read by a sigmoid, as a softmax of it would always be 1.

    >>> activate(torch.zeros(1, 2), "softmax"), activate(torch.zeros(1, 1), "softmax")
    (tensor([[0.5000, 0.5000]], dtype=torch.float64), tensor([[0.5000]], dtype=torch.float64))
    """
    # In float64, or what a hidden patch costs would be lost in the rounding of a probability near 1.
    logits = logits.detach().cpu().double()
    if reading == "softmax" and logits.shape[-1] > 1:
        return logits.softmax(dim=-1)
    return logits.sigmoid() if reading in ("softmax", "sigmoid") else logits


def log_odds(logits: Tensor, reading: str) -> Tensor:
    """The log-odds of each class against all others that logits [..., classes] stand for, float64 on the CPU.

    Of a softmax `z_t − logsumexp` of the other logits; those of a sigmoid are log-odds as they are, and so is the one
    logit of a model that has nothing else to answer. Their size is that of the logits, however sure the model is.
    Numbers that are read otherwise stay as they are.

    >>> log_odds(torch.tensor([[40.0, 0.0]]), "softmax")
    tensor([[ 40., -40.]], dtype=torch.float64)
    """
    logits = logits.detach().cpu().double()
    if reading != "softmax" or logits.shape[-1] == 1:
        return logits
    top = logits.argmax(dim=-1, keepdim=True)
    below = logits.scatter(-1, top, -torch.inf).logsumexp(dim=-1, keepdim=True)
    together = torch.logaddexp(logits.gather(-1, top), below)
    # No other class has more than half of the whole, so that the rest without it is not lost in rounding.
    others = together + torch.log1p(-(logits - together).exp())
    return logits - others.scatter(-1, top, below)
