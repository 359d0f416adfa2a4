"""Which class to explain: by index, by name, the most probable ones, or each image's own."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import OptionError
from vitflow.explaining.choices import Chosen
from vitflow.models.facts import wordnet_of
from vitflow.models.outputs import Outputs


@dataclass(frozen=True, slots=True)
class Score:
    """What a model answered to what it was asked; without a name where it has no classes.

    Attributes:
        name: of the class, "class 3" where names are not known; of two that are set against each other, both.
        value: the model's probability of the class, the cosine or the number that it answers with, or the difference
            of two; None where it is not known.
        unit: of the number: "probability", "logits", "cosine", or what the answers tell, which may be nothing.
        index: of the class; None for two.
        predicted: index of the class that the model finds most probable.
        named: whether the name is the class's own.
        sides: indices of two classes that are set against each other.
        opposed: their names.
        single: whether it is the sigmoid of a model's only logit.
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

    @classmethod
    def of(cls, told: Tensor, index: int, outputs: Outputs) -> "Score":
        """The answer for one class, of what is told of all [classes].

        >>> import torch
        >>> answer = Score.of(torch.tensor([0.25, 0.75]), 0, Outputs(names=("cat", "dog"), activation="softmax"))
        >>> answer.name, answer.display
        ('cat', '25.0%')
        """
        name = outputs.names[index] if outputs.names else f"class {index}"
        unit = {"value": outputs.unit, "cosine": "cosine"}.get(outputs.activation, "probability")
        single = unit == "probability" and len(told) == 1
        return cls(name, float(told[index]), unit, index, int(told.argmax()), bool(outputs.names), single=single)

    @property
    def class_name(self) -> str | None:
        """The class's own name, where known."""
        return self.name if self.named and self.index is not None else None

    @property
    def probability(self) -> float | None:
        """The model's probability of the class."""
        return self.value if self.unit == "probability" else None

    @property
    def is_predicted(self) -> bool:
        """Whether it is about the class that the model finds most probable."""
        return self.index == self.predicted

    @property
    def display(self) -> str:
        """Its number as people read it; empty where that is not known.

        >>> Score("cat", 0.873).display, Score("cat against dog", -1.234, "logits").display
        ('87.3%', '−1.23 in logits')
        >>> Score("age", 31.4, "years").display, Score("cat", 0.873, single=True).display
        ('31.4 years', '87.3% (sigmoid)')
        """
        if self.value is None:
            return ""
        if self.unit == "probability":
            return f"{self.value:.1%}{' (sigmoid)' if self.single else ''}"
        signed = f"{self.value:+.2f} in logits" if self.unit == "logits" else ""
        words = f"cosine {self.value:.3f}" if self.unit == "cosine" else f"{self.value:.4g} {self.unit}".rstrip()
        return (signed or words).replace("-", "−")

    def to_dict(self) -> dict[str, Any]:
        """The columns of rows and the fields of JSON that tell of it; those of a class are None for two."""
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
# One target, several that are explained in turn, or an array with the class index of each image.
Targets = Target | Sequence[Target] | NDArray[np.integer[Any]] | Tensor


def resolve_targets(
    targets: Targets, probabilities: Tensor | None, class_names: Sequence[str] | None
) -> list[Tensor | None]:
    """Turn what the caller asked for into class indices, one tensor [batch] per target.

    Args:
        targets: one target or several, where "top5" stands for five, the most probable classes of each image; or an
            array [batch] with each image's own class index.
        probabilities: [batch, classes]; None where the model has no classes.
        class_names: names by class index, where known.

    Raises:
        OptionError: there is no such class, or the model has no classes.

    >>> resolve_targets(["top2"], torch.tensor([[0.1, 0.7, 0.2]]), None)
    [tensor([1]), tensor([2])]
    """
    if is_per_image(targets) and probabilities is not None:
        return [_given_targets(targets, probabilities)]
    several = isinstance(targets, Iterable) and not isinstance(targets, str) and getattr(targets, "ndim", 1) > 0
    given: Any = targets if several else [targets]
    requested: list[Target] = [target.item() if hasattr(target, "item") else target for target in given]
    if probabilities is None:
        if any(target is not None for target in requested):
            raise OptionError(f"This model has no classes, so none can be asked for (got {requested[0]!r}).")
        return [None]
    batch, count = probabilities.shape
    found: list[Tensor | None] = []
    for target in requested or [None]:
        top = _top(target)
        if top is not None:
            ranked = probabilities.topk(min(top, count), dim=1).indices
            found.extend(ranked[:, rank] for rank in range(ranked.shape[1]))
        else:
            found.append(torch.full((batch,), class_index(target, count, class_names), device=probabilities.device))
    return found


def doubt(probability: float, num_classes: int) -> str | None:
    """A note on a map for a class that the model all but rules out; None where it does not.

    The class is ruled out where its probability is told as 0.0 % (below 0.0005), and is less than half of chance where
    there are more than 1000 classes.

    >>> doubt(0.0001, 1000), doubt(0.2, 1000)
    ('the model gives this class 0.01 %: the map shows what would raise it, not what it saw', None)
    """
    if probability >= min(0.0005, 0.5 / max(num_classes, 1)):
        return None
    return f"the model gives this class {100 * probability:.2g} %: the map shows what would raise it, not what it saw"


def is_per_image(targets: Any) -> bool:
    """Whether targets are an array with a class index for each image."""
    return isinstance(targets, np.ndarray | Tensor) and targets.ndim > 0


def is_several(target: Any) -> bool:
    """Whether one target stands for several classes, as "top2" does.

    >>> is_several("top2"), is_several("top1"), is_several(None)
    (True, False, False)
    """
    return (_top(target) or 1) > 1


def is_top(target: Any) -> bool:
    """Whether a target stands for what the model answers.

    >>> is_top(None), is_top("top1"), is_top(3)
    (True, True, False)
    """
    return _top(target) is not None


def _given_targets(targets: Any, probabilities: Tensor) -> Tensor:
    found = torch.as_tensor(targets, device=probabilities.device)
    batch, count = probabilities.shape
    if found.shape != (batch,) or found.dtype.is_floating_point or found.dtype == torch.bool:
        raise OptionError(
            f"Expected an array of {batch} class indices, one for each image, got shape {tuple(found.shape)} of "
            f"{found.dtype}."
        )
    if ((found < 0) | (found >= count)).any():
        raise OptionError(f"Expected class indices from 0 to {count - 1}, got {found.tolist()}.")
    return found.long()


def class_index(target: Any, num_classes: int, class_names: Sequence[str] | None) -> int:
    """The index of a class given by index or name, or of ImageNet's classes by any of their names or a WordNet id.

    Case and underscores do not count.

    Raises:
        OptionError: there is no such class, or there are several.

    >>> class_index("Egyptian_CAT", 2, ["tabby", "Egyptian cat"])
    1
    """
    text = str(target).strip()
    if re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
        index = int(text)
        if not 0 <= index < num_classes:
            raise OptionError(f"Expected a class index from 0 to {num_classes - 1}, got {index}.")
        return index
    if class_names is None:
        raise OptionError(f"The names of this model's classes are not known: give an index instead of {text!r}.")
    wanted, called = _plain(text), _called(tuple(class_names))
    matches = [i for i, name in enumerate(class_names) if name.lower() == text.lower()]
    matches = matches or [i for i, names in enumerate(called) if wanted == names[0]]
    matches = matches or [i for i, names in enumerate(called) if wanted in names]
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(f"{class_names[i]!r} ({i})" for i in matches[:5])
        raise OptionError(f"Several classes are called {text!r}: {listed}. Give the index.")
    close = _close(wanted, called)
    known = wordnet_of(tuple(class_names)) or [("", name) for name in class_names]
    hint = f" Did you mean {', '.join(repr(', '.join(known[i][1:])) for i in close)}?" if close else ""
    raise OptionError(f"Unknown class {text!r}.{hint} Give a name of the model's {num_classes} classes, or an index.")


def _plain(name: str) -> str:
    """A name without what people write differently: case, underscores, further spaces."""
    return " ".join(name.lower().replace("_", " ").split())


@lru_cache(maxsize=8)
def _called(class_names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What each class may be called, plainly written: its name, the parts of that, and what WordNet calls it."""
    wordnet = wordnet_of(class_names) or ((),) * len(class_names)
    every = ((name, *name.split(", "), *others) for name, others in zip(class_names, wordnet, strict=True))
    return [tuple(map(_plain, names)) for names in every]


def _close(wanted: str, called: Sequence[tuple[str, ...]], most: int = 5) -> list[int]:
    """The classes that were probably meant.

    First those with names that contain all of these words, then with one of them, then with a name spelt alike. A class
    comes first if more of its names contain the words: lesser panda, which is also called bear cat, is no cat.
    """
    words = {word for word in wanted.split() if len(word) > 2}
    alike = set(get_close_matches(wanted, {name for names in called for name in names}, n=3))
    found = []
    for i, names in enumerate(called):
        shares = any(words & set(name.split()) for name in names)
        if shares or not alike.isdisjoint(names):
            likeness = max(SequenceMatcher(None, wanted, name).ratio() for name in names)
            different = set(names)
            contain = sum(words <= set(name.split()) for name in different) / len(different) if shares else 0.0
            found.append((not shares, -contain, -likeness, i))
    return [i for *_, i in sorted(found)[:most]]


def _top(target: Target) -> int | None:
    """k where the target is "topk", or 1 where it is None; else None."""
    if target is None:
        return 1
    match = re.fullmatch(r"top([1-9]\d*)", target) if isinstance(target, str) else None
    return int(match.group(1)) if match else None


@dataclass(frozen=True, slots=True)
class Contrast:
    """One class against another: what speaks for the first, less what speaks for the second.

    Against "rest", the map is of the class's number less the mean of the others', and what is told is as of a class.

    Attributes:
        target: class index or name; None for the predicted class.
        against: class index or name; or "rest".
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
    def sides(self) -> list[Target]:
        """What is set against each other: the class, and the one against it, if it is one."""
        return [self.target] if self.against_rest else [self.target, self.against]

    @property
    def against_rest(self) -> bool:
        """Whether it is one class against all others."""
        return isinstance(self.against, str) and self.against.strip().lower() == "rest"


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
    if len({one.against_rest for one in found}) > 1:
        raise OptionError("Expected contrasts against a class or against the rest, got both: ask one after the other.")
    for one in found:
        for side in one.sides:
            if is_several(side):
                raise OptionError(f"Expected one class on each side of a contrast, got {side!r}.")
    return found


def check_class_specific(chosen: Chosen) -> None:
    """Raise OptionError for a method whose map is the same for every class."""
    for one in chosen:
        if not one.method.class_specific:
            raise OptionError(
                f"Expected class-specific methods for one class against another, got {one.name}, whose map is the "
                "same for every class: use gae, gradient_rollout, consensus or gradcam."
            )
