"""Evaluate methods on a model and data: measure picture by picture, resumable, and put everything together."""

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from vitflow.errors import VitflowError
from vitflow.evaluation.choices import (
    applicable_methods,
    check_options,
    choose_all,
    label_methods,
    make_explainer,
    possible_groups,
)
from vitflow.evaluation.collecting import collect
from vitflow.evaluation.data.datasets import Dataset, open_dataset
from vitflow.evaluation.measures.token_dropping import can_drop_tokens
from vitflow.evaluation.metrics import choose_metrics
from vitflow.evaluation.results import Evaluation
from vitflow.evaluation.running import COSTLY, EvaluationProgress, Run
from vitflow.evaluation.scoring import Protocol
from vitflow.evaluation.statistics import RESAMPLES
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.method_choices import MethodChoice
from vitflow.explaining.method_table import get_method
from vitflow.folder.manifest import RunFolder
from vitflow.pictures.images import ImageSource

#: On how many pictures the costly groups are measured where nothing else is asked for.
SANITY_PICTURES = 24

_VERSIONS = ("vitflow", "torch", "timm", "numpy")


def evaluate(
    data: str | os.PathLike[str] | Dataset | Iterable[ImageSource],
    *,
    model: str | Path | nn.Module | Explainer | Callable[[], Explainer],
    methods: str | Sequence[MethodChoice] | None = None,
    metrics: Iterable[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    replace_by: str | None = None,
    points: int = 11,
    sanity_pictures: int = SANITY_PICTURES,
    batch_size: int | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[EvaluationProgress], None] | None = None,
    **options: Any,
) -> Evaluation:
    """Measure what the maps of several methods are worth, on your model and your pictures, beside two baselines.

    A picture that cannot be measured becomes a row with an error, and the others go on. With an output folder the rows
    are kept as they are made: a second run with the same options goes on where the first was ended, and tries failed
    pictures again.

    Args:
        data: drawn pictures ("demo:500"), annotations, a folder or list of pictures; see `open_dataset`.
        model: a model id (see `load_model`), a module, an Explainer, or a function that makes one when it is needed.
        methods: names, or (name, options) pairs; "all" for every method that applies to the model; by default all of
            these but blank-out, which runs the model once per patch (of "all" it is left out of the sanity checks). The
            baselines `random` and `centre` are added.
        metrics: names or groups ("localisation", "faithfulness", "sanity", "correlation"), or "all" among them; by
            default the first three groups.
        output: a folder for the rows, tables, figures and the page.
        images: where the pictures of an annotation file are, if not beside it.
        limit: take the first pictures only.
        replace_by: what is left of removed patches: "drop" (their tokens leave the sequence), "blank" or "blur"; by
            default "drop" where the model can, else "blank".
        points: of the deletion and insertion curves, both ends included.
        sanity_pictures: on how many pictures sanity and rank correlation are measured, which take many forward passes;
            they are drawn at random.
        batch_size: pictures per forward pass; by default 8 on a CPU and 64 on a GPU, halved where memory runs out.
        resamples: bootstrap resamples behind each interval.
        seed: of the resamples, of the random weights, and of the draw of the pictures for sanity.
        overwrite: forget the rows of an earlier run in the output folder.
        progress: called as pictures are done.
        options: options for every method that has them.

    Raises:
        OptionError: an option is wrong, or the output folder holds a run with other options and overwrite is False.
        VitflowError: the data or the model cannot be read, or no picture could be measured.
        KeyboardInterrupt: the rows that were made are kept in the output folder.

    >>> found = evaluate("demo:4", model="demo", methods=["gae"], metrics=["localisation"])
    >>> [(row.method, row.estimate.mean > 0.9) for row in found.table("roc_auc")]
    [('gae', True), ('random', False), ('centre', False)]
    """
    shown, groups = choose_metrics(metrics)
    check_options(points, sanity_pictures, batch_size, replace_by)
    chosen = label_methods(choose_all(methods), options)
    dataset = open_dataset(data, images=images, limit=limit)
    explainer = make_explainer(model)
    groups, notes = possible_groups(groups, dataset, explainer)
    if methods is None or methods == "all":
        chosen, left_out = applicable_methods(explainer, dataset, chosen)
        notes += left_out
    how = replace_by or ("drop" if "faithfulness" in groups and can_drop_tokens(explainer) else "blank")
    # Of "all" methods those that run the model once per patch would take longer than all others together.
    slow = [label for label, name, _ in chosen if methods == "all" and "predict" in get_method(name).needs]
    protocol = Protocol(tuple(chosen), tuple(groups), how, points, seed=seed, unchecked=tuple(slow))
    settings = _settings(dataset, explainer, protocol, sanity_pictures)
    run = Run(dataset, explainer, protocol, sanity_pictures, batch_size, progress)
    if output is None:
        rows: Iterable[dict[str, Any]] = list(run.rows())
    else:
        rows = run.keep(RunFolder(Path(output)), settings, overwrite)
    evaluation = collect(
        rows,
        dataset=dataset,
        model=explainer.model_id,
        protocol=protocol,
        metrics=[metric for metric in shown if metric.group in groups],
        settings=settings | {"resamples": resamples, "versions": _versions()},
        notes=notes,
    )
    if not evaluation.pictures:
        raise VitflowError(_nothing_measured(evaluation.failures))
    if output is not None:
        try:
            evaluation.save(Path(output))
        except OSError as error:
            raise VitflowError(
                f"What was measured is kept, but the report could not be written to {str(output)!r}: "
                f"{error.strerror or error}. Make room and run the same command again."
            ) from error
    return evaluation


def _settings(dataset: Dataset, explainer: Explainer, protocol: Protocol, sanity_pictures: int) -> dict[str, Any]:
    """Everything that the rows depend on; two runs that agree in it may share a folder."""
    costly = {"sanity_pictures": sanity_pictures} if set(COSTLY) & set(protocol.groups) else {}
    removing = {"replace_by": protocol.replace, "points": protocol.points} if "faithfulness" in protocol.groups else {}
    record = {
        "kind": "evaluation",
        "data": dict(dataset.identity) or {"own": dataset.name},
        **explainer.fingerprint(),
        "methods": {label: name for label, name, _ in protocol.methods},
        "options": {label: dict(options) for label, _, options in protocol.methods},
        "groups": list(protocol.groups),
        "seed": protocol.seed,
        **costly,
        **removing,
    }
    plain: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return plain


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in _VERSIONS}


def _nothing_measured(failures: Sequence[Mapping[str, Any]]) -> str:
    if not failures:
        return "There was no picture to measure."
    first = failures[0]
    return (
        f"None of the {len(failures)} pictures could be measured. The first was {first['input']!r}: "
        f"{first['error']}: {first['message']}"
    )
