"""What is asked of a recorded pass: for which classes maps are made, and how to run the model again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import OptionError
from vitflow.images.geometry import Placement
from vitflow.models.facts import ModelFacts
from vitflow.models.outputs import Outputs, activate, log_odds
from vitflow.recording.trace import Backward, Trace


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image that was read and placed, ready for the model.

    Attributes:
        name: its name in results.
        image: uint8 RGB [height, width, 3].
        placement: where the model input lies on it.
        pixels: the model input itself, [channels, height, width], if the caller gave it; else it is cut from the image.
        denormalised: whether the image was computed from that input, so that there is nothing around it.
    """

    name: str
    image: NDArray[np.uint8]
    placement: Placement
    pixels: Tensor | None = None
    denormalised: bool = False


@dataclass(slots=True)
class TargetedTrace(Trace):
    """A recorded pass with what is asked of it: what the function of a method is called with.

    It shares what was recorded with the trace that it was made from, on which nothing is written.

    Attributes:
        targets: the class that each image is explained for, [batch]; None where there are no classes.
        run: maps model inputs to the numbers [batch, classes] that are asked for, by running the model again.
        outputs: what is asked of the model's output; what a map is of, which need not be what is told beside it.
        facts: what the model says of itself.
        images: those that the pass was for.
        numbers: what the model answered, [batch, classes].
        probabilities: what is told beside the maps, [batch, classes]; None where the model has no classes.
        seconds: that the pass took.
        refinement_requested: whether refinement of the method in turn was asked for, and is no mere default.
        answered: what methods that run the model again have found, by what they asked: further classes, and further
            methods that ask the same, cost nothing.

    >>> import torch
    >>> asked = TargetedTrace.of(Trace(), torch.tensor([3]))
    >>> asked.wanted
    tensor([3])
    """

    targets: Tensor | None = None
    run: Callable[[Tensor], Tensor] | None = None
    outputs: Outputs = field(default_factory=Outputs)
    facts: ModelFacts | None = None
    images: Sequence[PlacedImage] = ()
    numbers: Tensor | None = None
    probabilities: Tensor | None = None
    seconds: float = 0.0
    refinement_requested: bool = False
    answered: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace, targets: Tensor | None, **further: Any) -> "TargetedTrace":
        """Ask a recorded pass for these classes; `further` are its own attributes."""
        recorded = {field.name: getattr(trace, field.name) for field in fields(Trace)}
        return cls(**recorded, targets=targets, **further)

    @property
    def wanted(self) -> Tensor:
        """The class that each image is explained for, [batch]; OptionError where there is none."""
        if self.targets is None:
            raise OptionError(
                "A class-specific method needs a target class for each image, and this model has no classes. "
                "Use one that is not class-specific, such as rollout, or pass outputs= to explain other numbers."
            )
        return self.targets

    @property
    def readout(self) -> Tensor:
        """As `Trace.readout`, by default for the outputs that are explained."""
        return self.readout_of(self.targets)

    def backward(self, targets: Tensor | None = None) -> Backward:
        """As `Trace.backward`, by default for the classes that are asked for."""
        return Trace.backward(self, self.wanted if targets is None else targets)

    def predict(self, pixels: Tensor) -> Tensor:
        """The probabilities [batch, classes] of model inputs, by running the model again."""
        return activate(self._run_again(pixels), self.outputs.activation)

    def log_odds(self, pixels: Tensor) -> Tensor:
        """Likewise, the log-odds [batch, classes], which keep apart what rounds to a probability of 1."""
        return log_odds(self._run_again(pixels), self.outputs.activation)

    def _run_again(self, pixels: Tensor) -> Tensor:
        assert self.run is not None
        with torch.no_grad():
            return self.run(pixels)
