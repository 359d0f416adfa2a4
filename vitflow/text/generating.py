"""Generation with attribution: generate text, and explain each generated token with any method for texts."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.analysis.clips import ClipSource
from vitflow.errors import OptionError, UnsupportedModelError, check_known
from vitflow.models.calls import reads_text
from vitflow.models.devices import device_of
from vitflow.models.hub import bundled, hub_for
from vitflow.models.names import check_name, model_id, model_note
from vitflow.models.parts import decoder_path, unwrap
from vitflow.progress import tracking
from vitflow.recording.attention_kinds import refuse_other_layers
from vitflow.recording.isolation import Hook, evaluating
from vitflow.registry.method_table import Method
from vitflow.text import languages
from vitflow.text.generation import Generation
from vitflow.text.image_tokens import ImageTokens
from vitflow.text.languages import default_prompt, load_language_model, load_processor
from vitflow.text.method_table import IMAGE_DEFAULT, PLAIN, TEXT_METHODS, for_kind, text_method
from vitflow.text.prompts import (
    Layout,
    PromptImages,
    Video,
    check_parts,
    source_words,
    tower_rows,
    with_images,
    with_source,
)
from vitflow.text.rows import TextResult, array_of, explain_encoder_decoder, explain_rows
from vitflow.text.words import Words, words_of


def explain_generation(
    model: str | Path | nn.Module,
    inputs: Any = None,
    *,
    image: Any = None,
    video: ClipSource | Video | None = None,
    frames: int | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    method: str | None = None,
    layout: ImageTokens | Layout = None,
    through_tower: bool = False,
    blank: bool = False,
    name: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Generation:
    """Generate text and compute the attribution of each generated token.

    Args:
        model: causal language model, vision-language model or encoder-decoder model (T5, BART, VisionEncoderDecoder)
            of transformers; a module, id or folder.
        inputs: the prompt as text, tokenizer output (input_ids, attention_mask) or ids [1, tokens]; with images, text,
            by default "Describe the image."; with an image encoder, text that the decoder continues, by default none.
        image: one or several images of the prompt, as paths, bytes, PIL images or arrays; exactly one for an image
            encoder.
        video: the video of the prompt: a file, or frames as a list of images or an array [frames, height, width, 3],
            2 per second; for other rates, a `vitflow.text.prompts.Video`.
        frames: the number of frames of a video file, evenly spaced; by default 8.
        tokenizer: tokenizer; by default the one saved with the model. Without a tokenizer, tokens are shown as ids.
        processor: image processor; by default the one saved with the model.
        method: "rollout", "attention", "flow", "gae" or "logit_lens". By default "rollout"; with images or a video
            "gae", whose maps match the named objects best and which requires a backward pass per token.
        layout: positions of the patch tokens in the prompt, for unknown model families.
        through_tower: record the vision tower, too, to propagate maps to its patches; not for a video.
        blank: also compute the probability of each token with each image replaced by its mean colour; not for models
            with an image encoder and cross-attention.
        name: display name of the model; by default its id.
        trust_remote_code: allow models whose repository contains Python code, and run it.
        options: options of `model.generate`, such as max_new_tokens=20 or do_sample=True, and of the method, such as
            causal="raw" (default "receptive_field"), head_fusion="max" or preset="paper".

    For encoder-decoder models, `layers` refers to the decoder, `start_layer` to the encoder.

    Raises:
        VitflowError: invalid model or option; the message names it and the remedy.
    """
    if video is not None:
        if image is not None or layout is not None or through_tower:
            raise OptionError("image, layout and through_tower are not supported with video: omit them.")
        image = Video.read(video, frames)
    elif frames is not None:
        raise OptionError("frames requires video.")
    if image is None and (through_tower or layout is not None):
        raise OptionError("through_tower and layout require image.")
    if image is not None and not (inputs is None or isinstance(inputs, str)):
        raise OptionError(f"With images or a video, the prompt is one text, got {type(inputs).__name__}.")
    of_method = {key: options[key] for key in options if any(row.accepts(key) for row in TEXT_METHODS.values())}
    generate = {key: value for key, value in options.items() if key not in of_method}
    definition, used = text_method(method or (PLAIN if image is None else IMAGE_DEFAULT), of_method)
    used = for_kind(used, decoder=True)
    if not isinstance(model, nn.Module):
        inputs = default_prompt(model) if inputs is None and image is not None else inputs
        name, model = name or (str(model) if bundled(model) != model else None), bundled(model)
        with hub_for(model):
            if image is not None and processor is None:
                processor = load_processor(model, trust_remote_code=trust_remote_code)
            model, default = load_language_model(model, trust_remote_code=trust_remote_code)
        tokenizer = default if tokenizer is None else tokenizer
    model = unwrap(model)
    languages.refuse_generation(model, generate)
    refuse_other_layers(model, definition.name)
    has_encoder = languages.has_encoder(model)
    if blank and (image is None or has_encoder):
        raise OptionError("blank requires an image in the prompt of a vision-language model.")
    layout = [layout] if isinstance(layout, ImageTokens) else layout
    request = _Request(
        model, inputs, image, tokenizer, processor, layout, through_tower, blank, definition, used, generate
    )
    started = time.perf_counter()
    generation = (_encoder_decoder if has_encoder else _decoder)(request)
    seconds = time.perf_counter() - started
    return replace(generation, model=model_id(model) if name is None else check_name(name), seconds=seconds)


@dataclass(frozen=True, slots=True)
class _Request:
    """Arguments of `explain_generation` for a loaded model; a video is an image, `options` are those of the method."""

    model: Any
    inputs: Any
    image: Any
    tokenizer: Any
    processor: Any
    layout: Layout
    through_tower: bool
    blank: bool
    method: Method
    options: dict[str, Any]
    generate: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Text:
    """A generated text: arguments of `generate`, ids of all tokens of the decoder, position of the first new one."""

    arguments: dict[str, Any]
    ids: list[int]
    start: int
    tokenizer: Any


def _decoder(request: _Request) -> Generation:
    """Explain the text of a decoder, whose prompt may contain images or a video."""
    model, images, without = request.model, None, list[dict[str, Any]]()
    languages.refuse_not_causal(model)
    if request.image is not None:
        inputs, processor, images = with_images(model, request.inputs, request.image, request.processor, request.layout)
        tokenizer = processor.tokenizer if request.tokenizer is None else request.tokenizer
        without = _without_images(replace(request, processor=processor), images) if request.blank else []
        request = replace(request, inputs=inputs, tokenizer=tokenizer)
    text = _generated(request)
    passed = _forward_inputs(model, text.arguments, text.ids[:-1])
    targets = list(enumerate(text.ids[text.start :], text.start - 1))
    readout = torch.eye(len(text.ids) - 1, device=device_of(model))[[position for position, _ in targets]]
    method, within = request.method, decoder_path(model)
    result = explain_rows(model, passed, readout, method, request.options, targets=targets, within=within)
    if images is not None and request.through_tower:
        prepared = {name: text.arguments[name] for name in request.inputs}
        with evaluating(model), languages.reading(model):
            tower = tower_rows(model, prepared, images.parts, residual=request.options.get("residual", 0.5))
        images = replace(images, tower=tower)
    probabilities = _probabilities(model, text, passed, without) if request.blank else None
    return _generation(request, text, result, images=images, probabilities=probabilities)


def _encoder_decoder(request: _Request) -> Generation:
    """Explain the text of a decoder that attends to an encoder of a text or an image."""
    check_known("method for encoders and decoders", request.method.name, ("rollout", "attention", "flow", "gae"))
    model, inputs, images = request.model, request.inputs, None
    if request.through_tower or isinstance(request.image, Video):
        raise OptionError(
            f"{type(model).__name__} has an encoder, through which maps always propagate: omit video and through_tower."
        )
    if request.image is not None and getattr(model, "main_input_name", "") == "pixel_values":
        if isinstance(inputs, str) and inputs:
            tokenizer = languages.part_of("tokenizer", model, request.tokenizer)
            begin = tokenizer(inputs, add_special_tokens=False, return_tensors="pt").input_ids
            request = replace(request, tokenizer=tokenizer, generate={**request.generate, "decoder_input_ids": begin})
        inputs, images = with_source(model, request.image, request.processor, request.layout)
    elif request.image is not None:
        inputs, _, images = with_images(model, inputs, request.image, request.processor, request.layout)
    text = _generated(replace(request, inputs=inputs))
    result = explain_encoder_decoder(model, text.arguments, text.ids, text.start, request.method, request.options)
    count = result.rows.shape[-1] - (len(text.ids) - 1)
    if images is not None:
        check_parts(images.parts, 1, count)
    source = source_words(text.arguments, text.tokenizer, count)
    return _generation(request, text, result, source=source, images=images)


def _generated(request: _Request) -> _Text:
    """Generate the text."""
    tokenizer = languages.part_of(
        "tokenizer", request.model, request.tokenizer, required=isinstance(request.inputs, str)
    )
    arguments = languages.generate_arguments(request.inputs, tokenizer, request.model, request.generate)
    with evaluating(request.model), torch.no_grad():
        ids, start = _generate(request.model, arguments)
    return _Text(arguments, ids, start, tokenizer)


def _generation(
    request: _Request, text: _Text, result: TextResult, source: Words | None = None, **fields: Any
) -> Generation:
    """Return the rows as a Generation; `source` has the tokens of an encoder."""
    words = words_of(text.tokenizer, text.ids)
    prompt, generated = words[: text.start], words[text.start :]
    prompt = prompt if source is None else source + prompt
    m, n = prompt.length, generated.length
    rows = array_of(result.rows.permute(1, 2, 0))  # [n, tokens, layers]
    return Generation(
        values=rows[:, :m],
        # The last generated token is not an input.
        among_generated=np.pad(rows[:, m:], ((0, 0), (0, n - (rows.shape[1] - m)), (0, 0))),
        prompt_tokens=prompt,
        generated_tokens=generated,
        model="",
        method=request.method.name,
        options=request.options,
        self_share=None if result.self_share is None else array_of(result.self_share.T),
        model_note=model_note(request.model),
        **fields,
    )


def _generate(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[list[int], int]:
    """Generate text: return all ids of the decoder, and how many of them it was given."""
    encoded = languages.has_encoder(model)
    given: list[int] = []

    def before(args: Any, kwargs: Any) -> None:
        text = reads_text((), {**kwargs, "input_ids": None}) if encoded else reads_text(args, kwargs)
        if text is not None and not given:
            given.append(text.shape[1])
        if not encoded and given and given[0] > arguments["input_ids"].shape[1]:
            raise UnsupportedModelError(
                f"{type(model).__name__} reads {given[0]} tokens, but the text has {arguments['input_ids'].shape[1]}: "
                "models that insert further tokens to predict the next one are not supported."
            )
        progress(1)

    steps = languages.generation_setting(model, arguments, "max_new_tokens")
    with tracking("generation", int(steps or 20)) as progress:  # 20 is transformers' default
        hook = Hook(model, before, before=True)
        try:
            with languages.reading(model, arguments.get("input_ids")):
                output = model.generate(**arguments)  # type: ignore[operator]
        finally:
            hook.remove()
    ids: list[list[int]] = (output if isinstance(output, Tensor) else output.sequences).tolist()
    return ids[0], given[0]


def _forward_inputs(model: nn.Module, arguments: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Tensor]:
    """Return the arguments of a forward pass over a text that begins with the prompt: also pixels and token types."""
    text = torch.tensor([ids], device=device_of(model))
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    prompt = arguments["input_ids"]
    token_type = 1 if getattr(getattr(model, "config", None), "model_type", "") == "paligemma" else 0  # of a suffix
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name not in ("input_ids", "attention_mask", "position_ids", "inputs_embeds"):
            if languages.is_per_token(value, prompt):
                value = nn.functional.pad(value, (0, len(ids) - prompt.shape[1]), value=token_type)
            inputs[name] = value
    return inputs


def _without_images(request: _Request, images: PromptImages) -> list[dict[str, Any]]:
    """Return the inputs with each image replaced by its mean colour, and if there are several with all replaced."""

    def plain(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.broadcast_to(image.mean(axis=(-3, -2), keepdims=True).round().astype(np.uint8), image.shape)

    if isinstance(request.image, Video):
        shown: list[Any] = [replace(request.image, frames=plain(request.image.frames))]
    else:
        count = len(images.images)
        chosen = [{index} for index in range(count)] + ([set(range(count))] if count > 1 else [])
        shown = [
            [plain(image) if index in blank else image for index, image in enumerate(images.images)] for blank in chosen
        ]
    return [with_images(request.model, request.inputs, each, request.processor, request.layout)[0] for each in shown]


def _probabilities(
    model: nn.Module, text: _Text, inputs: Mapping[str, Tensor], without: Sequence[Mapping[str, Any]]
) -> NDArray[np.float32]:
    """Return the probability of each generated token with these inputs, and with the pixels of each of `without`."""
    columns = []
    with evaluating(model), torch.no_grad(), languages.reading(model):
        for other in ({}, *without):
            pixels = {name: other[name].to(inputs[name]) for name in other if name.startswith("pixel_values")}
            shares = model(**{**inputs, **pixels}).logits[0, text.start - 1 :].float().softmax(dim=-1)
            tokens = torch.tensor(text.ids[text.start :], device=shares.device)
            columns.append(shares.gather(1, tokens.unsqueeze(1)))
    return array_of(torch.cat(columns, dim=1))
