"""What stands beside a drawn map: its method, what was asked, and its numbers, in words that people can read."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vitflow.explaining.method_table import get_method

if TYPE_CHECKING:
    from vitflow.explaining.saliency import Saliency

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
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def method_title(method: str) -> str:
    """What a method is called in a figure; a registered one is called what its author called it."""
    return _TITLES.get(method, method)


def class_lines(saliency: "Saliency") -> Iterator[str]:
    """What was asked and its number, in one line or two."""
    if saliency.contrast is not None:
        yield from (saliency.label, saliency.contrast.told)
    if saliency.target is not None and saliency.probability is not None:
        chance = "<0.1%" if saliency.probability < 0.0005 else f"{saliency.probability:.1%}"
        # The probability of a long name gets a line of its own, so that it is not cut off.
        yield from (saliency.label, chance) if len(saliency.label) > 40 else (f"{saliency.label}, {chance}",)


def own_options(saliency: "Saliency") -> str:
    """What differs from the method's defaults, such as "discard ratio 0.9", or the preset that this amounts to."""
    method = get_method(saliency.method)
    differing = {name: value for name, value in saliency.options.items() if value != method.defaults.get(name)}
    for name, preset in method.presets.items():
        if differing and {**method.defaults, **preset} == saliency.options:
            return "as in the paper" if name == "paper" else f"preset {name}"
    return ", ".join(_option(name, value) for name, value in differing.items())


def _option(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"not {words}"
    if isinstance(value, tuple | list):
        value = ", ".join(str(part) for part in value)
        return f"{words} ({value})"
    return f"{words} {value}"


def readable(*values: float) -> tuple[tuple[str, ...], str]:
    """Numbers in as many decimals as give the largest two digits, and the power of 10 that they are to be taken by.

    The power is empty unless the numbers are too small or too large to be written out.

    >>> readable(0.00021, 0.0134), readable(-0.5, 0.0, 2.0), readable(1.2e-6, 3.4e-5)
    ((('0', '0.013'), ''), (('−0.5', '0', '2'), ''), (('1', '34'), '× 10⁻⁶'))
    """
    largest = max(map(abs, values))
    magnitude = math.floor(math.log10(largest)) if 0 < largest < math.inf else 0
    power = 0 if -3 <= magnitude < 5 else 3 * (magnitude // 3)
    decimals = max(1 - magnitude + power, 0)
    told = tuple(f"{value / 10.0**power:.{decimals}f}" for value in values)
    if decimals:
        told = tuple(text.rstrip("0").rstrip(".") for text in told)
    told = tuple("0" if text == "-0" else text.replace("-", "−") for text in told)
    return told, f"× 10{str(power).translate(_SUPERSCRIPTS)}" if power else ""


def duration(seconds: float) -> str:
    """A time in milliseconds, or in seconds from one on.

    >>> duration(0.0421), duration(12.34)
    ('42 ms', '12.3 s')
    """
    return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"
