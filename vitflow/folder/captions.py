"""Resumable captioning of folders of images, with a map for each word."""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from vitflow.analysis.strips import draw_words
from vitflow.errors import ModelError, OptionError, UnsupportedModelError, whole_number
from vitflow.files import write_inside
from vitflow.folder.batches import RunProgress, Tally
from vitflow.folder.columns import Grid, Row, failed_row
from vitflow.folder.decoders import DecoderPool
from vitflow.folder.plan import Input, list_inputs
from vitflow.folder.run import FolderSummary, run_folder
from vitflow.folder.store import Run
from vitflow.images.figures import figure_bytes
from vitflow.images.reading import MAX_PIXELS
from vitflow.models.checkpoints import weights_sha256
from vitflow.models.hub import bundled
from vitflow.models.names import check_name, model_id
from vitflow.registry.option_types import TextOptions
from vitflow.text.generating import explain_generation
from vitflow.text.generation import Generation
from vitflow.text.languages import called, default_prompt, hub_for, load_language_model, load_processor
from vitflow.text.method_table import IMAGE_DEFAULT, for_kind, text_method

_STRIP = "-caption.png"


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
    max_new_tokens: int = 30,
    max_pixels: int = MAX_PIXELS,
    trust_remote_code: bool = False,
    progress: Callable[[RunProgress], None] | None = None,
    command: Sequence[str] | None = None,
    **options: Unpack[TextOptions],
) -> FolderSummary:
    """Caption every image of a folder, with a map for each content word.

    A strip of these maps is written to `name-caption.png` in the folder structure of the inputs; `manifest.jsonl` has
    a row for each image with its caption and, for each word, the shares of its map on the image. `read_grids` reads
    the maps by word. Another call with the
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
    limits = {"max_new_tokens": max_new_tokens}
    arguments: dict[str, Any] = {"method": method, "name": name, "do_sample": False, **limits, **options}
    common = {
        "model": name,
        "weights_sha256": weights_sha256(model),
        "prompt": prompt,
        "methods": {method: method},
        "options": {method: {**used, **limits}},
    }
    common = json.loads(json.dumps(common, default=str))
    fingerprint = {"kind": "captions", "root": listing.root, **common}

    def explain(run: Run, inputs: list[Input], missing: set[str], tally: Tally) -> None:
        captioned = 0
        with DecoderPool(1, max_pixels=max_pixels) as decoders:
            for item in (item for item in inputs if item.key in missing):
                decoded, begun = decoders.submit(item.path).result().named(item.known), time.perf_counter()
                row, grids = decoded.row, dict[str, Grid]()
                try:
                    if decoded.image is not None:
                        generation = explain_generation(
                            model, prompt, image=decoded.image, processor=processor, **arguments
                        )
                        columns, grids = _describe(generation, item, run.folder)
                        height, width = decoded.image.shape[:2]
                        seconds = round(time.perf_counter() - begun, 4)
                        row |= {"status": "explained", "width": width, "height": height, "seconds": seconds} | columns
                        captioned += 1
                except Exception as error:  # an error on one image must not stop the run
                    if not captioned and isinstance(error, OptionError | ModelError | UnsupportedModelError):
                        raise  # applies to every image
                    row = failed_row(row, error)
                run.put([(row, grids)])
                tally.row(row)

    return run_folder(
        listing,
        fingerprint,
        [_STRIP],
        explain,
        common,
        overwrite=overwrite,
        progress=progress,
        command=command,
        **selection,
    )


def _describe(generation: Generation, item: Input, output: Path) -> tuple[Row, dict[str, Grid]]:
    """Write the strip of a caption, and return its columns and its maps by word."""
    words, left_out = generation.words()
    maps = {word: replace(generation.image(places), source=item.key) for word, places in words.items()}
    row: Row = {"outputs": {}, "written": {}, "placement": None}
    if maps:
        path, strip = f"{item.stem}{_STRIP}", figure_bytes(draw_words(list(maps.values()), left_out=left_out), ".png")
        write_inside(output, path, strip)
        row = {"outputs": {"png": path}, "written": {path: len(strip)}}
        row["placement"] = next(iter(maps.values())).placement.to_dict()
    shares = ("on_image", "on_edges", "on_first_patch")
    row |= {
        "caption": generation.answer,
        "words": [
            {"word": word, **{name: round(float(saliency.facts[name]), 6) for name in shares}}
            for word, saliency in maps.items()
        ],
        "left_out": left_out,
    }
    return row, {word: saliency.grid for word, saliency in maps.items()}
