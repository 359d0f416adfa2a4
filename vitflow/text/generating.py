"""Generation with attribution: generate text, and explain each generated token with any method for texts."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import OptionError
from vitflow.explaining.clips import ClipSource
from vitflow.explaining.method_table import Method
from vitflow.models.hub import bundled
from vitflow.models.names import check_name, model_id, model_note
from vitflow.models.parts import decoder_path, unwrap
from vitflow.recording.attention_kinds import refuse_other_layers
from vitflow.recording.isolation import device_of, evaluating
from vitflow.text import languages
from vitflow.text.encoder_decoder import ExplainedText, explain_pairs
from vitflow.text.generate_calls import (
    arguments_of,
    extra_inputs,
    generate_tokens,
    refuse_not_causal,
    split,
)
from vitflow.text.generation import Generation
from vitflow.text.image_tokens import tower_rows
from vitflow.text.images import Layout, Video, with_images, with_source
from vitflow.text.languages import default_prompt, hub_for, load_language_model, load_processor
from vitflow.text.method_table import IMAGE_DEFAULT, PLAIN, TEXT_METHODS, for_kind, text_method
from vitflow.text.methods import check_options
from vitflow.text.prompt_images import with_neutral
from vitflow.text.rows import RowsRead, array_of, read_rows
from vitflow.text.words import Words


def explain_generation(
    model: str | Path | nn.Module,
    inputs: Any = None,
    *,
    image: Any = None,
    video: ClipSource | None = None,
    frames: int | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    method: str | None = None,
    layout: Layout = None,
    neutral: Any = None,
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
        inputs: the prompt as text, tokenizer output (input_ids, attention_mask) or ids [batch, tokens]; with images,
            text (by default "Describe the image.") or processor output. For an image encoder, text that the decoder
            continues, by default none, or processor output (pixel_values).
        image: one or several images of the prompt, as paths, bytes, PIL images or arrays; exactly one for an image
            encoder.
        video: the video of the prompt: a file, or frames as a list of images or an array [frames, height, width, 3],
            2 per second; for other rates, pass processor output, too.
        frames: the number of frames of a video file, evenly spaced; by default 8.
        tokenizer: tokenizer; by default the one saved with the model. Without a tokenizer, tokens are shown as ids.
        processor: image processor; by default the one saved with the model.
        method: "rollout", "attention", "flow", "gae" or "logit_lens". By default "rollout"; with images or a video
            "gae", whose maps match the named objects best and which requires a backward pass per token.
        layout: positions of the patch tokens in the prompt, for unknown model families.
        neutral: another prompt for the same images, such as "Describe the image.", required by `image(relative=True)`.
        through_tower: record the vision tower, too, to propagate maps to its patches; not for a video.
        blank: also compute the probability of each token with the image replaced by its mean colour; not for models
            with an image encoder and cross-attention.
        name: display name of the model; by default its id.
        trust_remote_code: allow models whose repository contains Python code, and run it.
        options: options of `model.generate`, such as max_new_tokens=20 or do_sample=True, and of the method, such as
            causal="raw" (default "receptive_field"), head_fusion="max" or preset="paper".

    Encoder and decoder form one graph. Rollout propagates from a generated token down through the layers of the
    decoder, each with two steps, self-attention and cross-attention, both with a residual connection, and through the
    encoder: the share of the source is the sum over layers of decoder rollout above · cross-attention · encoder
    rollout. Flow uses the same graph, raw attention the cross-attention only, and "gae" the rules of Chefer et al.,
    ICCV 2021. `layers` refers to the decoder, `start_layer` to the encoder.

    Raises:
        VitflowError: invalid model or option; the message names it and the remedy.
    """
    given = {name: options[name] for name in options if any(row.accepts(name) for row in TEXT_METHODS.values())}
    generate = {name: value for name, value in options.items() if name not in given}
    if video is not None:
        if image is not None or layout is not None or through_tower:
            raise OptionError("image, layout and through_tower are not supported with video: omit them.")
        image = Video.read(video, frames)
    elif frames is not None:
        raise OptionError("frames requires video.")
    method = (PLAIN if image is None else IMAGE_DEFAULT) if method is None else method
    definition, used = text_method(method, given)
    used = for_kind(used, decoder=True)
    check_options(used)
    if isinstance(model, nn.Module):
        model = unwrap(model)
    else:
        if inputs is None and image is not None:
            inputs = default_prompt(model)
        name, model = name or (str(model) if bundled(model) != model else None), bundled(model)
        with hub_for(model):
            if image is not None and processor is None:
                processor = load_processor(model, trust_remote_code=trust_remote_code)
            model, default = load_language_model(model, trust_remote_code=trust_remote_code)
        tokenizer = default if tokenizer is None else tokenizer
    languages.refuse_generation(model, generate)
    if not languages.has_encoder(model):
        refuse_not_causal(model)
    images = None
    if image is not None and languages.has_encoder(model) and getattr(model, "main_input_name", "") == "pixel_values":
        if video is not None or neutral is not None or through_tower:
            raise OptionError(
                f"{type(model).__name__} reads one image without a prompt, and maps always propagate through its "
                "encoder: omit video, neutral and through_tower."
            )
        if isinstance(inputs, str) and inputs:
            tokenizer = languages.tokenizer_of(model, tokenizer)
            generate["decoder_input_ids"] = tokenizer(inputs, add_special_tokens=False, return_tensors="pt").input_ids
        inputs, images = with_source(model, inputs, image, processor, layout)
    elif image is not None:
        inputs, processor, images = with_images(model, inputs, image, processor, layout)
        tokenizer = processor.tokenizer if tokenizer is None else tokenizer
    elif neutral is not None or through_tower or layout is not None:
        raise OptionError("neutral, through_tower and layout require image.")
    if blank and (images is None or languages.has_encoder(model)):
        raise OptionError("blank requires an image in the prompt of a vision-language model.")
    arguments, tokenizer = arguments_of(inputs, tokenizer, model, generate)
    started = time.perf_counter()
    prompts, generated, rows, self_shares = _explained(model, arguments, tokenizer, definition, used)
    if images is not None and neutral is not None:
        neutral_inputs, _, neutral_images = with_images(model, neutral, image, processor, layout)
        neutral_rows = _neutral_rows(model, neutral_inputs, processor, definition, used)
        images = with_neutral(images, neutral_images, neutral_rows)
    if images is not None and through_tower:
        with evaluating(model), languages.reading(model):
            prepared = {name: arguments[name] for name in inputs}
            tower = tower_rows(model, prepared, images.parts, residual=used.get("residual", 0.5))
        images = replace(images, tower=tower)
    probabilities = _with_and_without_image(model, arguments, prompts[0], generated[0]) if blank else None
    values = array_of(rows.permute(0, 2, 3, 1))  # [batch, rows, tokens, layers]
    n = values.shape[1]
    start = values.shape[2] - n + 1  # the last generated token is not an input
    among_generated = np.zeros((len(values), n, n, values.shape[-1]), np.float32)
    among_generated[:, :, : n - 1] = values[:, :, start:]
    generation = Generation(
        values=values[:, :, :start],
        among_generated=among_generated,
        prompt_tokens=tuple(prompts),
        generated_tokens=tuple(generated),
        model=model_id(model) if name is None else check_name(name),
        method=method,
        options=used,
        self_share=None if self_shares is None else array_of(self_shares.permute(0, 2, 1)),
        seconds=time.perf_counter() - started,
        images=images,
        probabilities=probabilities,
        model_note=model_note(model),
    )
    return generation[0] if len(generation) == 1 else generation


def _explained(
    model: nn.Module, arguments: Mapping[str, Any], tokenizer: Any, method: Method, options: dict[str, Any]
) -> tuple[list[Words], list[Words], Tensor, Tensor | None]:
    """Generate text: return prompts, generated tokens, rows [batch, layers, rows, tokens] and self-shares."""
    refuse_other_layers(model, method.name)
    with evaluating(model), torch.no_grad():
        if languages.has_encoder(model):
            return _stacked(explain_pairs(model, arguments, tokenizer, method, options))
        prompts, generated = split(generate_tokens(model, arguments), arguments, tokenizer, model)
    return _stacked(_teacher_forced(model, arguments, prompts, generated, method, options))


def _with_and_without_image(
    model: nn.Module, arguments: Mapping[str, Any], prompt: Words, generated: Words
) -> NDArray[np.float32]:
    """Return the probability of each generated token, with the image and with its mean colour instead, [n, 2]."""
    ids = torch.tensor([(prompt + generated).ids[:-1]], device=device_of(model))
    inputs = extra_inputs(model, arguments, 0, prompt.length, generated.length - 1)
    blank = dict(inputs)
    for name, value in inputs.items():
        if value.is_floating_point() and name.startswith("pixel_values"):
            # of an image [..., height, width], or of its patches [patches, pixels]
            blank[name] = value.mean(dim=(-2, -1) if value.ndim > 2 else 0, keepdim=True).expand_as(value)
    columns = []
    with evaluating(model), torch.no_grad(), languages.reading(model):
        for given in (inputs, blank):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0, prompt.length - 1 :]
            shares = logits.float().softmax(dim=-1)
            columns.append(shares.gather(1, torch.tensor(generated.ids, device=shares.device).unsqueeze(1)))
    return array_of(torch.cat(columns, dim=1))


def _neutral_rows(
    model: nn.Module, inputs: Mapping[str, Any], processor: Any, method: Method, options: dict[str, Any]
) -> NDArray[np.float32]:
    """Return the row of the last token of a prompt, up to each layer: [tokens, layers]."""
    arguments, _ = arguments_of(inputs, processor.tokenizer, model, {})
    ids = arguments["input_ids"][:, arguments["attention_mask"][0].bool()]
    length = ids.shape[1]
    return array_of(_rows_at(model, arguments, 0, ids, length, [(length - 1, None)], method, options).rows[:, 0].T)


def _teacher_forced(
    model: nn.Module,
    arguments: Mapping[str, Any],
    prompts: Sequence[Words],
    generated: Sequence[Words],
    method: Method,
    options: dict[str, Any],
) -> Iterator[ExplainedText]:
    """Compute the rows of a method in one pass over each generated text."""
    for index, (prompt, new) in enumerate(zip(prompts, generated, strict=True)):
        source = index * len(arguments["input_ids"]) // len(prompts)  # num_return_sequences may be above 1
        ids = torch.tensor([(prompt + new).ids[:-1]], device=device_of(model))
        targets = list(enumerate(new.ids, start=prompt.length - 1))
        result = _rows_at(model, arguments, source, ids, prompt.length, targets, method, options)
        yield ExplainedText(prompt, new, result.rows, result.self_share)


def _rows_at(
    model: nn.Module,
    arguments: Mapping[str, Any],
    prompt: int,
    ids: Tensor,
    length: int,
    targets: Sequence[tuple[int, int | None]],
    method: Method,
    options: dict[str, Any],
) -> RowsRead:
    """Compute the rows of a method for targets in a text [1, tokens], whose prompt (an index) has `length` tokens."""
    readout = torch.eye(ids.shape[1], device=ids.device)[[position for position, _ in targets]]
    extra = extra_inputs(model, arguments, prompt, length, ids.shape[1] - length)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **extra}
    within = decoder_path(model)
    return read_rows(model, inputs, readout, method, options, targets=targets, within=within)


def _stacked(texts: Iterable[ExplainedText]) -> tuple[list[Words], list[Words], Tensor, Tensor | None]:
    """Stack rows and self-shares, with prompts padded on the left."""
    texts = list(texts)
    prompts, generated = [text.prompt for text in texts], [text.generated for text in texts]
    start, n = (max(words.length for words in batch) for batch in (prompts, generated))
    rows, shares = [], []
    for text in texts:
        left, below = start - text.prompt.length, n - text.generated.length
        rows.append(torch.nn.functional.pad(text.rows.float(), (left, below, 0, below)))
        shares.append(None if text.self_share is None else torch.nn.functional.pad(text.self_share.float(), (0, below)))
    self_shares = [share for share in shares if share is not None]
    return prompts, generated, torch.stack(rows), torch.stack(self_shares) if self_shares else None
