"""Methods: name, options, requirements and source. Imports no torch: functions are loaded when they first run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import isfinite
from typing import Any, Literal

from vitflow.errors import OptionError, check_known, unknown_name
from vitflow.explaining.options import COMMON, REFINING, UNREFINED

# Stage at which a method's map is refined.
Refined = Literal["after", "positive", "within", "never"]
_NEEDS = frozenset({"attention", "heads", "gradients", "features", "tokens", "predict"})


@dataclass(frozen=True, slots=True)
class Method:
    """A saliency method.

    Attributes:
        name: its name in calls.
        function: `(trace, **options) -> maps`, or its location as "module:name"; `trace` is a `Trace` with `targets`
            and `predict`, and the maps are [batch, rows, cols], or `Maps` with facts. Refinement options are not passed
            (see `refined`).
        summary: one line for `vitflow methods`.
        defaults: options and their defaults; `refine`, `affinity` and `shifts` are added automatically.
        needs: what must be recorded: "attention" (fused per head_fusion and value_weighted), "heads" (every head),
            "gradients" (of everything recorded), "features" (tokens after the first norm of block `layer`), "tokens"
            (output of block `layer`, or of every block), "predict" (further forward passes).
        class_specific: whether the map depends on the target.
        paper: source.
        presets: named sets of options for `preset`; "paper" is the published definition.
        implies: option values that select a preset, {(option, value): preset}.
        refined: "after" its function, by the common step; "positive": likewise, with negative values clamped; "within"
            its function; or "never": no options `refine`, `affinity`, `shifts`. "positive" and "within" functions
            receive the refinement options.
        question: the question that its map answers.
        title: name in figures and pages; by default `name`.

    Raises:
        OptionError: `needs` contains an unknown name.
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
        """Options of the publication, without refinement and shifts; None without a publication.

        >>> Method("mine", max, defaults={"refine": 1}, paper="Mine, 2026").published
        {'refine': 0, 'affinity': 'attention', 'shifts': 0}
        """
        if not self.paper:
            return None
        published = {**self.defaults, **UNREFINED, **self.presets.get("paper", {})}
        return {name: published[name] for name in self.defaults}

    def load(self) -> Callable[..., Any]:
        """Return the function."""
        if callable(self.function):
            return self.function
        module, _, name = self.function.partition(":")
        loaded: Callable[..., Any] = getattr(import_module(module), name)
        return loaded

    def function_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that its function receives, without those of the common refinement step."""
        common = COMMON.keys() - (REFINING.keys() if self.refined in ("positive", "within") else ())
        return {name: value for name, value in options.items() if name not in common}

    def accepts(self, name: str) -> bool:
        """Return True if it has this option; `preset` counts if there are presets."""
        return name in self.defaults or (name == "preset" and bool(self.presets))

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in options that are missing or None, from `preset` or the defaults.

        Raises:
            OptionError: unknown option or preset, or a value that is not finite.
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


#: Methods by name; filled by `vitflow.explaining.method_table`.
METHODS: dict[str, Method] = {}
