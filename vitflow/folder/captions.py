"""What a model writes about every picture of a folder, with a map for each word; resumable as other runs are."""

import io
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from vitflow.errors import ModelError, OptionError, UnsupportedModelError
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.strips import draw_words
from vitflow.files import is_remote, write_atomically, write_inside
from vitflow.folder.decoders import Decoded, DecoderPool
from vitflow.folder.plan import Input, clear_outputs, done_before, list_inputs
from vitflow.folder.run import FolderSummary
from vitflow.folder.work import Picture
from vitflow.models.checkpoints import weights_sha256
from vitflow.models.facts import check_name, model_id
from vitflow.models.hub import bundled, called, hub_for, own_prompt
from vitflow.models.languages import load_language_model, load_processor
from vitflow.pictures.figures import figure_bytes
from vitflow.pictures.images import MAX_PIXELS
from vitflow.runs.batches import RunProgress, Tally
from vitflow.runs.columns import failed_row, json_line
from vitflow.runs.store import Run, finishing
from vitflow.text.generating import explain_generation
from vitflow.text.generation import Generation
from vitflow.text.method_table import PICTURED, for_kind, text_method

_STRIP, _MAPS = "-caption.png", "-caption.npz"
# What a row says in the manifest, before what is the same in all of them.
_TOLD = (
    *("input", "status", "error", "message", "caption", "words", "left_out", "outputs"),
    *("size", "mtime_ns", "sha256", "width", "height", "seconds"),
)


def caption_folder(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    model: str | Path | nn.Module,
    prompt: str | None = None,
    processor: Any = None,
    method: str = PICTURED,
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
    **options: Any,
) -> FolderSummary:
    """Let a model write about every picture of a folder, with a map for each word that says something.

    A strip of these maps goes to `name-caption.png` in the tree of the inputs, and `manifest.jsonl` beside them has a
    row for each picture: what was written, and of each word how much of it rests on the picture. The same call goes on
    where a run was ended, and does what is missing or changed. A picture that cannot be read or described is a row with
    an error, and the others go on. One picture is done after the other.

    Args:
        source: a folder, a picture, a pattern, or several of them, on this machine.
        output: folder for the results, on this machine.
        model: sees and writes; its id, its folder, or "demo-caption".
        prompt: what to ask; by default as `explain_generation` asks.
        processor: prepares the pictures; by default the one saved beside the model, by name.
        method: of texts, as for `explain_generation`.
        name: what to call the model.
        recursive, glob, limit, overwrite, max_pixels, progress, command: as for `explain_folder`.
        save_map: write the unscaled maps as `name-caption.npz`, too: `words` [n], `maps` [n, rows, cols], `metadata`.
        max_new_tokens: tokens to write at most.
        trust_remote_code: run Python code that a model by name brings along.
        options: of the method.

    Raises:
        OptionError: an option is wrong, or the folder holds a run with other options and overwrite is False.
        ImageError: there is nothing at a source.
        ModelError: the model cannot be loaded.

    >>> import tempfile
    >>> from vitflow.demo import SAMPLE_FOLDER
    >>> summary = caption_folder(SAMPLE_FOLDER, tempfile.mkdtemp(), model="demo-caption", limit=1)
    >>> [row["caption"] for row in summary]
    ['a yellow star right of a pink crescent and an orange disc']
    """
    started, clock = datetime.now(UTC), time.perf_counter()
    used = for_kind(text_method(method, options)[1], decoder=True)
    for words, value in (("limit", limit), ("max_new_tokens", max_new_tokens)):
        if value is not None and value < 1:
            raise OptionError(f"Expected {words} of at least 1, got {value}.")
    sources = [source] if isinstance(source, str | os.PathLike) else list(source)
    if any(map(is_remote, [*sources, output])):
        raise OptionError("Expected folders on this machine for captions, got a URL: fetch it first.")
    folder = Path(output)
    listing = list_inputs(sources, folder, recursive=recursive, glob=glob, limit=limit)
    endings = [_STRIP, _MAPS]
    if not isinstance(model, nn.Module):
        name, prompt = name or called(model), own_prompt(model) if prompt is None else prompt
        with hub_for(bundled(model)):
            beside = {"trust_remote_code": trust_remote_code}
            processor = load_processor(bundled(model), **beside) if processor is None else processor
            model, _ = load_language_model(bundled(model), **beside)
    name = model_id(model) if name is None else check_name(name)
    asked = {"method": method, "name": name, "max_new_tokens": max_new_tokens, "do_sample": False, **options}
    fingerprint = {
        "kind": "captions",
        "root": os.fspath(listing.root),
        "model": name,
        "weights_sha256": weights_sha256(model),
        "prompt": prompt,
        "methods": {method: method},
        "options": {method: {**used, "max_new_tokens": max_new_tokens}},
        "save_map": save_map,
    }
    fingerprint = json.loads(json.dumps(fingerprint, default=str))

    worked: list[str] = []

    def describe(one: Input, decoded: Decoded) -> tuple[dict[str, Any], dict[str, bytes]]:
        known = Picture(one.key, one.stem, decoded).known
        if decoded.image is None:
            return failed_row(known, decoded.error or "", decoded.message or ""), {}
        begun = time.perf_counter()
        try:
            found = explain_generation(model, prompt, image=decoded.image, processor=processor, **asked)
            row, files = _told(found, one, save_map)
        except Exception as error:  # whatever a model makes of one picture shall not stop the others
            if not worked and isinstance(error, OptionError | ModelError | UnsupportedModelError):
                raise  # no picture can be described this way
            return failed_row(known, error), {}
        worked.append(one.key)
        height, width = decoded.image.shape[:2]
        seconds = round(time.perf_counter() - begun, 4)
        return known | row | {"status": "explained", "width": width, "height": height, "seconds": seconds}, files

    clear = partial(clear_outputs, listing=listing, endings=endings, overwrite=overwrite)
    with Run(folder, fingerprint, max_pixels=max_pixels, overwrite=overwrite, clear=clear) as run:
        inputs = listing.plan(endings, {row["input"]: row["stem"] for row in run.all_rows()})
        done = done_before(inputs, run)
        tally = Tally(progress, len(inputs), len(done))
        missing = [one for one in inputs if one.key not in done]
        with DecoderPool(min(1, len(missing)), max_pixels=max_pixels) as decoders:
            for one in missing:
                wrong = Decoded(error="OSError", message=one.problem) if one.problem else None
                row, files = describe(one, wrong or decoders.submit(one.path).result())
                try:
                    for path, content in files.items():
                        write_inside(folder, path, content)
                except OSError as error:
                    row = failed_row(row, error, f"Could not write {path!r}: {error.strerror or error}.")
                run.put([(row, {})])
                tally.row(row)
        totals = run.finish()
        with finishing(folder):
            common = {part: fingerprint[part] for part in ("model", "weights_sha256", "prompt", "methods", "options")}
            with write_atomically(folder / "manifest.jsonl", durable=True) as file:
                for row in run.rows():
                    file.write(json_line({part: row.get(part) for part in _TOLD} | common))
            seconds = time.perf_counter() - clock
            times = {"started": started.isoformat(timespec="seconds"), "seconds": round(seconds, 3)}
            run.write_summary({"recursive": recursive, "glob": glob, "limit": limit}, totals, times, command)
    return FolderSummary(folder, folder / "manifest.jsonl", kept=len(done), seconds=seconds, report=None, **totals)


def _told(found: Generation, one: Input, save_map: bool) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What a row says of a caption, and its files by path below the output folder."""
    words, left_out = found.words()
    maps = {word: replace(found.picture(places), source=one.key) for word, places in words.items()}
    files: dict[str, bytes] = {}
    if maps:
        files[f"{one.stem}{_STRIP}"] = figure_bytes(draw_words(list(maps.values()), left_out=left_out), ".png")
    if maps and save_map:
        files[f"{one.stem}{_MAPS}"] = _packed(maps)
    shares = ("on_picture", "on_edges", "on_first_patch")
    row = {
        "caption": found.answer,
        "words": [
            {"word": word, **{name: round(float(saliency.facts[name]), 6) for name in shares}}
            for word, saliency in maps.items()
        ],
        "left_out": left_out,
        "outputs": {path.rpartition(".")[2]: path for path in files},
        "written": {path: len(content) for path, content in files.items()},
    }
    return row, files


def _packed(maps: Mapping[str, Saliency]) -> bytes:
    """The maps of all words in one file, the same every time."""
    first = next(iter(maps.values()))
    metadata = {name: value for name, value in first.to_dict().items() if name not in ("seconds", "facts")}
    file = io.BytesIO()
    text = np.array(json.dumps(metadata, ensure_ascii=False))
    grids = np.stack([saliency.grid for saliency in maps.values()])
    np.savez_compressed(file, words=np.array(list(maps)), maps=grids, metadata=text)
    return file.getvalue()
