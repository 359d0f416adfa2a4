"""Let a model write, by any method: what each token that it writes rests on."""

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
from vitflow.explaining.method import Method
from vitflow.models import languages
from vitflow.models.anatomy import unwrap
from vitflow.models.facts import check_name, model_id, model_note
from vitflow.models.hub import bundled, default_prompt, hub_for
from vitflow.models.languages import load_language_model, load_processor
from vitflow.recording.isolation import device_of, evaluating
from vitflow.text.encoder_decoder import Written, write_and_read
from vitflow.text.generation import Generation
from vitflow.text.image_tokens import refuse_videos, tower_rows
from vitflow.text.images import Layout, with_images, with_neutral, with_source
from vitflow.text.layout import Words
from vitflow.text.method_table import IMAGE_DEFAULT, PLAIN, TEXT_METHODS, for_kind, text_method
from vitflow.text.read_rows import RowsRead, array_of, read_rows
from vitflow.text.writing import arguments_of, extra_inputs, follow, refuse_looking_ahead, split, write


def explain_generation(
    model: str | Path | nn.Module,
    inputs: Any = None,
    *,
    image: Any = None,
    tokenizer: Any = None,
    processor: Any = None,
    method: str | None = None,
    layout: Layout = None,
    neutral: Any = None,
    through_tower: bool = False,
    name: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Generation:
    """Let a model write, and tell what each token that it writes rests on.

    Args:
        model: a causal language model of `transformers`, one that sees as well, or one with an encoder and a decoder
            (T5, BART, VisionEncoderDecoder); its id or folder.
        inputs: the prompt, as the tokenizer makes it (input_ids, attention_mask), ids [batch, tokens], or a text; with
            images, a text (by default "Describe the image.") or what the processor makes of it with them. Beside an
            encoder that sees, what the decoder begins with, by default nothing; or what the processor makes of the
            image (pixel_values).
        image: an image of the prompt, or several, as paths, bytes, PIL images or arrays; for an encoder one.
        tokenizer: its tokenizer; by default the one saved beside it. Without one, tokens are told by their numbers.
        processor: what prepares images for the model; by default the one saved beside it.
        method: "rollout", "attention", "flow", "gae" or "logit_lens"; by default "gae" with `image`, whose maps lie
            best on what a word names and which takes a backward pass for each token, and "rollout" without.
        layout: where the patches of the images stand in the prompt, for a family of models that is not known.
        neutral: another prompt for the same images, such as "Describe the image.": what `image(relative=True)`
            compares with.
        through_tower: also record the vision tower, so that maps can be carried on to its own patches.
        name: what to call the model; by default the id that it was loaded by.
        trust_remote_code: run Python code that a model by name brings along; without it such a model is refused.
        options: as `model.generate` takes them, such as max_new_tokens=20 or do_sample=True; and the method's own, such
            as causal="raw" (by default "receptive_field"), head_fusion="max", or preset="paper".

    An encoder and a decoder are one graph. Rollout goes from a written token down through each layer of the decoder,
    where its attention among the decoder's tokens and then that to the source is each a step with a residual connection
    of its own, and on through the encoder: the share of the source is the sum over layers of decoder rollout above ·
    cross-attention · encoder rollout. Flow is that of the same graph, raw attention the cross-attention alone, and
    "gae" the rules of Chefer et al., ICCV 2021. `layers` are those of the decoder, `start_layer` one of the encoder.

    Raises:
        VitflowError: the model or an option is wrong; the message says which and what to do.
    """
    asked = {name: options[name] for name in options if any(one.accepts(name) for one in TEXT_METHODS.values())}
    generate = {name: value for name, value in options.items() if name not in asked}
    method = (PLAIN if image is None else IMAGE_DEFAULT) if method is None else method
    chosen, used = text_method(method, asked)
    used = for_kind(used, decoder=True)
    if isinstance(model, nn.Module):
        model = unwrap(model)
    else:
        if inputs is None and image is not None:
            inputs = default_prompt(model)
        name, model = name or (str(model) if bundled(model) != model else None), bundled(model)
        with hub_for(model):
            if image is not None and processor is None:
                processor = load_processor(model, trust_remote_code=trust_remote_code)
            model, own_tokenizer = load_language_model(model, trust_remote_code=trust_remote_code)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    languages.refuse_generation(model, generate)
    if not languages.has_encoder(model):
        refuse_looking_ahead(model)
    images = None
    if image is not None and languages.has_encoder(model) and getattr(model, "main_input_name", "") == "pixel_values":
        if neutral is not None or through_tower:
            raise OptionError(
                f"{type(model).__name__} reads no prompt beside the image, and what its words rest on goes down "
                "through its encoder already: leave out neutral and through_tower."
            )
        if isinstance(inputs, str) and inputs:
            tokenizer = languages.tokenizer_of(model, tokenizer)
            generate["decoder_input_ids"] = tokenizer(inputs, add_special_tokens=False, return_tensors="pt").input_ids
        inputs, images = with_source(model, inputs, image, processor, layout)
    elif image is not None:
        inputs, processor, images = with_images(model, inputs, image, processor, layout)
        tokenizer = processor.tokenizer if tokenizer is None else tokenizer
    elif neutral is not None or through_tower or layout is not None:
        raise OptionError("Expected image= beside neutral, through_tower and layout, got none.")
    elif isinstance(inputs, Mapping) and isinstance(inputs.get("input_ids"), Tensor):
        refuse_videos(getattr(model, "config", None), inputs)
    arguments, tokenizer = arguments_of(inputs, tokenizer, model, generate)
    started = time.perf_counter()
    with evaluating(model), torch.no_grad():
        if languages.has_encoder(model):
            prompts, written, rows, own = _joined(write_and_read(model, arguments, tokenizer, chosen, used))
        elif method == "rollout":
            sequences, rows, own = follow(model, arguments, used)
            prompts, written = split(sequences, arguments, tokenizer, model)
        else:
            prompts, written = split(write(model, arguments), arguments, tokenizer, model)
    if method != "rollout" and not languages.has_encoder(model):
        prompts, written, rows, own = _joined(_taught(model, arguments, prompts, written, chosen, used))
    if images is not None and neutral is not None:
        again, _, others = with_images(model, neutral, image, processor, layout)
        images = with_neutral(images, others, _neutral_rows(model, again, processor, chosen, used))
    if images is not None and through_tower:
        with evaluating(model), languages.reading(model):
            given = {name: arguments[name] for name in inputs}
            tower = tower_rows(model, given, images.parts, residual=used.get("residual", 0.5))
        images = replace(images, tower=tower)
    values = array_of(rows.permute(0, 2, 3, 1))  # [batch, rows, tokens, layers]
    n = values.shape[1]
    start = values.shape[2] - n + 1  # the last token is written, and never read
    beside = np.zeros((len(values), n, n, values.shape[-1]), np.float32)
    beside[:, :, : n - 1] = values[:, :, start:]
    found = Generation(
        values=values[:, :, :start],
        among_generated=beside,
        prompt_tokens=tuple(prompts),
        generated_tokens=tuple(written),
        model=model_id(model) if name is None else check_name(name),
        method=method,
        options=used,
        self_share=None if own is None else array_of(own.permute(0, 2, 1)),
        seconds=time.perf_counter() - started,
        images=images,
        model_note=model_note(model),
    )
    return found[0] if len(found) == 1 else found


def _neutral_rows(
    model: nn.Module, inputs: Mapping[str, Any], processor: Any, method: Method, options: dict[str, Any]
) -> NDArray[np.float32]:
    """The row of a method at the end of a prompt, up to each layer: [tokens, layers]."""
    given, _ = arguments_of(inputs, processor.tokenizer, model, {})
    ids = given["input_ids"][:, given["attention_mask"][0].bool()]
    length = ids.shape[1]
    return array_of(_rows_at(model, given, ids, length, [(length - 1, None)], method, options).rows[:, 0].T)


def _taught(
    model: nn.Module,
    arguments: Mapping[str, Any],
    prompts: Sequence[Words],
    written: Sequence[Words],
    method: Method,
    options: dict[str, Any],
) -> Iterator[Written]:
    """Rows of a method by one pass over each finished text."""
    for prompt, new in zip(prompts, written, strict=True):
        ids = torch.tensor([(prompt + new).ids[:-1]], device=device_of(model))
        targets = list(enumerate(new.ids, start=prompt.length - 1))
        read = _rows_at(model, arguments, ids, prompt.length, targets, method, options)
        yield Written(prompt, new, read.rows, read.self_share)


def _rows_at(
    model: nn.Module,
    arguments: Mapping[str, Any],
    ids: Tensor,
    length: int,
    targets: Sequence[tuple[int, int | None]],
    method: Method,
    options: dict[str, Any],
) -> RowsRead:
    """Rows of a method at some targets, in one pass over a text [1, tokens] whose prompt has so many."""
    readout = torch.eye(ids.shape[1], device=ids.device)[[place for place, _ in targets]]
    beside = extra_inputs(model, arguments, length, ids.shape[1] - length)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **beside}
    within = languages.decoder_path(model)
    return read_rows(model, inputs, readout, method, options, targets=targets, within=within)


def _joined(texts: Iterable[Written]) -> tuple[list[Words], list[Words], Tensor, Tensor | None]:
    """Prompts, what was written, rows and own shares as `follow` gives those of rollout: padded on the left."""
    texts = list(texts)
    prompts, written = [text.prompt for text in texts], [text.generated for text in texts]
    start, n = (max(words.length for words in these) for these in (prompts, written))
    rows, shares = [], []
    for text in texts:
        left, below = start - text.prompt.length, n - text.generated.length
        rows.append(torch.nn.functional.pad(text.rows.float(), (left, below, 0, below)))
        shares.append(None if text.self_share is None else torch.nn.functional.pad(text.self_share.float(), (0, below)))
    told = [one for one in shares if one is not None]
    return prompts, written, torch.stack(rows), torch.stack(told) if told else None
