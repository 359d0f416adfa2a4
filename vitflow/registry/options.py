"""Option table: one row for each option of methods, refinement, text methods and drawing.

The command line, signatures, checks, captions and documentation are derived from it. This module imports no torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from vitflow.errors import OptionError, check_known, whole_number
from vitflow.images import BACKGROUNDS, INTERPOLATIONS, UNSEEN

#: method: options of single methods; refinement: of the step shared by all methods except baselines; text: only of
#: methods for texts; drawing: of overlays and figures.
Scope = Literal["method", "refinement", "text", "drawing"]


# Layers of the flow: a number, a range as text, or both ends.
_LAYERS: Any = int | str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Option:
    """Row of the option table; the command line writes its name with dashes.

    Attributes:
        kind: Python type of a value; "choice" takes one of `choices`. Numbers of a tuple are separated by commas.
        choices: values of a "choice"; of other types, values that are not of the type.
        metavar: placeholder of the value in the help, with the range of a number.
        default: default of refinement and drawing options, which does not depend on the method.
        default_help: description of the default, if it is not a value.
        limits: smallest and largest value of a number, if the table checks them.
        droppable: a default that does not apply to a model is dropped; a requested value is refused.
        selects_layers: whether it selects layers or heads, which `layer_maps` does itself.
        phrase: describes a value in captions; by default "name value".
    """

    name: str
    kind: Any
    help: str
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    scope: Scope = "method"
    default: Any = None
    default_help: str = ""
    limits: tuple[int, int | None] | None = None
    droppable: bool = False
    selects_layers: bool = False
    phrase: Callable[[Any], str] | None = None

    @property
    def values(self) -> str:
        """Description of the possible values."""
        others = ("on", "off") if self.kind is bool else () if self.kind == "choice" else (str(self.metavar),)
        return "|".join((*others, *self.choices))

    def read(self, text: str) -> Any:
        """Parse a value; OptionError if it is none of this option.

        >>> OPTIONS["patch"].read("3,7"), OPTIONS["value_weighted"].read("on"), OPTIONS["residual"].read("0.5")
        ((3, 7), True, 0.5)
        """
        switch = {"on": True, "off": False} if self.kind is bool else {}
        if switch or self.kind == "choice":
            if text not in switch and text not in self.choices:
                raise OptionError(f"{self.name}: expected {', '.join((*switch, *self.choices))}, got {text!r}.")
            return switch.get(text, text)
        if self.kind in (str, _LAYERS) or text in self.choices:
            return text
        if self.kind == Mapping[str, Any]:
            with suppress(ValueError):
                if isinstance(value := json.loads(text), dict):
                    return value
            raise OptionError(f"{self.name}: expected a JSON object, got {text!r:.80}.")
        kinds = get_args(self.kind) or (self.kind,)
        try:
            numbers = tuple(kind(part) for kind, part in zip(kinds, text.split(","), strict=True))
        except ValueError as error:
            raise OptionError(f"{self.name}: expected {self.metavar}, got {text!r}.") from error
        return numbers if get_args(self.kind) else numbers[0]

    def checked(self, value: Any) -> Any:
        """Return a value that was given in Python, where a switch may be "on" or "off" as on the command line.

        >>> OPTIONS["value_weighted"].checked("on"), OPTIONS["value_weighted"].checked("output")
        (True, 'output')
        """
        if self.kind is bool and isinstance(value, str):
            return self.read(value)
        word = self.kind is int and bool(self.choices) and isinstance(value, str)
        if word or (self.kind == "choice" and value is not None):  # None: the default depends on the model
            check_known(self.name.replace("_", " "), value, self.choices)
        return whole_number(self.name, value, *self.limits) if self.kind is int and self.limits else value

    @property
    def annotation(self) -> Any:
        """Type of a value; None stands for the method's default."""
        if self.kind == "choice":
            return Literal[self.choices] | None
        switch = ("on", "off") if self.kind is bool else ()
        return (self.kind | Literal[(*switch, *self.choices)] if self.choices else self.kind) | None


def _layers_in_words(value: Any) -> str:
    if value == "all":
        return "all layers"
    return f"last {value} layers" if str(value).isdecimal() else f"layers {value}"


_drawn = partial(Option, scope="drawing")

OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "head_fusion",
            "choice",
            "Fusion of the heads of a layer; signed_mean (gradient methods): average heads before clamping negatives.",
            ("mean", "max", "min", "signed_mean"),
            phrase=lambda value: f"{value} over heads".replace("_", " "),
        ),
        Option(
            "discard_ratio",
            float,
            "Share of the smallest attention values to set to 0.",
            metavar="0…<1",
            phrase=lambda value: f"{100 * value:g}% discarded",
        ),
        Option("residual", float, "Share of the residual connection in each layer.", metavar="0…<1"),
        Option(
            "start_layer",
            int,
            "First layer of the product, counted from 1; 2 leaves out layer 1. middle (rollout): the first of the "
            "upper half, if the model has at least twelve layers of one grid, else 1.",
            ("middle",),
            metavar="N≥1",
            selects_layers=True,
            phrase=lambda value: "upper half of 12 or more layers" if value == "middle" else f"start layer {value}",
        ),
        Option(
            "end_layer",
            int,
            "Last layer of the product, counted from 1; -1 is the model's last.",
            metavar="N≥1|-1",
            selects_layers=True,
        ),
        Option("layer", int, "Layer to use, counted from 1; -1 is the last.", metavar="N≥1|-1", selects_layers=True),
        Option(
            "head",
            int,
            "Attention of this head instead of the fused heads, counted from 1; -1 is the last.",
            metavar="N≥1|-1",
            selects_layers=True,
        ),
        Option(
            "value_weighted",
            bool,
            "Weight attention by the norm of the value vectors; output: by their projection on the attention's output; "
            "off: no weighting.",
            ("output",),
            droppable=True,
            phrase={
                "output": "value-weighted",
                True: "weighted by value norms",
                False: "not value-weighted",
            }.__getitem__,
        ),
        Option(
            "patch",
            tuple[int, int],
            "Query patch of the top layer instead of the model's output (row and column from 0); similarity: the patch "
            "to compare with.",
            metavar="ROW,COL",
        ),
        Option(
            "box",
            tuple[float, float, float, float],
            "Region of the image, in pixels: detectors explain the detection there, models for segmentation the class "
            "inside; similarity compares with its patches.",
            metavar="LEFT,TOP,RIGHT,BOTTOM",
        ),
        Option("patch_size", int, "Pixels per side of a patch, if not the model's.", metavar="N≥1"),
        Option(
            "occlusion_batch",
            int,
            "Masked images per forward pass. If masked tokens are dropped, the batch is scaled to the same total "
            "number of tokens.",
            metavar="N≥1",
        ),
        Option(
            "score",
            "choice",
            "Score whose drop is measured: log-odds, or the probability as in the paper.",
            ("log-odds", "probability"),
            phrase="drop in {}".format,
        ),
        Option(
            "peer_options",
            Mapping[str, Any],
            "Options of the other package's class for captum:NAME and cam:NAME, as JSON.",
            metavar="JSON",
            phrase=lambda value: ", ".join(f"{key} {each}" for key, each in value.items()),
        ),
        Option(
            "masks",
            int,
            "Number of random masks; more masks give a more reliable map.",
            metavar="N≥2",
            droppable=True,
        ),
        Option(
            "random_seed",
            int,
            "Seed of the random map, or of the masks.",
            limits=(0, None),
            metavar="N≥0",
        ),
        Option(
            "layers",
            _LAYERS,
            "Layers of the flow: the last N, FIRST:LAST counted from 1, or all. all without other options is the "
            "paper's definition.",
            metavar="N|A:B|all",
            phrase=_layers_in_words,
        ),
        Option(
            "below",
            "choice",
            "How to propagate from the lowest flow layer to the input: rollout or none.",
            ("rollout", "none"),
            phrase={"rollout": "rollout below", "none": "nothing below"}.__getitem__,
        ),
        Option(
            "causal",
            "choice",
            "For decoders: raw attention, or relative to uniform attention over the same tokens.",
            ("raw", "receptive_field"),
            scope="text",
            phrase={"raw": "causal raw", "receptive_field": "relative to the receptive field"}.__getitem__,
        ),
        Option(
            "refine",
            int,
            "Refinement steps, which spread the map among patches that the model treats as similar; 0: none.",
            metavar="0…100",
            scope="refinement",
            default=0,
            limits=(0, 100),  # each step brings a map nearer to a constant one
            droppable=True,
        ),
        Option(
            "affinity",
            "choice",
            "Similarity of patches for the refinement: their attention, their keys, or both.",
            ("attention", "keys", "both"),
            scope="refinement",
            default="attention",
            droppable=True,
        ),
        Option("preset", "choice", "The published definition, if the defaults differ from it.", ("paper",)),
        _drawn(
            "cmap",
            str,
            "Colour map of matplotlib.",
            metavar="NAME",
            default_help="plasma; red and blue if the map has both signs",
        ),
        _drawn("alpha", float, "Opacity of the colours.", limits=(0, 1), metavar="0…1", default_help="0.75"),
        _drawn(
            "vmin",
            float,
            "Value of the first colour.",
            metavar="X",
            default_help="2nd percentile; -vmax for both signs",
        ),
        _drawn(
            "vmax", float, "Value of the last colour.", metavar="X", default_help="98th percentile of absolute values"
        ),
        _drawn(
            "interpolation", "choice", "How patches are upsampled to pixels.", INTERPOLATIONS, default_help="smooth"
        ),
        _drawn("background", "choice", "Image under the colours; none: transparent.", BACKGROUNDS, default_help="grey"),
        _drawn("unseen", "choice", "Border of the part that the model saw.", UNSEEN, default_help="off if grey"),
        _drawn("crop_to_seen", bool, "Draw only the part of the image that the model saw."),
    )
}


def options_of(*scopes: Scope) -> dict[str, Option]:
    """Return the rows of these scopes by name, in the order of the table."""
    return {name: option for name, option in OPTIONS.items() if option.scope in scopes}


#: Defaults of the options of refinement, which all methods except baselines have.
REFINING: Mapping[str, Any] = {name: option.default for name, option in options_of("refinement").items()}
#: Options of methods for images.
METHOD_OPTIONS = options_of("method", "refinement")


def option_in_words(name: str, value: Any) -> str:
    """Describe the value of an option for captions.

    >>> option_in_words("head_fusion", "max"), option_in_words("patch", (3, 7)), option_in_words("mirrored", False)
    ('max over heads', 'patch (3, 7)', 'not mirrored')
    """
    phrase = OPTIONS[name].phrase if name in OPTIONS else None
    if phrase is not None and value is not None:
        return phrase(value)
    if isinstance(value, bool):
        return f"{'' if value else 'not '}{name}".replace("_", " ")
    if isinstance(value, tuple | list):
        value = f"({', '.join(map(str, value))})"
    return f"{name} {f'{value:g}' if isinstance(value, float) else value}".replace("_", " ")


def default_in_words(name: str, value: Any) -> str:
    """Describe the default of an option; if None, that of a switch and of texts depends on the model.

    >>> default_in_words("patch", None), default_in_words("value_weighted", None)
    ('none', 'depends on the model')
    """
    if value is None:
        by_model = name in OPTIONS and (OPTIONS[name].kind is bool or OPTIONS[name].scope == "text")
        return "depends on the model" if by_model else "none"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
