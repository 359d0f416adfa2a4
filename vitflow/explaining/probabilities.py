"""Probabilities that a model returns instead of logits, found by a run in which its last activation is observed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitflow.errors import ModelError, VitflowError
from vitflow.models.info import ModelInfo
from vitflow.models.parts import output_cache
from vitflow.recording.experiment import Call
from vitflow.recording.readout import Read
from vitflow.recording.trace import Trace

_SOFTMAXES = (torch.softmax, F.softmax, Tensor.softmax)
_SIGMOIDS = (torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_, torch.special.expit)
# Number of images of noise: seldom are the logits of all of them between 0 and 1.
_NOISE = 7


class _Activations(TorchFunctionMode):
    """Function mode that keeps the results of sigmoids, and of softmaxes that are not those of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _SIGMOIDS or (func in _SOFTMAXES and output.ndim < 3):
            self.results.append(output.detach().flatten().clone())
        return output


def note_on_range(trace: Trace, logits: Tensor, info: ModelInfo) -> str:
    """Return a note if the outputs of a model may be probabilities already; ModelError if they are."""
    activation = info.outputs.activation
    in_range = bool((logits >= 0).all() and (logits <= 1).all())
    if activation not in ("softmax", "sigmoid") or trace.call is None or not in_range:
        return ""
    if "prompts" in info.outputs.description:  # scaled cosines, computed by vitflow
        return ""
    call, read, cache = trace.call, info.outputs.read, output_cache(trace.model, info.outputs.read)
    if _kind not in cache:
        cache[_kind] = _kind(call, read)
    logits_again = f"{'output' if isinstance(trace.output, Tensor) else 'output.logits'}.logit(eps=1e-6)"
    if cache[_kind] == "known":
        remedy = f"Leave out the sigmoid or softmax of the model, or pass outputs=lambda output: {logits_again} and "
        if info.outputs.function is not None:
            remedy = "Return logits, such as output.logit(eps=1e-6), from `outputs`, with "
        raise ModelError(
            f"Expected logits from {info.id}, got probabilities, which a sigmoid or softmax returned; another one "
            f"would change them. {remedy}activation='sigmoid'."
        )
    if not cache[_kind]:
        return ""
    return (
        "all outputs are between 0 and 1: if they are probabilities already, the shown ones are wrong, and outputs="
        f"lambda output: {logits_again} with activation='sigmoid' gives the right ones"
    )


def _kind(call: Call, read: Read) -> str:
    """Return "known" if the explained outputs of a call are results of activations, "range" if all are between 0 and 1.

    The outputs may be indexed, stacked or reshaped. A model that rejects noise is run on its own images. Empty for
    logits, and for a model that fails.
    """
    for pixels in (torch.cat([call.pixels[:1], call.noise(_NOISE)]), call.pixels):
        with call.experiment(autocast=True), _Activations() as activations:
            try:
                outputs = read(call(pixels, same_images=pixels is call.pixels))
            except (VitflowError, torch.OutOfMemoryError):
                raise
            except Exception:  # a model may reject noise or a batch in any way
                continue
        if outputs is None or bool((outputs < 0).any() or (outputs > 1).any()):
            return ""
        inside = outputs[(outputs > 0) & (outputs < 1)].double()
        results = torch.cat([each.to(inside) for each in activations.results] or [inside[:0]])
        if not inside.numel():
            return ""
        if bool(torch.isin(inside, results).all()):
            return "known"
        # A single logit is often between 0 and 1.
        enough = len(outputs) > _NOISE and (outputs[0].numel() > 1 or results.numel() > 0)
        return "range" if enough else ""
    return ""
