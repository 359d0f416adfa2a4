"""Choosing methods: names and options as callers write them, looked up in the table and completed.

This module imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from vitflow.errors import OptionError
from vitflow.explaining.method import METHODS, Method
from vitflow.explaining.method_table import get_method
from vitflow.explaining.options import OPTIONS, check_common

# What callers may call the class to explain, which is `target` here.
_CALLED_TARGET = ("class_", "class_id", "class_idx", "class_index", "class_name", "category", "cls", "label")
# What is one thing for some functions and several for others: the right name, and what it takes.
_MISNAMED = {
    "method": ("methods", "which takes several methods"),
    "methods": ("method", "one by its name; explain_batch takes several"),
    "target": ("targets", "which takes one class or a list of them"),
    "targets": ("target", "one class by its index or name; explain_batch takes several"),
}


@dataclass(frozen=True, slots=True)
class ChosenMethod:
    """A method with all its options.

    Attributes:
        name: the method's name in the table.
        options: every one with its value.
        label: what it is called; no two methods of a run are called the same.
        given: the requested options that a default could drop (value_weighted, refine): if one does not apply, it is
            refused; a default that does not apply is dropped.
    """

    name: str
    options: dict[str, Any]
    label: str = ""
    given: frozenset[str] = frozenset()

    @property
    def method(self) -> Method:
        """The method itself."""
        return get_method(self.name)

    def but(self, **options: Any) -> "ChosenMethod":
        """The same with other values of these options, as far as it has them."""
        return replace(self, options={name: options.get(name, value) for name, value in self.options.items()})


# Methods with all their options.
Chosen = Sequence[ChosenMethod]
# A method by name, by name with options of its own, or with all of them.
MethodChoice = str | tuple[str, Mapping[str, Any]] | ChosenMethod


def _respelt(name: str, value: Any) -> str:
    """The value that was given by the wrong one of two names, as the right one takes it; "…" where it does not.

    >>> _respelt("methods", "gae"), _respelt("method", ["gae"]), _respelt("target", [0, 1])
    ("['gae']", "'gae'", '…')
    """
    if isinstance(value, list | tuple) and len(value) == 1 and not name.endswith("s"):
        value = value[0]
    if isinstance(value, list | tuple) and not name.endswith("s"):
        return "…"
    return f"{[value] if name == 'methods' and isinstance(value, str) else value!r:.80}"


def default_method(asks: bool) -> str:
    """The method where none is named: with a target gae, without one rollout, whose map no target changes."""
    return "gae" if asks else "rollout"


def has_targets(targets: Any) -> bool:
    """Whether targets ask for anything but what the model predicts.

    >>> has_targets("tabby"), has_targets(["top3"]), has_targets([None]), has_targets(None)
    (True, True, False, False)
    """
    return any(one is not None for one in targets) if isinstance(targets, list | tuple) else targets is not None


def choose_methods(
    methods: Sequence[MethodChoice] | None, options: Mapping[str, Any], *, asks: bool = False
) -> list[ChosenMethod]:
    """Look methods up and complete their options: shared `options` go to each method that has them.

    Args:
        methods: names, or names with options; None for the default method.
        options: for every method that has them.
        asks: whether there is a target, on which the default method depends.

    Raises:
        OptionError: an unknown method or option, or an option that none of the methods has.
    """
    if methods is None:
        methods = [default := default_method(asks)]
        for name in options:
            if not get_method(default).accepts(name) and any(method.accepts(name) for method in METHODS.values()):
                _refuse_option_of_default(name, asks)
    if isinstance(methods, str):
        methods = [methods]
    if not methods:
        raise OptionError("Expected at least one method, got none.")
    named = [
        (one, {}) if isinstance(one, str) else (one.name, one.options) if isinstance(one, ChosenMethod) else one
        for one in methods
    ]
    pairs = [(get_method(name), own) for name, own in named]
    for name in options:
        if any(method.accepts(name) for method, _ in pairs):
            continue
        if name in _MISNAMED:
            right, what = _MISNAMED[name]
            value = options[name]
            raise OptionError(f"Expected {right}={_respelt(right, value)}, {what}, got {name}={value!r:.80}.")
        if name in _CALLED_TARGET:
            raise OptionError(
                f"Unknown option {name!r}: name the class to explain by target={options[name]!r} (targets, for several "
                "images or classes at once)."
            )
        pairs[0][0].complete({name: None})  # raises, naming the options that there are
    chosen = []
    for method, own in pairs:
        shared = {name: value for name, value in options.items() if method.accepts(name)}
        # A run hands over each method with all its options: one that equals the default was not asked for.
        asked = frozenset(
            name
            for name, option in OPTIONS.items()
            if option.droppable and (shared.get(name) or (own.get(name) and own[name] != method.defaults.get(name)))
        )
        chosen.append(ChosenMethod(method.name, method.complete({**shared, **own}), method.name, asked))
        check_common(chosen[-1].options)
    return chosen


def _refuse_option_of_default(name: str, asks: bool) -> NoReturn:
    """Raise OptionError for an option that the default method does not have, and some other method has."""
    default = default_method(asks)
    having = ", ".join(method.name for method in METHODS.values() if method.accepts(name))
    why = "there is a target" if asks else "there is no target"
    raise OptionError(
        f"Method {default} has no option {name!r}. No method was named, and {default} was chosen because {why}: name "
        f"one that has this option (method=…, or --method on the command line): {having}."
    )


def check_methods(
    methods: Sequence[MethodChoice] | None, options: Mapping[str, Any], *, asks: bool = False
) -> list[ChosenMethod]:
    """As `choose_methods`; OptionError also for the same method with the same options twice."""
    chosen = choose_methods(methods, options, asks=asks)
    for number, one in enumerate(chosen):
        if any((one.name, one.options) == (other.name, other.options) for other in chosen[:number]):
            raise OptionError(f"Expected different methods or options, got {one.name} twice with the same options.")
    return chosen


def left_out(refusals: Mapping[str, str]) -> list[str]:
    """What to tell of methods that do not apply, of which the reasons are known by name.

    >>> left_out({"flow": "No layers.", "gae": "No layers."})
    ['Left out: flow, gae. No layers.']
    """
    reasons = dict.fromkeys(refusals.values())
    names = [", ".join(name for name, own in refusals.items() if own == reason) for reason in reasons]
    return [f"Left out: {those}. {reason}" for those, reason in zip(names, reasons, strict=True)]
