"""Measure the pictures of a data set, one batch after the other, and keep the rows, so that a run can go on."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vitflow.errors import VitflowError
from vitflow.evaluation.data.datasets import Dataset, Sample
from vitflow.evaluation.questions import ask
from vitflow.evaluation.rows import accepts
from vitflow.evaluation.scoring import Item, Protocol, failed_row, measure
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.method_table import is_slow
from vitflow.explaining.progress import watched
from vitflow.folder.fingerprints import check_same_run
from vitflow.folder.manifest import Journal, RunFolder

# Groups of metrics that take many forward passes per picture.
COSTLY = ("sanity", "correlation")

# How often the sanity checks make each map of a picture anew: stages of random weights, shifts, flips, classes.
_SANITY_ROUNDS = 9

_AUTO_BATCH = {"cpu": 8, "cuda": 64}


@dataclass(frozen=True, slots=True)
class EvaluationProgress:
    """Where a run stands, for a progress callback: called at the start (without a row), then once per picture.

    Attributes:
        done: pictures with a row, those of earlier runs included.
        total: pictures of the run.
        row: the newest row.
        under_way: how many more pictures' worth of work is done, as far as it is known. Methods that take long are told
            of in between, without a row.
    """

    done: int
    total: int
    row: Mapping[str, Any] | None
    under_way: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Measures the pictures of a data set, and keeps what it has measured."""

    dataset: Dataset
    explainer: Explainer
    protocol: Protocol
    sanity_pictures: int
    batch_size: int | None
    progress: Callable[[EvaluationProgress], None] | None

    def keep(self, folder: RunFolder, settings: Mapping[str, Any], overwrite: bool) -> Iterator[dict[str, Any]]:
        """Measure what the folder has no row of, and give all rows in the order of the data."""
        with folder.lock():
            journal = Journal(folder.journal, accepts(self.protocol, self.explainer))
            if journal.header is None or overwrite:
                journal.start({"run": dict(settings)})
            else:
                check_same_run(journal, folder, settings)
            folder.remove_leftovers()
            groups = self._groups()
            known = {
                sample.name
                for sample in self.dataset.samples
                if sample.name in journal and _is_done(next(journal.rows([sample.name])), sample, groups[sample.name])
            }
            for row in self.rows(known):
                journal.append([row])
            names = [sample.name for sample in self.dataset.samples]
            journal.compact(names)
        # What an earlier, longer run measured beyond this one's share does not count.
        return (_only(row, groups[row["input"]]) for row in journal.rows(names))

    def rows(self, known: Iterable[str] = ()) -> Iterator[dict[str, Any]]:
        """Measure all pictures but the known ones, in batches, a row for each."""
        done = set(known)
        groups = self._groups()
        missing = [sample for sample in self.dataset.samples if sample.name not in done]
        count = len(done)
        self._tell(count, None)
        num_classes = self.explainer.num_classes
        size = self.batch_size or _AUTO_BATCH.get(self.explainer.device.type, 8)
        for start in range(0, len(missing), size):
            batch = missing[start : start + size]
            with watched(partial(self._tell_share, count, len(batch)), self._rounds(batch, groups)):
                for row in self._measure(batch, groups, num_classes):
                    count += 1
                    self._tell(count, row)
                    yield row

    def _tell_share(self, done: int, pictures: int, share: float) -> None:
        """Tell of a batch's share, in pictures, before all of its rows are there."""
        self._tell(done, None, share * pictures)

    def _rounds(self, batch: Sequence[Sample], groups: Mapping[str, tuple[str, ...]]) -> float:
        """How many times the work of the methods that take long, on the whole batch, is expected of it."""
        slow = [label for label, name, _ in self.protocol.methods if is_slow(name)]
        checked = len([label for label in slow if label not in self.protocol.unchecked])
        share = sum("sanity" in groups[sample.name] for sample in batch) / len(batch)
        return max(len(slow) + checked * share * _SANITY_ROUNDS, 1)

    def _measure(
        self, batch: Sequence[Sample], groups: Mapping[str, tuple[str, ...]], num_classes: int
    ) -> Iterator[dict[str, Any]]:
        items: list[Item] = []
        stamps = {}
        for sample in batch:
            stamps[sample.name] = {"stamp": sample.stamp()}
            try:
                picture = sample.read()
                question = ask(picture, num_classes, self.explainer.class_names)
            except (VitflowError, OSError) as error:
                yield failed_row(sample.name, error) | stamps[sample.name]
            else:
                items.append(Item(sample.name, picture, question, groups[sample.name]))
        if items:
            for row in measure(self.explainer, items, self.protocol):
                yield row | stamps[row["input"]]

    def _tell(self, done: int, row: Mapping[str, Any] | None, under_way: float = 0.0) -> None:
        if self.progress is not None:
            self.progress(EvaluationProgress(done, len(self.dataset), row, under_way))

    def _groups(self) -> dict[str, tuple[str, ...]]:
        """What is measured on each picture: the costly groups on some of them."""
        quick = tuple(group for group in self.protocol.groups if group not in COSTLY)
        names = [sample.name for sample in self.dataset.samples]
        drawn = set(sorted(names, key=lambda name: _draw(name, self.protocol.seed))[: self.sanity_pictures])
        return {name: self.protocol.groups if name in drawn else quick for name in names}


def _draw(name: str, seed: int) -> bytes:
    """A picture's lot: those with the smallest are drawn, and more pictures in the data change little of it."""
    return hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogateescape")).digest()


def _is_done(row: Mapping[str, Any], sample: Sample, groups: Sequence[str]) -> bool:
    """Whether an earlier run measured this very picture, and all that is asked for."""
    return row["status"] == "measured" and row["stamp"] == sample.stamp() and set(groups) <= set(row["groups"])


def _only(row: dict[str, Any], groups: Sequence[str]) -> dict[str, Any]:
    """A row without the groups of metrics that this run does not measure on the picture."""
    if row["status"] != "measured" or set(row["groups"]) <= set(groups):
        return row
    kept = {name: value for name, value in row.items() if name not in ("stages", "correlation")}
    return kept | {"groups": list(groups)}
