"""Gradient maps (Grad-CAM on tokens, LeGrad, input gradient), and attention weighted by values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitflow.errors import OptionError
from vitflow.images.geometry import Extent
from vitflow.methods.cells import sum_cells
from vitflow.methods.fusion import HeadFusion, check_head_fusion, fuse_heads, normalize_rows


def grad_cam(features: Tensor, gradients: Tensor, *, num_prefix_tokens: int = 1) -> Tensor:
    """Grad-CAM on tokens: ReLU(Σ_c w_c x_c), where w_c is the mean gradient of channel c over the patch tokens.

    Both tensors are [batch, tokens, channels], the map is [batch, tokens].

    Source: Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization", ICCV
    2017, eq. 1 and 2, with patch tokens as the positions.

    >>> features = torch.tensor([[[9.0, 9.0], [1.0, 2.0], [3.0, 0.0]]])
    >>> gradients = torch.tensor([[[5.0, 5.0], [1.0, -1.0], [1.0, -3.0]]])
    >>> grad_cam(features, gradients)  # channel weights 1 and -2
    tensor([[0., 0., 3.]])
    """
    features, gradients = at_least_float32(features), at_least_float32(gradients)
    weights = gradients[:, num_prefix_tokens:].mean(dim=1, keepdim=True)  # [batch, 1, channels]
    return (weights * features).sum(dim=-1).clamp_min(0.0)


def input_gradient(gradients: Tensor, *, rows: int, cols: int, extent: Extent | None = None) -> Tensor:
    """Input gradient: |∂ logit / ∂ pixel| summed over the channels and pixels of each patch, [batch, rows, cols].

    The gradients are by the normalised model input, [batch, channels, height, width]; without `extent`, patches divide
    it evenly.

    Source: Simonyan et al., "Deep Inside Convolutional Networks: Visualising Image Classification Models and Saliency
    Maps", ICLR 2014 workshop, with a sum over each patch instead of a maximum over channels.

    >>> input_gradient(torch.tensor([[[[1.0, -2.0], [0.0, 3.0]]]]), rows=1, cols=2)
    tensor([[[1., 5.]]])
    """
    return sum_cells(at_least_float32(gradients).abs().sum(dim=1), rows, cols, extent)


def legrad(gradients: Sequence[Tensor]) -> Tensor:
    """LeGrad: E_j = 1/L Σ_l 1/(h n) Σ_h Σ_i (∂s_l / ∂A_l[h, i, j])⁺ over heads h, queries i, layers l: [batch, keys].

    s_l is the output of the model's last norm, pooling and head for the tokens after layer l; the gradients of each
    layer are [batch, heads, queries, keys].

    Source: Bousselham et al., "LeGrad: An Explainability Method for Vision Transformers via Feature Formation
    Sensitivity", ICCV 2025, §3.

    >>> legrad([torch.tensor([[[[1.0, -1.0], [3.0, 2.0]]]])])
    tensor([[2., 1.]])
    """
    layers = [at_least_float32(gradient).clamp_min(0.0).mean(dim=(1, 2)) for gradient in gradients]
    return sum(layers[1:], start=layers[0]) / len(layers)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the detached tensor, in float32 if it was in half precision."""
    tensor = tensor.detach()
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


# False: attention unchanged. True: times the norm of the transformed value vector. "output": times the projection of
# that vector on the attention's output.
ValueWeighting = bool | Literal["output"]
VALUE_WEIGHTINGS: tuple[ValueWeighting, ...] = (False, True, "output")


def check_value_weighting(value_weighted: object) -> None:
    """Raise OptionError unless the value is False, True or "output"."""
    if not any(value_weighted is known or (known == "output" == value_weighted) for known in VALUE_WEIGHTINGS):
        raise OptionError(f"Expected value_weighted to be False, True or 'output', got {value_weighted!r}.")


@dataclass(frozen=True, slots=True)
class Values:
    """Value vectors of a layer and their output projection.

    Attributes:
        vectors: value vectors v of each head, [batch, heads, tokens, width].
        projection: W_O, [out, heads · width]; head h has the columns from h · width on.
        gram: W_Oᵀ W_O, if it is known already.

    >>> values = Values(torch.tensor([[[[1.0], [0.0]], [[0.0], [2.0]]]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    >>> values.norms()
    tensor([[[3., 0.],
             [0., 8.]]])
    """

    vectors: Tensor
    projection: Tensor
    gram: Tensor | None = None

    def norms(self) -> Tensor:
        """‖v_j W_O‖₂ per head and token, [batch, heads, tokens], from one small Gram matrix per head.

        Source: Kobayashi et al., "Attention is Not Only a Weight", EMNLP 2020; ‖v W‖² = v (W Wᵀ) vᵀ.
        """
        heads, width = self.vectors.shape[1], self.vectors.shape[-1]
        with torch.autocast(self.vectors.device.type, enabled=False):
            slices = self.projection.reshape(-1, heads, width).permute(1, 2, 0)  # [heads, width, out]
            gram = slices @ slices.transpose(-2, -1)  # [heads, width, width]
            norms: Tensor = ((self.vectors @ gram) * self.vectors).sum(dim=-1).clamp_min(0).sqrt()
        return norms

    def gram_for(self, vectors: int) -> Tensor | None:
        """W_Oᵀ W_O if it saves time for this number of vectors: it replaces two products with W_O by one."""
        return self.projection.T @ self.projection if vectors > len(self.projection) else None

    def along(self, mixed: Tensor) -> Tensor:
        """Return a_i = o_i W_Oᵀ W_O by heads, [batch, heads, queries, width], of o_i, [batch, queries, heads · width].

        The product of v_j and the part of a_i for head h is that of v_j W_O and the attention output of query i.
        """
        with torch.autocast(self.vectors.device.type, enabled=False):
            gram = self.gram_for(math.prod(mixed.shape[:2])) if self.gram is None else self.gram
            along: Tensor = mixed @ self.projection.T @ self.projection if gram is None else mixed @ gram
        heads: Tensor = along.unflatten(-1, (self.vectors.shape[1], -1)).transpose(1, 2)
        return heads

    def weigh(self, attention: Tensor, value_weighted: ValueWeighting) -> Tensor:
        """Weight the attention of all heads by their value vectors: [batch, heads, tokens, tokens], not normalised.

        - False: A[h, i, j] itself.
        - True: A[h, i, j] · ‖v_j W_O‖, the length of what token j passes on to token i through head h.
        - "output": A[h, i, j] · (v_j W_O · o_i)⁺ / ‖o_i‖, that vector's length along the attention output
          o_i = Σ_hj A[h, i, j] v_j W_O; components orthogonal to o_i are ignored. Without the clamp at 0, row i sums to
          ‖o_i‖ over all heads and tokens.

        Source: Kobayashi et al., EMNLP 2020, for the norm. For the length along the output: the same vectors, as in
        Ferrando et al., "Measuring the Mixing of Contextual Information in the Transformer", EMNLP 2022, who use the
        distance to the sum of the vectors; here the inner product with the sum.
        """
        check_value_weighting(value_weighted)
        if value_weighted is False:
            return attention
        if value_weighted is True:
            return attention * self.norms().unsqueeze(-2)
        with torch.autocast(self.vectors.device.type, enabled=False):
            mixed = attention @ self.vectors
            along = self.along(mixed.transpose(1, 2).flatten(2))
            lengths = (mixed * along).sum(dim=(1, -1)).clamp_min(0).sqrt()  # ‖o_i‖
            along = along / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)[:, None, :, None]
            return (along @ self.vectors.transpose(-2, -1)).clamp_min_(0.0).mul_(attention)


def join_values(parts: Sequence[Values]) -> Values:
    """Combine the values of parallel attention modules: all their heads, and the sum of their outputs."""
    vectors, projections = [part.vectors for part in parts], [part.projection for part in parts]
    return Values(torch.cat(vectors, dim=1), torch.cat(projections, dim=1))


def fuse_weighted(
    attention: Tensor, head_fusion: HeadFusion, value_weighted: ValueWeighting, values: Values | None
) -> Tensor:
    """Weight the heads of one layer by their values and fuse them: [batch, tokens, tokens].

    Weighted rows are normalised to sum 1 after the fusion. `values` are required unless value_weighted is False.
    """
    check_head_fusion(head_fusion)
    if value_weighted is False:
        return fuse_heads(attention, head_fusion)
    if values is None:
        raise OptionError("value_weighted requires the value vectors of the layer, got none. Record with values=True.")
    return normalize_rows(fuse_heads(values.weigh(attention, value_weighted), head_fusion))
