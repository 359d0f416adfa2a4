"""Choosing methods: names and options as callers write them, looked up in the table and completed.

This module imports no torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vitflow.errors import OptionError
from vitflow.explaining.asking.method_options import check_common
from vitflow.explaining.asking.method_table import Method, get_method

# What callers may call the class to explain, which is `target` here.
_CALLED_TARGET = ("class_", "class_id", "class_idx", "class_index", "class_name", "category", "cls", "label")
# What is one thing for some functions and several for others, and how each wants it.
_MISNAMED = {
    "method": "methods=[{0!r}], which takes several methods",
    "methods": "method=…, one by its name; explain_batch takes several",
    "target": "targets={0!r}, which takes one class or a list of them",
    "targets": "target=…, one class by its index or name; explain_batch takes several",
}
# A method by name, or by name with options of its own.
MethodChoice = str | tuple[str, Mapping[str, Any]]
# Methods with all their options.
Chosen = Sequence[tuple[Method, dict[str, Any]]]


def choose_methods(methods: Sequence[MethodChoice], options: Mapping[str, Any]) -> list[tuple[Method, dict[str, Any]]]:
    """Look methods up and complete their options: shared `options` go to each method that has them.

    Raises:
        OptionError: an unknown method or option, or an option that none of the methods has.
    """
    if isinstance(methods, str):
        methods = [methods]
    if not methods:
        raise OptionError("Expected at least one method, got none.")
    pairs = [
        (get_method(choice), {}) if isinstance(choice, str) else (get_method(choice[0]), choice[1])
        for choice in methods
    ]
    for name in options:
        if name in _MISNAMED and not any(method.accepts(name) for method, _ in pairs):
            value = options[name]
            told = _MISNAMED[name].format(value if isinstance(value, str | int) else "…")
            raise OptionError(f"Expected {told}, got {name}={value!r:.80}.")
        if name in _CALLED_TARGET and not any(method.accepts(name) for method, _ in pairs):
            raise OptionError(
                f"Unknown option {name!r}: name the class to explain by target={options[name]!r} (targets, for several "
                "pictures or classes at once)."
            )
        if not any(method.accepts(name) for method, _ in pairs):
            pairs[0][0].complete({name: None})  # raises, naming the options that there are
    chosen = [
        (method, method.complete({**{k: v for k, v in options.items() if method.accepts(k)}, **own}))
        for method, own in pairs
    ]
    for _, complete in chosen:
        check_common(complete)
    return chosen


def asked_for(names: Sequence[str], methods: Sequence[MethodChoice], options: Mapping[str, Any]) -> frozenset[str]:
    """Which of these options are asked for, and are no mere defaults: what does not apply is then refused.

    A run hands over each method with all its options, so that one that equals its method's default was not asked for.

    >>> sorted(asked_for(["refine"], ["gae"], {"refine": 1}))
    ['refine']
    >>> sorted(asked_for(["refine"], [("gae", {"refine": 1})], {}))
    []
    """
    pairs = [(get_method(choice[0]), choice[1]) for choice in methods if not isinstance(choice, str)]
    return frozenset(
        name
        for name in names
        if options.get(name) or any(own.get(name) and own[name] != method.defaults.get(name) for method, own in pairs)
    )


def check_methods(methods: Sequence[MethodChoice], options: Mapping[str, Any]) -> None:
    """Raise OptionError for an unknown method or option, or for the same method with the same options twice."""
    chosen = choose_methods(methods, options)
    for number, one in enumerate(chosen):
        if one in chosen[:number]:
            raise OptionError(f"Expected different methods or options, got {one[0].name} twice with the same options.")
