"""Outputs that are explained: k scores an image, each with a name and a unit. The classes of a model are one case."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from vitflow.errors import ModelError, OptionError, VitflowError, check_known
from vitflow.methods.tokens import TokenLayout
from vitflow.models.calls import as_rows, in_words, logits_of, no_logits, tensors_in
from vitflow.models.classes import ClassNames
from vitflow.models.identity import state_sha256, weights_sha256

#: Activations: probabilities that sum to 1, independent probabilities, cosines, or unchanged values.
ACTIVATIONS = ("softmax", "sigmoid", "cosine", "value")

_NO_REST = (
    "Expected several outputs for a contrast with the rest, got one: leave out against, or give rest in Outputs(…)."
)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Outputs:
    """Outputs that can be explained: scores computed from what a model returns.

    Attributes:
        function: maps the output of the model to numbers [batch, k] or, for one output, [batch], each row from its own
            image (`output.softmax(1)`, not `output.softmax(0)`), through which gradients pass; None for the logits.
        names: names of the k outputs; None if unknown.
        count: k; 0 if the model ends in features, None if unknown before it runs.
        activation: one of `ACTIVATIONS`; with a single output, softmax is replaced by sigmoid.
        unit: unit of values without activation, such as "years".
        scale: factor of the cosines in the scores.
        description: extra entries of the fingerprint, for JSON; a run is resumed only if they are unchanged.
        reference: maps the output to the reference of each output, [batch, k] or [batch, 1]; None for the mean of the
            other outputs.
        against: description of this reference.
        images: reference image of each output, uint8 RGB [height, width, 3], displayed next to the map.
        minus_rest_by_default: explain each output minus its reference by default.
        perturbed_outputs: outputs to use for perturbed images, in which another output (query) may detect the object;
            None for the same outputs.

    >>> outputs = Outputs(lambda output: output[:, :2] - output[:, 2:], ("left", "right"), 2)
    >>> outputs.raw_scores(torch.tensor([[1.0, 2.0, 3.0, 5.0]]))
    tensor([[-2., -3.]])
    """

    function: Callable[[Any], Tensor] | None = None
    names: tuple[str, ...] | None = None
    count: int | None = None
    activation: str = "value"
    unit: str = ""
    scale: float = 1.0
    description: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[[Any], Tensor] | None = None
    against: str = "the mean of the other classes"
    images: tuple[NDArray[np.uint8], ...] = ()
    minus_rest_by_default: bool = False
    perturbed_outputs: "Outputs | None" = None

    def __post_init__(self) -> None:
        check_known("activation", self.activation, ACTIVATIONS)
        if self.count == 1 and self.activation == "softmax":  # would be 100 % for every image
            object.__setattr__(self, "activation", "sigmoid")

    def raw_scores(self, output: Any) -> Tensor | None:
        """Compute the scores [batch, k] from a model's output: its logits, or None, without a function.

        Raises:
            ModelError: the function failed, did not return k floating-point scores per image, or is not differentiable.
        """
        if self.function is None:
            return logits_of(output)
        scores = _called(self.function, output)
        scores = as_rows(scores) if isinstance(scores, Tensor) else scores
        k = "outputs" if self.count is None else f"{self.count}, one for each name" if self.names else str(self.count)
        if not isinstance(scores, Tensor) or scores.ndim != 2 or self.count not in (None, scores.shape[1]):
            raise ModelError(
                f"Expected `outputs` to return a tensor [images, {k}] for the output of the model "
                f"({in_words(output)}), got {_shape_of(scores)}."
            )
        if not scores.is_floating_point():
            raise ModelError(f"Expected floating-point scores from `outputs`, got {scores.dtype}.")
        differentiable = scores.requires_grad or not any(one.requires_grad for one in tensors_in(output))
        if torch.is_grad_enabled() and not differentiable:
            raise ModelError(
                "`outputs` is not differentiable: remove detach(), torch.no_grad(), NumPy calls, argmax and "
                "comparisons, or use a method without gradients, such as rollout or occlusion."
            )
        return scores

    def required_scores(self, output: Any, model: str) -> Tensor:
        """Compute `raw_scores`; ModelError, which names the model, for an output without logits."""
        if (scores := self.raw_scores(output)) is None:
            raise no_logits(output, model)
        return scores

    def fingerprint(self) -> dict[str, Any]:
        """Return how these outputs differ from the model's classes, for JSON, without activation and names."""
        usual = Outputs()
        settings = {name: getattr(self, name) for name in ("unit", "against", "minus_rest_by_default")}
        settings["scale"] = float(f"{self.scale:.5g}")  # rounding differs between machines
        return {
            **(_identified(self.function) if self.function is not None else {}),
            **self.description,
            **({"reference": _identified(self.reference)} if self.reference is not None else {}),
            **{name: value for name, value in settings.items() if value != getattr(usual, name)},
            **({"images": [_sha256(one) for one in self.images]} if self.images else {}),
        }

    def with_reference(self, output: Any) -> list[Tensor]:
        """Compute the scores [batch, k], then those of the reference if it is given, [batch, k] or [batch, 1].

        Raises:
            ModelError: as for `raw_scores`; or there are no scores, or `reference` failed or returned another shape.
        """
        scores = self.required_scores(output, "the model")
        if self.reference is None:
            return [scores]
        reference = _called(self.reference, output)
        rows, columns = scores.shape[0], scores.shape[-1]
        if not isinstance(reference, Tensor) or reference.shape not in ((rows, columns), (rows, 1)):
            raise ModelError(
                f"Expected reference to return a tensor [{rows}, {columns}] or [{rows}, 1], got "
                f"{_shape_of(reference)}: return one row per image, with one reference or one for each output."
            )
        return [scores, reference]

    @property
    def read(self) -> Callable[[Any], Tensor | None]:
        """The function that reads scores from a model's output: `raw_scores`, or `logits_of` for its classes."""
        return logits_of if self.function is None else self.raw_scores

    def against_rest(self) -> "Outputs":
        """Return these outputs, each minus its reference: the mean of the others, unless `reference` is given.

        Raises:
            OptionError: there is a single output, without a reference.
        """
        if self.reference is None and self.count in (0, 1):
            raise OptionError(_NO_REST)
        return replace(
            self, function=self.scores_minus_rest, activation="value", reference=None, perturbed_outputs=None
        )

    def scores_minus_rest(self, output: Any) -> Tensor:
        """Compute the scores minus their reference, by default the mean of the others, [batch, k]."""
        numbers, *rest = self.with_reference(output)
        if numbers.ndim != 2:
            raise OptionError(
                "Expected logits [images, classes] for a contrast with the rest, got shape "
                f"{tuple(numbers.shape)}: leave out against, or pass outputs=."
            )
        if rest:
            return numbers - rest[0]
        if numbers.shape[1] == 1:
            raise OptionError(_NO_REST)
        return numbers - (numbers.sum(dim=1, keepdim=True) - numbers) / (numbers.shape[1] - 1)

    def scores(self, numbers: Tensor) -> Tensor:
        """Return the reported scores [..., k]: probabilities, cosines, or unchanged values; float64 on the CPU."""
        return activate(numbers, self.activation) / (self.scale if self.activation == "cosine" else 1.0)

    def counted(self, output: Any, images: int) -> "Outputs":
        """Return these outputs with their count, from what the model returned for some images.

        Raises:
            ModelError: as for `with_reference`, or there is not one row for each image.
        """
        scores = self.with_reference(output)[0]
        if scores.shape[0] != images:
            raise ModelError(f"Expected a row of outputs for each image, got {scores.shape[0]} for {images} images.")
        return replace(self, count=scores.shape[1] if scores.ndim == 2 else 0)


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """The model that runs and the settings of an explainer, which the method `bind` of each kind of `outputs=` returns.

    Attributes:
        model: the model that runs, such as the image tower of an image–text model.
        outputs: what is explained: `Outputs`, a function of the model's output, or None for the model's classes.
        data_config, class_names, activation, layout, name: as for `Explainer`.
        complete: returns the outputs of the explainer for the number of outputs of a trial run; None to keep these.
        selects: selects a detection or region of each image, if one is explained.
    """

    model: nn.Module
    outputs: Any = None
    data_config: Any = None
    class_names: ClassNames | None = None
    activation: str | None = None
    layout: TokenLayout | None = None
    name: str | None = None
    complete: Callable[[int, nn.Module], Outputs] | None = None
    selects: Any = None

    def refuse_class_names(self) -> None:
        """Raise OptionError if there are class names, for outputs with names of their own."""
        if self.class_names is not None:
            raise OptionError("class_names cannot be used with prompts or reference images.")


def _shape_of(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"


def similarity_outputs(vectors: Tensor, names: Sequence[str], images: Sequence[NDArray[np.uint8]]) -> Outputs:
    """Return the cosines of an image's features with those of reference images, `vectors` [images, width]."""
    called = [name if list(names).count(name) == 1 else f"{name} ({n})" for n, name in enumerate(names, start=1)]
    units = normalize(vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32)).cpu(), dim=-1)
    return Outputs(
        lambda output: cosines(features_of(output), units),
        tuple(called),
        len(called),
        "cosine",
        description={"similarity_to": [_sha256(one) for one in images]},
        against="the mean of the other images",
        images=tuple(images),
    )


def features_of(output: Any) -> Tensor:
    """Return the features [batch, width] of a model without head; without pooling, the first token."""
    features = logits_of(output)
    if features is None or features.ndim not in (2, 3):
        raise ModelError(f"Expected a model that ends in features [batch, width], got {in_words(output)}.")
    return features if features.ndim == 2 else features[:, 0]


def cosines(features: Any, vectors: Tensor) -> Tensor:
    """Compute the cosines [batch, vectors] of features [batch, width] and unit vectors [vectors, width], in float32."""
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    return normalize(wide, dim=-1) @ vectors.to(wide).mT


def _sha256(image: NDArray[np.uint8]) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


def _identified(function: Any) -> dict[str, Any]:
    """Identify a function by its name and the hash of its code and state; a module also by the hash of its weights.

    Functions of vitflow itself are described by `Outputs.description` alone.
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    if str(getattr(inner, "__module__", "")).startswith("vitflow."):
        return {}
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    weights = {"weights_sha256": weights_sha256(inner)} if isinstance(inner, nn.Module) else {}
    return {"function": named.__qualname__, **weights, "state_sha256": state_sha256(function)}


def _called(function: Callable[[Any], Tensor], output: Any) -> Any:
    """Call a user's function; ModelError if it raises any exception."""
    try:
        return function(output)
    except VitflowError:
        raise
    except Exception as error:
        raise ModelError(
            f"The function of `outputs` failed on the output of the model ({in_words(output)}): "
            f"{type(error).__name__}: {error}"
        ) from error


def activate(logits: Tensor, activation: str) -> Tensor:
    """Apply the activation to scores [..., outputs], float64 on the CPU: logits become probabilities.

    A single logit gets a sigmoid, as its softmax would always be 1.
    """
    # In float64: near probability 1, the effect of a single patch is smaller than float32 rounding.
    logits = logits.detach().cpu().double()
    if activation == "softmax" and logits.shape[-1] > 1:
        return logits.softmax(dim=-1)
    return logits.sigmoid() if activation in ("softmax", "sigmoid") else logits


def log_odds(logits: Tensor, activation: str) -> Tensor:
    """Return the log-odds of each class from logits [..., classes], float64 on the CPU.

    For softmax, `z_t − logsumexp` of the other logits. Logits of a sigmoid, and a single logit, are log-odds already.
    Unlike probabilities, log-odds do not saturate. Other numbers are returned unchanged.

    >>> log_odds(torch.tensor([[40.0, 0.0]]), "softmax")
    tensor([[ 40., -40.]], dtype=torch.float64)
    """
    logits = logits.detach().cpu().double()
    if activation != "softmax" or logits.shape[-1] == 1:
        return logits
    top = logits.argmax(dim=-1, keepdim=True)
    below = logits.scatter(-1, top, -torch.inf).logsumexp(dim=-1, keepdim=True)
    together = torch.logaddexp(logits.gather(-1, top), below)
    # No other class has more than half of the total, so subtracting it does not lose precision.
    others = together + torch.log1p(-(logits - together).exp())
    return logits - others.scatter(-1, top, below)


def log_odds_gradient(logits: Tensor, targets: Tensor, activation: str) -> Tensor:
    """Return the gradient of the log-odds of each image's target with respect to the logits [batch, classes], float64.

    For softmax, 1 for the target and minus the softmax among the others for these; otherwise 1 for the target.

    >>> log_odds_gradient(torch.zeros(1, 3), torch.tensor([0]), "softmax")
    tensor([[ 1.0000, -0.5000, -0.5000]], dtype=torch.float64)
    """
    logits = logits.detach().double()
    chosen = torch.zeros_like(logits).scatter(1, targets.to(logits.device).view(-1, 1), 1.0)
    if activation != "softmax" or logits.shape[1] == 1:
        return chosen
    return chosen - logits.masked_fill(chosen.bool(), -torch.inf).softmax(dim=1)
