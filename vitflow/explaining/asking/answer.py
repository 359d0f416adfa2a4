"""An answer: the number that a model gave to what it was asked, made once for captions, rows, JSON and pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model answered to what it was asked; without a name where it has no classes.

    Attributes:
        name: of the class, "class 3" where names are not known; of two that are set against each other, both.
        number: the model's probability of the class, or the difference of two logits; None where it is not known.
        unit: of the number.
        index: of the class; None for two.
        predicted: index of the class that the model finds most probable.
        named: whether the name is the class's own.
        sides: indices of two classes that are set against each other.
    """

    name: str = ""
    number: float | None = None
    unit: Literal["probability", "logits"] = "probability"
    index: int | None = None
    predicted: int | None = None
    named: bool = True
    sides: tuple[int, int] | None = None

    @classmethod
    def of(cls, probabilities: Tensor, index: int, class_names: Sequence[str] | None) -> "Answer":
        """The answer for one class, of the probabilities [classes] of all.

        >>> import torch
        >>> Answer.of(torch.tensor([0.25, 0.75]), 0, ["cat", "dog"]).to_dict()["class_name"]
        'cat'
        """
        name = class_names[index] if class_names else f"class {index}"
        number, predicted = float(probabilities[index]), int(probabilities.argmax())
        return cls(name, number, "probability", index, predicted, bool(class_names))

    @property
    def class_name(self) -> str | None:
        """The class's own name, where known."""
        return self.name if self.named and self.index is not None else None

    @property
    def probability(self) -> float | None:
        """The model's probability of the class."""
        return self.number if self.unit == "probability" else None

    @property
    def is_predicted(self) -> bool:
        """Whether it is about the class that the model finds most probable."""
        return self.index == self.predicted

    @property
    def told(self) -> str:
        """Its number as people read it; empty where that is not known.

        >>> Answer("cat", 0.873).told, Answer("cat against dog", -1.234, "logits").told
        ('87.3%', '−1.23 in logits')
        """
        if self.number is None:
            return ""
        return f"{self.number:.1%}" if self.unit == "probability" else f"{self.number:+.2f} in logits".replace("-", "−")

    def to_dict(self) -> dict[str, Any]:
        """The columns of rows and the fields of JSON that tell of it; those of a class are None for two."""
        return {
            "class_index": self.index,
            "class_name": self.class_name,
            "probability": self.probability,
            "target": self.name or None,
            "value": self.number,
            "predicted_index": self.predicted,
        }
