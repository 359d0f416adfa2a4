"""Records of the documentation's images, so that a test notices an outdated one.

Each image is kept with the methods that it shows: every option that they had when it was drawn, and what they gave
then for one bundled image by the bundled model. Where an option has another default today, or the map or its colours
are others, the documentation's image is an old one. This needs neither photographs nor weights that are not bundled.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import vitflow
from vitflow.demo import sample_images

ASSETS = Path(__file__).resolve().parent.parent / "assets"
NAME = "drawn.json"
#: Squares that a map is averaged over, along each side.
SIDE = 4
#: How far averages may lie from what is kept: of a map, in shares of their range; of its colours, in steps of 255.
MAP_TOLERANCE, COLOUR_TOLERANCE = 0.03, 6

# A method, or a method with its options, as `vitflow.compare` takes them.
Choice = str | tuple[str, Mapping[str, Any]]


@cache
def _explainer() -> vitflow.Explainer:
    return vitflow.Explainer("demo", device="cpu")


@cache
def _print_of(method: str, options: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vitflow.VitflowWarning)  # a flow through all layers is saturated
        actual = _explainer().explain(sample_images()[0], method=method, **json.loads(options))
    means = _means(actual.grid)
    low, high = means.min(), means.max()
    return {
        "method": method,
        "options": json.loads(options),
        "used": json.loads(json.dumps(actual.to_dict()["options"])),
        "map": np.round((means - low) / max(high - low, 1e-12), 3).ravel().tolist(),
        "colours": np.rint(_means(actual.overlay())).astype(int).reshape(-1, 3).tolist(),
    }


def _means(values: NDArray[Any]) -> NDArray[np.float64]:
    """The means over SIDE × SIDE parts of the first two axes."""
    rows = [part.mean(axis=0) for part in np.array_split(values.astype(np.float64), SIDE)]
    return np.stack([[part.mean(axis=0) for part in np.array_split(row, SIDE)] for row in rows])


def print_of(choice: Choice) -> dict[str, Any]:
    """Return a method's current options, and its map and colours for the bundled image, averaged over squares."""
    method, options = (choice, {}) if isinstance(choice, str) else choice
    return _print_of(method, json.dumps(dict(options)))


def keep(image: Path, choices: Sequence[Choice], folder: Path) -> Path:
    """Keep, in a file of the folder, by what an image of it was drawn."""
    kept = kept_in(folder) | {image.relative_to(folder).as_posix(): [print_of(choice) for choice in choices]}
    lines = []
    for name in sorted(kept):
        entry = ",\n".join(f"  {json.dumps(one)}" for one in kept[name])
        lines.append(f" {json.dumps(name)}: [\n{entry}\n ]")
    (folder / NAME).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return image


def kept_in(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By what each image of a folder was drawn."""
    file = folder / NAME
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def departs(kept: Mapping[str, Any]) -> str:
    """Describe the differences between a method and its record; empty if there are none."""
    today = print_of((kept["method"], kept["options"]))
    if today["used"] != kept["used"]:
        return f"the options of {kept['method']} were {kept['used']}, and are {today['used']}"
    for name, tolerance in (("map", MAP_TOLERANCE), ("colours", COLOUR_TOLERANCE)):
        apart = float(np.abs(np.subtract(today[name], kept[name])).max())
        if apart > tolerance:
            reported = f"{kept['method']} {kept['options'] or ''}".strip()
            return f"the {name} of {reported} lie {apart:.3g} apart; {tolerance} is allowed"
    return ""
