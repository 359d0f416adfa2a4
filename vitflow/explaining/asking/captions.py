"""What stands beside a drawn map: its method, what was asked, and its numbers, in words that people can read."""

from collections.abc import Iterator, Mapping
from typing import Any

from vitflow.explaining.asking.answer import Answer
from vitflow.explaining.asking.method_table import get_method

_TITLES = {
    "attention": "Raw attention",
    "rollout": "Attention rollout",
    "flow": "Attention flow",
    "gradient_rollout": "Gradient rollout",
    "gae": "GAE",
    "consensus": "Consensus",
    "gradcam": "Grad-CAM",
    "input_gradient": "Input gradient",
    "occlusion": "Blank-out",
    "random": "Random map",
    "centre": "Centre prior",
}


def method_title(method: str) -> str:
    """What a method is called in a figure; a registered one is called what its author called it."""
    return _TITLES.get(method, method)


def class_lines(answer: Answer) -> Iterator[str]:
    """What was asked and its number, in one line or two."""
    if answer.sides:
        yield from (answer.name, answer.told)
    elif answer.number is not None:
        chance = "<0.1%" if answer.number < 0.0005 else answer.told
        # The probability of a long name gets a line of its own, so that it is not cut off.
        yield from (answer.name, chance) if len(answer.name) > 40 else (f"{answer.name}, {chance}",)


def own_options(name: str, options: Mapping[str, Any]) -> str:
    """What differs from the method's defaults, such as "discard ratio 0.9", or the preset that this amounts to."""
    method = get_method(name)
    differing = {name: value for name, value in options.items() if value != method.defaults.get(name)}
    for preset, values in method.presets.items():
        if differing and {**method.defaults, **values} == options:
            return "as in the paper" if preset == "paper" else f"preset {preset}"
    return ", ".join(_option(name, value) for name, value in differing.items())


def _option(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"not {words}"
    if isinstance(value, tuple | list):
        value = ", ".join(str(part) for part in value)
        return f"{words} ({value})"
    return f"{words} {value}"


def duration(seconds: float) -> str:
    """A time in milliseconds, or in seconds from one on, in minutes from ten, and in hours from two.

    >>> duration(0.0421), duration(12.34), duration(1234), duration(40000)
    ('42 ms', '12.3 s', '21 min', '11.1 h')
    """
    if seconds >= 600:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"
