"""An answer: the number that a model gave to what it was asked, made once for captions, rows, JSON and pages."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vitflow.models.answers import Answers


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model answered to what it was asked; without a name where it has no classes.

    Attributes:
        name: of the class, "class 3" where names are not known; of two that are set against each other, both.
        number: the model's probability of the class, the cosine or the number that it answers with, or the difference
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
    number: float | None = None
    unit: str = "probability"
    index: int | None = None
    predicted: int | None = None
    named: bool = True
    sides: tuple[int, int] | None = None
    opposed: tuple[str, str] | None = None
    single: bool = False

    @classmethod
    def of(cls, told: Tensor, index: int, answers: Answers) -> "Answer":
        """The answer for one class, of what is told of all [classes].

        >>> import torch
        >>> answer = Answer.of(torch.tensor([0.25, 0.75]), 0, Answers(names=("cat", "dog"), reading="softmax"))
        >>> answer.name, answer.told
        ('cat', '25.0%')
        """
        name = answers.names[index] if answers.names else f"class {index}"
        unit = {"value": answers.unit, "cosine": "cosine"}.get(answers.reading, "probability")
        single = unit == "probability" and len(told) == 1
        return cls(name, float(told[index]), unit, index, int(told.argmax()), bool(answers.names), single=single)

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
        >>> Answer("age", 31.4, "years").told, Answer("cat", 0.873, single=True).told
        ('31.4 years', '87.3% (sigmoid)')
        """
        if self.number is None:
            return ""
        if self.unit == "probability":
            return f"{self.number:.1%}{' (sigmoid)' if self.single else ''}"
        signed = f"{self.number:+.2f} in logits" if self.unit == "logits" else ""
        words = f"cosine {self.number:.3f}" if self.unit == "cosine" else f"{self.number:.4g} {self.unit}".rstrip()
        return (signed or words).replace("-", "−")

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
