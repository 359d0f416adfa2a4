"""A method: what it is called, what it needs, what it can be asked, and where it comes from.

This module imports no torch: a method's function is loaded when it first runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import isfinite
from typing import Any, Literal

from vitflow.errors import OptionError, check_known, unknown_name
from vitflow.explaining.options import COMMON, REFINING, UNREFINED

# When a method's map is spread among the patches that the model treats alike.
Refined = Literal["after", "positive", "within", "never"]
_NEEDS = frozenset({"attention", "heads", "gradients", "features", "tokens", "predict"})


@dataclass(frozen=True, slots=True)
class Method:
    """One saliency method.

    Attributes:
        name: what callers write.
        function: `(trace, **options) -> maps`, or where to load it from as "module:name"; `trace` is a `Trace` that has
            `targets` and `predict`, too, and the maps are [batch, rows, cols], or `Maps` with facts. The options that
            all methods have in common are not passed on (see `refined`).
        summary: one line for `vitflow methods`.
        defaults: its options and their default values; `refine`, `affinity` and `shifts` need not be given.
        needs: what must be recorded: "attention" (fused per head_fusion and value_weighted), "heads" (every head),
            "gradients" (of all that is recorded), "features" (tokens after the first norm of block `layer`), "tokens"
            (those that block `layer` gives, or every block), "predict" (running the model again).
        class_specific: whether the map depends on the asked class.
        paper: where it comes from.
        presets: named sets of options for `preset`; "paper" is the published definition.
        implies: option values that ask for a preset by themselves, {(option, value): preset}.
        refined: "after" its function, by the step that all methods have in common; "positive": likewise, without what
            is below 0; "within" its function, which is given the options of that step; or "never". Else `refine`,
            `affinity` and `shifts` are among its options.
        question: the question that its map answers.
        title: what figures and pages call it; by default its name.

    Raises:
        OptionError: `needs` holds something unknown.
    """

    name: str
    function: str | Callable[..., Any]
    summary: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    class_specific: bool = False
    paper: str = ""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    implies: Mapping[tuple[str, Any], str] = field(default_factory=dict)
    refined: Refined = "after"
    question: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(self.needs))
        object.__setattr__(self, "title", self.title or self.name)
        for need in self.needs - _NEEDS:
            raise OptionError(unknown_name("need", need, _NEEDS))
        if self.refined != "never":
            common = {name: self.defaults.get(name, value) for name, value in COMMON.items()}
            presets = {name: {**UNREFINED, **options} for name, options in self.presets.items()}
            object.__setattr__(self, "defaults", {**self.defaults, **common})
            object.__setattr__(self, "presets", presets)

    @property
    def published(self) -> dict[str, Any] | None:
        """Every option as its publication has it, where nothing is refined or shifted; None where it has none.

        >>> Method("mine", max, defaults={"refine": 1}, paper="Mine, 2026").published
        {'refine': 0, 'affinity': 'attention', 'shifts': 0}
        """
        if not self.paper:
            return None
        published = {**self.defaults, **UNREFINED, **self.presets.get("paper", {})}
        return {name: published[name] for name in self.defaults}

    def load(self) -> Callable[..., Any]:
        """The function itself."""
        if callable(self.function):
            return self.function
        module, _, name = self.function.partition(":")
        loaded: Callable[..., Any] = getattr(import_module(module), name)
        return loaded

    def function_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options that its function is called with: those of the common step are not among them."""
        common = COMMON.keys() - (REFINING.keys() if self.refined == "within" else ())
        return {name: value for name, value in options.items() if name not in common}

    def accepts(self, name: str) -> bool:
        """Whether it has an option of that name; `preset` is one where there are presets."""
        return name in self.defaults or (name == "preset" and bool(self.presets))

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in options that were not given (or are None): from `preset` if it was given, else from the defaults.

        Raises:
            OptionError: it has no such option or preset; a number is infinite or none.
        """
        for name, value in options.items():
            if isinstance(value, float) and not isfinite(value):
                raise OptionError(f"Expected a finite {name}, got {value}.")
            if not self.accepts(name):
                known = self.defaults or {"(none)": None}
                having = [method.name for method in METHODS.values() if method.accepts(name)]
                belongs = f" {name!r} is an option of {', '.join(having)}." if having else ""
                raise OptionError(unknown_name(f"option of method {self.name}", name, known) + belongs)
        defaults, preset = dict(self.defaults), options.get("preset")
        if preset is None:
            preset = next((name for (key, value), name in self.implies.items() if options.get(key) == value), None)
        if preset is not None:
            check_known(f"preset of method {self.name}", preset, self.presets)
            defaults |= self.presets[preset]
        return {name: default if options.get(name) is None else options[name] for name, default in defaults.items()}


#: The methods by name; `vitflow.explaining.method_table` fills it.
METHODS: dict[str, Method] = {}
