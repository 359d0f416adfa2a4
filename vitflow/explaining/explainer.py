"""Explain pictures: from photograph and model to saliency, one-shot or with a model that is kept."""

import hashlib
import json
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import (
    ModelError,
    OptionError,
    ShapeError,
    UnsupportedModelError,
    ValueNormsError,
    VitflowWarning,
    unknown_name,
)
from vitflow.explaining.maps import Maps
from vitflow.explaining.method_table import Method, get_method
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Target, Targets, doubt, is_per_picture, resolve_targets
from vitflow.methods.tokens import TokenLayout, check_layout
from vitflow.models.anatomy import block_norm, logits_of, unwrap
from vitflow.models.checkpoints import architecture_sha256, weights_sha256
from vitflow.models.libraries import class_count, forward_options, is_multi_label
from vitflow.models.loading import class_names_of, load_model, model_id, read_input_spec
from vitflow.pictures.geometry import FITS, Fit, Placement, place, prepare
from vitflow.pictures.images import ImageSource, image_name, read_image
from vitflow.recording.isolation import evaluating, turn
from vitflow.recording.recorder import record_attention
from vitflow.recording.trace import FusionKey, Trace

# What callers may call the class to explain, which is `target` here.
_CALLED_TARGET = ("class_", "class_id", "class_idx", "class_index", "class_name", "category", "cls", "label")
# A method by name, or by name with options of its own.
MethodChoice = str | tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Picture:
    """A picture that was read and placed, ready for the model."""

    name: str
    image: NDArray[np.uint8]
    placement: Placement


def explain(
    image: ImageSource,
    *,
    model: str | Path | nn.Module,
    method: str = "rollout",
    target: Target = None,
    fit: str = "crop",
    device: str | torch.device | None = None,
    data_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Saliency:
    """Explain one picture with one method. To explain several with the same model, keep an `Explainer`.

    Args:
        image: a path, bytes, a PIL picture, or an RGB array.
        model: a model id (see `load_model`), or a module of your own.
        method: a name from `list_methods()`.
        target: class index or name; by default the predicted class.
        fit: "crop" (the model's own preprocessing), "squash", "pad" or "native".
        device: where to run, by default the model's own device, or a GPU if there is one.
        data_config: what a model that does not say so itself wants to see, as for `Explainer`.
        options: the method's own, such as head_fusion="max".

    Raises:
        VitflowError: the picture, the model or an option is wrong; the message says which and what to do.

    >>> from vitflow.demo import sample_pictures
    >>> explain(sample_pictures()[0], model="demo", method="rollout", head_fusion="max").grid.shape
    (12, 12)
    """
    explainer = Explainer(model, device=device, fit=fit, data_config=data_config)
    return explainer.explain(image, method=method, target=target, **options)


class Explainer:
    """A model that is kept, to explain one picture after another or in batches.

    Several threads may share it: explanations of one model take turns. A model in training mode is put into eval mode
    for each, and back afterwards.

    Args:
        model: a model id (see `load_model`), or a module of your own; beside a move to `device` it is left as it is.
        device: where to run, and where your module is moved to if given; by default where your module lies, or a GPU
            if there is one for a model by name.
        fit: "crop" (the model's own preprocessing), "squash", "pad" or "native" (whole picture, aspect ratio kept,
            through timm's dynamic image size).
        class_names: names of the classes, where the model does not know them.
        data_config: input_size, mean, std, crop_pct, interpolation, for a model without `pretrained_cfg`; or the
            settings of its transformers image processor, `processor.to_dict()`.
        layout: prefix tokens and patch grid, for a model that does not tell its own.
        activation: "softmax" or "sigmoid" (multi-label); by default what the model's configuration says, else softmax.

    Raises:
        VitflowError: the model cannot be loaded, or an option is wrong.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        device: str | torch.device | None = None,
        fit: str = "crop",
        class_names: Sequence[str] | None = None,
        data_config: Mapping[str, Any] | None = None,
        layout: TokenLayout | None = None,
        activation: str | None = None,
    ) -> None:
        if fit not in FITS:
            raise OptionError(unknown_name("fit", fit, FITS))
        if not isinstance(model, nn.Module):
            model = load_model(model, dynamic_img_size=fit == "native")
            device = device or default_device()
        self.model = unwrap(model)
        self.device = _move(self.model, device)
        self.fit: Fit = fit
        self.spec = read_input_spec(self.model, data_config)
        self.class_names = list(class_names) if class_names is not None else class_names_of(self.model)
        self.model_id = model_id(self.model)
        check_layout(layout)
        self.layout = layout
        self._weighable = True
        config: Any = getattr(self.model, "pretrained_cfg", None) or {}
        own = config.get("activation") or ("sigmoid" if is_multi_label(self.model) else "softmax")
        self.activation = activation or own
        if self.activation not in ("softmax", "sigmoid"):
            raise OptionError(f"Expected activation 'softmax' or 'sigmoid', got {self.activation!r}.")
        if fit == "native" and (self.spec.patch_size is None or not self.spec.dynamic):
            raise UnsupportedModelError(
                f"fit='native' needs a model that takes pictures of any size, and {self.model_id} was built for "
                f"{self.spec.size[0]} × {self.spec.size[1]} pixels. Build it with dynamic_img_size=True, or use "
                "fit='pad'."
            )

    def explain(
        self, image: ImageSource, *, method: str = "rollout", target: Target = None, **options: Any
    ) -> Saliency:
        """Explain one picture with one method; arguments as for `vitflow.explain`."""
        found = self.explain_batch([image], methods=[method], targets=target, **options)
        if len(found) != 1:
            raise OptionError(f"One map was expected, and {target!r} asks for {len(found)}: use explain_batch.")
        return found[0]

    def explain_batch(
        self,
        images: Sequence[ImageSource],
        *,
        methods: Sequence[MethodChoice] = ("rollout",),
        targets: Targets = None,
        **options: Any,
    ) -> list[Saliency]:
        """Explain several pictures with several methods: one forward pass, at most one backward pass per target.

        Args:
            images: pictures; those of one input size run as one batch.
            methods: names, or (name, options) pairs.
            targets: one target for all; a list of targets that each class-specific method explains in turn, where
                "top5" stands for five; or an array with the class index of each picture.
            options: options for every method that has them.

        Returns:
            Picture by picture, method by method, and for class-specific methods target by target.

        Raises:
            VitflowError: a picture cannot be read, or an option is wrong; nothing is returned then.
        """
        if not isinstance(images, Sequence | np.ndarray):
            images = list(images) if isinstance(images, Iterable) else [images]
        chosen = choose_methods(methods, options)
        given = [options, *(choice[1] for choice in methods if not isinstance(choice, str))]
        weighting_asked = any(own.get("value_weighted") for own in given)
        per_picture: Any = targets if is_per_picture(targets) else images
        if len(per_picture) != len(images):
            raise OptionError(f"Expected one class index for each of {len(images)} pictures, got {len(per_picture)}.")
        pictures = [self._read(image, number) for number, image in enumerate(images)]
        results: list[list[Saliency]] = [[] for _ in pictures]
        groups: dict[tuple[int, int], list[int]] = {}
        for index, picture in enumerate(pictures):
            groups.setdefault(picture.placement.input_size, []).append(index)
        for members in groups.values():
            wanted: Any = targets
            if is_per_picture(targets):
                wanted = wanted[members]
            found_by_picture = self._run([pictures[i] for i in members], chosen, wanted, weighting_asked)
            for index, found in zip(members, found_by_picture, strict=True):
                results[index] = found
        return [saliency for found in results for saliency in found]

    def refusals(self, methods: Sequence[MethodChoice]) -> dict[str, str]:
        """Which of these methods do not apply to this model, and why: tried one by one on a grey picture."""
        height, width = self.spec.size
        grey = np.full((height, width, 3), 128, np.uint8)
        found = {}
        for method, options in choose_methods(methods, {}):
            if "predict" in method.needs:
                continue  # it only runs the model, which every model allows
            try:
                self.explain_batch([grey], methods=[(method.name, options)])
            except UnsupportedModelError as error:
                found[method.name] = str(error)
        return found

    def fingerprint(self) -> dict[str, Any]:
        """All that the maps of this explainer depend on, ready for JSON: other maps come of another fingerprint.

        Weights, architecture and class names stand in it as hashes, and the device by its kind.
        """
        names = None if self.class_names is None else json.dumps(self.class_names).encode()
        return {
            "model": self.model_id,
            "weights_sha256": weights_sha256(self.model),
            "architecture_sha256": architecture_sha256(self.model),
            "device": self.device.type,
            "fit": self.fit,
            "input": asdict(self.spec),
            "activation": self.activation,
            "class_names_sha256": None if names is None else hashlib.sha256(names).hexdigest(),
            "layout": None if self.layout is None else asdict(self.layout),
        }

    @property
    def num_classes(self) -> int:
        """How many classes the model has, 0 where it ends in features; one that does not say is tried."""
        count = class_count(self.model)
        if count is None:
            with torch.no_grad(), evaluating(self.model):
                answer = logits_of(self._forward(self.pixels(np.full((*self.spec.size, 3), 128, np.uint8))))
            count = 0 if answer is None or answer.ndim != 2 else answer.shape[1]
        return count

    def pixels(self, image: ImageSource) -> Tensor:
        """The model input that a picture becomes, [1, channels, height, width], on the explainer's device."""
        return self._tensor([self._read(image, 0)])

    def _read(self, source: ImageSource, number: int) -> _Picture:
        image = read_image(source)
        name = image_name(source) if isinstance(source, str | Path) else f"picture {number + 1}"
        spec = self.spec
        placement = place(
            (image.shape[0], image.shape[1]),
            spec.size,
            fit=self.fit,
            crop_pct=spec.crop_pct,
            crop_mode=spec.crop_mode,
            patch_size=spec.patch_size,
        )
        return _Picture(str(source) if isinstance(source, str | Path) else name, image, placement)

    def _tensor(self, pictures: Sequence[_Picture]) -> Tensor:
        spec = self.spec
        arrays = []
        for picture in pictures:
            image = picture.image
            if spec.channels == 1:  # luminance by ITU-R 601-2, as PIL's convert("L")
                grey = np.round(image @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)
                image = np.repeat(grey[..., None], 3, axis=2)
            arrays.append(
                prepare(image, picture.placement, mean=spec.mean, std=spec.std, interpolation=spec.interpolation)
            )
        stacked = torch.from_numpy(np.stack(arrays)[:, : spec.channels])
        parameter = next(self.model.parameters(), stacked)
        return stacked.to(self.device, parameter.dtype)

    def _run(
        self,
        pictures: Sequence[_Picture],
        chosen: Sequence[tuple[Method, dict[str, Any]]],
        targets: Any,
        weighting_asked: bool,
    ) -> list[list[Saliency]]:
        """Explain pictures of one input size: [pictures][methods and targets]."""
        needs = frozenset[str]().union(*(method.needs for method, _ in chosen))
        gradients = "gradients" in needs
        if gradients:
            _refuse_inference_tensors(self.model)
        # Leaving inference mode lets a caller's torch.inference_mode() stand around this.
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), evaluating(self.model):
            started = time.perf_counter()
            trace, chosen = self._record_weighted(self._tensor(pictures), chosen, needs, weighting_asked)
            probabilities = self._probabilities(trace)
            forward = time.perf_counter() - started
            wanted = resolve_targets(targets, probabilities, self.class_names)  # [targets][batch]
            found: list[list[list[Saliency]]] = [[[] for _ in chosen] for _ in pictures]
            for number, target in enumerate(wanted):
                trace.targets = target
                started = time.perf_counter()
                if gradients:
                    trace.backward()  # once for all methods, and each method's seconds hold it
                backward = time.perf_counter() - started
                for place_of_method, (method, options) in enumerate(chosen):
                    if number and not method.class_specific:
                        continue
                    seconds = forward + (backward if "gradients" in method.needs else 0.0)
                    for index, saliency in enumerate(
                        self._apply(method, options, trace, pictures, probabilities, seconds)
                    ):
                        found[index][place_of_method].append(saliency)
                trace.forget_gradients()
        return [[saliency for maps in of_picture for saliency in maps] for of_picture in found]

    def _apply(
        self,
        method: Method,
        options: dict[str, Any],
        trace: Trace,
        pictures: Sequence[_Picture],
        probabilities: Tensor | None,
        seconds: float,
    ) -> list[Saliency]:
        """One method for the trace's targets: a map for each picture. `seconds` is what the batch has taken before."""
        started = time.perf_counter()
        maps = method.load()(trace, **options)
        maps = maps if isinstance(maps, Maps) else Maps(maps)
        grids = _check_grids(maps.grids, method, len(pictures))
        seconds = (seconds + time.perf_counter() - started) / len(pictures)
        read_out = method.needs & {"attention", "heads"}
        answers = [self._answer(probabilities, trace.targets, index) for index in range(len(pictures))]
        notes = [_doubts(method, answer, probabilities) for answer in answers]
        return [
            Saliency(
                grid=grids[index],
                placement=picture.placement,
                image=picture.image,
                source=picture.name,
                model=self.model_id,
                method=method.name,
                options=options,
                class_specific=method.class_specific,
                facts=({"readout": trace.pooling} if read_out else {})
                | (maps.facts[index] if maps.facts else {})
                | notes[index],
                seconds=seconds,
                **answers[index],
            )
            for index, picture in enumerate(pictures)
        ]

    def _record_weighted(
        self,
        pixels: Tensor,
        chosen: Sequence[tuple[Method, dict[str, Any]]],
        needs: frozenset[str],
        weighting_asked: bool,
    ) -> tuple[Trace, Sequence[tuple[Method, dict[str, Any]]]]:
        """Record, without value weighting where it is only a default and does not apply to the model."""
        plain = [
            (method, options | {"value_weighted": False} if "value_weighted" in options else options)
            for method, options in chosen
        ]
        if not self._weighable and not weighting_asked:
            return self._record(pixels, plain, needs), plain
        try:
            return self._record(pixels, chosen, needs), chosen
        except ValueNormsError as error:
            if weighting_asked:
                raise
            self._weighable = False
            reason = str(error).removesuffix(" Use value_weighted=False.")
            warnings.warn(f"{reason} Maps are made without value weighting.", VitflowWarning, stacklevel=2)
        return self._record(pixels, plain, needs), plain

    def _record(self, pixels: Tensor, chosen: Sequence[tuple[Method, dict[str, Any]]], needs: frozenset[str]) -> Trace:
        """One forward pass that keeps no more than the methods need."""
        gradients, attention = "gradients" in needs, bool(needs & {"attention", "heads"})
        every_head = any(
            "heads" in method.needs or (gradients and attention) or options.get("head") is not None
            for method, options in chosen
        )
        fusions: set[FusionKey] = {
            (str(options.get("head_fusion", "mean")), options.get("value_weighted", False))
            for method, options in chosen
            if "attention" in method.needs
        }
        weighted = any(options.get("value_weighted") for _, options in chosen)
        features = {block_norm(self.model, options["layer"]) for m, options in chosen if "features" in m.needs}
        with record_attention(
            self.model,
            fusions=() if every_head else fusions,
            value_norms=every_head and weighted,
            gradients=gradients,
            features=sorted(features),
            attention=attention,
            layout=self.layout,
        ) as trace:
            self._forward(pixels)
        trace.predict = self._predict
        return trace

    def _forward(self, pixels: Tensor) -> Any:
        return self.model(pixels, **forward_options(self.model, (pixels.shape[-2], pixels.shape[-1])))

    def logits(self, pixels: Tensor) -> Tensor:
        """What the model answers in eval mode to model inputs [pictures, channels, height, width]: [pictures, classes].

        Raises:
            ModelError: it answers with something else than a tensor, or an output that has one.
        """
        with evaluating(self.model):
            logits = logits_of(self._forward(pixels))
        if logits is None:
            raise ModelError(f"Expected {self.model_id} to return one tensor of logits, got none.")
        return logits

    def _predict(self, pixels: Tensor) -> Tensor:
        with torch.no_grad():
            return self._activate(self.logits(pixels))

    def _activate(self, logits: Tensor) -> Tensor:
        # In float64, or what a hidden patch costs would be lost in the rounding of a probability near 1.
        logits = logits.detach().cpu().double()
        return logits.sigmoid() if self.activation == "sigmoid" else logits.softmax(dim=-1)

    def _probabilities(self, trace: Trace) -> Tensor | None:
        """Probabilities [batch, classes]; None where the model has no classes."""
        logits = trace.logits
        if not isinstance(logits, Tensor):
            raise ModelError(f"Expected {self.model_id} to return one tensor of logits, got none.")
        if class_count(self.model) == 0 or logits.ndim != 2:
            return None
        if not torch.isfinite(logits).all():
            raise ModelError(
                f"{self.model_id} returned NaN or infinite logits for this picture: its weights or its precision "
                f"({logits.dtype}) are at fault, and no map of it would mean anything."
            )
        return self._activate(logits)

    def _answer(self, probabilities: Tensor | None, target: Tensor | None, index: int) -> dict[str, Any]:
        if probabilities is None or target is None:
            return {}
        number = int(target[index])
        return {
            "target": number,
            "class_name": self.class_names[number] if self.class_names else None,
            "probability": float(probabilities[index, number]),
            "predicted": int(probabilities[index].argmax()),
        }


def choose_methods(methods: Sequence[MethodChoice], options: Mapping[str, Any]) -> list[tuple[Method, dict[str, Any]]]:
    """Look methods up and complete their options: shared `options` go to each method that has them.

    Raises:
        OptionError: an unknown method or option, or an option that none of the methods has.
    """
    if not methods:
        raise OptionError("Expected at least one method, got none.")
    pairs = [
        (get_method(choice), {}) if isinstance(choice, str) else (get_method(choice[0]), choice[1])
        for choice in methods
    ]
    for name in options:
        if name in _CALLED_TARGET and not any(method.accepts(name) for method, _ in pairs):
            raise OptionError(
                f"Unknown option {name!r}: name the class to explain by target={options[name]!r} (targets, for several "
                "pictures or classes at once)."
            )
        if not any(method.accepts(name) for method, _ in pairs):
            pairs[0][0].complete({name: None})  # raises, naming the options that there are
    return [
        (method, method.complete({**{k: v for k, v in options.items() if method.accepts(k)}, **own}))
        for method, own in pairs
    ]


def default_device() -> str:
    """The accelerator that is there, or the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _move(model: nn.Module, device: str | torch.device | None) -> torch.device:
    if device is None:
        return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    try:
        device = torch.device(device)
        with turn(model):
            model.to(device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise OptionError(f"The device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _doubts(method: Method, answer: Mapping[str, Any], probabilities: Tensor | None) -> dict[str, str]:
    """The fact that a class which was asked for is one that the model all but rules out."""
    if not method.class_specific or probabilities is None or answer.get("target") in (None, answer.get("predicted")):
        return {}
    note = doubt(answer["probability"], probabilities.shape[1])
    return {} if note is None else {"note": note}


def _refuse_inference_tensors(model: nn.Module) -> None:
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ModelError(
            f"The weights of {type(model).__name__} were made under torch.inference_mode(), and no gradient can pass "
            "them. Build or load the model outside of it; explaining inside is fine."
        )


def _check_grids(grids: Tensor, method: Method, batch: int) -> NDArray[np.float32]:
    array: NDArray[np.float32] = grids.detach().float().cpu().numpy()
    if array.ndim != 3 or len(array) != batch:
        raise ShapeError(f"Expected maps [{batch}, rows, cols] from method {method.name}, got {array.shape}.")
    if not np.isfinite(array).all():
        raise ShapeError(f"Method {method.name} gave a map with NaN or infinite values.")
    return array
