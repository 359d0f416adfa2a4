"""Image models: preprocessing, forward passes, recording and outputs."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from vitflow.errors import OptionError, VitflowError, check_known, printable, unknown_name
from vitflow.explaining.inputs import ImageInput, ModelInputs, PlacedImage, at_least_one, name_of
from vitflow.explaining.maps import TargetedTrace
from vitflow.explaining.regions import Boxes, Masks, boxes
from vitflow.images import FITS
from vitflow.images.preprocessing import InputSpec, Preprocessing
from vitflow.images.reading import ImageSource, image_name
from vitflow.methods.tokens import TokenLayout
from vitflow.models import DTYPES
from vitflow.models.anatomy import forward_options
from vitflow.models.blocks import headless
from vitflow.models.calls import refused_input
from vitflow.models.identity import library_versions, state_sha256, weights_sha256
from vitflow.models.info import library_data_config, read_model_info
from vitflow.models.loading import load_model
from vitflow.models.names import ClassNames, check_name_count, model_id
from vitflow.models.outputs import Binding, Outputs, features_of, similarity_outputs
from vitflow.models.pairs import (
    Prompts,
    bind_tower,
    is_pair,
    is_prompted_detector,
    pair_of,
    refuse_without_prompts,
)
from vitflow.models.parts import refuse_joint_text, refuse_scripted, unwrap
from vitflow.models.videos import StackedFrames, is_video_model
from vitflow.recording.block_watch import guessed_blocks
from vitflow.recording.isolation import default_device, evaluating, move_to
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace

# Number of class names shown in a notebook.
_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True, eq=False)
class SimilarityTo:
    """Similarity to reference images as the outputs of a model; see `similarity_to`."""

    images: tuple[ImageSource, ...]

    def bind(self, binding: Binding) -> Binding:
        """Bind the encoder of a model, without its classifier."""
        binding.refuse_class_names()
        if is_pair(binding.model):
            binding = bind_tower(binding, pair_of(binding.model))
        config = binding.data_config or library_data_config(binding.model)
        return replace(binding, model=headless(binding.model), outputs=Outputs(count=0), data_config=config)


def similarity_to(images: ImageSource | Sequence[ImageSource]) -> SimilarityTo:
    """Explain the similarity to reference images: `Explainer(model, outputs=similarity_to([...]))`.

    Each reference is one output: the cosine of the pooled features of the two images. The head of a classifier is
    skipped.

    Args:
        images: one or several reference images: paths, bytes, PIL images or RGB arrays.

    Raises:
        OptionError: no image.

    >>> from vitflow import Explainer, similarity_to
    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo", outputs=similarity_to(sample_images()[:1]))
    >>> explainer.explain(sample_images()[0]).score.display
    'cosine 1.000'
    """
    return SimilarityTo(tuple(at_least_one(images)))


class ImageModel:
    """A model with its preprocessing and outputs. Base class of `Explainer`, which documents the arguments."""

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        checkpoint: str | Path | None = None,
        num_classes: int | None = None,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        fit: str = "crop",
        class_names: ClassNames | None = None,
        data_config: Any = None,
        layout: TokenLayout | None = None,
        activation: str | None = None,
        name: str | None = None,
        outputs: Outputs | Callable[[Any], Tensor] | Prompts | SimilarityTo | Boxes | Masks | None = None,
    ) -> None:
        if fit not in FITS:  # before a model is loaded
            raise OptionError(unknown_name("fit", fit, FITS))
        if dtype is not None:
            check_known("dtype", dtype, DTYPES)
        if isinstance(model, str | Path):
            native = fit == "native"
            model = load_model(model, checkpoint=checkpoint, num_classes=num_classes, dynamic_img_size=native)
            device = default_device() if device is None else device
        elif checkpoint is not None or num_classes is not None:
            raise OptionError(f"checkpoint= and num_classes= require a model id, got a {type(model).__name__}.")
        binding = Binding(unwrap(model), outputs, data_config, class_names, activation, layout, name)
        binding = _bound(binding, outputs)
        self.model, self.regions = binding.model, binding.selects
        self._blocks: list[str] | None = None  # of the latest recorded pass
        self.device = move_to(self.model, device, None if dtype is None else getattr(torch, dtype))
        names = ("data_config", "class_names", "activation", "layout", "name", "outputs")
        self.model_info = read_model_info(self.model, **{name: getattr(binding, name) for name in names})
        self.inputs = ModelInputs(self.model_info.preprocessing(fit), self.model_id)
        if isinstance(outputs, SimilarityTo):
            self.model_info = replace(self.model_info, outputs=self._similarities(outputs.images))
        elif outputs is not None:  # errors come before the first image
            self.model_info = replace(self.model_info, outputs=self._tried(binding))
        if binding.class_names is not None and self.model_info.outputs.count is None:
            check_name_count(self.model_info.outputs.names or (), self.num_classes)

    def _similarities(self, references: Sequence[ImageSource]) -> Outputs:
        """Compute the outputs of `similarity_to`."""
        names = [str(image_name(name_of(image, index))) for index, image in enumerate(references, start=1)]
        placed = [self.placed(image, name) for image, name in zip(references, names, strict=True)]
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.model):
            vectors = [features_of(self.forward(self._tensor([image]))) for image in placed]
        return similarity_outputs(torch.cat(vectors), names, [image.image for image in placed])

    def _tried(self, binding: Binding) -> Outputs:
        """Return the outputs after a trial run on noise."""
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.model):
            noise = torch.cat([self.pixels(image) for image in self.inputs.two_images()])
            tried = self.outputs.validated(
                lambda images: self.forward(images.clone()), noise, check_batch=binding.check_batch
            )
            return tried if binding.complete is None else binding.complete(tried.count or 0, self.model)

    def __repr__(self) -> str:
        count = "" if self.model_info.outputs.count is None else f", {self.model_info.outputs.count} classes"
        height, width = self.spec.size
        return f"Explainer({printable(self.model_id)}{count}, input {width} × {height}, fit={self.fit}, {self.device})"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return a table of the model's properties for notebooks."""
        from vitflow.images.figures import bundle, html_table  # loads matplotlib

        names, spec = self.class_names or [], self.spec
        more = f", … ({len(names)})" if len(names) > _NAMES_SHOWN else ""
        rows = [
            ("model", f"{self.model_id} ({type(self.model).__name__}, {self.device})"),
            ("input", f"{spec.size[1]} × {spec.size[0]} pixels, fit={self.fit}"),
            ("classes", ", ".join(names[:_NAMES_SHOWN]) + more if names else self.outputs.count),
            ("activation", self.outputs.activation),
        ]
        return bundle(repr(self), tables=[html_table(rows)])

    @property
    def model_id(self) -> str:
        """Name of the model in results."""
        return self.model_info.id

    @property
    def outputs(self) -> Outputs:
        """Outputs that can be explained."""
        return self.model_info.outputs

    @cached_property
    def _minus_rest(self) -> Outputs:
        """Each output minus the mean of the others."""
        return self.outputs.against_rest()

    @property
    def class_names(self) -> list[str] | None:
        """Class names by index, or None."""
        names = self.model_info.outputs.names
        return None if names is None else list(names)

    @property
    def layout(self) -> TokenLayout | None:
        """Prefix tokens and patch grid, if given."""
        return self.model_info.layout

    @property
    def preprocessing(self) -> Preprocessing:
        """Preprocessing from images to model inputs."""
        return self.inputs.preprocessing

    @property
    def spec(self) -> InputSpec:
        """Input size and normalisation."""
        return self.preprocessing.spec

    @property
    def fit(self) -> str:
        """Mode of fitting images to the input: "crop", "squash", "pad" or "native"."""
        return self.preprocessing.fit

    def fingerprint(self) -> dict[str, Any]:
        """Return everything that the maps of this explainer depend on, for JSON.

        Weights, code and class names are hashes (see `vitflow.models.identity`), and the device is its type.
        """
        return {
            **self.model_info.fingerprint(),
            "weights_sha256": weights_sha256(self.model),
            "state_sha256": state_sha256(self.model),
            "libraries": library_versions(self.model),
            "device": self.device.type,
            "fit": self.fit,
        }

    @property
    def num_classes(self) -> int:
        """Number of classes, 0 for a model of features; determined by a forward pass if necessary."""
        if self.model_info.outputs.count is not None:
            return self.model_info.outputs.count
        with torch.no_grad(), evaluating(self.model):
            logits = self.outputs.raw_scores(self.forward(self.pixels(self.inputs.grey())))
        return 0 if logits is None or logits.ndim != 2 else logits.shape[1]

    def with_model(self, model: nn.Module) -> Self:
        """Return this explainer with another module of the same architecture, such as a copy with random weights."""
        result = copy.copy(self)
        result.model, result._blocks = model, None
        return result

    def with_input_size(self, size: tuple[int, int]) -> Self:
        """Return this explainer for images that are resized to this (height, width), whatever their aspect."""
        result = copy.copy(self)
        result.inputs = copy.copy(self.inputs)
        result.inputs.preprocessing = Preprocessing(replace(self.spec, size=size), "squash")
        return result

    def pixels(self, image: ImageInput) -> Tensor:
        """Return the model input of an image, [1, channels, height, width], on the explainer's device."""
        return self._tensor([self.placed(image, "")])

    def placed(self, source: ImageInput, name: str, original: ImageSource | None = None) -> PlacedImage:
        """Read an image and compute its placement; `original` is the image of a model input."""
        if isinstance(self.model, StackedFrames) and not isinstance(source, PlacedImage):
            frames = self.model.shape.frames
            raise OptionError(
                f"{self.model_id} reads clips of {frames} frames, got an image: use vitflow.explain_clip."
            )
        return self.inputs.placed(source, name, original)

    def _tensor(self, images: Sequence[PlacedImage]) -> Tensor:
        parameter = next(self.model.parameters(), None)
        return self.inputs.tensor(images, self.device, None if parameter is None else parameter.dtype)

    def forward(self, pixels: Tensor) -> Any:
        """Run the model on inputs [batch, channels, height, width] and return its output unchanged.

        Raises:
            ModelError: the model takes other inputs than one tensor.
        """
        try:
            return self.model(pixels, **forward_options(self.model, (pixels.shape[-2], pixels.shape[-1])))
        except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            if (refused := refused_input(type(self.model).__name__, error, pixels.shape)) is None:
                raise
            raise refused from error

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

    def _run_recorded(self, pixels: Tensor, outputs: Outputs, *, reads: bool, **options: Any) -> Trace:
        """Record one forward pass, with its readout if `reads`; a second one if the first has not recorded enough."""
        if not reads or options.get("readout") is not None:
            return self._recorded_pass(pixels, outputs, **options)
        if self._blocks is None:
            self._blocks = guessed_blocks(self.model)
        try:
            trace = self._recorded_pass(pixels, outputs, cut=self._blocks, **options)
        except (VitflowError, torch.OutOfMemoryError):
            raise
        except Exception:  # a model may refuse gradients of its head in any way; then the readout is found separately
            self._blocks = []
            trace = self._recorded_pass(pixels, outputs, **options)
        if trace.refusal is not None:
            return trace
        if self._blocks:
            self._blocks = list(dict.fromkeys(trace.blocks))
        multiplied = any(layer.multiplied for layer in trace.layers)
        if trace.discards_other_values() or (multiplied and trace.reads_several_blocks()):
            again = {"residual": 0.0, "discard_ratio": 0.0}
            return self._recorded_pass(pixels, outputs, cut=self._blocks, **options | again)
        return trace

    def _recorded_pass(self, pixels: Tensor, outputs: Outputs, **options: Any) -> Trace:
        with torch.set_grad_enabled(torch.is_grad_enabled() or bool(options.get("cut"))):
            with record_attention(self.model, layout=self.layout, outputs=self.outputs.read, **options) as trace:
                self.forward(pixels)
            if outputs is not self.outputs:  # maps explain other values than the reported ones
                trace.logits, trace.read = outputs.raw_scores(trace.output), outputs.read
        return trace

    def targeted(
        self, trace: Trace, targets: Tensor | None, outputs: Outputs | None = None, **further: Any
    ) -> TargetedTrace:
        """Add to a recorded pass its targets, by default of the explainer's outputs, and the means to run it again."""
        outputs = outputs or self.outputs
        run = partial(self.logits, outputs=outputs.perturbed_outputs or outputs)
        return TargetedTrace.of(trace, targets, run=run, outputs=outputs, model_info=self.model_info, **further)

    def logits(self, pixels: Tensor, outputs: Outputs | None = None) -> Tensor:
        """Run the model in eval mode and return its logits, [batch, classes].

        Args:
            pixels: model inputs, [batch, channels, height, width].
            outputs: by default the outputs of the explainer.

        Raises:
            ModelError: the model's output contains no logits.
        """
        with evaluating(self.model):
            output = self.forward(pixels.clone())  # the model may change it in place
            return (outputs or self.outputs).required_scores(output, self.model_id)


def _bound(binding: Binding, outputs: Any) -> Binding:
    """Return the model and settings for what is explained; a video model reads its frames as one tall image."""
    refuse_scripted(binding.model)
    refuse_joint_text(binding.model)
    if isinstance(outputs, Prompts) and is_prompted_detector(binding.model):
        outputs = boxes(prompts=outputs)
    if isinstance(outputs, Prompts | SimilarityTo | Boxes | Masks):
        binding = outputs.bind(binding)
    refuse_without_prompts(binding.model)
    if is_video_model(binding.model):
        model, config, layout = _stacked(binding.model, binding.data_config)
        name = binding.name or model_id(binding.model)
        binding = replace(binding, model=model, data_config=config, layout=layout, name=name)
    return binding


def _stacked(model: nn.Module, data_config: Any) -> tuple[StackedFrames, dict[str, Any], TokenLayout]:
    """Return a video model that reads tall images, their data config, and the layout of its tubelets."""
    stacked = StackedFrames(model)
    config = stacked.data_config() | dict(data_config or {})
    channels, height, width = config["input_size"]
    if (height, width) != stacked.shape.size:
        expected, given = (3, *stacked.shape.size), tuple(config["input_size"])
        raise OptionError(f"Expected input_size={expected}, the size of a frame, got {given}.")
    config["input_size"] = (channels, stacked.shape.frames * height, width)
    return stacked, config, stacked.layout
