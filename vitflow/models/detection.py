"""Outputs of models for object detection and semantic segmentation, in one form.

Recognised by their fields, so that no library is imported: detectors in the format of DETR (DETR, Conditional DETR,
YOLOS and others of transformers, and models that return `pred_logits` and `pred_boxes`), and segmentation by logits per
pixel (SegFormer, DPT, UperNet, BEiT, torchvision, a tensor [batch, classes, height, width]) or by queries (MaskFormer,
Mask2Former). OWL-ViT and OWLv2 detect what prompts name; `PromptedDetector` fixes the prompts.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import ModelError, OptionError, UnsupportedModelError
from vitflow.models.anatomy import in_words
from vitflow.models.libraries import embedding_of, without
from vitflow.models.pairs import Prompts, embedded, is_prompted_detector, text_encoder

#: Name of the last class of a detector with a softmax.
NO_OBJECT = "no object"
_DEFORMABLE = "deformable"


class PromptedDetector(nn.Module):
    """OWL-ViT or OWLv2 of transformers with fixed prompts: maps images to logits and boxes in the format of DETR.

    There is a detection for each patch of the image, with a logit for each prompt.

    Args:
        model: the model, of which the text encoder is left out.
        prompts: the prompts, embedded once.

    Raises:
        UnsupportedModelError: the model is not such a detector.
        ModelError: its tokenizer is not available.
    """

    vectors: Tensor

    def __init__(self, model: nn.Module, prompts: Prompts) -> None:
        super().__init__()
        embedding = embedding_of(model)
        if not is_prompted_detector(model) or embedding is None:
            raise UnsupportedModelError(
                f"boxes(prompts=…) requires OWL-ViT or OWLv2 of transformers, got {type(model).__name__}: leave out "
                "prompts, and name a class of the model by target= (--class)."
            )
        owner: Any = model
        prefix = owner.base_model_prefix
        with torch.inference_mode(False), torch.no_grad():
            encoder = text_encoder(getattr(owner, prefix), prompts.processor)
            vectors = embedded(encoder, prompts.texts, prompts.templates)
        self.model: Any = without(model, f"{prefix}.text_model")
        self.register_buffer("vectors", vectors.to(next(model.parameters())))
        self._size = embedding.image_size

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return the logits [batch, patches, prompts] and pred_boxes [batch, patches, 4] of images."""
        other = {"interpolate_pos_encoding": True} if tuple(pixels.shape[-2:]) != self._size else {}
        grid, _ = self.model.image_embedder(pixel_values=pixels, **other)
        patches = grid.flatten(1, 2)
        logits, _ = self.model.class_predictor(patches, self.vectors.expand(len(pixels), -1, -1))
        return {"logits": logits, "pred_boxes": self.model.box_predictor(patches, grid, **other)}


def detections_of(output: Any) -> tuple[Tensor, Tensor]:
    """Return the class logits and boxes of a detector in the format of DETR.

    Returns:
        Logits [batch, queries, classes]; and boxes [batch, queries, 4], left, top, right and bottom as shares of the
        width and height of the model input.

    Raises:
        ModelError: the output has another format.

    >>> output = {"pred_logits": torch.zeros(1, 1, 3), "pred_boxes": torch.tensor([[[0.5, 0.5, 0.2, 0.4]]])}
    >>> detections_of(output)[1]
    tensor([[[0.4000, 0.3000, 0.6000, 0.7000]]])
    """
    logits, boxes = _field(output, "logits", "pred_logits"), _field(output, "pred_boxes")
    if logits is None or boxes is None or logits.ndim != 3 or boxes.shape != (*logits.shape[:2], 4):
        raise ModelError(
            "Expected the output of a detector in the format of DETR or YOLOS: logits [batch, queries, classes] and "
            f"pred_boxes [batch, queries, 4], got {in_words(output)}. Remedy: for other models pass a function of the "
            "output as outputs=."
        )
    middle, half = boxes[..., :2], boxes[..., 2:] / 2
    return logits, torch.cat([middle - half, middle + half], dim=-1)


def dense_logits_of(output: Any) -> Tensor:
    """Return the logits [batch, classes, height, width] of a model for semantic segmentation.

    Queries with masks are summed as by transformers: the probability of each class times that of each mask.

    Raises:
        ModelError: the output has another format.
    """
    classes, masks = _field(output, "class_queries_logits"), _field(output, "masks_queries_logits")
    if classes is not None and masks is not None:
        return torch.einsum("bqc,bqhw->bchw", classes.softmax(dim=-1)[..., :-1], masks.sigmoid())
    logits = output if isinstance(output, Tensor) else _field(output, "logits", "out")
    if logits is None or logits.ndim != 4:
        remedy = "for other models pass a function of the output as outputs=."
        if _field(output, "pred_masks") is not None:  # SAM
            remedy = (
                "pass a module whose forward(pixels) adds the points or boxes to segment, and returns "
                "output.pred_masks.flatten(1, 2)."
            )
        raise ModelError(
            "Expected the output of a model for semantic segmentation: logits [batch, classes, height, width], got "
            f"{in_words(output)}. Remedy: {remedy}"
        )
    return logits


def _field(output: Any, *names: str) -> Tensor | None:
    """Return the first of the named tensors of an output."""
    for name in names:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    return None


def label_count(model: nn.Module) -> int | None:
    """Return the number of labels in the configuration of a transformers model; None for other models."""
    count = getattr(getattr(model, "config", None), "num_labels", None)
    return count if isinstance(count, int) else None


def output_names(model: nn.Module, given: list[str] | None, count: int) -> tuple[str, ...] | None:
    """Return the name of each output: those given, or of the model's configuration; the last may be "no object".

    Raises:
        OptionError: there is another number of names.
    """
    names: Any = getattr(getattr(model, "config", None), "id2label", None) or {}
    listed = given or [str(names[index]) for index in sorted(names, key=int)]
    if len(listed) in (count, count - 1):
        return (*listed, NO_OBJECT)[:count]
    if given:
        raise OptionError(f"Expected {count} class names, or {count - 1} without {NO_OBJECT!r}, got {len(given)}.")
    return None


def is_segmenting(model: nn.Module) -> bool:
    """Return True for a model of transformers for semantic segmentation."""
    name = type(model).__name__
    return name.endswith(("ForSemanticSegmentation", "ForUniversalSegmentation", "ForInstanceSegmentation"))


def refuse_joint_text(model: nn.Module) -> None:
    """Raise UnsupportedModelError for a detector that mixes its text with the image, such as Grounding DINO."""
    if "GroundingDino" in type(model).__name__:
        raise UnsupportedModelError(
            f"{type(model).__name__} reads its text together with the image, and has deformable attention, of which "
            "there is no attention matrix. Use OWL-ViT or OWLv2; or pass a module whose forward(pixels) adds the text "
            "and returns logits and pred_boxes, with sampling, occlusion or gradcam."
        )


def has_regions(model: nn.Module) -> bool:
    """Return True for a model of transformers for object detection or segmentation."""
    return is_segmenting(model) or type(model).__name__.endswith("ForObjectDetection")


def refuse_deformable(model: nn.Module) -> None:
    """Raise UnsupportedModelError if a model has deformable attention, of which there is no matrix."""
    if any(_DEFORMABLE in type(module).__name__.lower() for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has deformable attention: each query reads a few sampled points, so that there "
            "is no attention matrix to follow to its patches. Use sampling, occlusion or gradcam."
        )
