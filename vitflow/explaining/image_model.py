"""Image models: preprocessing, forward passes and outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import OptionError, VitflowError, check_known, printable, unknown_name
from vitflow.explaining.inputs import ImageInput, ModelInputs, PlacedImage, at_least_one, name_of
from vitflow.explaining.regions import Boxes, Masks, boxes
from vitflow.images import FITS
from vitflow.images.preprocessing import InputSpec, Preprocessing
from vitflow.images.reading import ImageSource, image_name
from vitflow.methods.tokens import TokenLayout
from vitflow.models import DTYPES
from vitflow.models.anatomy import forward_options
from vitflow.models.blocks import headless
from vitflow.models.calls import check_rows, refused_input
from vitflow.models.classes import ClassNames, check_name_count
from vitflow.models.data_configs import library_data_config
from vitflow.models.devices import default_device, move_to
from vitflow.models.identity import library_versions, state_sha256, weights_sha256
from vitflow.models.info import read_model_info
from vitflow.models.loading import load_model
from vitflow.models.names import model_id
from vitflow.models.outputs import Binding, Outputs, features_of, similarity_outputs
from vitflow.models.pairs import Prompts, bind_tower, is_pair, is_prompted_detector, pair_of, refuse_without_prompts
from vitflow.models.parts import modules_of, refuse_scripted, refuse_volumes, unwrap
from vitflow.models.videos import StackedFrames, is_video_model
from vitflow.recording.isolation import evaluating, model_lock


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
        with model_lock(self.model):
            self.device = move_to(self.model, device, None if dtype is None else getattr(torch, dtype))
        self.model_info = read_model_info(binding)
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
            tried = self.outputs.counted(self.forward(noise), len(noise))
            return tried if binding.complete is None else binding.complete(tried.count or 0, self.model)

    def __repr__(self) -> str:
        count = "" if self.model_info.outputs.count is None else f", {self.model_info.outputs.count} classes"
        height, width = self.spec.size
        return f"Explainer({printable(self.model_id)}{count}, input {width} × {height}, fit={self.fit}, {self.device})"

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

        Weights and code are hashes (see `vitflow.models.identity`), and the device is its type.
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
            logits = self.outputs.raw_scores(self.forward(self.pixels(self.inputs.two_images()[0])))
        return 0 if logits is None or logits.ndim != 2 else logits.shape[1]

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
            ModelError: the model fails on the tensor, or does not return a row of logits per image.
        """
        try:
            output = self.model(pixels, **forward_options(self.model, (pixels.shape[-2], pixels.shape[-1])))
        except VitflowError:
            raise
        except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            raise refused_input(type(self.model).__name__, error, pixels.shape) from error
        if self.outputs.function is None:
            check_rows(output, len(pixels))
        return output

    def logits(self, pixels: Tensor, outputs: Outputs | None = None) -> Tensor:
        """Run the model in eval mode on inputs [batch, channels, height, width] and return logits [batch, classes].

        They are those of `outputs`, by default the explainer's; ModelError if the model's output contains none.
        """
        with evaluating(self.model):
            output = self.forward(pixels.clone())  # the model may change it in place
            return (outputs or self.outputs).required_scores(output, self.model_id)


def _bound(binding: Binding, outputs: Any) -> Binding:
    """Return the model and settings for what is explained; a video model reads its frames as one tall image."""
    refuse_scripted(binding.model, modules_of(binding.model))
    if isinstance(outputs, Prompts) and is_prompted_detector(binding.model):
        outputs = boxes(prompts=outputs)
    if isinstance(outputs, Prompts | SimilarityTo | Boxes | Masks):
        binding = outputs.bind(binding)
    refuse_without_prompts(binding.model)
    if is_video_model(binding.model):
        model, config, layout = _stacked(binding.model, binding.data_config)
        name = binding.name or model_id(binding.model)
        binding = replace(binding, model=model, data_config=config, layout=layout, name=name)
    else:
        refuse_volumes(binding.model)
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
