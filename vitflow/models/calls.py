"""Arguments and outputs of forward passes: text, caches, logits, detections, and segmentations.

Outputs are recognised by their fields, so that no library is imported: detectors in the format of DETR (DETR,
Conditional DETR, YOLOS and others of transformers, and models that return `pred_logits` and `pred_boxes`), and
segmentation by logits per pixel (SegFormer, DPT, UperNet, BEiT, torchvision, a tensor [batch, classes, height, width])
or by queries (MaskFormer, Mask2Former).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import ModelError, UnsupportedModelError

# Text arguments of a forward pass, in order of preference.
_TEXTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
# Names of the logits in outputs with fields, in order of preference.
_OUTPUTS = ("logits", "pooler_output", "image_embeds", "last_hidden_state")
# Numbers of axes, most similar to logits [batch, classes] first.
_AXES = (2, 1, 4, 3, 5)
_TENSORS_LISTED = 8


def reads_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the text among the arguments of a forward pass, token ids [batch, tokens] or embeddings; else None."""
    text = next((kwargs[name] for name in _TEXTS if isinstance(kwargs.get(name), Tensor)), None)
    if text is None and args and isinstance(args[0], Tensor) and args[0].ndim == 2:
        text = None if args[0].is_floating_point() else args[0]
    return text


def reads_cache(kwargs: Mapping[str, Any]) -> Any:
    """Return the key–value cache among the arguments of a forward pass, or None.

    transformers calls it `cache` since 5.24, and `past_key_values` before.
    """
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def refuse_static(cache: Any) -> None:
    """Check that a key–value cache is not static (preallocated at full length)."""
    cache = getattr(cache, "self_attention_cache", cache)
    kinds = [type(cache).__name__, *(type(layer).__name__ for layer in getattr(cache, "layers", ()))]
    static = next((kind for kind in kinds if kind.startswith("Static")), None)
    if static is not None:
        raise UnsupportedModelError(
            f"Expected a dynamic cache, got {static}, which includes empty keys: omit cache_implementation and "
            "the cache, or pass a DynamicCache."
        )


def logits_of(output: Any) -> Tensor | None:
    """Return the logits of a model's output: the tensor itself, its `logits`, or its pooled features; see `as_rows`.

    In a tuple or list, they are the only tensor with two axes; None if there is none, or several.

    >>> logits_of({"logits": torch.zeros(1, 5), "hidden": torch.zeros(1, 17, 8)}).shape
    torch.Size([1, 5])
    """
    if isinstance(output, Tensor):
        return as_rows(output)
    fields = (output.get(name) if isinstance(output, Mapping) else getattr(output, name, None) for name in _OUTPUTS)
    logits = next((field for field in fields if field is not None), None)
    if logits is None and isinstance(output, tuple | list):
        tensors = [value for value in output if isinstance(value, Tensor)]
        outputs = [tensor for tensor in tensors if tensor.ndim == 2] or tensors[:1]
        logits = outputs[0] if len(outputs) == 1 else None
    return as_rows(logits) if isinstance(logits, Tensor) else None


def as_rows(scores: Tensor) -> Tensor:
    """Return one score per image, [batch] or a number, as [batch, 1], and [batch, classes, 1, 1] as [batch, classes].

    >>> as_rows(torch.zeros(2)).shape, as_rows(torch.zeros(2, 5, 1, 1)).shape
    (torch.Size([2, 1]), torch.Size([2, 5]))
    """
    if scores.ndim < 2:
        return scores.reshape(-1, 1)
    return scores.flatten(1) if scores.ndim == 4 and scores.shape[2:] == (1, 1) else scores


def check_rows(output: Any, images: int) -> None:
    """Raise ModelError if the logits of a model's output have another number of rows than there are images."""
    logits = logits_of(output)
    if logits is None or len(logits) == images:
        return
    remedy = "Make it return logits [images, classes], or select them by outputs=."
    if logits.shape[1] == 1:  # such as the classes of one image after squeeze()
        classes = len(logits)
        remedy = f"For {classes} classes of one image, pass outputs=lambda output: output.reshape(-1, {classes})."
    raise ModelError(f"Expected a row of logits for each image, got {in_words(output)} for {images} images. {remedy}")


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield all tensors of a model's output, including nested mappings and sequences."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_in(value)


def tokens_of(output: Any) -> Tensor | None:
    """Return the token tensor of a module's output: itself, the first of a sequence, or `last_hidden_state`."""
    if isinstance(output, Mapping):
        output = output.get("last_hidden_state")
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.is_floating_point() and output.ndim in (3, 4) else None


def with_tokens(output: Any, tokens: Tensor) -> Any:
    """Return a module's output with its tokens replaced."""
    if isinstance(output, Mapping):
        output["last_hidden_state"] = tokens  # type: ignore[index]
        return output
    if isinstance(output, tuple | list):
        return [tokens, *output[1:]] if isinstance(output, list) else (tokens, *output[1:])
    return tokens


def detections_of(output: Any) -> tuple[Tensor, Tensor]:
    """Return the class logits [batch, queries, classes] and boxes [batch, queries, 4] of a detector as DETR.

    Boxes are left, top, right and bottom as shares of the width and height of the model input.

    >>> output = {"pred_logits": torch.zeros(1, 1, 3), "pred_boxes": torch.tensor([[[0.5, 0.5, 0.2, 0.4]]])}
    >>> detections_of(output)[1]
    tensor([[[0.4000, 0.3000, 0.6000, 0.7000]]])
    """
    logits, boxes = _field(output, "logits", "pred_logits"), _field(output, "pred_boxes")
    if logits is None or boxes is None or logits.ndim != 3 or boxes.shape != (*logits.shape[:2], 4):
        raise ModelError(
            "--box and boxes(…) require a segmentation model or a detector in the format of DETR or YOLOS (logits "
            f"[batch, queries, classes], pred_boxes [batch, queries, 4]), got {in_words(output)}. Leave out the box; "
            "or compare a region with --method similarity."
        )
    middle, half = boxes[..., :2], boxes[..., 2:] / 2
    return logits, torch.cat([middle - half, middle + half], dim=-1)


def dense_logits_of(output: Any) -> Tensor:
    """Return the logits [batch, classes, height, width] of a model for semantic segmentation.

    Queries with masks are summed as by transformers: the probability of each class times that of each mask.
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


def no_logits(output: Any, model: str) -> ModelError:
    """Return the error for an output without logits, with a fitting example of `outputs`."""
    tensors = [(path, value) for path, value in _tensors_by_path(output) if value.is_floating_point() and value.ndim]
    remedy = "Make the model return its logits as a tensor [batch, classes]"
    if tensors:
        path, value = min(tensors, key=lambda entry: _AXES.index(min(entry[1].ndim, 5)))
        remedy = f"Pass the scores to explain, such as outputs=lambda output: output{path}"
        remedy += {1: "[:, None]", 2: "", 3: ".mean(1)"}.get(value.ndim, f".mean({tuple(range(2, value.ndim))})")
    return ModelError(
        f"Expected {model} to return one tensor of logits, or an output with logits, got {in_words(output)}. {remedy}."
    )


def refused_input(model: str, error: Exception, shape: Sequence[int]) -> ModelError:
    """Return the error for a forward pass that failed on a tensor of this shape."""
    return ModelError(
        f"Expected a model whose forward method takes one tensor {tuple(shape)}, but that of {model} failed on it with "
        f"{type(error).__name__}: {error}. If it takes other inputs, such as a dict, pass a module whose "
        "forward(pixels) makes them; vitflow.evaluation.blank_inputs compares several images."
    )


def in_words(output: Any) -> str:
    """Return a description of an output: its type and the shapes of its tensors."""
    if isinstance(output, Tensor):
        return f"a tensor {tuple(output.shape)}"
    shapes = [f"{path.lstrip('.')} {tuple(value.shape)}" for path, value in _tensors_by_path(output)]
    more = [f"… ({len(shapes)} tensors)"] if len(shapes) > _TENSORS_LISTED else []
    return f"{type(output).__name__} with {', '.join(shapes[:_TENSORS_LISTED] + more) or 'no tensors'}"


def _tensors_by_path(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield an output that is a tensor, or its tensors by their access path: `["logits"]`, `[0]` or `.logits`."""
    parts: Iterable[tuple[str, Any]] = [("", output)]
    if isinstance(output, Mapping):
        parts = ((f'["{name}"]' if isinstance(name, str) else f"[{name!r}]", value) for name, value in output.items())
    elif isinstance(output, list | tuple):
        parts = ((f"[{index}]", value) for index, value in enumerate(output))
    elif not isinstance(output, Tensor | type | nn.Module):
        fields = getattr(output, "__dataclass_fields__", None) or getattr(output, "__dict__", {})
        parts = ((f".{name}", getattr(output, name, None)) for name in fields if not name.startswith("_"))
    yield from ((path, value) for path, value in parts if isinstance(value, Tensor))
