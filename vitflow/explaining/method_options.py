"""The options that methods may have: what the command line offers, and which all methods have in common.

This module imports no torch.
"""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from vitflow.errors import OptionError, unknown_name, whole_number

# Options of the step that spreads a map among the patches that the model treats alike.
REFINING: Mapping[str, Any] = {"refine": 0, "affinity": "attention"}
# Options of every method but the baselines.
COMMON: Mapping[str, Any] = {**REFINING, "shifts": 0}


# Steps of refinement, at most. Each brings a map nearer to a constant one: by attention nothing else is left after ten.
_MOST_STEPS = 100


# What a value is, where the kind of an option does not say it.
_ANNOTATIONS: dict[str, Any] = {
    "patch": tuple[int, int],
    "box": tuple[float, float, float, float],
    "text": int | str,
    "choice": None,
}


# Kinds that are several numbers with commas between them: what these are called, their type, and how they are meant.
_TUPLES: Mapping[str, tuple[str, Any, str]] = {
    "patch": ("ROW,COL", int, " counted from 0, such as 3,7"),
    "box": ("LEFT,TOP,RIGHT,BOTTOM", float, " in pixels, such as 40,20,300,260"),
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option that methods may have; the command line and the checks are made from it.

    Attributes:
        name: its Python name; the command line writes dashes.
        kind: the Python type of a value; "choice" takes one of `choices`, "patch" and "box" some numbers.
        help: one sentence for the command line.
        choices: the values of a "choice"; of a bool, what it can be beside True and False.
        metavar: what stands for the value in the help, with the range of a number.
    """

    name: str
    kind: type | str
    help: str
    choices: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def values(self) -> str:
        """What it can be, in words."""
        switch = ("on", "off") if self.kind is bool else ()
        return "|".join((*switch, *self.choices)) or str(self.metavar)

    def read(self, text: str) -> Any:
        """The value that a text stands for.

        Raises:
            OptionError: it stands for none.

        >>> OPTIONS["patch"].read("3,7"), OPTIONS["value_weighted"].read("on"), OPTIONS["residual"].read("0.5")
        ((3, 7), True, 0.5)
        """
        switch = {"on": True, "off": False} if self.kind is bool else {}
        if switch or self.kind == "choice":
            if text not in switch and text not in self.choices:
                raise OptionError(f"{self.name}: expected {', '.join((*switch, *self.choices))}, got {text!r}.")
            return switch.get(text, text)
        if self.kind == "text":
            return text
        name, kind, told = _TUPLES.get(str(self.kind), (str(self.metavar), self.kind, ""))
        try:
            numbers = tuple(kind(part) for part in text.split(","))
        except ValueError:
            numbers = ()
        if len(numbers) != name.count(",") + 1:
            raise OptionError(f"{self.name}: expected {name}{told}, got {text!r}.")
        return numbers if self.kind in _TUPLES else numbers[0]

    @property
    def annotation(self) -> Any:
        """What it can be, as a type; None stands for the method's own default."""
        kind: Any = _ANNOTATIONS.get(str(self.kind), self.kind)
        return (kind | Literal[self.choices] if self.choices else kind) | None


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "head_fusion",
            "choice",
            "How the heads of a layer become one matrix; signed_mean, of gradients: the mean before what is below 0 is "
            "cut, not after.",
            ("mean", "max", "min", "signed_mean"),
        ),
        Option("discard_ratio", float, "Share of the smallest attention values to set to 0.", metavar="0…<1"),
        Option("residual", float, "Share of the residual connection in each layer.", metavar="0…<1"),
        Option("start_layer", int, "First layer of the product, counted from 1; 2 leaves out layer 1.", metavar="N≥1"),
        Option("end_layer", int, "Last layer of the product; -1 is the model's last.", metavar="N≥1|-1"),
        Option("layer", int, "Layer to look at, counted from 1; -1 is the last.", metavar="N≥1|-1"),
        Option("head", int, "One head's own attention instead of the fused heads, counted from 0.", metavar="N≥0"),
        Option(
            "value_weighted",
            bool,
            "Weight attention by the norm of the value vectors that it passes on; off: attention as it is; output: by "
            "what these vectors add to the attention's output, along that output.",
            ("output",),
        ),
        Option(
            "patch",
            "patch",
            "Explain what this patch of the top layer holds, not the whole answer; or compare with it. Row and column "
            "count from 0.",
            (),
            "ROW,COL",
        ),
        Option(
            "box",
            "box",
            "Compare with what the patches in this box of the picture hold; its edges are in pixels.",
            (),
            "LEFT,TOP,RIGHT,BOTTOM",
        ),
        Option("patch_size", int, "Pixels per side of a patch, where it need not be the model's own.", metavar="N≥1"),
        Option(
            "occlusion_batch",
            int,
            "Pictures with hidden patches per forward pass; where these leave the sequence, as many tokens.",
            metavar="N≥1",
        ),
        Option(
            "score",
            "choice",
            "What blank-out takes the drop of: the class's log-odds, or its probability as in the paper.",
            ("log-odds", "probability"),
        ),
        Option(
            "pooled",
            "choice",
            "What LeGrad reads a layer's answer from where the model reads a class token: the mean of all tokens, as "
            "in the paper, or that token (own).",
            ("mean", "own"),
        ),
        Option("masks", int, "Random masks of sampling: more make its map surer.", metavar="N≥2"),
        Option("keep", float, "Share of the patches that each mask keeps.", metavar="0<K<1"),
        Option("cells", int, "Random numbers on a side of a mask: more make its regions smaller.", metavar="N≥2"),
        Option("random_seed", int, "Seed of the random map, or of the masks.", metavar="N≥0"),
        Option("sigma", float, "Width of the centre prior, as a share of the picture's side.", metavar="S>0"),
        Option(
            "layers",
            "text",
            "Layers that the flow runs through: the last N, FIRST:LAST counted from 1, or all; alone, all stands for "
            "the paper's definition.",
            (),
            "N|A:B|all",
        ),
        Option("below", "choice", "What carries the flow on to the input below its layers.", ("rollout", "none")),
        Option(
            "refine",
            int,
            "Steps that spread the map among the patches that the model treats alike; 0: none.",
            metavar=f"0…{_MOST_STEPS}",
        ),
        Option(
            "affinity",
            "choice",
            "What tells which patches are alike for --refine: that they attend to the same patches, that their keys "
            "point the same way, or both.",
            ("attention", "keys", "both"),
        ),
        Option(
            "shifts",
            int,
            "Mean over so many crops, each moved by half a patch: 4, or 0 for the model's own crop alone.",
            metavar="0|4",
        ),
        Option("preset", "choice", "The published definition, where the defaults differ.", ("paper",)),
    )
}


def shown(value: Any) -> str:
    """A value of an option in words.

    >>> shown(True), shown(None), shown(0.5)
    ('on', 'none', '0.5')
    """
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else "none" if value is None else str(value)


def check_common(options: Mapping[str, Any]) -> None:
    """Raise OptionError unless those of the common options that are there can be used."""
    whole_number("refine", options.get("refine", 0), 0, _MOST_STEPS)
    affinities = OPTIONS["affinity"].choices
    if options.get("affinity", affinities[0]) not in affinities:
        raise OptionError(unknown_name("affinity", options["affinity"], affinities))
    if options.get("shifts", 0) not in (0, 4) or isinstance(options.get("shifts"), bool):
        raise OptionError(f"Expected shifts of 0 or 4, got {options['shifts']!r}.")


_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes_method_options(function: _Function) -> _Function:
    """Let the signature and the help of a function name the options that its `**options` may hold."""
    signature = inspect.signature(function)
    *named, rest = signature.parameters.values()
    more = [
        inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option.annotation)
        for option in OPTIONS.values()
        if option.name not in signature.parameters
    ]
    # What is left of **options is for the methods that a user registers.
    function.__signature__ = signature.replace(parameters=[*named, *more, rest])  # type: ignore[attr-defined]
    told = (f"{option.name}: {option.help} ({option.values})" for option in OPTIONS.values())
    wrapped = (textwrap.fill(line, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for line in told)
    head = "Options of the methods; list_methods() and `vitflow methods NAME` tell which has which, and its default:"
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", head, *wrapped, ""])
    return function
