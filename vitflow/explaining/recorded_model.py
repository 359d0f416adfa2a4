"""Recorded passes of an image model: what is recorded for the requested methods, and when a pass is repeated."""

import copy
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from vitflow.errors import NoAttentionError, ValueNormsError, VitflowError, VitflowWarning
from vitflow.explaining.applying import (
    apply_methods,
    needs_gradients,
    probabilities_of,
    recording_options,
    starts_at_readout,
)
from vitflow.explaining.image_model import ImageModel
from vitflow.explaining.inputs import ImageInput, PlacedImage
from vitflow.explaining.maps import TargetedTrace
from vitflow.explaining.probabilities import note_on_range
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import resolve_targets
from vitflow.models.devices import random_state, refuse_inference_tensors
from vitflow.models.outputs import Outputs
from vitflow.recording.head import known_blocks
from vitflow.recording.isolation import evaluating
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace
from vitflow.registry.choices import Chosen, without_affinity


class RecordedModel(ImageModel):
    """An image model that is explained by recorded passes. Base class of `Explainer`."""

    _refuses_cuts = False  # True if the model failed in a pass whose graph was cut after its blocks
    _unweighted = ""  # the latest reason why value weighting was switched off

    def with_model(self, model: nn.Module) -> Self:
        """Return this explainer with another module of the same architecture, such as a copy with random weights."""
        result = copy.copy(self)
        result.model = model
        return result

    def record(self, image: ImageInput, **options: Any) -> Trace:
        """Run the model on one image and record its attention; options as for `record_attention`.

        Raises:
            VitflowError: the image cannot be read, an option is invalid, or no attention is recorded.

        >>> from vitflow.demo import sample_images
        >>> from vitflow import Explainer
        >>> Explainer("demo").record(sample_images()[0], head_fusion="mean").attentions[0].shape
        torch.Size([1, 145, 145])
        """
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(bool(options.get("gradients"))),
            evaluating(self.model),
        ):
            return self._run_recorded(self.pixels(image), self.outputs, reads=True, **options)

    def targeted(
        self, trace: Trace, targets: Tensor | None, outputs: Outputs | None = None, **further: Any
    ) -> TargetedTrace:
        """Add to a recorded pass its targets, by default of the explainer's outputs, and the means to run it again."""
        outputs = outputs or self.outputs
        run = partial(self.logits, outputs=outputs.perturbed_outputs or outputs)
        return TargetedTrace.of(trace, targets, run=run, outputs=outputs, model_info=self.model_info, **further)

    def explain_pass(
        self, images: Sequence[PlacedImage], chosen: Chosen, targets: Any, outputs: Outputs, readout: Any
    ) -> list[list[Saliency]]:
        """Explain images of one input size by one pass: [images][methods and targets]."""
        gradients = needs_gradients(chosen)
        if gradients:
            refuse_inference_tensors(self.model)
        # Leave the caller's torch.inference_mode(), in which tensors have no gradients.
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), evaluating(self.model):
            started, state = time.perf_counter(), random_state(self.device)
            trace, chosen = self._record_for(self._tensor(images), chosen, outputs, readout)
            reported = trace.logits if outputs is self.outputs else None
            logits = self.outputs.required_scores(trace.output, self.model_id) if reported is None else reported
            logits = logits.detach().cpu()
            probabilities = probabilities_of(logits, self.model_info)
            range_note = note_on_range(trace, logits, self.model_info)
            seconds = time.perf_counter() - started
            indices = resolve_targets(targets, probabilities, self.model_info.outputs.names)
            targeted = self.targeted(
                trace,
                None,
                outputs,
                images=images,
                raw_scores=logits,
                probabilities=probabilities,
                range_note=range_note,
                seconds=seconds,
                is_random=not torch.equal(state, random_state(self.device)),
            )
            return apply_methods(targeted, chosen, indices)

    def _record_for(
        self, pixels: Tensor, chosen: Chosen, outputs: Outputs, readout: Any, affinity: bool = True
    ) -> tuple[Trace, Chosen]:
        """Run one forward pass that records only what the methods need; return the methods without inapplicable steps.

        Value weighting and refinement are left out if the model does not support them, unless they were requested.
        """
        options = recording_options(chosen, self.model, affinity=affinity)
        reads = any(map(starts_at_readout, chosen))
        try:
            return self._run_recorded(pixels, outputs, reads=reads, readout=readout, **options), chosen
        except NoAttentionError:
            plain = [
                each.with_options(**without_affinity(each.requested))
                if each.method.needs <= {"predict", "repeat"}
                else each
                for each in chosen
            ]
            if not affinity or any(each.options.get("refine") and "refine" in each.requested for each in chosen):
                raise
            affinity = False
        except ValueNormsError as error:
            plain = [each.with_options(value_weighted=False) for each in chosen]
            if any("value_weighted" in each.requested for each in chosen) or plain == list(chosen):
                raise
            if self._unweighted != error.args[0]:
                self._unweighted = error.args[0]
                warnings.warn(f"{self._unweighted} Value weighting is switched off.", VitflowWarning, stacklevel=2)
        return self._record_for(pixels, plain, outputs, readout, affinity)

    def _run_recorded(self, pixels: Tensor, outputs: Outputs, *, reads: bool, **options: Any) -> Trace:
        """Record one forward pass, with its readout if `reads`; a second one if the first has not recorded enough."""
        if not reads or options.get("readout") is not None:
            return self._recorded_pass(pixels, outputs, **options)
        try:
            trace = self._recorded_pass(pixels, outputs, cut=self._cut, **options)
        except (VitflowError, torch.OutOfMemoryError):
            raise
        except Exception:  # a model may refuse gradients of its head in any way; then the readout is found separately
            self._refuses_cuts = True
            trace = self._recorded_pass(pixels, outputs, **options)
        if trace.refusal is not None:
            return trace
        if trace.layers.discards_other_values():
            return self._recorded_pass(pixels, outputs, cut=self._cut, **options | {"discard_ratio": 0.0})
        return trace

    @property
    def _cut(self) -> Sequence[str]:
        """Blocks after which the graph of a pass is cut."""
        return () if self._refuses_cuts else known_blocks(self.model)

    def _recorded_pass(self, pixels: Tensor, outputs: Outputs, **options: Any) -> Trace:
        with torch.set_grad_enabled(torch.is_grad_enabled() or bool(options.get("cut"))):
            settings = {"layout": self.model_info.layout, "outputs": self.outputs.read, **options}
            with record_attention(self.model, **settings) as trace:
                self.forward(pixels)
            if outputs is not self.outputs:  # maps explain other values than the reported ones
                trace.logits, trace.read = outputs.raw_scores(trace.output), outputs.read
        return trace
