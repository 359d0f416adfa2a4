"""What stands beside a drawn map: its method, what was asked, and its numbers, in words that people can read."""

from collections.abc import Iterator, Mapping
from typing import Any

from vitflow.explaining.asking.answer import Answer
from vitflow.explaining.asking.method_table import get_method

# Below it, the halves of a sample agree so little that another seed may well give another map.
_LOW_RELIABILITY = 0.2


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
    return in_words(differing)


def in_words(options: Mapping[str, Any]) -> str:
    """Options as people read them.

    >>> in_words({"head_fusion": "max", "value_weighted": False, "patch": (3, 7)})
    'head fusion max, not value weighted, patch (3, 7)'
    """
    told = []
    for name, value in options.items():
        if isinstance(value, tuple | list):
            value = f"({', '.join(map(str, value))})"
        told.append(f"{name} {value}" if not isinstance(value, bool) else name if value else f"not {name}")
    return ", ".join(told).replace("_", " ")


def unsure(facts: Mapping[str, Any]) -> str:
    """That the halves of a sample agree little, with their rank correlation; empty where they agree, or there is none.

    >>> unsure({"reliability": 0.04})
    'reliability 0.04: more masks make it surer'
    """
    reliability = facts.get("reliability")
    if reliability is None or reliability >= _LOW_RELIABILITY:
        return ""
    return f"reliability {reliability:.2f}: more masks make it surer".replace("-", "−")


def duration(seconds: float) -> str:
    """A time in milliseconds, or in seconds from one on, in minutes from ten, and in hours from two.

    >>> duration(0.0421), duration(12.34), duration(1234), duration(40000)
    ('42 ms', '12.3 s', '21 min', '11.1 h')
    """
    if seconds >= 600:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"
