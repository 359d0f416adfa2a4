"""A model for images that is kept: what it says of itself, how images become its input, and what it answers."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import OptionError, ShapeError, VitflowWarning, printable, unknown_name
from vitflow.explaining.targeted_trace import PlacedImage
from vitflow.images import FITS
from vitflow.images.geometry import place
from vitflow.images.preprocessing import InputSpec
from vitflow.images.reading import ImageSource, image_name, read_image
from vitflow.methods.tokens import TokenLayout
from vitflow.models import DTYPES
from vitflow.models.anatomy import no_logits, unwrap
from vitflow.models.checkpoints import ClassNames, check_name_count, weights_sha256
from vitflow.models.facts import read_facts
from vitflow.models.libraries import forward_options, headless, library_data_config
from vitflow.models.loading import load_model
from vitflow.models.outputs import Outputs, features_of, similarity_outputs
from vitflow.models.pairs import Prompts, is_pair, pair_of, prompt_outputs, refuse_without_prompts
from vitflow.recording.isolation import default_device, evaluating, move_to, refuse_inference_tensors
from vitflow.recording.probing import probe
from vitflow.recording.readout import Head
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import Trace

# Names of classes that a notebook shows.
_NAMES_SHOWN = 12
# How far beyond 0 and 1 the values of an image may lie: resizing overshoots.
_BEYOND = 0.5

#: An image, or the model input [channels, height, width] that it became.
ImageInput = ImageSource | Tensor | PlacedImage


@dataclass(frozen=True, slots=True, eq=False)
class SimilarityTo:
    """Similarity to reference images as the outputs of a model; see `similarity_to`."""

    images: tuple[ImageSource, ...]


def similarity_to(images: ImageSource | Sequence[ImageSource]) -> SimilarityTo:
    """Explain the similarity to reference images: `Explainer(model, outputs=similarity_to([...]))`.

    Each reference is one output: the cosine of the pooled features of the two images. A classifier is run without its
    head.

    Args:
        images: one reference image, or several: paths, bytes, PIL images or RGB arrays.

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
        device: str | torch.device | None = None,
        dtype: str | None = None,
        fit: str = "crop",
        class_names: ClassNames | None = None,
        data_config: Any = None,
        layout: TokenLayout | None = None,
        activation: str | None = None,
        name: str | None = None,
        outputs: Outputs | Callable[[Any], Tensor] | Prompts | SimilarityTo | None = None,
    ) -> None:
        if fit not in FITS:  # before a model is loaded
            raise OptionError(unknown_name("fit", fit, FITS))
        if dtype is not None and dtype not in DTYPES:
            raise OptionError(unknown_name("dtype", dtype, DTYPES))
        if not isinstance(model, nn.Module):
            model = load_model(model, dynamic_img_size=fit == "native")
            device = device or default_device()
        self.model = unwrap(model)
        references = outputs.images if isinstance(outputs, SimilarityTo) else None
        named = isinstance(outputs, Prompts | SimilarityTo)
        if named and class_names is not None:
            raise OptionError("Prompts and reference images are the names of the outputs: leave out class_names.")
        if isinstance(outputs, Prompts) or (references is not None and is_pair(self.model)):
            pair = pair_of(self.model, getattr(outputs, "processor", None))
            self.model, data_config, name = pair.tower, data_config or pair.data_config, name or pair.name
            outputs = prompt_outputs(pair, outputs) if isinstance(outputs, Prompts) else outputs
        if references is not None:
            data_config = data_config or library_data_config(self.model)
            self.model, outputs = headless(self.model), Outputs(count=0)
        refuse_without_prompts(self.model)
        self._warned = False  # that a tensor does not look normalised
        self._heads: dict[bool, Head | None] = {}  # of the outputs, and of these minus what they are set against
        self.device = move_to(self.model, device, None if dtype is None else getattr(torch, dtype))
        self.facts = read_facts(
            self.model,
            data_config=data_config,
            class_names=class_names,
            activation=activation,
            layout=layout,
            name=name,
            outputs=outputs,
        )
        self.preprocessing = self.facts.preprocessing(fit)
        if references is not None:
            self.facts = replace(self.facts, outputs=self._similarities(references))
        elif outputs is not None:  # errors come before the first image
            with torch.inference_mode(False), torch.no_grad(), evaluating(self.model):
                tried = self.outputs.tried(self.forward, self._two_images(), alone=not named)
            self.facts = replace(self.facts, outputs=tried)
        if class_names is not None and self.facts.outputs.count is None:
            check_name_count(self.facts.outputs.names or (), self.num_classes)

    def _similarities(self, references: Sequence[ImageSource]) -> Outputs:
        """The outputs of `similarity_to`."""
        names = [str(image_name(name_of(one, number))) for number, one in enumerate(references, start=1)]
        placed = [self.placed(one, name) for one, name in zip(references, names, strict=True)]
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.model):
            vectors = [features_of(self.forward(self._tensor([one]))) for one in placed]
        return similarity_outputs(torch.cat(vectors), names, [one.image for one in placed])

    def __repr__(self) -> str:
        count = "" if self.facts.outputs.count is None else f", {self.facts.outputs.count} classes"
        height, width = self.spec.size
        return f"Explainer({printable(self.model_id)}{count}, input {width} × {height}, fit={self.fit}, {self.device})"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """What a notebook shows: what is known of the model."""
        from vitflow.images.figures import bundle, html_table  # loads matplotlib

        names, spec = self.class_names or [], self.spec
        more = f", … ({len(names)})" if len(names) > _NAMES_SHOWN else ""
        rows = [
            ("model", f"{self.model_id} ({type(self.model).__name__}, {self.device})"),
            ("input", f"{spec.size[1]} × {spec.size[0]} pixels, fit={self.fit}"),
            ("classes", ", ".join(names[:_NAMES_SHOWN]) + more if names else self.outputs.count),
            ("answers by", self.outputs.activation),
        ]
        return bundle(repr(self), tables=[html_table(rows)])

    @property
    def model_id(self) -> str:
        """The name that the model goes by."""
        return self.facts.id

    @property
    def outputs(self) -> Outputs:
        """What the model can be asked about."""
        return self.facts.outputs

    @cached_property
    def _apart(self) -> Outputs:
        """The answers, each less what stands against it."""
        return self.outputs.against_rest()

    @property
    def class_names(self) -> list[str] | None:
        """Names by class index, where known."""
        names = self.facts.outputs.names
        return None if names is None else list(names)

    @property
    def layout(self) -> TokenLayout | None:
        """Prefix tokens and patch grid, where they were told."""
        return self.facts.layout

    @property
    def spec(self) -> InputSpec:
        """What the model wants to see."""
        return self.preprocessing.spec

    @property
    def fit(self) -> str:
        """How images are fitted to that: "crop", "squash", "pad" or "native"."""
        return self.preprocessing.fit

    def fingerprint(self) -> dict[str, Any]:
        """All that the maps of this explainer depend on, ready for JSON: other maps come of another fingerprint.

        Weights and class names are in it as hashes, the device by its kind, and the rest as what the model and its
        outputs make of two fixed images (see `vitflow.recording.probing`).
        """
        return {
            **self.facts.fingerprint(),
            "weights_sha256": weights_sha256(self.model),
            "probe": probe(self.model, self._probed, self.input_shape),
            "device": self.device.type,
            "fit": self.fit,
        }

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """The shape of an image as the model takes it, (channels, height, width)."""
        return self.spec.channels, *self.spec.size

    @property
    def num_classes(self) -> int:
        """How many classes the model has, 0 where it ends in features; one that does not say is tried."""
        if self.facts.outputs.count is not None:
            return self.facts.outputs.count
        with torch.no_grad(), evaluating(self.model):
            answer = self.outputs.numbers(self.forward(self.pixels(self.grey())))
        return 0 if answer is None or answer.ndim != 2 else answer.shape[1]

    def grey(self) -> NDArray[np.uint8]:
        """A grey image of the model's own size, uint8 [height, width, 3], to try what does not depend on images."""
        return np.full((*self.spec.size, 3), 128, np.uint8)

    def _two_images(self) -> Tensor:
        """Model inputs of two images that any model tells apart: dark and bright noise."""
        noise = np.random.RandomState(0).randint(0, 96, (2, *self.spec.size, 3), dtype=np.uint8)
        return torch.cat([self.pixels(noise[0]), self.pixels(noise[1] + 160)])

    def pixels(self, image: ImageInput) -> Tensor:
        """The model input of an image, [1, channels, height, width], on the explainer's device."""
        return self._tensor([self.placed(image, "")])

    def placed(self, source: ImageInput, name: str, original: ImageSource | None = None) -> PlacedImage:
        """An image, read and placed as the model sees it; `original` is the image of a model input."""
        if isinstance(source, PlacedImage):
            return source
        if isinstance(source, Tensor):
            return self._placed_tensor(source, name, original)
        if original is not None:
            raise OptionError("original= is the image of a tensor, and was given with an image: leave it out.")
        image = read_image(source)
        return PlacedImage(name, image, self.preprocessing.place((image.shape[0], image.shape[1])))

    def _placed_tensor(self, pixels: Tensor, name: str, original: ImageSource | None) -> PlacedImage:
        """A model input, and the image that it shows: the original, or the input without its normalisation."""
        pixels = pixels[0] if pixels.ndim == 4 and len(pixels) == 1 else pixels
        channels, height, width = self.input_shape
        size = (int(pixels.shape[1]), int(pixels.shape[2])) if pixels.ndim == 3 else (0, 0)
        fits = pixels.ndim == 3 and len(pixels) == channels and (size == self.spec.size or self.spec.dynamic)
        if not fits or not pixels.is_floating_point() or not torch.isfinite(pixels).all():
            raise ShapeError(
                f"Expected a finite float tensor [{channels}, {height}, {width}], normalised for {self.model_id}, or a "
                f"batch of them, got {pixels.dtype} {list(pixels.shape)}."
            )
        pixels = pixels.detach()
        values = pixels.float().cpu()
        mean, std = (torch.tensor(each[:channels]).view(-1, 1, 1) for each in (self.spec.mean, self.spec.std))
        shown = values * std + mean
        if not self._warned and (
            float(shown.min()) < -_BEYOND
            or float(shown.max()) > 1 + _BEYOND
            or (float(values.min()) >= 0 and float(values.max()) <= 1 < float(((1 - mean) / std).max()))
        ):
            self._warned = True
            low, high = float((-mean / std).min()), float(((1 - mean) / std).max())
            warnings.warn(
                f"The tensor does not look normalised for {self.model_id}: its values are from {values.min():.3g} to "
                f"{values.max():.3g}, and (image - mean) / std gives {low:.3g} to {high:.3g}, with "
                f"mean={self.spec.mean} and std={self.spec.std}.",
                VitflowWarning,
                stacklevel=2,
            )
        if original is None:
            image = (255 * shown).round().clamp(0, 255).to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0).numpy()
            return PlacedImage(name, np.ascontiguousarray(image), place(size, size, fit="squash"), pixels, True)
        image = read_image(original)
        placement = self.preprocessing.place((image.shape[0], image.shape[1]))
        if placement.input_size != size:
            raise ShapeError(
                f"Expected a tensor of {placement.input_size} pixels for this original and fit={self.fit!r}, "
                f"got {size}."
            )
        return PlacedImage(name, image, placement, pixels)

    def _tensor(self, images: Sequence[PlacedImage]) -> Tensor:
        inputs = [
            torch.from_numpy(self.preprocessing.prepare(one.image, one.placement)) if one.pixels is None else one.pixels
            for one in images
        ]
        parameter = next(self.model.parameters(), inputs[0])
        return torch.stack([one.to(self.device, parameter.dtype) for one in inputs])

    def forward(self, pixels: Tensor) -> Any:
        """Run the model as it stands on model inputs [images, channels, height, width]; returns its own output."""
        return self.model(pixels, **forward_options(self.model, (pixels.shape[-2], pixels.shape[-1])))

    def record(self, image: ImageInput, **options: Any) -> Trace:
        """Run the model on one image and record its attention; options as for `record_attention`.

        Raises:
            VitflowError: the image cannot be read, an option is wrong, or no attention is seen.

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
            return self._recorded(self.pixels(image), self.outputs, reads=True, **options)

    def _recorded(self, pixels: Tensor, outputs: Outputs, *, reads: bool, **options: Any) -> Trace:
        """One forward pass, recorded; a second one if the readout turns out to need gradients in the head.

        Args:
            pixels: model inputs [batch, channels, height, width].
            outputs: the outputs that are explained.
            reads: whether the readout is needed.
            options: as for `record_attention`.
        """
        against = outputs is not self.outputs
        head = None if options.get("gradients") or not reads else self._heads.get(against)
        while True:
            if head is not None:
                refuse_inference_tensors(self.model)
            with torch.set_grad_enabled(torch.is_grad_enabled() or head is not None):
                recording = record_attention(
                    self.model, layout=self.layout, outputs=self.outputs.read, head=head, **options
                )
                with recording as trace:
                    self.forward(pixels)
                if against:  # maps are of other numbers than those that are reported
                    trace.logits, trace.read = outputs.numbers(trace.output), outputs.read
            if not reads or options.get("gradients") or trace.refusal is not None or not trace.reads_target:
                return trace
            if trace.head == head:
                return trace
            head = self._heads[against] = trace.head

    def logits(self, pixels: Tensor, outputs: Outputs | None = None) -> Tensor:
        """What the model answers in eval mode to model inputs [images, channels, height, width]: [images, classes].

        Args:
            pixels: the inputs.
            outputs: what is asked, by default the explainer's own answers.

        Raises:
            ModelError: it answers with something else than a tensor, or an output that has one.
        """
        with evaluating(self.model):
            output = self.forward(pixels)
            logits = (outputs or self.outputs).numbers(output)
        if logits is None:
            raise no_logits(output, self.model_id)
        return logits

    def _probed(self, pixels: Tensor) -> Any:
        """What the model returns; or its answers and what stands against them, if a function computes either."""
        output = self.forward(pixels)
        classes = self.outputs.function is None and self.outputs.rest is None
        return output if classes else self.outputs.with_rest(output)


def several(images: Any) -> Any:
    """The images of a batch: a path, the bytes of a file, and an array [height, width] or [height, width, 3] are one.

    So is a tensor [channels, height, width].

    >>> several("cats/tabby.jpg"), len(several(np.zeros((5, 9, 3)))), len(several(np.zeros((5, 9, 9, 3))))
    (['cats/tabby.jpg'], 1, 5)
    """
    if isinstance(images, np.ndarray):
        one = images.ndim == 2 or (images.ndim == 3 and images.shape[2] in (3, 4))
        return [images] if one else images
    if isinstance(images, Tensor):
        return [images] if images.ndim == 3 else list(images)
    if isinstance(images, str | bytes | PlacedImage) or not isinstance(images, Iterable):
        return [images]
    return images if isinstance(images, Sequence) else list(images)


def at_least_one(images: Any) -> Any:
    """As `several`; OptionError where there is no image."""
    if not len(sources := several(images)):
        raise OptionError("Expected at least one image, got none.")
    return sources


def name_of(source: ImageInput, number: int) -> str:
    """The name of an image: its path, or its number."""
    if isinstance(source, PlacedImage):
        return source.name
    return str(source) if isinstance(source, str | Path) else f"image {number}"
