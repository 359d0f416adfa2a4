"""What is asked of a recorded pass: for which classes maps are made, and how to run the model again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from vitflow.errors import OptionError
from vitflow.models.answers import Answers
from vitflow.models.facts import ModelFacts
from vitflow.pictures.geometry import Placement
from vitflow.recording.trace import Backward, Trace


@dataclass(slots=True)
class AskedTrace(Trace):
    """A recorded pass with what is asked of it: what the function of a method is called with.

    It shares what was recorded with the trace that it was made from, on which nothing is written.

    Attributes:
        targets: the class that each picture is explained for, [batch]; None where there are no classes.
        predict: maps model inputs to probabilities [batch, classes]; for methods that run the model again.
        log_odds: likewise, to log-odds [batch, classes], which keep apart what rounds to a probability of 1.
        answers: what is asked of the model's output; what a map is of, which need not be what is told beside it.
        refinement_asked: whether refinement of the method in turn was asked for, and is no mere default.
        facts: what the model says of itself.
        placements: where each model input lies on its picture.
        answered: what methods that run the model again have found, by what they asked: further classes, and further
            methods that ask the same, cost nothing.

    >>> import torch
    >>> asked = AskedTrace.of(Trace(), torch.tensor([3]))
    >>> asked.wanted
    tensor([3])
    """

    targets: Tensor | None = None
    predict: Callable[[Tensor], Tensor] | None = None
    log_odds: Callable[[Tensor], Tensor] | None = None
    refinement_asked: bool = False
    facts: ModelFacts | None = None
    placements: Sequence[Placement] = ()
    answers: Answers = field(default_factory=Answers)
    answered: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        trace: Trace,
        targets: Tensor | None,
        predict: Callable[[Tensor], Tensor] | None = None,
        log_odds: Callable[[Tensor], Tensor] | None = None,
        **further: Any,
    ) -> "AskedTrace":
        """Ask a recorded pass for these classes; `further` are its own attributes."""
        recorded = {field.name: getattr(trace, field.name) for field in fields(Trace)}
        return cls(**recorded, targets=targets, predict=predict, log_odds=log_odds, **further)

    @property
    def wanted(self) -> Tensor:
        """The class that each picture is explained for, [batch]; OptionError where there is none."""
        if self.targets is None:
            raise OptionError(
                "A class-specific method needs a target class for each picture, and this model has no classes. "
                "Use one that is not class-specific, such as rollout."
            )
        return self.targets

    def backward(self, targets: Tensor | None = None) -> Backward:
        """As `Trace.backward`, by default for the classes that are asked for."""
        return Trace.backward(self, self.wanted if targets is None else targets)
