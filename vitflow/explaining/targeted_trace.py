"""A recorded pass with its targets, and with the means to run the model again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import OptionError
from vitflow.explaining.inputs import PlacedImage
from vitflow.models.info import ModelInfo
from vitflow.models.outputs import Outputs, activate, log_odds
from vitflow.recording.layers import Backward
from vitflow.recording.readout import Readouts
from vitflow.recording.trace import Trace


@dataclass(slots=True, kw_only=True)
class TargetedTrace(Trace):
    """A recorded pass with its targets: the first argument of the function of a method.

    It shares the recorded tensors with the trace that it was made from.

    Attributes:
        pixels: the model input, [batch, channels, height, width].
        run: maps model inputs to logits [batch, classes] by running the model again.
        model_info: properties of the model.
        targets: target class of each image, [batch]; None if the model has no classes.
        outputs: the outputs that maps explain; may differ from the reported ones.
        images: the images of the pass.
        raw_scores: logits of the reported outputs, [batch, classes].
        probabilities: reported scores, [batch, classes]; None if the model has no classes.
        seconds: duration of the pass.
        refinement_requested: whether the refinement of the current method was requested, not a default.
        is_random: True if the pass used random numbers, as Monte-Carlo dropout does.
        cached_outputs: outputs of further forward passes by key, for further classes and methods.
    """

    pixels: Tensor
    run: Callable[[Tensor], Tensor]
    model_info: ModelInfo
    targets: Tensor | None = None
    outputs: Outputs = field(default_factory=Outputs)
    images: Sequence[PlacedImage] = ()
    raw_scores: Tensor | None = None
    probabilities: Tensor | None = None
    seconds: float = 0.0
    refinement_requested: bool = False
    is_random: bool = False
    cached_outputs: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace, targets: Tensor | None, **further: Any) -> "TargetedTrace":
        """Add targets and further attributes, at least `run` and `model_info`, to a recorded pass."""
        recorded = {field.name: getattr(trace, field.name) for field in fields(Trace)}
        return cls(**recorded, targets=targets, **further)

    @property
    def class_indices(self) -> Tensor:
        """Target class of each image, [batch]; OptionError if there is none."""
        if self.targets is None:
            raise OptionError(
                "Class-specific methods require classes, and this model has none. Use a method that is not "
                "class-specific, such as rollout, or pass outputs= to explain other values."
            )
        return self.targets

    @property
    def readout(self) -> Tensor:
        """Readout of the explained outputs; see `Trace.readout`."""
        return self.readout_of(self.targets)

    @property
    def readouts(self) -> Readouts:
        """Readouts of the explained outputs; see `Trace.readouts`."""
        return self.readouts_of(self.targets)

    @property
    def perturbed_outputs(self) -> Outputs:
        """Outputs that are computed for changed images."""
        return self.outputs.perturbed_outputs or self.outputs

    def backward(self, targets: Tensor | None = None) -> Backward:
        """Backward pass, by default for the targets; see `Trace.backward`."""
        return Trace.backward(self, self.class_indices if targets is None else targets)

    def predict(self, pixels: Tensor) -> Tensor:
        """Run the model again and return the probabilities [batch, classes]."""
        with torch.no_grad():
            return activate(self.run(pixels), self.perturbed_outputs.activation)

    def log_odds(self, pixels: Tensor) -> Tensor:
        """Run the model again and return the log-odds [batch, classes], which do not saturate at probability 1."""
        with torch.no_grad():
            return log_odds(self.run(pixels), self.perturbed_outputs.activation)
