"""The maps that the sanity checks hold others against."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.method_choices import MethodChoice
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Target
from vitflow.pictures.images import ImageSource


def original_maps(
    explainer: Explainer,
    image: ImageSource,
    methods: Sequence[MethodChoice],
    target: Target,
    maps: Sequence[Saliency] | None,
    options: Mapping[str, Any],
) -> tuple[Sequence[Saliency], NDArray[np.intp] | None]:
    """One map per method, and the class that they explain, as what other maps of the picture are asked for.

    Args:
        explainer: holds the model.
        image: the picture.
        methods: names, or (name, options) pairs.
        target: one class, by default the predicted one.
        maps: the maps themselves, where they are already made.
        options: options for every method that has them.

    Raises:
        OptionError: the target stands for several classes, or the given maps are not one per method and of one class.
    """
    if maps is None:
        maps = explainer.explain_batch([image], methods=methods, targets=target, **options)
        if len(maps) != len(methods):
            raise OptionError(f"Expected one class to explain, got {target!r}, which stands for several.")
    names = [choice if isinstance(choice, str) else choice[0] for choice in methods]
    if [saliency.method for saliency in maps] != names or len({saliency.target for saliency in maps}) > 1:
        raise OptionError(
            f"Expected one map by each of {', '.join(names)}, all of one class, got "
            f"{', '.join(f'{saliency.method} of {saliency.target}' for saliency in maps) or 'none'}."
        )
    return maps, None if maps[0].target is None else np.array([maps[0].target])
