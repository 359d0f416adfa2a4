"""A model together with what is explained of it, while an explainer is built.

Each kind of `outputs=` has a method `bind`, which returns the model to run and the settings that follow from the
question.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from vitflow.errors import OptionError
from vitflow.methods.tokens import TokenLayout
from vitflow.models.names import ClassNames
from vitflow.models.outputs import Outputs


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """A model and the settings of an explainer.

    Attributes:
        model: the model that runs, such as the image tower of an image–text model.
        outputs: what is explained: `Outputs`, a function of the model's output, or None for the model's classes.
        data_config, class_names, activation, layout, name: as for `Explainer`.
        check_batch: whether the outputs may mix the images of a batch, which is then tested.
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
    check_batch: bool = True
    complete: Callable[[int, nn.Module], Outputs] | None = None
    selects: Any = None

    def refuse_class_names(self) -> None:
        """Raise OptionError if there are class names, for outputs with names of their own."""
        if self.class_names is not None:
            raise OptionError("class_names cannot be used with prompts or reference images.")
