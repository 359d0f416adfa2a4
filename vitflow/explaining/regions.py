"""Questions about a region of the image: a detection of an object detector, or a class inside a region."""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from vitflow.errors import OptionError, OutsideImageError, ShapeError
from vitflow.explaining.features import box_inside, check_box
from vitflow.images.geometry import Placement
from vitflow.images.preprocessing import upsample
from vitflow.models.calls import dense_logits_of, detections_of
from vitflow.models.classes import checked_class_names, class_index, top_count
from vitflow.models.data_configs import library_data_config
from vitflow.models.names import NO_OBJECT, config_labels, is_segmenting, model_id, output_names
from vitflow.models.outputs import Binding, Outputs, activate
from vitflow.models.pairs import PromptedDetector, Prompts
from vitflow.models.pairs import prompts as prompts_of

#: Left, top, right and bottom in pixels of the image.
Box = tuple[float, float, float, float]

_SAME = 0.5  # detections of one class with a larger IoU are of one object


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """A detection, or a class inside a region, of one image."""

    index: int  # of the class
    place: Any  # index of the query; or the weights of a region, [height, width]
    box: Tensor | None = None  # of a detection, [4] in shares of the model input
    facts: dict[str, Any] = field(default_factory=dict)
    outline: NDArray[np.bool_] | None = None  # of a region, [height, width] of the image


@dataclass(eq=False)
class Regions(ABC):
    """A question about a region of the image, and the outputs that answer it; see `boxes` and `masks`.

    The detection or region that `binding` sets is explained. One object serves all images, so that the head of a model
    is observed once for a question.
    """

    _names: list[str] | None = field(default=None, init=False, repr=False)
    _activation: str | None = field(default=None, init=False, repr=False)
    _bound: Selected | None = field(default=None, init=False, repr=False)

    def bind(self, binding: Binding) -> Binding:
        """Bind a model to a copy, whose outputs are complete after a trial run."""
        bound, names = copy.copy(self), binding.class_names
        bound._names = None if names is None else list(checked_class_names(names, None))
        bound._activation, bound._bound = binding.activation, None
        binding = replace(binding, class_names=None, activation=None)  # `completed` has both
        outputs = Outputs(bound.scores, activation="softmax")
        return replace(binding, outputs=outputs, complete=bound.completed, selects=bound)

    @contextmanager
    def binding(self, selected: Selected) -> Iterator[None]:
        """Compute the outputs for this detection or region."""
        self._bound = selected
        try:
            yield
        finally:
            self._bound = None

    def select(self, output: Any, placement: Placement, targets: Any, outputs: Outputs) -> list[Selected]:
        """Select the detections or regions of one image, from the model's output for it."""
        selected = []
        for target in targets if isinstance(targets, list | tuple) else [targets]:
            count = top_count(target)
            index = class_index(target, outputs.count or 0, outputs.names) if count is None else None
            selected += self._selected(output, placement, index, count or 1)
        return selected

    @abstractmethod
    def completed(self, count: int, model: nn.Module) -> Outputs:
        """Return the outputs with names and activation for the number of classes that a trial run gave."""

    @abstractmethod
    def scores(self, output: Any) -> Tensor:
        """Compute the scores [batch, classes]."""

    @abstractmethod
    def _selected(self, output: Any, placement: Placement, index: int | None, count: int) -> list[Selected]:
        """Select for one class, or for the `count` most probable ones."""


@dataclass(eq=False)
class Boxes(Regions):
    """The class logits of a detection."""

    box: Box | None = None
    prompts: Prompts | None = None

    def bind(self, binding: Binding) -> Binding:
        """Bind a detector; with prompts, one whose classes are these."""
        if self.prompts is not None:
            binding.refuse_class_names()
            config = binding.data_config or library_data_config(binding.model, self.prompts.processor)
            model, name = PromptedDetector(binding.model, self.prompts), binding.name or model_id(binding.model)
            binding = replace(binding, model=model, data_config=config, name=name)
            named = list(self.prompts.texts)
            binding = replace(binding, class_names=named, activation=binding.activation or "sigmoid")
        return super().bind(binding)

    def completed(self, count: int, model: nn.Module) -> Outputs:
        """Return the outputs, of which the last is "no object" with a softmax."""
        description: dict[str, Any] = {"boxes": self.box}
        if self.prompts is not None:
            description |= {"prompts": list(self.prompts.texts), "templates": list(self.prompts.templates)}
        names, labels = output_names(model, self._names, count), self._names or config_labels(model)
        self._activation = self._activation or ("sigmoid" if len(labels) == count else "softmax")
        if self._activation == "softmax" and names is None:
            names = (*(f"class {index}" for index in range(count - 1)), NO_OBJECT)
        followed = Outputs(self._followed, activation="sigmoid")
        return Outputs(self.scores, names, count, self._activation, description=description, perturbed_outputs=followed)

    def _selected(self, output: Any, placement: Placement, index: int | None, count: int) -> list[Selected]:
        logits, places = (each[0].detach().cpu() for each in detections_of(output))
        scores = self._objects(activate(logits, self._activation or "softmax"))
        return _matching(scores, places.double(), self.box, placement, index, count)

    def _objects(self, probabilities: Tensor) -> Tensor:
        """Return the probabilities of the objects, without "no object"."""
        return probabilities[..., :-1] if self._activation != "sigmoid" else probabilities

    def scores(self, output: Any) -> Tensor:
        """Class logits of the bound detection, or of each image's most probable one."""
        logits, _ = detections_of(output)
        if self._bound is not None:
            return logits[:, self._bound.place]
        most = self._objects(activate(logits, self._activation or "softmax")).amax(dim=-1).argmax(dim=1)
        return logits[torch.arange(len(logits)), most.to(logits.device)]

    def _followed(self, output: Any) -> Tensor:
        """Log-odds [batch, classes] of the largest product of IoU and probability over the queries."""
        from torchvision.ops import box_iou

        logits, places = detections_of(output)
        products = activate(logits, self._activation or "softmax")
        if self._bound is not None and self._bound.box is not None:
            overlaps = box_iou(places.detach().cpu().double().flatten(0, 1), self._bound.box[None])
            products = overlaps.view(*products.shape[:2], 1) * products
        return products.amax(dim=1).logit(eps=1e-9)


def _matching(
    scores: Tensor, places: Tensor, box: Box | None, placement: Placement, index: int | None, count: int
) -> list[Selected]:
    """Select detections by class, box and number, from scores [queries, classes] and boxes [queries, 4]."""
    if index is not None and index >= scores.shape[1]:
        raise OptionError(f"Expected the class of an object, got {NO_OBJECT!r}.")
    from torchvision.ops import batched_nms, box_iou  # slow to import

    ranked = scores if index is None else scores[:, [index]]
    overlaps = torch.ones(len(scores)).double()
    if box is not None:
        overlaps = box_iou(places, _input_shares(box, placement)[None])[:, 0]
        if not overlaps.any():
            raise OutsideImageError(
                f"None of the {len(scores)} detections overlaps the box {box}: omit it, to see those of target='top5'."
            )
    best, classes = (ranked * overlaps.unsqueeze(1)).max(dim=1)
    selected: list[Selected] = []
    for query in batched_nms(places, best, classes, _SAME)[:count].tolist():
        kind = int(classes[query]) if index is None else index
        left, top, right, bottom = places[query].tolist()
        height, width = placement.input_size
        edges = placement.box_on_image((top * height, bottom * height), (left * width, right * width))
        detection: dict[str, Any] = {
            "box": [round(edge, 1) for edge in edges],
            "probability": round(float(scores[query, kind]), 4),
            "query": query,
        }
        if box is not None:
            detection |= {"requested": list(box), "iou": round(float(overlaps[query]), 3)}
        selected.append(Selected(kind, query, places[query], {"detection": detection}))
    return selected


@dataclass(eq=False)
class Masks(Regions):
    """The mean logits of the classes over a region."""

    region: Any = None

    def completed(self, count: int, model: nn.Module) -> Outputs:
        """Return the outputs; a mask is described by its hash."""
        region = self.region
        described = hashlib.sha256(region.tobytes()).hexdigest() if isinstance(region, np.ndarray) else region
        names, activation = output_names(model, self._names, count), self._activation or "softmax"
        return Outputs(self.scores, names, count, activation, description={"masks": described})

    def _selected(self, output: Any, placement: Placement, index: int | None, count: int) -> list[Selected]:
        if count > 1:
            raise OptionError(f"Expected a class name or index with masks, got 'top{count}'.")
        return [self._region(dense_logits_of(output)[0].detach().cpu().double(), placement, index)]

    def scores(self, output: Any) -> Tensor:
        """Mean logits over the bound region, or over the whole image."""
        logits = dense_logits_of(output)
        if self._bound is None:
            return logits.mean(dim=(2, 3))
        return torch.einsum("bchw,hw->bc", logits, self._bound.place.to(logits))

    def _region(self, logits: Tensor, placement: Placement, index: int | None) -> Selected:
        """Select a region, or by default the pixels for which the model predicts the class."""
        size = (int(logits.shape[1]), int(logits.shape[2]))
        if self.region is None:
            predicted = logits.argmax(dim=0)
            index = int(predicted.flatten().mode().values) if index is None else index
            weights, words = (predicted == index).double(), "where the model predicts the class"
            if not weights.any():
                raise OutsideImageError("The model predicts this class nowhere: pass a region, or another class.")
            outline = upsample(weights.numpy().astype(np.float32), placement, interpolation="nearest") > 0.5
        else:
            outline, words = _outline(self.region, placement)
            weights = _weights(outline, placement, size)
            if not weights.any():
                raise OutsideImageError(
                    f"The region has no pixel inside the region that the model saw, {placement.seen_box}: choose a "
                    "region inside, or fit='squash' or 'pad'."
                )
        weights = weights / weights.sum()
        means = torch.einsum("chw,hw->c", logits, weights)
        index = int(means.argmax()) if index is None else index
        facts = {"region": {"of": words, "mean_logit": round(float(means[index]), 4), "pixels": int(outline.sum())}}
        return Selected(index, weights, None, facts, outline)


def _input_shares(box: Box, placement: Placement) -> Tensor:
    """Return a box of the image in shares of the model input, [4]."""
    left, top, right, bottom = box
    (y0, x0), (y1, x1) = placement.to_input(top, left), placement.to_input(bottom, right)
    height, width = placement.input_size
    return torch.tensor([x0 / width, y0 / height, x1 / width, y1 / height], dtype=torch.float64)


def _outline(region: Any, placement: Placement) -> tuple[NDArray[np.bool_], str]:
    """Return a region of the image as a mask, and its kind in words."""
    height, width = placement.image_size
    if isinstance(region, np.ndarray):
        if region.shape != (height, width):
            raise ShapeError(f"Expected a mask [{height}, {width}] as the image, got {list(region.shape)}.")
        return region, "the given mask"
    mask = np.zeros((height, width), np.bool_)
    left, top, right, bottom = (max(0, round(edge)) for edge in box_inside(region, placement))
    mask[top:bottom, left:right] = True
    if not mask.any():
        raise OutsideImageError(f"The box {region} is outside the image of {width} × {height} pixels.")
    return mask, "the given box"


def _weights(outline: NDArray[np.bool_], placement: Placement, size: tuple[int, int]) -> Tensor:
    """Return the share of a region in each cell of the model's output, float64 [height, width]."""
    fine = [max(n, side) for n, side in zip(size, placement.input_size, strict=True)]
    (rows, cols) = ((np.arange(n) + 0.5) * side / n for n, side in zip(fine, placement.input_size, strict=True))
    y, x = placement.to_image(rows, cols)
    inside = np.outer((y >= 0) & (y < outline.shape[0]), (x >= 0) & (x < outline.shape[1]))
    places = np.ix_(*(np.floor(each).astype(int).clip(0, n - 1) for each, n in zip((y, x), outline.shape, strict=True)))
    shares = adaptive_avg_pool2d(torch.from_numpy((outline[places] & inside)[None].astype(np.float64)), size)[0]
    if not shares.any() and outline.sum() == 1:  # a point between the pixels of a larger image
        [[row, col]] = np.argwhere(outline)
        at = placement.to_input(row + 0.5, col + 0.5)
        cells = [int(each * n // side) for each, n, side in zip(at, size, placement.input_size, strict=True)]
        if all(0 <= cell < n for cell, n in zip(cells, size, strict=True)):
            shares[cells[0], cells[1]] = 1.0
    return shares


def boxes(box: Sequence[float] | None = None, *, prompts: Sequence[str] | Prompts | None = None) -> Boxes:
    """Explain a detection: `Explainer(model, outputs=boxes((40, 20, 300, 260)))`, for detectors like DETR and YOLOS.

    The outputs are the class logits of one detection: the one with the largest product of IoU with the box and
    probability of the target class (of any class without a target); without a box, the most probable one. The target
    "top3" gives a map for each of the three most probable ones. Methods that change the image (sampling, occlusion,
    consensus) follow a detection as D-RISE does, by the largest product of IoU and probability over all detections,
    because another query may detect the object then.

    Args:
        box: left, top, right and bottom in pixels of the image.
        prompts: the classes that OWL-ViT and OWLv2 detect: texts, or `prompts(...)` with templates or a processor.

    Raises:
        OptionError: the box has no area; or no prompt, or the same prompt twice.

    References:
        D-RISE: Petsiuk et al., CVPR 2021.

    >>> boxes((40, 20, 300, 260))
    Boxes(box=(40.0, 20.0, 300.0, 260.0), prompts=None)
    """
    named = prompts if prompts is None or isinstance(prompts, Prompts) else prompts_of(prompts)
    return Boxes(None if box is None else check_box(box), named)


def masks(region: Any = None) -> Masks:
    """Explain a class inside a region: `Explainer(model, outputs=masks(mask))`, for semantic segmentation.

    The output of a class is its mean logit over the region, at the resolution of the model's output. The reported
    probability is the softmax of these means.

    Args:
        region: a mask [height, width] of the image, True inside; a box (left, top, right, bottom) or a point (x, y) in
            its pixels; by default the pixels for which the model predicts the target class.

    Raises:
        OptionError: the region is none of these.

    >>> masks((12, 40))
    Masks(region=(12.0, 40.0, 13.0, 41.0))
    """
    if region is None:
        return Masks()
    array = np.asarray(region)
    if array.ndim == 2:
        return Masks(array > 0)
    if array.shape == (2,):  # the box of its pixel
        x, y = np.floor(array.astype(float))
        return Masks(check_box((x, y, x + 1, y + 1)))
    if array.shape != (4,):
        raise OptionError(
            f"Expected a mask [height, width], a box (left, top, right, bottom) or a point (x, y), got {region!r:.60}."
        )
    return Masks(check_box(region))


def about_region(model: nn.Module, region: Any = None, prompts: Prompts | None = None) -> Boxes | Masks:
    """Return `Masks` for a segmentation model, otherwise `Boxes`."""
    return masks(region) if is_segmenting(model) else boxes(region, prompts=prompts)
