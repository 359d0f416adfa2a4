"""Resumable captioning of folders of images, with a map for each word."""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from torch import nn

from vitflow.errors import ModelError, OptionError, UnsupportedModelError, whole_number
from vitflow.explaining.option_types import TextOptions
from vitflow.explaining.strips import draw_words
from vitflow.folder.decoders import DecoderPool
from vitflow.folder.pipeline import Pipeline
from vitflow.folder.plan import Input, list_inputs
from vitflow.folder.run import FolderSummary, run_folder
from vitflow.folder.work import InputImage, encode_maps
from vitflow.images.figures import figure_bytes
from vitflow.images.reading import MAX_PIXELS
from vitflow.models.checkpoints import weights_sha256
from vitflow.models.hub import bundled
from vitflow.models.names import check_name, model_id
from vitflow.runs.batches import Batches, RunProgress, Tally
from vitflow.runs.columns import Maps, Row, failed_row, write_manifest
from vitflow.runs.store import Run
from vitflow.text.generating import explain_generation
from vitflow.text.generation import Generation
from vitflow.text.languages import called, default_prompt, hub_for, load_language_model, load_processor
from vitflow.text.method_table import IMAGE_DEFAULT, for_kind, text_method

_STRIP, _MAPS = "-caption.png", "-caption.npz"
_Described = tuple[Row, Maps, dict[str, bytes]]


def caption_folder(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    model: str | Path | nn.Module,
    prompt: str | None = None,
    processor: Any = None,
    method: str = IMAGE_DEFAULT,
    name: str | None = None,
    recursive: bool = False,
    glob: str | None = None,
    limit: int | None = None,
    overwrite: bool = False,
    save_map: bool = False,
    max_new_tokens: int = 30,
    max_pixels: int = MAX_PIXELS,
    trust_remote_code: bool = False,
    progress: Callable[[RunProgress], None] | None = None,
    command: Sequence[str] | None = None,
    **options: Unpack[TextOptions],
) -> FolderSummary:
    """Caption every image of a folder, with a map for each content word.

    A strip of these maps is written to `name-caption.png` in the folder structure of the inputs; `manifest.jsonl` has
    a row for each image with its caption and, for each word, the shares of its map on the image. Another call with the
    same options resumes and updates changed images. An image that cannot be read or captioned gets a row with an
    error, and the run continues. Images are processed one by one.

    Args:
        source, output: as for `explain_folder`.
        model: a vision-language model; its id, its folder, or "demo-caption".
        prompt: the prompt; by default that of `explain_generation`.
        processor: prepares the images; by default the processor saved with the model, if it is given by name.
        method: method for texts, as for `explain_generation`.
        name: display name of the model.
        recursive, glob, limit, overwrite, max_pixels, progress, command: as for `explain_folder`.
        save_map: also write the unscaled maps as `name-caption.npz`: `words` [n], `maps` [n, rows, cols], `metadata`.
        max_new_tokens: maximal number of generated tokens.
        trust_remote_code: run Python code from the repository of a model given by name.
        options: options of the method.

    Raises:
        OptionError: an option is invalid, or the folder has a run with other options and overwrite is False.
        ImageError: a source does not exist.
        ModelError: the model cannot be loaded.

    >>> import tempfile
    >>> from vitflow.demo import SAMPLE_FOLDER
    >>> summary = caption_folder(SAMPLE_FOLDER, tempfile.mkdtemp(), model="demo-caption", limit=1)
    >>> [row["caption"] for row in summary]
    ['a yellow star right of a pink crescent and an orange disc']
    """
    used = for_kind(text_method(method, options)[1], decoder=True)
    whole_number("max_new_tokens", max_new_tokens, 1)
    selection: dict[str, Any] = {"recursive": recursive, "glob": glob, "limit": limit}
    listing = list_inputs(source, output, **selection)
    if not isinstance(model, nn.Module):
        name, prompt = name or called(model), default_prompt(model) if prompt is None else prompt
        with hub_for(bundled(model)):
            loading = {"trust_remote_code": trust_remote_code}
            processor = load_processor(bundled(model), **loading) if processor is None else processor
            model, _ = load_language_model(bundled(model), **loading)
    name = model_id(model) if name is None else check_name(name)
    arguments: dict[str, Any] = {
        "method": method,
        "name": name,
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        **options,
    }
    common = {
        "model": name,
        "weights_sha256": weights_sha256(model),
        "prompt": prompt,
        "methods": {method: method},
        "options": {method: {**used, "max_new_tokens": max_new_tokens}},
    }
    common = json.loads(json.dumps(common, default=str))
    fingerprint = {"kind": "captions", "root": listing.root, **common, "save_map": save_map}
    worked: list[str] = []

    def describe(image: InputImage) -> _Described:
        decoded = image.decoded
        if decoded.image is None:
            return failed_row(image.known, decoded.error or "", decoded.message or ""), {}, {}
        begun = time.perf_counter()
        try:
            generation = explain_generation(model, prompt, image=decoded.image, processor=processor, **arguments)
            row, files = _row_and_files(generation, image, save_map)
        except Exception as error:  # an error on one image must not stop the run
            if not worked and isinstance(error, OptionError | ModelError | UnsupportedModelError):
                raise  # applies to every image
            return failed_row(image.known, error), {}, {}
        worked.append(image.item.key)
        height, width = decoded.image.shape[:2]
        seconds = round(time.perf_counter() - begun, 4)
        row = image.known | row | {"status": "explained", "width": width, "height": height, "seconds": seconds}
        return row, {}, files

    def compute(_: Batches, images: list[InputImage]) -> list[_Described]:
        return [describe(image) for image in images]

    def explain(run: Run, inputs: list[Input], missing: set[str], tally: Tally) -> None:
        with DecoderPool(1, max_pixels=max_pixels) as decoders:
            # Strips are drawn in this thread, since matplotlib is not thread-safe. Rows are written without delay.
            pipeline = Pipeline(compute, lambda _, row: row, run, tally, decoders, batch_size=1, behind=0)
            pipeline.run(inputs, missing)

    def write(run: Run) -> tuple[Path, None]:
        path = run.folder / "manifest.jsonl"
        write_manifest(path, ((row, {}) for row in run.rows()), common, where="captions")
        return path, None

    return run_folder(
        listing,
        fingerprint,
        [_STRIP, _MAPS],
        explain,
        write,
        overwrite=overwrite,
        progress=progress,
        command=command,
        **selection,
    )


def _row_and_files(
    generation: Generation, image: InputImage, save_map: bool
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the columns of a caption, and its files by path relative to the output folder."""
    words, left_out = generation.words()
    maps = {word: replace(generation.image(places), source=image.item.key) for word, places in words.items()}
    files: dict[str, bytes] = {}
    if maps:
        files[f"{image.item.stem}{_STRIP}"] = figure_bytes(draw_words(list(maps.values()), left_out=left_out), ".png")
    if maps and save_map:
        metadata = {name: value for name, value in next(iter(maps.values())).to_dict().items() if name != "facts"}
        grids = np.stack([saliency.grid for saliency in maps.values()])
        files[f"{image.item.stem}{_MAPS}"] = encode_maps(metadata, words=np.array(list(maps)), maps=grids)
    shares = ("on_image", "on_edges", "on_first_patch")
    row = {
        "caption": generation.answer,
        "words": [
            {"word": word, **{name: round(float(saliency.facts[name]), 6) for name in shares}}
            for word, saliency in maps.items()
        ],
        "left_out": left_out,
        "outputs": {path.rpartition(".")[2]: path for path in files},
        "written": {path: len(content) for path, content in files.items()},
    }
    return row, files
