"""LeGrad: how an answer made of each layer's own tokens depends on the attention of that layer."""

from dataclasses import replace

import torch
from torch import Tensor

from vitflow.errors import UnsupportedModelError, check_known
from vitflow.explaining.asked import AskedTrace
from vitflow.explaining.maps import Maps
from vitflow.explaining.method_options import OPTIONS
from vitflow.explaining.progress import tracking
from vitflow.methods import gradients
from vitflow.methods.attention import check_layer
from vitflow.models.blocks import block_paths
from vitflow.recording.replaying import answer_from


def legrad(trace: AskedTrace, *, start_layer: int, pooled: str) -> Maps:
    """The positive gradients of each layer's own answer by its attention, averaged over heads, queries and layers.

    The answer of a layer is what the model returns where the tokens of that layer stand for those of the last one.
    Where a class token is read, the paper puts the mean of all tokens in its place.
    """
    check_known("pooled", pooled, OPTIONS["pooled"].choices)
    paths = block_paths(trace.model)
    blocks = [next((path for path in paths if f"{layer.name}.".startswith(f"{path}.")), None) for layer in trace.layers]
    if trace.staged or blocks != paths:
        raise UnsupportedModelError(
            "LeGrad asks what the model would answer from the tokens of each of its layers, and "
            f"{type(trace.model).__name__} has windows, stages with different tokens, or attention outside of one "
            "stack of blocks. Use gae or gradient_rollout, which go through them, or gradcam."
        )
    first = check_layer("start_layer", start_layer, len(paths))
    found = []
    with tracking("LeGrad", len(paths) - first) as progress:
        for path, layer in list(zip(paths, trace.layers, strict=True))[first:]:
            # Of this layer alone: those above it have no part in its answer.
            own = replace(trace, layers=[layer], features={}, pixels=None)
            found += own.gradients_of(_answer_of(trace, trace.features[path], paths[-1], pooled)).attentions
            progress(1)
    return Maps(trace.layout.to_grid(gradients.legrad(found)))


def _answer_of(trace: AskedTrace, tokens: Tensor, last: str, pooled: str) -> Tensor:
    """What each picture's target would have as its number if the last block gave these tokens, [batch, 1]."""
    assert trace.pixels is not None
    with torch.inference_mode(False), torch.enable_grad():
        if pooled == "mean":
            tokens = _with_mean(trace, tokens)
        numbers = trace.answers.numbers(answer_from(trace.model, trace.pixels, last, tokens))
        assert numbers is not None
        return numbers.gather(1, trace.wanted.to(numbers.device).view(-1, 1))


def _with_mean(trace: AskedTrace, tokens: Tensor) -> Tensor:
    """The tokens with the mean of all in the place of each prefix token that is read more than any patch."""
    readout, layout = trace.readout, trace.layout
    prefix = layout.num_prefix_tokens
    read = readout[:, :prefix] > readout[:, layout.patches].amax(dim=1, keepdim=True)
    whole = torch.where(read.to(tokens.device).unsqueeze(-1), tokens.mean(dim=1, keepdim=True), tokens[:, :prefix])
    return torch.cat([whole, tokens[:, prefix:]], dim=1)
