"""Maps from gradients of token features, of attention and of pixels: Grad-CAM on tokens, LeGrad, input gradient."""

from collections.abc import Sequence

from torch import Tensor

from vitflow.errors import ShapeError
from vitflow.methods.cells import sum_cells


def grad_cam(features: Tensor, gradients: Tensor, *, num_prefix_tokens: int = 1) -> Tensor:
    """Grad-CAM on tokens: ReLU(Σ_c w_c x_c), where w_c is the mean gradient of channel c over the patch tokens.

    Args:
        features: token features x, [batch, tokens, channels].
        gradients: gradient of each picture's target logit with respect to them, of the same shape.
        num_prefix_tokens: tokens before the patches, which have no part in the channel weights.

    Returns:
        [batch, tokens].

    Raises:
        ShapeError: the shapes differ, or are not [batch, tokens, channels].

    Source: Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization",
    ICCV 2017, eq. 1 and 2, with patch tokens as the positions.

    >>> import torch
    >>> features = torch.tensor([[[9.0, 9.0], [1.0, 2.0], [3.0, 0.0]]])
    >>> gradients = torch.tensor([[[5.0, 5.0], [1.0, -1.0], [1.0, -3.0]]])
    >>> grad_cam(features, gradients)  # channel weights 1 and -2
    tensor([[0., 0., 3.]])
    """
    if features.ndim != 3 or features.shape != gradients.shape:
        raise ShapeError(
            f"Expected features and gradients of one shape [batch, tokens, channels], got {tuple(features.shape)} and "
            f"{tuple(gradients.shape)}."
        )
    features, gradients = at_least_float32(features), at_least_float32(gradients)
    weights = gradients[:, num_prefix_tokens:].mean(dim=1, keepdim=True)  # [batch, 1, channels]
    return (weights * features).sum(dim=-1).clamp_min(0.0)


def input_gradient(gradients: Tensor, *, rows: int, cols: int) -> Tensor:
    """Input gradient: |∂ logit / ∂ pixel| summed over the channels and pixels of each patch.

    The pixels are those of the model input, after its normalisation.

    Args:
        gradients: gradient of each picture's target logit by its pixels, [batch, channels, height, width].
        rows: patches from top to bottom.
        cols: patches from left to right.

    Returns:
        [batch, rows, cols].

    Raises:
        ShapeError: the gradients are not [batch, channels, height, width], or there are more patches than pixels.

    Source: Simonyan et al., "Deep Inside Convolutional Networks: Visualising Image Classification Models and Saliency
    Maps", ICLR 2014 workshop, with the sum over a patch for the maximum over channels.

    >>> import torch
    >>> input_gradient(torch.tensor([[[[1.0, -2.0], [0.0, 3.0]]]]), rows=1, cols=2)
    tensor([[[1., 5.]]])
    """
    if gradients.ndim != 4:
        raise ShapeError(f"Expected gradients [batch, channels, height, width], got {tuple(gradients.shape)}.")
    return sum_cells(at_least_float32(gradients).abs().sum(dim=1), rows, cols)


def legrad(gradients: Sequence[Tensor]) -> Tensor:
    """LeGrad: E_j = 1/L Σ_l 1/(h n) Σ_h Σ_i (∂s_l / ∂A_l[h, i, j])⁺, over heads h, queries i and layers l.

    s_l is the answer that the model's last norm, pooling and head make of the tokens of layer l itself.

    Args:
        gradients: ∂s_l / ∂A_l of each layer, [batch, heads, queries, keys]; all with as many keys.

    Returns:
        [batch, keys].

    Raises:
        ShapeError: other shapes, or no layer.

    Source: Bousselham et al., "LeGrad: An Explainability Method for Vision Transformers via Feature Formation
    Sensitivity", ICCV 2025, §3.

    >>> import torch
    >>> legrad([torch.tensor([[[[1.0, -1.0], [3.0, 2.0]]]])])
    tensor([[2., 1.]])
    """
    shapes = [tuple(gradient.shape) for gradient in gradients]
    if not shapes or any(len(shape) != 4 for shape in shapes) or len({shape[-1] for shape in shapes}) > 1:
        raise ShapeError(f"Expected gradients [batch, heads, queries, keys] of each layer, got shapes {shapes}.")
    layers = [at_least_float32(gradient).clamp_min(0.0).mean(dim=(1, 2)) for gradient in gradients]
    return sum(layers[1:], start=layers[0]) / len(layers)


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor without its graph, in float32 where it was in half precision."""
    tensor = tensor.detach()
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()
