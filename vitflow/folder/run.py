"""Explain folders of pictures: plan, run, and leave a manifest; what was done is not done again."""

import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from vitflow.errors import OptionError, VitflowWarning
from vitflow.explaining.asking.choices import MethodChoice
from vitflow.explaining.asking.method_options import takes_method_options
from vitflow.explaining.asking.targets import Contrast, Target
from vitflow.explaining.explainer import Explainer
from vitflow.folder.decoders import DecoderPool
from vitflow.folder.earlier import clear_outputs, done_before
from vitflow.folder.found.manifest import write_manifest
from vitflow.folder.pipeline import Pipeline
from vitflow.folder.plan import Input, list_inputs
from vitflow.folder.ray_engine import Asked, Cluster, choose_engine, run_on_ray
from vitflow.folder.rows import is_folder_row
from vitflow.folder.shards import tidy
from vitflow.folder.work import Job, auto_batch, check_target, cost_of, explainer_for, make_job, sides_of
from vitflow.pictures.files import is_remote
from vitflow.pictures.images import MAX_PIXELS
from vitflow.pictures.options import MANIFEST_FORMATS
from vitflow.pictures.overlay import blend
from vitflow.runs.columns import load_pyarrow
from vitflow.runs.fingerprints import run_fingerprint, without_probe
from vitflow.runs.journal import Journal
from vitflow.runs.keeper import RunProgress, Tally, finishing, keep_rows, versions
from vitflow.runs.places import RunFolder
from vitflow.runs.remote import open_folder
from vitflow.runs.stores import lies_in

if TYPE_CHECKING:
    from vitflow.folder.found.report import Thumbnails


@dataclass(frozen=True, slots=True, repr=False)
class FolderSummary:
    """What a folder run left behind; iterate over it for the rows of its manifest, in the order of the inputs.

    Attributes:
        output: the folder, a path or a URL.
        manifest: the manifest's file.
        total: inputs, which are `explained + failed`.
        explained: pictures whose files are there.
        failed: pictures with an error in their row.
        kept: of the explained ones, those that an earlier run had done.
        seconds: duration of this run.
        report: the report's first page, where one was asked for.
        accepts: tells a row of this kind of run from one that was edited.
    """

    output: Path | str
    manifest: Path | str
    total: int
    explained: int
    failed: int
    kept: int
    seconds: float
    report: Path | None = None
    accepts: Callable[[Mapping[str, Any]], bool] = is_folder_row

    def __repr__(self) -> str:
        kept = f" ({self.kept} of them before)" if self.kept else ""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"FolderSummary({self.explained} explained{kept}{failed}; {self.manifest})"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """What a notebook shows: the first overlays, with the rows of their pictures."""
        from vitflow.folder.sheet import SHOWN, show_run

        return show_run(repr(self), self.output, list(itertools.islice(self, SHOWN)))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every input's row, read from the disk as it is needed; `grids` and `window` are the journal's own."""
        return itertools.islice(open_folder(self.output).open_journal(self.accepts).rows(), self.total)

    def failures(self) -> Iterator[dict[str, Any]]:
        """The rows of the pictures that failed."""
        return (row for row in self if row["status"] == "failed")


@takes_method_options
def explain_folder(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    model: str | Path | nn.Module | Explainer | Callable[[], Explainer],
    methods: Sequence[MethodChoice] | None = None,
    target: Target | Contrast = None,
    recursive: bool = False,
    glob: str | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    save_map: bool = False,
    store: str = "overlays",
    format: str = "jpg",
    manifest: str = "jsonl",
    report: bool = False,
    max_pixels: int = MAX_PIXELS,
    drawing: Mapping[str, Any] | None = None,
    engine: str = "local",
    address: str | None = None,
    actors: int | None = None,
    progress: Callable[[RunProgress], None] | None = None,
    command: Sequence[str] | None = None,
    **options: Any,
) -> FolderSummary:
    """Explain every picture of a folder, resumable: a second run with the same options does what is missing or changed.

    Overlays go to the output folder in the tree of the inputs, as `name-method.jpg`, with a manifest (one row per
    input) and `run.json` beside them. A picture that cannot be read or explained becomes a row with an error, and the
    others go on. Failed pictures are tried again by the next run.

    Args:
        source: a folder, a picture, a pattern such as `photographs/*.jpg`, or several of them; or the URL of a
            folder, such as s3://bucket/photographs, which fsspec reads.
        output: folder for the results, a path or a URL.
        model: a model id (see `load_model`), a module, an Explainer, or a function that makes one when it is needed.
        methods: names, or (name, options) pairs; by default gae with a target or an explainer that is asked prompts,
            reference pictures or a function, and rollout without.
        target: class that class-specific methods explain; by default each picture's predicted one.
        recursive: read the folders below, too.
        glob: read the files whose name or path below the source matches this pattern, whatever their suffix.
        limit: take the first pictures only.
        batch_size: pictures that the model works on at once; by default 16 on a CPU and 64 on a GPU, halved where
            memory runs out.
        workers: processes that read pictures, no more than there are cores or pictures to read; by default half the
            cores, at most 8. With 0 this process reads them,
            and a file that crashes the decoder takes the run with it.
        overwrite: do everything anew; the outputs of an earlier run with other options are removed.
        save_map: write each unscaled map as .npz, too.
        store: "overlays" draws each map; "grids" keeps the maps alone, in Parquet files of some hundred pictures each
            (see `read_grids`), from which `draw_run` and the report draw.
        format: of the overlays: "jpg", "png" or "webp".
        manifest: "jsonl", "csv" or "parquet".
        report: write a report in HTML, too.
        max_pixels: pictures of more pixels are refused.
        drawing: options of `Saliency.overlay`, such as cmap.
        engine: "local", or "ray" for a cluster, whose machines must all reach the source and the output; the rows are
            the same.
        address: of the cluster; by default Ray is started on this machine, or the one in use is taken.
        actors: processes of the cluster with a model each; by default one for each GPU, or for each core.
        progress: called as pictures are done.
        command: the command line, for run.json.
        options: options for every method that has them.

    Raises:
        OptionError: an option is wrong, or the folder holds a run with other options and overwrite is False.
        ImageError: there is nothing at a source.
        ModelError: the model cannot be loaded or explained this way.
        VitflowError: the disk is full; what was done is kept.
        KeyboardInterrupt: what was done is kept, for the next run to go on from.

    >>> import tempfile
    >>> from vitflow.demo import SAMPLE_FOLDER
    >>> summary = explain_folder(SAMPLE_FOLDER, tempfile.mkdtemp(), model="demo", limit=2)
    >>> summary.explained, summary.failed, [row["input"] for row in summary]
    (2, 0, ['disc_star_and_crescent.png', 'ring_and_triangle.png'])
    """
    started, clock = datetime.now(UTC), time.perf_counter()
    if methods is None and callable(model) and not isinstance(model, nn.Module):
        model = explainer_for(model)  # what it is asked decides on the method
    asks = isinstance(model, Explainer) and model.asks(target)
    job = make_job(
        methods, options, target=target, drawing=drawing, format=format, save_map=save_map, store=store, asks=asks
    )
    _check(job, manifest, batch_size, workers, limit)
    cluster = choose_engine(engine, address, actors)
    sources = [source] if isinstance(source, str | os.PathLike) else list(source)
    _check_urls(sources, output, report)
    folder = open_folder(output)
    # What is wrong with the sources is told before a model is loaded, and nothing is written.
    listing = list_inputs(sources, folder.path, recursive=recursive, glob=glob, limit=limit)
    explainer = explainer_for(model)
    check_target(job, explainer)
    known = explainer.fingerprint()
    fingerprint = _fingerprint(listing.root, job, known)
    header = {"run": fingerprint, "max_pixels": max_pixels}
    clear = partial(clear_outputs, output=folder, listing=listing, endings=job.endings, overwrite=overwrite)
    with (
        keep_rows(folder, header, is_folder_row, overwrite=overwrite, clear=clear) as journal,
        _photographs(folder, report) as photographs,
    ):
        inputs = listing.plan(job.endings, {row["input"]: row["stem"] for row in journal.rows()})
        size = batch_size or auto_batch(explainer)
        asked = Asked(model, known, job, folder, size, workers, max_pixels)
        kept = _run(inputs, journal, explainer, asked, cluster, progress, photographs)
        folder.remove_leftovers()  # of actors that were killed
        keys = [one.key for one in inputs]
        if job.store == "grids":
            tidy(journal, folder, job.labels)
        journal.compact(keys)
        explained = sum(row["status"] == "explained" for row in journal.rows(keys))
        totals = {"total": len(keys), "explained": explained, "failed": len(keys) - explained}
        with finishing(folder):
            table = _write_manifest(folder, journal, keys, fingerprint, manifest)
            page = None
            if report:
                from vitflow.folder.found.report import report_run

                page = report_run(folder.path, keys=keys, thumbnails=photographs)
            seconds = time.perf_counter() - clock
            done_now = explained - kept
            record = {
                "versions": versions(),
                "command": list(command) if command else None,
                "run": without_probe(fingerprint)
                | {"recursive": recursive, "glob": glob, "limit": limit, "manifest": manifest},
                "totals": totals,
                "time": {
                    "started": started.isoformat(timespec="seconds"),
                    "seconds": round(seconds, 3),
                    "explained_by_this_run": done_now,
                    "pictures_per_second": round(done_now / seconds, 3),
                },
            }
            folder.put("run.json", json.dumps(record, indent=2).encode("ascii") + b"\n", durable=True)
    return FolderSummary(folder.address, table, **totals, kept=kept, seconds=seconds, report=page)


def _check(job: Job, manifest: str, batch_size: int | None, workers: int | None, limit: int | None) -> None:
    """What can be known to be wrong before anything is loaded."""
    if manifest not in MANIFEST_FORMATS:
        raise OptionError(f"Expected a manifest of {', '.join(MANIFEST_FORMATS)}, got {manifest!r}.")
    if manifest == "parquet" or job.store == "grids":
        load_pyarrow()
    for name, value, least in (("batch_size", batch_size, 1), ("workers", workers, 0), ("limit", limit, 1)):
        if value is not None and value < least:
            raise OptionError(f"Expected {name} of at least {least}, got {value}.")
    drawing = {name: value for name, value in job.drawing.items() if name != "interpolation"}
    blend(np.zeros((1, 2, 3), np.uint8), np.array([[0.0, 1.0]]), **drawing)  # raises for a wrong one


def _check_urls(sources: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], report: bool) -> None:
    """What a store cannot do, and a folder can."""
    if report and any(map(is_remote, [*sources, output])):
        raise OptionError("A report links the files beside it: leave it out where the source or the output is a URL.")
    # On this machine the output may lie among the pictures: it is left out where these are listed.
    inside = [one for one in sources if (is_remote(one) or is_remote(output)) and lies_in(output, one)]
    if inside:
        raise OptionError(
            f"The output {os.fspath(output)!r} lies in {os.fspath(inside[0])!r}, which is read: choose another one."
        )


def _fingerprint(root: Path | str, job: Job, model: Mapping[str, Any]) -> dict[str, Any]:
    drawn = {"target": sides_of(job), "drawing": dict(job.drawing)}
    drawn |= {"format": job.format, "save_map": job.save_map, "store": job.store}
    return run_fingerprint("folder", {"root": os.fspath(root)}, model, job.methods, drawn)


def _run(
    inputs: Sequence[Input],
    journal: Journal,
    explainer: Explainer,
    asked: Asked,
    cluster: Cluster | None,
    progress: Callable[[RunProgress], None] | None,
    photographs: "Thumbnails | None",
) -> int:
    """Do what is missing; how many pictures were done before."""
    before = done_before(inputs, journal, cache(asked.output.length))
    tally = Tally(progress, len(inputs), len(before))
    if (cost := cost_of(asked.job, explainer, len(inputs) - len(before))) is not None:
        warnings.warn(cost, VitflowWarning, stacklevel=4)
    if len(before) < len(inputs) and cluster is not None:
        run_on_ray(inputs, before, asked, cluster, journal, tally)
    elif len(before) < len(inputs):
        cores = os.cpu_count() or 2
        count = min(8, max(1, cores // 2)) if asked.workers is None else asked.workers
        count = min(count, cores, len(inputs) - len(before))  # more would have nothing to do
        with DecoderPool(count, max_pixels=asked.max_pixels) as decoders:
            told: dict[str, Any] = {"tally": tally, "on_pixels": None if photographs is None else photographs.add}
            told |= {"batch_size": asked.batch_size, "decoders": decoders}
            Pipeline(explainer, asked.job, asked.output, journal, **told).run(inputs, before)
    return len(before)


def _photographs(folder: RunFolder, report: bool) -> AbstractContextManager["Thumbnails | None"]:
    """Where the photographs that the run has in hand wait for its report."""
    if not report:
        return nullcontext()
    from vitflow.folder.found.report import Thumbnails

    return closing(Thumbnails(folder.journal.parent))


def _write_manifest(
    folder: RunFolder, journal: Journal, keys: Sequence[str], fingerprint: Mapping[str, Any], kind: str
) -> Path | str:
    """Write the manifest, and take those of other formats away: they would be of an earlier state."""
    options = fingerprint["options"]
    shared: dict[str, Any] = {}
    for name in dict.fromkeys(name for own in options.values() for name in own):
        values = [own[name] for own in options.values() if name in own]
        # A column per option, where all methods that have it agree; what they do not is in `options`.
        shared[name] = values[0] if all(value == values[0] for value in values) else None
    common = {
        "model": fingerprint["model"],
        "weights_sha256": fingerprint["weights_sha256"],
        "methods": list(fingerprint["methods"]),
        "options": options,
    }
    path = folder.manifest(kind)
    write_manifest(path, journal.rows(keys), {**shared, **common})
    folder.remove(folder.manifest(other).name for other in MANIFEST_FORMATS if other != kind)
    return folder.publish(path)
