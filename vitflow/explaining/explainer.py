"""Explain images: from photograph and model to saliency, one-shot or with a model that is kept."""

import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import NoAttentionError, OptionError, UnsupportedModelError, ValueNormsError, VitflowWarning
from vitflow.explaining.applying import (
    apply_methods,
    needs_gradients,
    probabilities_of,
    recorded_for,
    starts_at_readout,
)
from vitflow.explaining.choices import Chosen, MethodChoice, choose_methods, has_targets
from vitflow.explaining.image_model import ImageInput, ImageModel, name_of, several
from vitflow.explaining.options import takes_method_options
from vitflow.explaining.refining import explain_shifted
from vitflow.explaining.saliency import Saliency, contrasted
from vitflow.explaining.targeted_trace import PlacedImage, TargetedTrace
from vitflow.explaining.targets import (
    Contrast,
    Target,
    Targets,
    check_class_specific,
    contrasts_among,
    is_per_image,
    resolve_targets,
)
from vitflow.images.reading import ImageSource
from vitflow.models.outputs import Outputs
from vitflow.recording.isolation import evaluating, refuse_inference_tensors
from vitflow.recording.trace import Trace


@takes_method_options
def explain(
    image: ImageSource | Tensor,
    *,
    model: str | Path | nn.Module,
    method: str | None = None,
    target: Target | Contrast = None,
    fit: str = "crop",
    device: str | torch.device | None = None,
    data_config: Any = None,
    readout: Tensor | NDArray[Any] | None = None,
    **options: Any,
) -> Saliency:
    """Explain one image with one method. To explain several with the same model, keep an `Explainer`.

    Args:
        image: a path, bytes, a PIL image, an RGB array, or the input of the model: a normalised float tensor
            [3, height, width] or [1, 3, height, width]. The map lies on what the tensor shows.
        model: a model id (see `load_model`), or a module of your own.
        method: a name from `list_methods()`; by default gae with a target, and rollout without one.
        target: class index or name, or `Contrast(one, against=another)`; by default the predicted class.
        fit: "crop" (the model's own preprocessing), "squash", "pad" or "native".
        device: where to run, by default the model's own device, or a GPU if there is one.
        data_config: what a model that does not say so itself wants to see, as for `Explainer`.
        readout: weights of the tokens that the map starts at, [tokens], or of the patches, [rows, cols]; by default
            those that the output is computed from.
        options: the method's own, such as head_fusion="max".

    Raises:
        VitflowError: the image, the model or an option is wrong; the message says which and what to do.

    >>> from vitflow.demo import sample_images
    >>> explain(sample_images()[0], model="demo", method="rollout", head_fusion="max").grid.shape
    (12, 12)
    """
    explainer = Explainer(model, device=device, fit=fit, data_config=data_config)
    return explainer.explain(image, method=method, target=target, readout=readout, **options)


class Explainer(ImageModel):
    """A model that is kept, to explain one image after another or in batches.

    Several threads may share it: explanations of one model take turns. A model in training mode is put into eval mode
    for each, and back afterwards.

    Args:
        model: a model id (see `load_model`), or a module of your own; beside a move to `device` and `dtype` it is left
            as it is.
        device: where to run, and where your module is moved to if given; by default where your module lies, or a GPU
            if there is one for a model by name.
        dtype: precision that the model is converted to: "float32", "bfloat16" or "float16"; by default its
            own. Maps and probabilities are computed in float32 at least whatever it is.
        fit: "crop" (the model's own preprocessing), "squash", "pad" or "native" (whole image, aspect ratio kept,
            through timm's dynamic image size).
        class_names: names of the classes, where the model does not know them: a file (one per line, or JSON), the names
            in order, or {index: name}.
        data_config: input_size, mean, std, crop_pct, interpolation, for a model without `pretrained_cfg`; or its image
            processor of transformers, or `weights.transforms()` of torchvision.
        layout: prefix tokens and patch grid, for a model that does not tell its own.
        activation: how answers are read: "softmax" or "sigmoid" (multi-label), by default what the model's
            configuration says, else softmax; "cosine", or "value" for numbers as they are, as those of a function.
            A single logit is read by a sigmoid instead of a softmax.
        name: what to call the model in figures and rows; by default the id that `load_model` loaded its weights by, and
            of weights that it does not know the architecture.
        outputs: what to explain instead of the model's classes: `prompts([...])` for an image–text model,
            `similarity_to([...])` for reference images, or a function of the model's output that returns scores
            [images, k] and passes gradients, with `class_names` as their names; or `Outputs`, which also has a unit.

    Attributes:
        model, device: the module itself, and where it runs.
        facts: what the model says of itself.
        preprocessing: how images become its input.

    Raises:
        VitflowError: the model cannot be loaded, or an option is wrong.
    """

    _weighable = True  # until value weighting turned out not to apply to the model

    def asks(self, targets: Any) -> bool:
        """Whether anything but the predicted class is asked: targets, or answers other than the model's classes."""
        return has_targets(targets) or self.outputs.function is not None

    @takes_method_options
    def explain(
        self,
        image: ImageSource | Tensor,
        *,
        method: str | None = None,
        target: Target | Contrast = None,
        readout: Tensor | NDArray[Any] | None = None,
        original: ImageSource | None = None,
        **options: Any,
    ) -> Saliency:
        """Explain one image with one method; arguments as for `vitflow.explain`.

        `original` is the image of a tensor, which was placed on it as by this explainer: the map lies on it then.
        """
        methods = None if method is None else [method]
        # tells of options that explain_batch has, and this one has not
        choose_methods(methods, options, asks=self.asks(target))
        originals = None if original is None else [original]
        found = self.explain_batch(
            [image], methods=methods, targets=target, readout=readout, originals=originals, **options
        )
        if len(found) != 1:
            raise OptionError(f"One map was expected, and {target!r} asks for {len(found)}: use explain_batch.")
        return found[0]

    @takes_method_options
    def explain_batch(
        self,
        images: ImageInput | Sequence[ImageInput],
        *,
        methods: Sequence[MethodChoice] | None = None,
        targets: Targets | Contrast | Sequence[Contrast] = None,
        names: Sequence[str] | None = None,
        readout: Tensor | NDArray[Any] | None = None,
        originals: Sequence[ImageSource] | None = None,
        **options: Any,
    ) -> list[Saliency]:
        """Explain several images with several methods: one forward pass, at most one backward pass per target.

        Args:
            images: images, or one; those of one input size run as one batch. A tensor [batch, 3, height, width] is a
                batch of model inputs, normalised as the model expects, on any device.
            methods: names, or (name, options) pairs; by default gae with targets, prompts, reference images or a
                function of answers, and rollout without.
            targets: one target for all; a list of targets that each class-specific method explains in turn, where
                "top5" stands for five; or an array with the class index of each image.
            names: what to call each image; by default its path, or "image 1" and so on.
            readout: weights of the tokens that maps start at, [tokens], or of the patches, [rows, cols], for all
                images; by default those that each output is computed from.
            originals: the image of each tensor, which was placed on it as by this explainer: maps lie on these then.
            options: options for every method that has them.

        Returns:
            Image by image, method by method, and for class-specific methods target by target.

        Raises:
            VitflowError: an image cannot be read, or an option is wrong; nothing is returned then.
        """
        sources = several(images)
        if originals is not None:
            if len(originals) != len(sources):
                raise OptionError(f"Expected one original for each of {len(sources)} tensors, got {len(originals)}.")
            named = [name_of(image, n) for n, image in enumerate(originals, start=1)] if names is None else names
            sources = [self.placed(*each) for each in zip(sources, named, originals, strict=True)]
        chosen = choose_methods(methods, options, asks=self.asks(targets))
        if readout is not None and not any(starts_at_readout(one) for one in chosen):
            listed = ", ".join(one.name for one in chosen)
            raise OptionError(f"readout= applies to methods that start at tokens, such as rollout; got {listed}.")
        if contrasts := contrasts_among(targets):
            check_class_specific(chosen)
            if not contrasts[0].against_rest:
                sides = [side for one in contrasts for side in one.sides]
                maps = self._explain_sources(sources, chosen, sides, names, self.outputs, readout)
                pairs = zip(maps[::2], maps[1::2], strict=True)
                return [contrasted(first, second, self.outputs.activation) for first, second in pairs]
            return self._explain_sources(
                sources, chosen, [one.target for one in contrasts], names, self._apart, readout
            )
        outputs = self._apart if self.outputs.apart else self.outputs
        return self._explain_sources(sources, chosen, targets, names, outputs, readout)

    def _explain_sources(
        self,
        sources: Sequence[ImageInput],
        chosen: Chosen,
        targets: Any,
        names: Sequence[str] | None,
        outputs: Outputs,
        readout: Tensor | NDArray[Any] | None,
    ) -> list[Saliency]:
        """Explain several images with maps of these answers."""
        per_image: Any = targets if is_per_image(targets) else sources
        if len(per_image) != len(sources):
            raise OptionError(f"Expected one class index for each of {len(sources)} images, got {len(per_image)}.")
        names = [name_of(image, number) for number, image in enumerate(sources, start=1)] if names is None else names
        if len(names) != len(sources):
            raise OptionError(f"Expected one name for each of {len(sources)} images, got {len(names)}.")
        images = [self.placed(image, name) for image, name in zip(sources, names, strict=True)]
        explain = partial(self._explain_read, outputs=outputs, readout=readout)
        found = explain(images, chosen, targets)
        if any(one.options.get("shifts") for one in chosen):
            found = [
                explain_shifted(explain, chosen, image, maps, self.spec)
                for image, maps in zip(images, found, strict=True)
            ]
        return [saliency for maps in found for saliency in maps]

    def _explain_read(
        self, images: Sequence[PlacedImage], chosen: Chosen, targets: Any, outputs: Outputs, readout: Any
    ) -> list[list[Saliency]]:
        """Explain images that were read, those of one input size as one batch: [images][methods and targets]."""
        results: list[list[Saliency]] = [[] for _ in images]
        groups: dict[tuple[int, int], list[int]] = {}
        for index, image in enumerate(images):
            groups.setdefault(image.placement.input_size, []).append(index)
        for members in groups.values():
            wanted = targets[members] if is_per_image(targets) else targets
            maps_by_image = self._run([images[i] for i in members], chosen, wanted, outputs, readout)
            for index, found in zip(members, maps_by_image, strict=True):
                results[index] = found
        return results

    def refusals(self, methods: Sequence[MethodChoice], image: ImageSource | None = None) -> dict[str, str]:
        """Which of these methods do not apply to this model, and why: tried one by one on an image, or a grey one."""
        found = {}
        for one in choose_methods(methods, {}):
            if one.method.needs == {"predict"}:
                continue  # it only runs the model, which every model allows
            try:
                self.explain_batch([self.grey() if image is None else image], methods=[one])
            except (UnsupportedModelError, OptionError) as error:
                found[one.name] = str(error)
        return found

    def _run(
        self, images: Sequence[PlacedImage], chosen: Chosen, targets: Any, outputs: Outputs, readout: Any
    ) -> list[list[Saliency]]:
        """Explain images of one input size: [images][methods and targets]."""
        gradients = needs_gradients(chosen)
        if gradients:
            refuse_inference_tensors(self.model)
        # Leaving inference mode lets a caller's torch.inference_mode() stand around this.
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), evaluating(self.model):
            started = time.perf_counter()
            trace, chosen = self._record(pixels := self._tensor(images), chosen, outputs, readout)
            if trace.logits is None:
                self.logits(pixels)  # raises an error that describes the output
            own = trace.logits if outputs is self.outputs else self.outputs.numbers(trace.output)
            probabilities = probabilities_of(own, self.facts)
            seconds = time.perf_counter() - started
            wanted = resolve_targets(targets, probabilities, self.facts.outputs.names)
            numbers = None if own is None else own.detach()
            asked = TargetedTrace.of(
                trace,
                None,
                run=partial(self.logits, outputs=outputs),
                outputs=outputs,
                facts=self.facts,
                images=images,
                numbers=numbers,
                probabilities=probabilities,
                seconds=seconds,
            )
            return apply_methods(asked, chosen, wanted)

    def _record(self, pixels: Tensor, chosen: Chosen, outputs: Outputs, readout: Any) -> tuple[Trace, Chosen]:
        """One forward pass that keeps no more than the methods need; and these without what does not apply.

        That is value weighting, or the refining of maps of no attention where there is none: what was asked for is
        refused, and what is only a default left out.
        """
        weighting_requested = any("value_weighted" in one.given for one in chosen)
        if not self._weighable and not weighting_requested:
            chosen = [one.but(value_weighted=False) for one in chosen]
        while True:
            kept = recorded_for(chosen, self.model)
            try:
                reads = any(starts_at_readout(one) for one in chosen)
                return self._recorded(pixels, outputs, reads=reads, readout=readout, **kept), chosen
            except NoAttentionError:
                plain = [
                    one.but(refine=0) if one.method.needs == {"predict"} and "refine" not in one.given else one
                    for one in chosen
                ]
                if plain == chosen:
                    raise
            except ValueNormsError as error:
                plain = [one.but(value_weighted=False) for one in chosen]
                if weighting_requested or plain == chosen:
                    raise
                self._weighable = False
                warnings.warn(f"{error.args[0]} Maps are made without value weighting.", VitflowWarning, stacklevel=2)
            chosen = plain
