"""Captions of maps: method, options, target, score and notes as text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.explaining.targets import Contrast, Score
from vitflow.registry.method_table import Method, get_method
from vitflow.registry.options import REFINING, option_in_words

# Split-half Spearman correlation below which maps differ between seeds.
_LOW_RELIABILITY = 0.2
#: Said of a map that is the same for every class.
NOT_SPECIFIC = "not class-specific"


def class_lines(score: Score, class_specific: bool = True) -> Iterator[str]:
    """Yield the target of a map and its score, in one or two lines; of the predicted class, on which it may not depend.

    >>> score = Score("cat", 0.8, index=3, predicted=3)
    >>> list(class_lines(score)), list(class_lines(score, class_specific=False))
    (['cat, 80.0%'], ['predicted: cat, 80.0%'])
    """
    name = score.name if class_specific or not score.name or not score.is_predicted else f"predicted: {score.name}"
    if score.sides:
        yield from (name, score.display)
    elif score.value is not None:
        # The probability of a long name is on a separate line, so that it is not cut off.
        yield from (name, score.display) if len(score.name) > 40 else (f"{name}, {score.display}",)
    elif name:
        yield name


def ends(score: Score, class_specific: bool) -> tuple[str, str]:
    """Return labels for values of a map below and above 0.

    >>> ends(Score("cat against dog", opposed=("cat", "dog")), True), ends(Score("cat", 0.9), True)
    (('for dog', 'for cat'), ('against cat', 'for cat'))
    """
    if score.opposed:
        first, second = score.opposed
        return f"for {second}", f"for {first}"
    if class_specific and score.name:
        return f"against {score.name}", f"for {score.name}"
    return "below 0", "above 0"


def common_sign_labels(targets: Sequence[tuple[Score, bool]]) -> tuple[str, str]:
    """Return labels as of `ends` for several maps with a common colour scale.

    >>> common_sign_labels([(Score("cat", 0.9), True), (Score("dog", 0.1), True)])
    ('below 0', 'above 0')
    """
    labels = {ends(score, specific) for score, specific in targets}
    return labels.pop() if len(labels) == 1 else ("below 0", "above 0")


def departures(method: Method, options: Mapping[str, Any]) -> str:
    """Describe options that differ from the method's publication, or from its defaults if it has none; may be empty.

    >>> rollout = get_method("rollout")
    >>> departures(rollout, rollout.complete({"discard_ratio": 0.5, "affinity": "both"}))
    'max over heads, 50% discarded, upper half of 12 or more layers, value-weighted, refined by attention and keys'
    >>> departures(rollout, rollout.complete({"preset": "paper"}))
    ''
    """
    return _changes(options, method.defaults if method.published is None else method.published)


def _changes(options: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Describe options that differ from the usual ones."""
    differing = {name: value for name, value in options.items() if value != usual.get(name)}
    if options.get("refine") == 0:
        differing.pop("affinity", None)  # without effect
    elif "refine" in differing:
        differing["affinity"] = options["affinity"]
    return in_words(differing)


def variant(method: Method, options: Mapping[str, Any]) -> str:
    """Return "as published" if options are those of the publication, and these differ from the defaults; else "".

    The query, a patch or box, is part of neither.

    >>> rollout = get_method("rollout")
    >>> variant(rollout, rollout.complete({})), variant(rollout, rollout.complete({"preset": "paper", "patch": (3, 4)}))
    ('', 'as published')
    """
    if method.published is None or method.published == method.defaults:
        return ""
    ignored = {"patch", "box", *(["affinity"] if options.get("refine") == 0 else [])}
    same = all(options.get(name) == value for name, value in method.published.items() if name not in ignored)
    return "as published" if same else ""


def method_title(method: Method, options: Mapping[str, Any], *, class_specific: bool = True) -> str:
    """Return a method's title with its `variant`, and whether the map is not class-specific, in brackets."""
    text = ", ".join(filter(None, (variant(method, options), "" if class_specific else NOT_SPECIFIC)))
    return f"{method.title} ({text})" if text else method.title


def method_label(name: str, options: Mapping[str, Any], *, class_specific: bool = True) -> str:
    """Return a method's name with its `variant` and the options that differ from its defaults.

    For a map that is not class-specific, it is the method's title, and says so.

    >>> rollout = get_method("rollout")
    >>> [method_label("rollout", rollout.complete(options)) for options in ({"patch": (3, 4)}, {"preset": "paper"})]
    ['rollout (patch (3, 4))', 'rollout (as published)']
    >>> method_label("rollout", rollout.defaults, class_specific=False)
    'attention rollout (not class-specific)'
    """
    method = get_method(name)
    which = variant(method, options)
    changed = departures(method, options) if which else _changes(options, method.defaults)
    text = ", ".join(filter(None, (which, changed, "" if class_specific else NOT_SPECIFIC)))
    called = name if class_specific else f"{method.title[:1].lower()}{method.title[1:]}"
    return f"{called} ({text})" if text else called


def departures_from_paper(method: Method, options: Mapping[str, Any]) -> str | None:
    """Return `departures` for JSON: None for a method without a publication."""
    return None if method.published is None else departures(method, options)


def method_record(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method with its options, for JSON."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    return {"method": method.name, "options": plain, "departures_from_paper": departures_from_paper(method, options)}


def method_in_words(method: Method, options: Mapping[str, Any]) -> str:
    """Return a method's title, with its `variant` and departures from its publication in brackets."""
    text = ": ".join(filter(None, (variant(method, options), departures(method, options))))
    return f"{method.title} ({text})" if text else method.title


def model_in_words(model: str, note: str = "") -> str:
    """Return a model's id with its note.

    >>> model_in_words("vitflow_demo", "knows eight drawn shapes only")
    'vitflow_demo (knows eight drawn shapes only)'
    """
    return f"{model} ({note})" if note else model


def in_words(options: Mapping[str, Any]) -> str:
    """Describe options in words; refinement comes last.

    >>> in_words({"head_fusion": "max", "refine": 2, "affinity": "keys", "value_weighted": "output", "patch": (3, 7)})
    'max over heads, value-weighted, patch (3, 7), refined 2 times by keys'
    """
    phrases = [option_in_words(name, value) for name, value in options.items() if name not in REFINING]
    steps, affinity = options.get("refine"), options.get("affinity")
    if steps == 0:
        phrases.append("not refined")
    elif steps or affinity:
        by = "attention and keys" if affinity == "both" else affinity
        phrases.append(f"refined{f' {steps} times' if (steps or 1) > 1 else ''}{f' by {by}' if by else ''}")
    return ", ".join(phrases)


class Code(str):
    """Source code that `python_call` does not quote: a variable, or another call."""

    __slots__ = ()


def python_call(function: str, *given: object, **named: object) -> Code:
    """Return a call as Python source, without arguments that are None or False.

    >>> python_call("vitflow.explain", "cat.jpg", model=Code("model"), target=Contrast("cat", "dog"), patch=None)
    "vitflow.explain('cat.jpg', model=model, target=vitflow.Contrast('cat', 'dog'))"
    """
    keywords = [f"{name}={_python(value)}" for name, value in named.items() if value is not None and value is not False]
    return Code(f"{function}({', '.join([*map(_python, given), *keywords])})")


def _python(value: object) -> str:
    if isinstance(value, Code):
        return value
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return python_call("vitflow.Contrast", value.target, value.against) if isinstance(value, Contrast) else repr(value)


def unreliable(facts: Mapping[str, Any]) -> str:
    """Return the reliability of a sampling map if it is low (split-half Spearman below 0.2), or an empty string.

    >>> unreliable({"reliability": -0.04})
    'reliability −0.04'
    """
    reliability = facts.get("reliability")
    low = reliability is not None and reliability < _LOW_RELIABILITY
    return f"reliability {reliability:.2f}".replace("-", "−") if low else ""


def notes_of(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the score and the map.

    >>> list(notes_of({"against": "the mean of the other prompts"}))
    ['The map explains the score minus the mean of the other prompts.']
    >>> list(notes_of({"blank": {"value": 0.31, "display": "31.0%"}}))
    ['Score of the image replaced by its mean colour: 31.0%.']
    """
    if note := facts.get("note"):
        yield f"{note[0].upper()}{note[1:]}."
    if (cosine := facts.get("cosine")) is not None:
        yield f"Cosine {cosine:.3f}; the percentage is its share among the prompts.".replace("-", "−")
    if low := unreliable(facts):
        yield f"{low.capitalize()}: more masks increase it."
    if facts.get("random"):
        yield "The model uses random numbers, as Monte-Carlo dropout does: another run gives another score and map."
    if path := facts.get("cam_layer"):
        yield f"Grad-CAM at {path}: the output does not depend on the patches of a later layer."
    if facts.get("cam_partial"):
        yield "The output is also computed from other layers than that of Grad-CAM."
    if layers := facts.get("layers"):
        yield f"Layers {layers[0]} – {layers[1]}."
    if layers := facts.get("flow_layers"):
        below = facts.get("below")
        words = f"rollout through layers {below[0]} – {below[1]} below" if below else "nothing below"
        yield f"Flow through layers {layers[0]} – {layers[1]}, {words}."
    if blank := facts.get("blank"):
        cosine = f" (cosine {blank['cosine']:.3f})".replace("-", "−") if "cosine" in blank else ""
        yield f"Score of the image replaced by its mean colour: {blank['display']}{cosine}."
    if against := facts.get("against"):
        yield f"The map explains the score minus {against}."


def top_share(grid: NDArray[np.floating[Any]], top: float = 0.1) -> float | None:
    """Return the share of a map's absolute sum that its highest patches contain; None if every patch is 0.

    >>> top_share(np.array([[0.0, 1.0, 3.0, 0.0]]), 0.25), top_share(np.zeros((2, 2)))
    (0.75, None)
    """
    values = np.sort(np.abs(grid.astype(np.float64)).ravel())[::-1]
    if not values.any():
        return None
    held = np.interp(top * values.size, np.arange(values.size + 1), np.append(0.0, np.cumsum(values)))
    return round(float(held / values.sum()), 4)
