"""Whether the patches that an evaluation removes can leave the model's sequence of tokens."""

import torch

from vitflow.errors import UnsupportedModelError
from vitflow.explaining.explainer import Explainer
from vitflow.methods.tokens import TokenLayout
from vitflow.recording.token_dropping import droppable_tokens, run_on_patches

__all__ = ["can_drop_tokens", "check_can_drop", "run_on_patches"]


def can_drop_tokens(explainer: Explainer) -> bool:
    """Whether the explainer's model can run on some of its patches; it is tried once, on noise.

    >>> can_drop_tokens(Explainer("demo"))
    True
    """
    try:
        check_can_drop(explainer, explainer.spec.size)
    except UnsupportedModelError:
        return False
    return True


def check_can_drop(explainer: Explainer, input_size: tuple[int, int]) -> TokenLayout:
    """The layout of the tokens that can be dropped from a model input of (height, width) pixels.

    Raises:
        UnsupportedModelError: the model cannot run on some of its patches; the message says why, and what to do.
    """
    parameter = next(explainer.model.parameters(), torch.zeros(()))
    pixels = torch.empty(1, explainer.spec.channels, *input_size, dtype=parameter.dtype, device=explainer.device)
    try:
        return droppable_tokens(explainer.model, pixels, explainer.layout, explainer.answers.read)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{explainer.model_id} cannot drop patches from its sequence. {error} Hide patches in the picture "
            'instead, with replace="blank" or replace="blur".'
        ) from error
