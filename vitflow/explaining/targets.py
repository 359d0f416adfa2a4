"""Targets: classes by index or name, the most probable classes, one class per image, and contrasts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import OptionError
from vitflow.models.classes import class_index, is_several, top_count
from vitflow.models.outputs import Outputs
from vitflow.registry.choices import Chosen

# Number of the most probable classes that a score keeps: a class and three others.
_TOP = 4


@dataclass(frozen=True, slots=True)
class Score:
    """Target of a map and its score; without a name if the model has no classes.

    Attributes:
        name: class name, or "class 3" if names are unknown; for a contrast, both names.
        value: probability, cosine or other value of the output, or the difference of two; None if unknown.
        unit: unit of the value: "probability", "logits", "cosine", or that of the outputs, which may be empty.
        index: class index; None for a contrast.
        predicted: index of the most probable class.
        named: whether the class has a name.
        sides: class indices of a contrast.
        opposed: class names of a contrast.
        single: whether it is the sigmoid of the model's only logit.
        top: the most probable classes with their probabilities, at most four.
    """

    name: str = ""
    value: float | None = None
    unit: str = "probability"
    index: int | None = None
    predicted: int | None = None
    named: bool = True
    sides: tuple[int, int] | None = None
    opposed: tuple[str, str] | None = None
    single: bool = False
    top: tuple[tuple[int, float], ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def of(cls, scores: Tensor, index: int, outputs: Outputs) -> "Score":
        """Return the score of one class from the scores of all classes, [classes].

        >>> import torch
        >>> score = Score.of(torch.tensor([0.25, 0.75]), 0, Outputs(names=("cat", "dog"), activation="softmax"))
        >>> score.name, score.display
        ('cat', '25.0%')
        """
        name = outputs.names[index] if outputs.names else f"class {index}"
        unit = {"value": outputs.unit, "cosine": "cosine"}.get(outputs.activation, "probability")
        single = unit == "probability" and len(scores) == 1
        most = scores.float().topk(min(_TOP, len(scores)) if unit == "probability" else 0)
        top = tuple(zip(most.indices.tolist(), most.values.tolist(), strict=True))
        value, best = float(scores[index]), int(scores.argmax())
        return cls(name, value, unit, index, best, bool(outputs.names), single=single, top=top)

    @property
    def class_name(self) -> str | None:
        """Class name, or None."""
        return self.name if self.named and self.index is not None else None

    @property
    def probability(self) -> float | None:
        """Probability of the class, or None."""
        return self.value if self.unit == "probability" else None

    @property
    def is_predicted(self) -> bool:
        """True if the target is the most probable class."""
        return self.index == self.predicted

    @property
    def display(self) -> str:
        """Formatted value with its unit; empty if unknown.

        >>> Score("cat", 0.873).display, Score("cat against dog", -1.234, "logits").display
        ('87.3%', '−1.23 in logits')
        >>> Score("age", 31.4, "years").display, Score("cat", 0.873, single=True).display, Score("cat", 1e-5).display
        ('31.4 years', '87.3% (sigmoid)', '<0.1%')
        """
        if self.value is None:
            return ""
        if self.unit == "probability":
            probability = f"{self.value:.1%}" if self.value >= 0.0005 else "<0.1%"
            return f"{probability}{' (sigmoid)' if self.single else ''}"
        signed = f"{self.value:+.2f} in logits" if self.unit == "logits" else ""
        words = f"cosine {self.value:.3f}" if self.unit == "cosine" else f"{self.value:.4g} {self.unit}".rstrip()
        return (signed or words).replace("-", "−")

    def to_dict(self) -> dict[str, Any]:
        """Return the columns of rows and fields of JSON; the class fields are None for a contrast."""
        return {
            "class_index": self.index,
            "class_name": self.class_name,
            "probability": self.probability,
            "target": self.name or None,
            "value": self.value,
            "predicted_index": self.predicted,
        }


# A class index, a class name, "top1" … for the most probable ones, or None for the predicted class.
Target = int | str | None
# One target, several that are explained in turn, or an array with the class of each image.
Targets = Target | Sequence[Target] | NDArray[np.integer[Any]] | Tensor
# One target for all images, or one class for each.
ImageTargets = Target | Sequence[Target] | NDArray[np.integer[Any]] | Tensor


def resolve_targets(
    targets: Targets, probabilities: Tensor | None, class_names: Sequence[str] | None
) -> list[Tensor | None]:
    """Resolve targets to class indices, one tensor [batch] per target, from probabilities [batch, classes].

    "top5" gives the five most probable classes of each image; an array has the class index of each image. The
    probabilities are None if the model has no classes.

    >>> resolve_targets(["top2"], torch.tensor([[0.1, 0.7, 0.2]]), None)
    [tensor([1]), tensor([2])]
    """
    if is_per_image(targets) and probabilities is not None:
        batch, count = probabilities.shape
        array = np.asarray(targets.tolist()) if isinstance(targets, Tensor) else targets
        if array.shape != (batch,) or array.dtype.kind not in "iuOU":
            described = f"{array.dtype} {array.shape}"
            raise OptionError(f"Expected an array of {batch} class indices, one for each image, got {described}.")
        pairs = zip(array.tolist(), probabilities.argmax(dim=1).tolist(), strict=True)
        classes = [top if each in (None, "top1") else class_index(each, count, class_names) for each, top in pairs]
        return [torch.tensor(classes, device=probabilities.device)]
    several = isinstance(targets, Iterable) and not isinstance(targets, str) and getattr(targets, "ndim", 1) > 0
    given: Any = targets if several else [targets]
    requested: list[Target] = [target.item() if hasattr(target, "item") else target for target in given]
    if probabilities is None:
        if any(target is not None for target in requested):
            raise OptionError(
                f"This model has no classes; got target {requested[0]!r}. Leave it out, or pass a "
                "function in Python: outputs=lambda output: output[:, 1].mean((1, 2)) for class 1 of a segmentation."
            )
        return [None]
    batch, count = probabilities.shape
    indices: list[Tensor | None] = []
    for target in requested or [None]:
        top = top_count(target)
        if top is not None:
            ranked = probabilities.topk(min(top, count), dim=1).indices
            indices.extend(ranked[:, rank] for rank in range(ranked.shape[1]))
        else:
            indices.append(torch.full((batch,), class_index(target, count, class_names), device=probabilities.device))
    return indices


def requested_targets(target: Any, targets: Any) -> Any:
    """Return `targets`; or `target`, of which a list is one class for each image; OptionError for both.

    >>> requested_targets(None, [0, "cat"]), requested_targets([0, None], None)
    ([0, 'cat'], array([0, None], dtype=object))
    """
    if target is not None and targets is not None:
        raise OptionError("Expected target= or targets=, got both: use targets=[…].")
    if not isinstance(target, list | tuple):
        return targets if target is None else target
    array = np.empty(len(target), dtype=object)
    for index, each in enumerate(target):
        array[index] = each.item() if getattr(each, "ndim", 1) == 0 else each
        if is_several(each) or not isinstance(array[index], int | str | np.integer | None):
            words = "Expected target= as a list of one class for each image, by index or name, or None"
            raise OptionError(f"{words}; got {each!r}. targets=[…] explains each of several targets in every image.")
    return array


def is_per_image(targets: Any) -> TypeGuard[NDArray[Any] | Tensor]:
    """Return True if targets are an array with a class for each image."""
    return isinstance(targets, np.ndarray | Tensor) and targets.ndim > 0


@dataclass(frozen=True, slots=True)
class Contrast:
    """Contrast of two classes: the evidence for the first minus the evidence for the second.

    Against "rest", the map explains the class's score minus the mean of all others, and is reported like a class.

    Attributes:
        target: class index or name; None for the predicted class.
        against: class index or name; or "rest".

    >>> Contrast("orange disc", against=2)
    Contrast(target='orange disc', against=2)
    """

    target: Target
    against: Target

    @property
    def sides(self) -> list[Target]:
        """The class, and the class against it unless that is "rest"."""
        return [self.target] if self.against_rest else [self.target, self.against]

    @property
    def against_rest(self) -> bool:
        """True if one class is contrasted with all others."""
        return isinstance(self.against, str) and self.against.strip().lower() == "rest"


def contrasts_among(targets: Any) -> list[Contrast]:
    """Return the contrasts among targets, each of two single classes; an empty list if the targets are classes."""
    several = list(targets) if isinstance(targets, list | tuple) else [targets]
    contrasts = [target for target in several if isinstance(target, Contrast)]
    if contrasts and len(contrasts) != len(several):
        raise OptionError("Classes and contrasts cannot be mixed as targets: use separate calls.")
    if len({contrast.against_rest for contrast in contrasts}) > 1:
        raise OptionError("Contrasts against a class and against the rest cannot be mixed: use separate calls.")
    for contrast in contrasts:
        for side in contrast.sides:
            if is_several(side):
                raise OptionError(f"Expected one class on each side of a contrast, got {side!r}.")
    return contrasts


def check_class_specific(chosen: Chosen) -> None:
    """Raise OptionError for methods that are not class-specific."""
    if other := [each.name for each in chosen if not each.method.class_specific]:
        raise OptionError(f"Contrasts require class-specific methods, such as gae; got {', '.join(other)}.")
