"""What a model would answer if its last block gave other tokens: its norm, pooling and head, run on them."""

from typing import Any

import torch
from torch import Tensor, nn

from vitflow.models.libraries import forward_options
from vitflow.recording.isolation import Hook, evaluating


def answer_from(model: nn.Module, pixels: Tensor, path: str, tokens: Tensor) -> Any:
    """What a model returns where one of its modules gives these tokens instead of its own output.

    The model runs once more, without gradients up to that module; what it returns is differentiable by the tokens.

    Args:
        model: it is left as it was, also after an exception.
        pixels: the model inputs that the tokens were made of, [batch, channels, height, width].
        path: of the module, as a rule of the last block.
        tokens: of the shape of its output, or of the first of its outputs.

    >>> import timm
    >>> model = timm.create_model("test_vit").eval()
    >>> tokens = torch.zeros(1, 101, 64)
    >>> wanted = model.head(model.norm(tokens)[:, 0]).detach()
    >>> [float((answer_from(model, pixels, "blocks.5", tokens).detach() - wanted).abs().max())
    ...  for pixels in torch.randn(2, 1, 3, 160, 160)]
    [0.0, 0.0]
    """

    def give(args: Any, output: Any) -> Any:
        if output is None:  # an exception passes through
            return None
        torch.set_grad_enabled(True)  # until torch.no_grad() below is left
        return tokens if isinstance(output, Tensor) else (tokens, *output[1:])

    with torch.inference_mode(False), evaluating(model), torch.no_grad():
        hook = Hook(model.get_submodule(path), give, before=False)
        try:
            return model(pixels.detach(), **forward_options(model, (pixels.shape[-2], pixels.shape[-1])))
        finally:
            hook.remove()
