"""The table of methods: what each is called, what it needs, what it can be asked, and where it comes from.

This module imports no torch: a method's function is loaded when it first runs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from vitflow.errors import OptionError, unknown_name


@dataclass(frozen=True, slots=True)
class Option:
    """One option that methods may have; the command line and the checks are made from it.

    Attributes:
        name: its Python name; the command line writes dashes.
        kind: the Python type of a value; "choice" takes one of `choices`.
        help: one sentence for the command line.
        choices: the values of a "choice".
        metavar: what stands for the value in the help.
    """

    name: str
    kind: type | str
    help: str
    choices: tuple[str, ...] = ()
    metavar: str | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """One saliency method.

    Attributes:
        name: what callers write.
        summary: one line for `vitflow methods`.
        function: `(trace, **options) -> Maps`, or where to load it from as "module:name".
        defaults: its options and their default values.
        needs: what must be recorded: "attention" (fused per head_fusion and value_weighted), "heads" (every head),
            "gradients", "predict" (running the model again).
        class_specific: whether the map depends on the asked class.
        paper: where it comes from.
    """

    name: str
    summary: str
    function: str | Callable[..., Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    class_specific: bool = False
    paper: str = ""

    def load(self) -> Callable[..., Any]:
        """The function itself."""
        if callable(self.function):
            return self.function
        module, _, name = self.function.partition(":")
        loaded: Callable[..., Any] = getattr(import_module(module), name)
        return loaded

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Fill the defaults in for options that were not given (or are None); OptionError for one it does not have."""
        for name in options:
            if name not in self.defaults:
                known = self.defaults or {"(none)": None}
                raise OptionError(unknown_name(f"option of method {self.name}", name, known))
        return {
            name: default if options.get(name) is None else options[name] for name, default in self.defaults.items()
        }


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("head_fusion", "choice", "How the heads of a layer become one matrix.", ("mean", "max", "min")),
        Option("discard_ratio", float, "Share of the smallest attention values to set to 0.", metavar="0…<1"),
        Option("residual", float, "Share of the residual connection in each layer.", metavar="0…<1"),
        Option("start_layer", int, "First layer of the product; 1 is the paper, 2 leaves out layer 1.", metavar="N"),
        Option("layer", int, "Layer whose attention to show, 1 for the first, -1 for the last.", metavar="N"),
        Option("head", int, "One head's own attention instead of the fused heads, 0 for the first.", metavar="N"),
        Option("value_weighted", bool, "Weight attention by the norm of the value vectors that it passes on."),
        Option(
            "patch", "patch", "Explain what this patch of the top layer holds, not the whole answer.", (), "ROW,COL"
        ),
    )
}

_PAPER = "Abnar & Zuidema, ACL 2020"
_METHODS: dict[str, Method] = {}


def register_method(
    name: str,
    function: Callable[..., Any] | str,
    *,
    summary: str = "",
    defaults: Mapping[str, Any] | None = None,
    needs: Iterable[str] = (),
    class_specific: bool = False,
    paper: str = "",
    replace: bool = False,
) -> Method:
    """Add a method to the table, so that every verb of the toolkit can use it by name.

    Args:
        name: what callers write.
        function: called as `function(trace, **options)`; returns maps [batch, rows, cols], or `Maps` with facts.
        summary: one line for `vitflow methods`.
        defaults: its options with their default values.
        needs: any of "attention", "heads", "gradients", "predict".
        class_specific: whether the map depends on the asked class.
        paper: where it comes from.
        replace: allow an existing name to be taken over.

    Raises:
        OptionError: the name is taken, or `needs` holds something unknown.
    """
    if name in _METHODS and not replace:
        raise OptionError(f"There is already a method {name!r}: choose another name, or pass replace=True.")
    known = {"attention", "heads", "gradients", "predict"}
    for need in needs:
        if need not in known:
            raise OptionError(unknown_name("need", need, known))
    method = Method(name, summary, function, dict(defaults or {}), frozenset(needs), class_specific, paper)
    _METHODS[name] = method
    return method


def get_method(name: str) -> Method:
    """The method of that name; OptionError that lists the known ones if there is none."""
    if name not in _METHODS:
        raise OptionError(unknown_name("method", name, _METHODS))
    return _METHODS[name]


def list_methods() -> list[Method]:
    """All methods of the table, in the order of the documentation."""
    return list(_METHODS.values())


register_method(
    "rollout",
    "vitflow.methods.maps:rollout",
    summary="Attention rollout: attention as proportions, multiplied through the layers.",
    defaults={
        "head_fusion": "mean",
        "discard_ratio": 0.0,
        "residual": 0.5,
        "start_layer": 1,
        "value_weighted": False,
        "patch": None,
    },
    needs={"attention"},
    paper=f"{_PAPER}, §3.1",
)
register_method(
    "attention",
    "vitflow.methods.maps:attention",
    summary="Raw attention of one layer, fused or of one head.",
    defaults={
        "head_fusion": "mean",
        "layer": -1,
        "head": None,
        "discard_ratio": 0.0,
        "value_weighted": False,
        "patch": None,
    },
    needs={"attention"},
    paper=f"{_PAPER}, the baseline",
)
