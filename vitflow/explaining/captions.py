"""What stands beside a drawn map: its method, what was asked, and its numbers, in words that people can read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitflow.explaining.method import Method
from vitflow.explaining.method_table import get_method
from vitflow.explaining.options import OPTIONS, REFINING
from vitflow.explaining.options import in_words as option_in_words
from vitflow.explaining.targets import Contrast, Score

# Below it, the halves of a sample agree so little that another seed may well give another map.
_LOW_RELIABILITY = 0.2


def class_lines(answer: Score) -> Iterator[str]:
    """What was asked and its number, in one line or two."""
    if answer.sides:
        yield from (answer.name, answer.display)
    elif answer.value is not None:
        rare = answer.unit == "probability" and answer.value < 0.0005
        chance = answer.display.replace("0.0%", "<0.1%") if rare else answer.display
        # The probability of a long name gets a line of its own, so that it is not cut off.
        yield from (answer.name, chance) if len(answer.name) > 40 else (f"{answer.name}, {chance}",)
    elif answer.name:
        yield answer.name


def ends(answer: Score, class_specific: bool) -> tuple[str, str]:
    """What values of a map below and above 0 stand for.

    >>> ends(Score("cat against dog", opposed=("cat", "dog")), True), ends(Score("cat", 0.9), True)
    (('for dog', 'for cat'), ('against cat', 'for cat'))
    """
    if answer.opposed:
        first, second = answer.opposed
        return f"for {second}", f"for {first}"
    if not (class_specific and answer.name):
        return "below 0", "above 0"
    if answer.unit == "probability":
        return f"against {answer.name}", f"for {answer.name}"
    return f"lowers {answer.name}", f"raises {answer.name}"


def ends_of_all(asked: Sequence[tuple[Score, bool]]) -> tuple[str, str]:
    """The same for several maps in one scale of colours: their own words where all have the same, or what they share.

    >>> ends_of_all([(Score("cat", 0.9), True), (Score("dog", 0.1), True)])
    ('against the class', 'for the class')
    """
    own = {ends(answer, specific) for answer, specific in asked}
    if len(own) == 1:
        return own.pop()
    if all(answer.opposed for answer, _ in asked):
        return "for the second", "for the first"
    if all(specific and answer.unit == "probability" for answer, specific in asked):
        return "against the class", "for the class"
    return "below 0", "above 0"


def departures(method: Method, options: Mapping[str, Any]) -> str:
    """How a map departs from its method's publication, in words; empty where it does not.

    Of a method that is from no publication: how it departs from the method's own defaults.

    >>> rollout = get_method("rollout")
    >>> departures(rollout, rollout.complete({"discard_ratio": 0.5, "affinity": "both"}))
    'max over heads, 50% discarded, value-weighted, refined by both'
    >>> departures(rollout, rollout.complete({"preset": "paper"}))
    ''
    """
    usual = method.defaults if method.published is None else method.published
    differing = {name: value for name, value in options.items() if value != usual.get(name)}
    if options.get("refine") == 0:
        differing.pop("affinity", None)  # by which nothing was spread
    elif "refine" in differing:
        differing["affinity"] = options["affinity"]
    return in_words(differing)


def departures_from_paper(method: Method, options: Mapping[str, Any]) -> str | None:
    """The same for JSON: None of a method that is from no publication."""
    return None if method.published is None else departures(method, options)


def method_record(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """A method with its options, ready for JSON."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    return {"method": method.name, "options": plain, "departures_from_paper": departures_from_paper(method, options)}


def method_in_words(method: Method, options: Mapping[str, Any]) -> str:
    """A method's title, and in brackets how its map departs from its publication."""
    return f"{method.title} ({told})" if (told := departures(method, options)) else method.title


def model_in_words(model: str, note: str = "") -> str:
    """A model's id with its note for readers.

    >>> model_in_words("vitflow_demo", "knows eight drawn shapes only")
    'vitflow_demo (knows eight drawn shapes only)'
    """
    return f"{model} ({note})" if note else model


def changed_options(name: str, options: Mapping[str, Any]) -> str:
    """What differs from the method's defaults, such as "90% discarded", or the preset that this amounts to."""
    method = get_method(name)
    differing = {name: value for name, value in options.items() if value != method.defaults.get(name)}
    for preset, values in method.presets.items():
        if differing and {**method.defaults, **values} == options:
            return "as in the paper" if preset == "paper" else f"preset {preset}"
    return in_words(differing)


def in_words(options: Mapping[str, Any]) -> str:
    """Options as people read them; how a map was refined comes last.

    >>> in_words({"head_fusion": "max", "refine": 2, "affinity": "keys", "value_weighted": "output", "patch": (3, 7)})
    'max over heads, value-weighted, patch (3, 7), refined 2 times by keys'
    """
    told = [
        OPTIONS[name].in_words(value) if name in OPTIONS else option_in_words(name, value)
        for name, value in options.items()
        if name not in REFINING
    ]
    steps, affinity = options.get("refine"), options.get("affinity")
    if steps == 0:
        told.append("not refined")
    elif steps or affinity:
        told.append(f"refined{f' {steps} times' if (steps or 1) > 1 else ''}{f' by {affinity}' if affinity else ''}")
    return ", ".join(told)


class Code(str):
    """What stands in a call as it is: a variable, or another call."""

    __slots__ = ()


def python_call(function: str, *given: object, **named: object) -> Code:
    """A call as it is written in Python, without what was not asked for.

    >>> python_call("vitflow.explain", "cat.jpg", model=Code("model"), target=Contrast("cat", "dog"), patch=None)
    "vitflow.explain('cat.jpg', model=model, target=vitflow.Contrast('cat', 'dog'))"
    """
    asked = [f"{name}={_python(one)}" for name, one in named.items() if one is not None and one is not False]
    return Code(f"{function}({', '.join([*map(_python, given), *asked])})")


def _python(value: object) -> str:
    if isinstance(value, Code):
        return value
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return python_call("vitflow.Contrast", value.target, value.against) if isinstance(value, Contrast) else repr(value)


def unsure(facts: Mapping[str, Any]) -> str:
    """That the halves of a sample agree little, with their rank correlation; empty where they agree, or there is none.

    >>> unsure({"reliability": 0.04})
    'reliability 0.04: more masks make it surer'
    """
    reliability = facts.get("reliability")
    if reliability is None or reliability >= _LOW_RELIABILITY:
        return ""
    return f"reliability {reliability:.2f}: more masks make it surer".replace("-", "−")


def notes_of(facts: Mapping[str, Any]) -> Iterator[str]:
    """What else is to be known of a number and of its map, in sentences.

    >>> list(notes_of({"against": "the mean of the other prompts"}))
    ['The map is of its number less the mean of the other prompts.']
    """
    if (cosine := facts.get("cosine")) is not None:
        yield f"Cosine {cosine:.3f}; the percentage is its share among the prompts.".replace("-", "−")
    if against := facts.get("against"):
        yield f"The map is of its number less {against}."


def duration(seconds: float) -> str:
    """A time in milliseconds, or in seconds from one on, in minutes from ten, and in hours from two.

    >>> duration(0.0421), duration(12.34), duration(1234), duration(40000)
    ('42 ms', '12.3 s', '21 min', '11.1 h')
    """
    if seconds >= 600:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"
