"""Explain images with a model: the function `explain` and the reusable `Explainer`."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitflow.errors import (
    NoGradientError,
    OptionError,
    UnsupportedModelError,
    VitflowError,
    VitflowWarning,
    printable,
)
from vitflow.explaining.applying import starts_at_readout
from vitflow.explaining.inputs import ImageInput, PlacedImage, name_of, several
from vitflow.explaining.recorded_model import RecordedModel
from vitflow.explaining.regions import Regions
from vitflow.explaining.saliency import Saliency, contrasted
from vitflow.explaining.targets import (
    Contrast,
    ImageTargets,
    Score,
    Target,
    Targets,
    check_class_specific,
    contrasts_among,
    is_per_image,
    requested_targets,
)
from vitflow.files import READ_SUFFIXES
from vitflow.images.reading import ImageSource
from vitflow.methods.cells import mean_colour
from vitflow.models.outputs import Outputs
from vitflow.models.parts import refuse_deformable
from vitflow.recording.isolation import evaluating
from vitflow.registry.choices import Chosen, MethodChoice, choose_methods, has_targets, left_out
from vitflow.registry.option_types import MethodOptions

_USE_BATCH = "use Explainer(model).explain_batch"
_FEW_MASKS = 8  # of a method that is only tried
_LISTED = 5  # names of images in an error
_OTHERS = "The other images can be explained without these; folder runs do so."
_NOT_BLANK = "blank=True requires a score of a class, prompt or function. Omit blank."


def explain(
    image: ImageSource | Tensor,
    model: "str | Path | nn.Module | Explainer",
    *,
    method: MethodChoice | None = None,
    target: Target | Contrast = None,
    fit: str = "crop",
    device: str | torch.device | None = None,
    data_config: Any = None,
    readout: Tensor | NDArray[Any] | None = None,
    **options: Unpack[MethodOptions],
) -> Saliency:
    """Explain one image with one method. Use an `Explainer` for several images.

    Args:
        image: a path, bytes, an open file, a PIL image, an RGB array, or the model's input: a normalised float tensor
            [3, height, width] or [1, 3, height, width], on which the map is drawn.
        model: a model id (see `load_model`), a module, or an `Explainer`.
        method: a name from `list_methods()`, a registered `Method`, or a (name, options) pair; by default gae with a
            target, and rollout without one.
        target: class index or name, or `Contrast(one, against=another)`; by default the predicted class.
        fit, device, data_config: as for `Explainer`.
        readout: weights of the tokens at which the map starts, [tokens], or of the patches, [rows, cols]; by default
            the tokens from which the output is computed.
        options: options of the method, such as head_fusion="max"; `vitflow methods NAME` and `list_methods()` have
            those of each method.

    Raises:
        VitflowError: the image, the model or an option is invalid.

    >>> from vitflow.demo import sample_images
    >>> explain(sample_images()[0], model="demo", method="rollout", head_fusion="max").grid.shape
    (12, 12)
    """
    explainer = Explainer.of(model, device=device, fit=fit, data_config=data_config)
    return explainer.explain(image, method=method, target=target, readout=readout, **options)


class Explainer(RecordedModel):
    """A model that explains single images or batches.

    Several threads may share it; explanations of one model run one after the other. A model in training mode is
    switched to eval mode during each explanation.

    Args:
        model: a model id (see `load_model`), or a module, which is only moved to `device` and `dtype`.
        checkpoint, num_classes: weights and number of classes of a model id, as for `load_model`.
        device: device to run on; by default the module's device, or a GPU for a model id if available.
        dtype: precision of the model: "float32", "bfloat16" or "float16"; by default unchanged. Maps and probabilities
            are computed in at least float32.
        fit: "crop" (the model's preprocessing), "squash", "pad" or "native" (whole image, aspect ratio kept,
            through timm's dynamic image size).
        class_names: class names, if the model has none: a file (one per line, or JSON), a list, {index: name} or
            {name: index}.
        data_config: input_size, mean, std, crop_pct, interpolation, for a model without `pretrained_cfg`; or its image
            processor of transformers, or `weights.transforms()` or a Compose of torchvision.
        layout: prefix tokens and patch grid, for a model whose layout is unknown.
        activation: activation of the outputs: "softmax" or "sigmoid" (multi-label), by default that of the model's
            configuration, else softmax; "cosine", or "value" for none. A single logit gets a sigmoid instead of a
            softmax.
        name: name of the model in figures and rows; by default the id passed to `load_model`, or the architecture.
        outputs: what to explain instead of the model's classes: `prompts([...])` for an image–text model,
            `similarity_to([...])` for reference images, `boxes(...)` for a detection, `masks(...)` for a class
            inside a region, or a differentiable function of the model's output that returns scores [images, k],
            each row from its own image, named by `class_names`; or `Outputs`, which also has a unit.

    Attributes:
        model, device: the module and its device.
        model_info: properties of the model.
        preprocessing: preprocessing from images to model inputs.

    Raises:
        VitflowError: the model cannot be loaded, or an option is invalid.

    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo")
    >>> saliency = explainer.explain(sample_images()[0], target="orange disc")
    >>> saliency.method, saliency.grid.shape, len(explainer.explain_batch(sample_images()[:2], method="rollout"))
    ('gae', (12, 12), 2)
    """

    @classmethod
    def of(cls, model: "str | Path | nn.Module | Explainer", **settings: Any) -> "Explainer":
        """Return an explainer unchanged, or create it with settings; OptionError for settings that it does not have."""
        image = Path(model).suffix.lower() in READ_SUFFIXES if isinstance(model, str | Path) else False
        if image or isinstance(model, Tensor | np.ndarray | Image.Image | bytes | list | tuple):
            given = repr(str(model)) if image else f"{type(model).__name__} as the model"
            raise OptionError(f"Expected an image first, then the model: explain(image, model); got {given} second.")
        if not isinstance(model, Explainer):
            return cls(model, **settings)
        device = settings.get("device")
        differs = {
            "fit": settings.get("fit", "crop") not in ("crop", model.fit),
            "device": device is not None and torch.device(device).type != model.device.type,
            "data_config": settings.get("data_config") is not None,
        }
        for name in filter(differs.get, differs):
            raise OptionError(f"{name}= differs from the given Explainer's: create it with Explainer(…, {name}=…).")
        return model

    def has_target(self, targets: Any) -> bool:
        """Return True if there are targets, or outputs other than the model's classes."""
        return has_targets(targets) or self.outputs.function is not None

    def explain(
        self,
        image: ImageSource | Tensor,
        *,
        method: MethodChoice | None = None,
        target: Target | Contrast = None,
        readout: Tensor | NDArray[Any] | None = None,
        original: ImageSource | None = None,
        blank: bool = False,
        **options: Unpack[MethodOptions],
    ) -> Saliency:
        """Explain one image with one method; arguments as for `vitflow.explain`.

        `original` is the image of a tensor that was preprocessed as by this explainer: the map is drawn on it. With
        `blank`, facts["blank"] has the score of the image replaced by its mean colour: if it is as high, the score
        does not depend on the image, whatever the map shows.
        """
        if len(images := several(image)) != 1:
            raise OptionError(f"explain takes one image, got {len(images)}: {_USE_BATCH}(images).")
        # Arguments of explain_batch are no options.
        choose_methods(None if method is None else [method], options, has_target=self.has_target(target))
        originals = None if original is None else [original]
        given: dict[str, Any] = {"readout": readout, "originals": originals, "blank": blank, **options}
        maps = self.explain_batch(images, method=method, target=target, **given)
        if len(maps) != 1:
            call = f"{_USE_BATCH}(image, target={target!r})"
            raise OptionError(f"explain takes one target, but {target!r} gives {len(maps)} maps: {call}.")
        return maps[0]

    def explain_batch(
        self,
        images: ImageInput | Sequence[ImageInput],
        *,
        methods: Sequence[MethodChoice] | None = None,
        method: MethodChoice | None = None,
        targets: Targets | Contrast | Sequence[Contrast] = None,
        target: ImageTargets | Contrast = None,
        names: Sequence[str] | None = None,
        readout: Tensor | NDArray[Any] | None = None,
        originals: Sequence[ImageSource] | None = None,
        blank: bool = False,
        **options: Unpack[MethodOptions],
    ) -> list[Saliency]:
        """Explain several images with several methods: one forward pass, at most one backward pass per target.

        Args:
            images: one image or several; images of the same input size form a batch. A tensor [batch, 3, height,
                width] is a batch of model inputs, normalised as the model expects, on any device.
            methods, method: names, or (name, options) pairs; by default gae with targets, prompts, reference images
                or a function as outputs, else rollout.
            target: one target for all images ("top5" gives five maps), or a list or array with one class for each
                image, by index or name, or None.
            targets: a list of targets, each explained in every image by the class-specific methods; or an array with
                the class index of each image.
            names: names of the images; by default the path, or "image 1" and so on.
            readout: weights of the tokens at which maps start, [tokens], or of the patches, [rows, cols], for all
                images; by default the tokens from which each output is computed.
            originals: the image of each tensor, preprocessed as by this explainer: maps are drawn on these.
            blank: also report the score of each image replaced by its mean colour.
            options: options for every method that accepts them.

        Returns:
            Maps in the order of images, methods and, for class-specific methods, targets.

        Raises:
            NoGradientError: the output of some images has no gradient, as behind an inactive ReLU; the message names
                them, and `images` has their indices, without which the others can be explained.
            VitflowError: an image cannot be read, or an option is invalid.
        """
        if method is not None and methods is not None:
            raise OptionError("Expected method= or methods=, got both: use methods=[…].")
        methods, given = methods if method is None else [method], requested_targets(target, targets)
        placed = self._read(several(images), names, originals)
        chosen = choose_methods(methods, options, has_target=self.has_target(targets if target is None else target))
        if readout is not None and not any(map(starts_at_readout, chosen)):
            listed = ", ".join(each.name for each in chosen)
            raise OptionError(
                f"readout= requires a method that starts at tokens, such as rollout, without patch=; got {listed}."
            )
        if is_per_image(given) and len(given) != len(placed):
            raise OptionError(
                f"Expected one class for each of {len(placed)} images, got {len(given)}: targets=[…] explains each "
                "of them in every image."
            )
        outputs = self._minus_rest if self.outputs.minus_rest_by_default else self.outputs
        contrasts = contrasts_among(given)
        pairs = bool(contrasts) and not contrasts[0].against_rest
        if blank and (contrasts or self.regions is not None):
            raise OptionError(_NOT_BLANK)
        if contrasts:
            check_class_specific(chosen)
            given = [side for contrast in contrasts for side in contrast.sides]
            outputs = self.outputs if pairs else self._minus_rest
        if pairs and self.regions is not None:
            raise OptionError("Boxes and masks can be contrasted with against='rest' only.")
        by_image = self._explain_targets(placed, chosen, given, outputs, readout)
        if blank:
            by_image = [self._with_blank(image, maps) for image, maps in zip(placed, by_image, strict=True)]
        maps = [saliency for maps in by_image for saliency in maps]
        if pairs:
            return [contrasted(*sides, self.outputs.activation) for sides in zip(maps[::2], maps[1::2], strict=True)]
        return maps

    def _read(
        self, sources: Sequence[ImageInput], names: Sequence[str] | None, originals: Sequence[ImageSource] | None
    ) -> list[PlacedImage]:
        """Read and place images, with a name and the original of a tensor for each."""
        for kind, given in (("name", names), ("original", originals)):
            if given is not None and len(given) != len(sources):
                raise OptionError(f"Expected one {kind} for each of {len(sources)} images, got {len(given)}.")
        named = sources if originals is None else originals
        names = names or [name_of(image, number) for number, image in enumerate(named, start=1)]
        behind: Sequence[ImageSource | None] = originals or [None] * len(sources)
        return [self.placed(*each) for each in zip(sources, names, behind, strict=True)]

    def _with_blank(self, image: PlacedImage, maps: Sequence[Saliency]) -> list[Saliency]:
        """Add the score of the image replaced by its mean colour to the facts of its maps."""
        with torch.inference_mode(False), torch.no_grad():
            logits = self.logits(mean_colour(self._tensor([image])))
        scores, compared = self.outputs.scores(logits)[0], []
        for saliency in maps:
            if saliency.target is None:
                raise OptionError(_NOT_BLANK)
            score = Score.of(scores, saliency.target, self.outputs)
            facts: dict[str, Any] = {"value": round(score.value or 0.0, 6), "display": score.display}
            if "cosine" in saliency.facts:
                facts["cosine"] = round(float(logits[0, saliency.target]) / self.outputs.scale, 4)
            compared.append(replace(saliency, facts={**saliency.facts, "blank": facts}))
        return compared

    def _explain_targets(
        self, images: Sequence[PlacedImage], chosen: Chosen, targets: Any, outputs: Outputs, readout: Any
    ) -> list[list[Saliency]]:
        """Explain images in batches of the same input size: [images][methods and targets]."""
        if self.regions is not None:
            by_image = [[target] for target in targets] if is_per_image(targets) else [targets] * len(images)
            return [
                self._explain_regions(self.regions, image, each, chosen, outputs, readout)
                for image, each in zip(images, by_image, strict=True)
            ]
        results: list[list[Saliency]] = [[] for _ in images]
        groups: dict[tuple[int, int], list[int]] = {}
        for index, image in enumerate(images):
            groups.setdefault(image.placement.input_size, []).append(index)
        for members in groups.values():
            group_targets = targets[members] if is_per_image(targets) else targets
            try:
                by_image = self.explain_pass([images[i] for i in members], chosen, group_targets, outputs, readout)
            except NoGradientError as error:
                if len(images) == 1:
                    raise
                failed = [members[index] for index in error.images]
                named = [printable(images[index].name) or f"image {index + 1}" for index in failed]
                listed = f"{', '.join(named[:_LISTED])}{', …' if len(named) > _LISTED else ''}"
                counted = f"{len(failed)} of {len(images)} images ({listed}): {error} {_OTHERS}"
                raise NoGradientError(counted, failed) from error
            for index, maps in zip(members, by_image, strict=True):
                results[index] = maps
        return results

    def _explain_regions(
        self, regions: Regions, image: PlacedImage, targets: Any, chosen: Chosen, outputs: Outputs, readout: Any
    ) -> list[Saliency]:
        """Explain the detections or regions of one image, which a plain forward pass selects."""
        if any(map(starts_at_readout, chosen)):
            refuse_deformable(self.model)
        with torch.inference_mode(False), evaluating(self.model):
            with torch.no_grad():
                output = self.forward(self._tensor([image]))
            runs = []
            for selected in regions.select(output, image.placement, targets, self.outputs):
                with regions.binding(selected):
                    [maps] = self.explain_pass([image], chosen, [selected.index], outputs, readout)
                runs.append(
                    [replace(each, facts={**each.facts, **selected.facts}, region=selected.outline) for each in maps]
                )
        by_method = zip(*runs, strict=True)
        return [each for maps in by_method for i, each in enumerate(maps) if i == 0 or each.class_specific]

    def refusals(self, methods: Sequence[MethodChoice], image: ImageInput) -> dict[str, VitflowError]:
        """Try each method on an image; return the errors of those that do not apply."""
        refusals: dict[str, VitflowError] = {}
        for chosen in choose_methods(methods, {}):
            if chosen.method.needs == {"predict"}:
                continue  # forward passes work for every model
            try:
                self.explain_batch([image], methods=[chosen.with_options(masks=_FEW_MASKS)])
            except (UnsupportedModelError, OptionError) as error:
                refusals[chosen.name] = error
        return refusals

    def explain_supported(
        self, image: ImageInput, methods: Sequence[MethodChoice], **arguments: Any
    ) -> tuple[list[Saliency], list[MethodChoice]]:
        """Explain one image with the methods that the model supports, which are returned too; warn about the others."""
        try:
            return self.explain_batch([image], methods=methods, **arguments), list(methods)
        except UnsupportedModelError:
            refused = self.refusals(methods, image)
        for note in left_out(refused):
            warnings.warn(note, VitflowWarning, stacklevel=3)
        chosen = zip(methods, choose_methods(methods, {}), strict=True)
        left = [choice for choice, method in chosen if method.name not in refused]
        return (self.explain_batch([image], methods=left, **arguments) if left else []), left
