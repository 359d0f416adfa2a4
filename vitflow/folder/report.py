"""The report of a run: its images with their maps, and the predictions next to the true classes if labels are given."""

import csv
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vitflow.errors import OptionError, VitflowError, printable
from vitflow.explaining.captions import NOT_SPECIFIC, departures, variant
from vitflow.folder.columns import Row, placement_of
from vitflow.folder.draw import explained, open_run, read_photograph
from vitflow.models.classes import class_index
from vitflow.registry.choices import is_signed
from vitflow.registry.method_table import get_method

# Labels without a class that a report names.
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Labels:
    """True classes of images by input: `classes`, and how many inputs have each label that is no class of the model."""

    classes: Mapping[str, int]
    unmatched: Mapping[str, int]

    @classmethod
    def read(cls, labels: str | os.PathLike[str], inputs: Sequence[str], names: Sequence[str] | None) -> "Labels":
        """Read the labels of these inputs, and find their classes by index, name, synonym or WordNet id.

        Raises:
            OptionError: the file is not such a table, or no label is a class of the model.
        """
        texts = _of_folders(inputs) if str(labels) == "folders" else _of_table(Path(labels), inputs)

        @cache
        def find(text: str) -> int | None:
            try:
                return class_index(text, len(names) if names else 2**31, names)
            except OptionError:
                return None

        classes = {name: index for name, text in texts.items() if (index := find(text)) is not None}
        unmatched = Counter(text for name, text in texts.items() if name not in classes)
        if not classes:
            given = f"such as {next(iter(unmatched))!r}" if unmatched else "none for these images"
            raise OptionError(f"Expected labels that are class names or indices of the model, got {given}.")
        return cls(classes, unmatched)

    def in_words(self, predicted: Mapping[str, int | None]) -> str:
        """Describe how many predictions are right, and which labels could not be compared."""
        right = sum(predicted[name] == index for name, index in self.classes.items() if name in predicted)
        total = sum(name in predicted for name in self.classes)
        parts = [f"{right:,} of {total:,} right ({right / max(total, 1):.1%})"]
        if self.unmatched:
            named = [*map(printable, list(self.unmatched)[:_NAMED]), *(["…"] if len(self.unmatched) > _NAMED else [])]
            parts.append(f"{sum(self.unmatched.values()):,} with a label that is no class: {', '.join(named)}")
        if missing := len(predicted.keys() - self.classes.keys()) - sum(self.unmatched.values()):
            parts.append(f"{missing:,} without a label")
        return "; ".join(parts)


def _of_folders(inputs: Sequence[str]) -> dict[str, str]:
    """Return the name of the folder of each input that is in one."""
    return {name: folder for name in inputs if (folder := Path(name).parent.name)}


def _of_table(path: Path, inputs: Sequence[str]) -> dict[str, str]:
    """Return the labels in a CSV table, whose files are inputs or names of files that occur once."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        table = {row["file"]: row.get("label_index") or row.get("label") or "" for row in rows}
    except (OSError, ValueError, KeyError, csv.Error) as error:
        reason = f"no column {error}" if isinstance(error, KeyError) else str(error)
        raise OptionError(
            f"Expected folders, or a CSV file with the columns file and label or label_index, got {str(path)!r}: "
            f"{reason}."
        ) from error
    counts = Counter(Path(name).name for name in inputs)
    texts = {}
    for name in inputs:
        short = Path(name).name
        texts[name] = table.get(name) or (table.get(short) if counts[short] == 1 else None)
    return {name: text for name, text in texts.items() if text}


def report_run(output: str | os.PathLike[str], *, labels: str | os.PathLike[str] | None = None, **options: Any) -> Path:
    """Write the report of a run, `report.html` and further pages, and return the first page's path.

    Args:
        output: the run's output folder.
        labels: true classes, which the report compares with the predictions: "folders" for the names of the images'
            folders, or a CSV file with the columns `file` and `label` or `label_index`.
        options: `per_page` of the report.

    Raises:
        OptionError: the folder has no run, its record is damaged, or no label is a class of the model.
    """
    from vitflow.viewer.pages import FAILURES_SHOWN, placed_grids, thumbnail, write_report

    with open_run(output) as saved:
        run = saved.fingerprint
        run = {**run, "signed": {label: is_signed(str(name)) for label, name in run["methods"].items()}}
        names, counts, failures = run.get("class_names"), Counter[str](), list[Row]()
        predicted: dict[str, int | None] = {}
        for row, _ in saved.with_maps():
            counts[row["status"]] += 1
            if row["status"] == "explained":
                predicted[row["input"]] = row.get("predicted_index")
            elif len(failures) < FAILURES_SHOWN:
                failures.append(row)
        truth = None if labels is None else Labels.read(labels, list(predicted), names)

        def images() -> Iterator[Row]:
            """Yield the row of each explained image, with photograph and maps."""
            for row, maps in explained(saved, None):
                placed = [(placement_of(row["placement"], label), grid.shape) for label, grid in maps.items()]
                shown: Row = {**placed_grids(placed or [(placement_of(row["placement"]), (1, 1))]), "photograph": None}
                if truth is not None:
                    shown["truth"] = truth.classes.get(row["input"])
                try:
                    shown["photograph"] = thumbnail(read_photograph(row, run["root"]))
                except (VitflowError, OSError) as error:
                    shown["no_photograph"] = printable(str(error))
                yield row | shown | {"grids": maps}

        described = {label: _described(run, label) for label in run["methods"]}
        compared = None if truth is None else truth.in_words(predicted)
        return write_report(saved.folder, run, images(), failures, counts, named=described, labels=compared, **options)


def _described(run: Mapping[str, Any], label: str) -> tuple[str, str]:
    """Return a method's label, with its `variant` and whether it is class-specific, and its departures.

    For a custom method or an edited record, it is the label alone.
    """
    try:
        method, options = get_method(run["methods"][label]), run["options"][label]
        words = filter(None, (variant(method, options), "" if method.class_specific else NOT_SPECIFIC))
        return f"{label} ({text})" if (text := ", ".join(words)) else label, departures(method, options)
    except (OptionError, KeyError, TypeError, ValueError, AttributeError):
        return label, ""
