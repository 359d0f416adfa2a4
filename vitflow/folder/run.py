"""Resumable runs over folders of images: list the inputs, explain them, and write a manifest."""

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from vitflow.errors import VitflowWarning, whole_number
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.targets import Contrast, Target
from vitflow.folder.columns import check_manifest, write_manifest
from vitflow.folder.decoders import DecoderPool
from vitflow.folder.draw import check_drawing, show_run
from vitflow.folder.pipeline import Pipeline
from vitflow.folder.plan import clear_outputs, is_done, list_inputs, remove_orphans
from vitflow.folder.ray_engine import Request, check_engine, run_on_ray
from vitflow.folder.saved import SavedRun, run_fingerprint
from vitflow.folder.store import Run, finishing
from vitflow.folder.work import RunProgress, Tally, auto_batch, check_target, explainer_for, make_job, sides_of
from vitflow.registry.choices import MethodChoice
from vitflow.registry.option_types import MethodOptions


@dataclass(frozen=True, slots=True, repr=False)
class FolderSummary:
    """Summary of a folder run; iterating yields the rows of its manifest, in the order of the inputs.

    Attributes:
        output: the output folder.
        manifest: path of the manifest.
        total: the number of inputs, `explained + failed`.
        explained: the number of explained images.
        failed: the number of images with an error in their row.
        kept: the number of explained images from earlier runs.
        seconds: duration of this run, without listing the inputs and loading the model.
        report: path of the report's first page, if requested.
    """

    output: Path
    manifest: Path
    total: int
    explained: int
    failed: int
    kept: int
    seconds: float
    report: Path | None = None

    def __repr__(self) -> str:
        kept = f" ({self.kept} of them before)" if self.kept else ""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"FolderSummary({self.explained} explained{kept}{failed}; {self.manifest})"

    def _repr_mimebundle_(self, **_: Any) -> Any:
        """Return the notebook display: the first overlays."""
        return show_run(repr(self), self.output, self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each input's row, read lazily."""
        with SavedRun(self.output) as run:
            yield from itertools.islice(run.rows(), self.total)

    def failures(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the images that failed."""
        return (row for row in self if row["status"] == "failed")


def explain_folder(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    model: str | Path | nn.Module | Explainer | Callable[[], Explainer],
    methods: Sequence[MethodChoice] | None = None,
    target: Target | Contrast = None,
    recursive: bool = False,
    limit: int | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    overlays: bool = True,
    format: str = "jpg",
    manifest: str = "jsonl",
    report: bool = False,
    drawing: Mapping[str, Any] | None = None,
    engine: str = "local",
    address: str | None = None,
    actors: int | None = None,
    progress: Callable[[RunProgress], None] | None = None,
    **options: Unpack[MethodOptions],
) -> FolderSummary:
    """Explain every image of a folder; another run with the same options resumes and updates changed images.

    Overlays are written to the output folder as `name-method.jpg`, in the folder structure of the inputs, alongside a
    manifest (one row per input) and `run.json`. `run.sqlite` contains every row and the grid of every map:
    `read_grids` reads them, `draw_run` and `vitflow report` draw them without the model. An image that cannot be read
    or explained gets a row with an error; the run continues, and the next run retries the image.

    Args:
        source: a folder, an image, a pattern such as `photographs/*.jpg`, or several of them; with engine="ray", also
            the URL of a folder, such as s3://bucket/photographs.
        output: local folder for the results.
        model: a model id (see `load_model`), a module, an Explainer, or a function that creates an Explainer.
        methods: names, or (name, options) pairs; by default gae with a target or an explainer of prompts, reference
            images or a function, otherwise rollout.
        target: class that class-specific methods explain; by default each image's predicted class.
        recursive: include subfolders.
        limit: process the first images only.
        batch_size: images at a time, which copies of the model share on several cores; halved if memory runs out. By
            default 64 on a GPU, and on a CPU 32, or 16 with slow methods and those that compute gradients.
        workers: processes that read images, at most one for each core and image; by default half the cores, at
            most 8. With 0, this process reads them, and a file that crashes the decoder ends the run.
        overwrite: recompute everything, and remove the outputs of an earlier run with other options.
        overlays: draw each map. Without overlays, a run is faster, and `draw_run` can draw a selection later.
        format: format of the overlays: "jpg", "png" or "webp".
        manifest: "jsonl", "csv", "parquet", or "parquet+grids" with the maps in columns.
        report: also write an HTML report.
        drawing: options of `Saliency.overlay`, such as cmap.
        engine: "local", or "ray" for a cluster whose machines can all access the source. It computes the same rows and
            maps without overlays, and does not support `workers` or `report`: use `draw_run` and
            `vitflow report` afterwards.
        address: address of the cluster; by default, Ray is started on this machine, unless it is already running.
        actors: processes of the cluster, each with a model; by default one for each GPU, or for each core.
        progress: called for each finished image, and on progress of slow methods.
        options: options for every method that supports them.

    Raises:
        OptionError: an option is invalid, or the folder has a run with other options and overwrite is False.
        ImageError: a source does not exist.
        ModelError: the model cannot be loaded, or does not support the options.
        VitflowError: the disk is full; finished rows are kept.
        KeyboardInterrupt: finished rows are kept, and the next run resumes.

    >>> import tempfile
    >>> from vitflow.demo import SAMPLE_FOLDER
    >>> summary = explain_folder(SAMPLE_FOLDER, tempfile.mkdtemp(), model="demo", limit=2)
    >>> summary.explained, summary.failed, [row["input"] for row in summary]
    (2, 0, ['disc_star_and_crescent.png', 'ring_and_triangle.png'])
    """
    check_engine(engine, address, actors, workers=workers, report=report)
    check_manifest(manifest)
    for name, value, least in (("batch_size", batch_size, 1), ("workers", workers, 0)):
        if value is not None:
            whole_number(name, value, least)
    explainer = model if isinstance(model, Explainer) else None
    if methods is None and callable(model) and not isinstance(model, nn.Module):
        explainer = explainer_for(model)  # its outputs determine the default method
    has_target = explainer is not None and explainer.has_target(target)
    overlays = overlays and engine == "local"
    drawn: dict[str, Any] = {"drawing": drawing, "format": format, "overlays": overlays}
    job = make_job(methods, options, target=target, has_target=has_target, **drawn)
    check_drawing(job.drawing, format)
    # Report errors of the sources before loading a model.
    selection: dict[str, Any] = {"recursive": recursive, "limit": limit}
    listing = list_inputs(source, output, **selection, urls=engine == "ray")
    workers = decoder_count(len(listing.files), workers) if engine == "local" else 0
    with DecoderPool(workers) as decoders:  # they start while the model is loaded
        explainer = explainer or explainer_for(model)
        check_target(job, explainer)
        known, started = explainer.fingerprint(), time.time()
        how = {"target": sides_of(job), "drawing": dict(job.drawing), "format": job.format, "overlays": job.overlays}
        fingerprint = run_fingerprint("folder", {"root": listing.root}, known, job.methods, how)
        clear = partial(clear_outputs, listing=listing, endings=job.endings, overwrite=overwrite)
        with Run(listing.output, fingerprint, overwrite=overwrite, clear=clear) as run:
            others = engine == "local" and run.names() - listing.files.keys()
            if others and (note := remove_orphans(run.all_rows(), listing)):
                warnings.warn(note, VitflowWarning, stacklevel=2)
            inputs = listing.plan(job.endings, {row["input"]: row["stem"] for row in run.all_rows() if "stem" in row})
            by_key = {item.key: item for item in inputs}
            missing = run.missing(list(by_key), lambda row: is_done(by_key[row["input"]], row, listing.output))
            wanted, size = [by_key[key] for key in missing], batch_size or auto_batch(explainer, job)
            tally = Tally(progress, len(inputs), len(inputs) - len(wanted))
            if wanted and engine == "ray":
                run_on_ray(wanted, Request(model, known, job, size), run, tally, address, actors)
            elif wanted:
                Pipeline(explainer, job, decoders, run, tally, batch_size=size).run(wanted)
            settings = selection | {"left_out": dict(listing.unread)}
            return _finish(run, len(inputs) - len(wanted), started, settings, manifest=manifest, report=report)


def _finish(
    run: Run, kept: int, started: float, settings: Mapping[str, Any], *, manifest: str, report: bool
) -> FolderSummary:
    """Write the manifest, the report and run.json; `kept` is the number of inputs that earlier runs explained."""
    from vitflow.folder.report import report_run  # pages take longer to import

    totals, fingerprint = run.finish(), run.fingerprint
    common = {name: fingerprint[name] for name in ("model", "weights_sha256", "options")}
    common |= {"methods": list(fingerprint["methods"])}
    with finishing(run.folder):
        rows = run.with_maps() if manifest.endswith("+grids") else ((row, {}) for row in run.rows())
        table = write_manifest(run.folder, rows, common, format=manifest)
        page = report_run(run.folder) if report else None
        seconds, explained = time.time() - started, totals["explained"] - kept
        times = {
            "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
            "explained_by_this_run": explained,
            "images_per_second": round(explained / max(seconds, 1e-9), 3),
        }
        run.write_summary(settings, totals, times)
    return FolderSummary(run.folder, table, **totals, kept=kept, seconds=seconds, report=page)


def decoder_count(images: int, workers: int | None) -> int:
    """Return the number of processes that read images."""
    cores = os.cpu_count() or 2
    return min(min(8, max(1, cores // 2)) if workers is None else workers, cores, images)
