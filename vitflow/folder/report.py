"""The report of a run: its images with their maps, and the predictions next to the true classes if labels are given."""

import csv
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

from vitflow.errors import OptionError, VitflowError, printable
from vitflow.explaining.captions import NOT_SPECIFIC, departures, variant
from vitflow.files import natural_order
from vitflow.folder.columns import AnyGrid, Maps, Row, placement_of
from vitflow.folder.draw import explained, open_run, read_photograph
from vitflow.folder.saved import SavedRun
from vitflow.images.overlay import is_soft, scale_range
from vitflow.models.classes import class_index
from vitflow.registry.choices import is_signed
from vitflow.registry.method_table import get_method
from vitflow.viewer.pages import (
    FAILURES_SHOWN,
    Page,
    color_tables,
    data_uri,
    drawing_of,
    make_html,
    placed_grids,
    thumbnail,
)

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


def report_run(
    output: str | os.PathLike[str], *, labels: str | os.PathLike[str] | None = None, per_page: int = 300
) -> Path:
    """Write the report of a run, `report.html` and further pages, and return the first page's path.

    It shows each image with each of its maps at any opacity, and the value of each patch. If an image is missing or has
    changed, its map is shown alone with the reason.

    Args:
        output: the run's output folder.
        labels: true classes, which the report compares with the predictions: "folders" for the names of the images'
            folders, or a CSV file with the columns `file` and `label` or `label_index`.
        per_page: number of images per page.

    Raises:
        OptionError: the folder has no run, its record is damaged, or no label is a class of the model.
    """
    with open_run(output) as saved:
        run, counts, failures = saved.fingerprint, Counter[str](), list[Row]()
        predicted: dict[str, int | None] = {}
        for row, _ in saved.with_maps():
            counts[row["status"]] += 1
            if row["status"] == "explained":
                predicted[row["input"]] = row.get("predicted_index")
            elif len(failures) < FAILURES_SHOWN:
                failures.append(row)
        truth = None if labels is None else Labels.read(labels, list(predicted), run.get("class_names"))
        described, drawing = {label: _described(run, label) for label in run["methods"]}, run["drawing"]
        soft = is_soft(drawing.get("vmin"), drawing.get("vmax"), True)
        shared = {
            "tables": color_tables(drawing.get("cmap")),
            "alpha": drawing.get("alpha", 0.75),
            "drawing": drawing_of(drawing.get("background", "grey"), soft=soft),
            "departures": {label: text for label, (_, text) in described.items()},
        }
        pages = range(1, max(-(-counts["explained"] // per_page), 1) + 1)
        names = [f"report-{number}.html" if number > 1 else "report.html" for number in pages]
        remaining = (_entry(row, maps, saved, truth.classes if truth else {}) for row, maps in explained(saved, None))
        for number, name in zip(pages, names, strict=True):
            entries = list(islice(remaining, per_page))
            page = make_html(
                "report",
                "report",
                title=saved.folder.resolve().name,
                run=run,
                explained=counts["explained"],
                failed=counts["failed"],
                failures=failures if number == 1 else [],
                labels=truth and truth.in_words(predicted),
                classes=sorted({entry["label"] for entry in entries}, key=natural_order),
                methods={label: name for label, (name, _) in described.items()},
                data={"images": entries, **shared},
                pages=names,
                number=number,
            )
            Page(page).save(saved.folder / name)
        return saved.folder / names[0]


def _entry(row: Row, maps: Maps, saved: SavedRun, truth: Mapping[str, int]) -> dict[str, Any]:
    """Return the data of an image on a page, for JSON."""
    run = saved.fingerprint
    source = os.path.join(run["root"], row["input"])  # noqa: PTH118 - a name that may not be text
    placed = [(placement_of(row["placement"], label), grid.shape) for label, grid in maps.items()]
    try:
        photograph, record = data_uri(thumbnail(read_photograph(row, run["root"]))), {}
    except (VitflowError, OSError) as error:
        photograph, record = None, {"photograph": printable(str(error))}
    return {
        "name": printable(row["input"], lines=True),
        "link": _link(os.path.relpath(source, saved.folder)),
        "image": photograph,
        "size": [row["width"], row["height"]],
        **placed_grids(placed or [(placement_of(row["placement"]), (1, 1))]),
        "label": row["target"] or "",
        "predicted": row["target"] is not None and row["class_index"] == row.get("predicted_index"),
        "probability": row["probability"],
        **_classes(row, run.get("class_names"), truth.get(row["input"])),
        "maps": {
            label: _map(
                grid, run["drawing"], is_signed(str(run["methods"].get(label))), row["facts"].get(label, {}) | record
            )
            for label, grid in maps.items()
        },
        "overlays": {label: _link(path) for label, path in row["outputs"].items()},
    }


def _classes(row: Row, names: Sequence[str] | None, truth: int | None) -> dict[str, Any]:
    """Return the predicted class of an image, other probable classes than its target, and its true class, by name."""

    def name_of(index: int | None) -> str:
        return "" if index is None else names[index] if names and index < len(names) else f"class {index}"

    others = [[name_of(index), value] for index, value in row.get("top") or () if index != row["class_index"]]
    classes: dict[str, Any] = {"prediction": name_of(row.get("predicted_index")), "others": others[:3]}
    if truth is not None:
        classes |= {"truth": name_of(truth), "wrong": truth != row.get("predicted_index")}
    return classes


def _link(path: str) -> str:
    """Return a relative link to a file, with escaped bytes and without a scheme."""
    return "./" + quote_from_bytes(os.fsencode(path).replace(os.sep.encode(), b"/"))


def _map(grid: AnyGrid, drawing: Mapping[str, Any], signed: bool, facts: Mapping[str, Any]) -> dict[str, Any]:
    limits = {name: drawing[name] for name in ("vmin", "vmax") if name in drawing}
    low, high = scale_range(grid, **limits, signed=signed)
    # Seven digits tell float32 values apart; more would make the page larger for nothing.
    return {
        "shape": list(grid.shape),
        "values": [float(f"{value:.7g}") for value in grid.ravel()],
        "low": low,
        "high": high,
        "facts": {name: value for name, value in facts.items() if isinstance(value, str | int | float)},
    }


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
