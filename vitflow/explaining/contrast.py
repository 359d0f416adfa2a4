"""What is asked of a map: a class, or one class against another; each with a name and a number to print."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError
from vitflow.explaining.method_table import Method
from vitflow.explaining.targets import Target

if TYPE_CHECKING:
    from vitflow.explaining.explainer import Explainer
    from vitflow.explaining.method_choices import MethodChoice
    from vitflow.explaining.saliency import Saliency


@dataclass(frozen=True, slots=True)
class Class:
    """A class that a map is about.

    Attributes:
        name: of the class, or "class 3" where names are not known.
        value: the model's probability of it.
    """

    name: str
    value: float

    @property
    def told(self) -> str:
        """Its number as people read it.

        >>> Class("cat", 0.873).told
        '87.3%'
        """
        return f"{self.value:.1%}"


@dataclass(frozen=True, slots=True)
class Contrast:
    """One class against another: what speaks for the first, less what speaks for the second.

    Attributes:
        target: class index or name; None for the predicted class.
        against: class index or name.
        name: both names, once the model was asked.
        value: the difference of their logits, likewise.

    >>> Contrast("orange disc", against=2)
    Contrast(target='orange disc', against=2, name='', value=None)
    """

    target: Target
    against: Target
    name: str = ""
    value: float | None = None

    @property
    def told(self) -> str:
        """Its number as people read it.

        >>> Contrast(3, 5, "cat against dog", -1.234).told
        '−1.23 in logits'
        """
        return "" if self.value is None else f"{self.value:+.2f} in logits".replace("-", "−")


def contrasts_among(targets: Any) -> list[Contrast]:
    """The contrasts that targets ask for; none where they ask for classes.

    Raises:
        OptionError: contrasts and classes are mixed, or a contrast names more than one class on a side.
    """
    several = list(targets) if isinstance(targets, list | tuple) else [targets]
    found = [one for one in several if isinstance(one, Contrast)]
    if found and len(found) != len(several):
        raise OptionError(
            "Expected either classes or contrasts as targets, got both: ask for them one after the other."
        )
    for one in found:
        for side in (one.target, one.against):
            if isinstance(side, str) and side.startswith("top") and side[3:].isdigit() and side != "top1":
                raise OptionError(f"Expected one class on each side of a contrast, got {side!r}.")
    return found


def check_class_specific(methods: Iterable[Method]) -> None:
    """Raise OptionError for a method whose map is the same for every class."""
    for method in methods:
        if not method.class_specific:
            raise OptionError(
                f"Expected class-specific methods for one class against another, got {method.name}, whose map is the "
                "same for every class: use gae, gradient_rollout, consensus or gradcam."
            )


def explain_contrasts(
    explainer: "Explainer",
    images: Sequence[Any],
    contrasts: Sequence[Contrast],
    chosen: Sequence[tuple[Method, Mapping[str, Any]]],
    methods: "Sequence[MethodChoice]",
    options: Mapping[str, Any],
    names: Sequence[str] | None = None,
) -> "list[Saliency]":
    """Explain several pictures for one class against another: one forward pass, two backward passes per contrast.

    Raises:
        OptionError: a method does not depend on the class, or both sides are one class.
    """
    check_class_specific(method for method, _ in chosen)
    sides: list[Target] = [side for one in contrasts for side in (one.target, one.against)]
    maps = explainer.explain_batch(images, methods=methods, targets=sides, names=names, **options)
    asked = [contrasts[number % len(contrasts)] for number in range(len(maps) // 2)]
    return [
        contrasted(one, first, second, explainer.activation)
        for one, first, second in zip(asked, maps[::2], maps[1::2], strict=True)
    ]


def contrasted(asked: Contrast, first: "Saliency", second: "Saliency", activation: str = "softmax") -> "Saliency":
    """What speaks for one class less what speaks for another, each map scaled by the sum of its absolute values.

    Raises:
        OptionError: both maps are of one class.
    """
    if first.target == second.target:
        raise OptionError(f"Expected two classes to set against each other, got {first.label} twice.")
    value = _log_odds(first.probability, activation) - _log_odds(second.probability, activation)
    told = replace(
        asked, target=first.target, against=second.target, name=f"{first.label} against {second.label}", value=value
    )
    return replace(
        first,
        grid=(_shares(first.grid) - _shares(second.grid)).astype(np.float32),
        target=None,
        class_name=None,
        probability=None,
        contrast=told,
        facts={name: fact for name, fact in first.facts.items() if name != "note"},
        seconds=first.seconds + second.seconds,
    )


def _shares(grid: NDArray[np.float32]) -> NDArray[np.float64]:
    values = grid.astype(np.float64)
    total = np.abs(values).sum()
    return values / total if total > 0 else values


def _log_odds(probability: float | None, activation: str) -> float:
    """A logit from its probability; that of a softmax up to what all classes have in common."""
    if not probability:
        return -inf
    if activation == "softmax":
        return log(probability)
    return inf if probability == 1.0 else log(probability) - log(1.0 - probability)
