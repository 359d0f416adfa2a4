"""Look up methods by name and complete their options. This module imports no torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitflow.errors import OptionError
from vitflow.registry.method_table import BASELINES, METHODS, PEERS, Method, get_method
from vitflow.registry.options import OPTIONS

#: The methods of a comparison by default; class-specific ones if the model has classes; baselines last.
DEFAULT_METHODS = ("attention", "rollout", "flow", "gradient_rollout", "gae", "gradcam", *BASELINES)

# Arguments that other functions or other libraries have, and the name of the right one.
_MISNAMED = {
    "method": "methods=, which takes a list",
    "methods": "method=; explain_batch takes several methods",
    "target": "targets=, which takes one class or a list",
    "targets": "target=; explain_batch takes several classes",
    "names": "explain_batch",
    "originals": "original=; explain_batch takes several images",
    "against": "target=vitflow.Contrast(CLASS, against=OTHER)",
    **{name: f"Explainer(model, {name}=…) as the model" for name in ("fit", "device", "dtype", "data_config")},
    **dict.fromkeys(
        ("class_", "class_id", "class_idx", "class_index", "class_name", "category", "cls", "label"),
        "target= (targets= for several images or classes)",
    ),
    **dict.fromkeys(
        ("alpha", "background", "cmap", "colormap", "interpolation", "opacity", "vmax", "vmin"),
        "cmap=, alpha= and other drawing options of overlay, figure and save of the result",
    ),
}


@dataclass(frozen=True, slots=True)
class ChosenMethod:
    """A method with all its options, and its label, which is unique within a run.

    Attributes:
        requested: options given as arguments among those that can be dropped (value_weighted, refine): a requested
            option that does not apply is refused, a default that does not apply is dropped.
    """

    name: str
    options: dict[str, Any]
    label: str = ""
    requested: frozenset[str] = frozenset()

    @property
    def method(self) -> Method:
        """Entry of the method table."""
        return get_method(self.name)

    def with_options(self, **options: Any) -> "ChosenMethod":
        """Return a copy with other values of these options, if the method has them."""
        return replace(self, options={name: options.get(name, value) for name, value in self.options.items()})


# Methods with all options.
Chosen = Sequence[ChosenMethod]
# A method by name, a registered method, a name with some options, or a method with all options.
MethodChoice = str | Method | tuple[str, Mapping[str, Any]] | ChosenMethod


def default_method(has_target: bool) -> str:
    """Return the default method: gae with a target, else rollout, which is not class-specific."""
    return "gae" if has_target else "rollout"


def without_affinity(requested: Collection[str]) -> dict[str, Any]:
    """Return the options of sampling for models without an affinity of patches, without those that were requested."""
    return {name: value for name, value in {"refine": 0, "masks": 256}.items() if name not in requested}


def is_slow(name: str) -> bool:
    """Return True if a method is slow enough for a progress bar."""
    needs = get_method(name).needs
    return name == "flow" or ("predict" in needs and "repeat" not in needs)


def is_signed(name: str) -> bool:
    """Return True if maps of this method are drawn around 0; also for methods that are not registered here."""
    return name not in METHODS or METHODS[name].signed


def has_targets(targets: Any) -> bool:
    """Return True if a target other than the predicted class is given.

    >>> has_targets("tabby"), has_targets(["top3"]), has_targets([None]), has_targets(None)
    (True, True, False, False)
    """
    return any(target is not None for target in targets) if isinstance(targets, list | tuple) else targets is not None


def choose_methods(
    methods: Sequence[MethodChoice] | None, options: Mapping[str, Any], *, has_target: bool = False
) -> list[ChosenMethod]:
    """Look up methods, by default the one that `has_target` determines, and complete their options.

    `options` are for every method that accepts them; OptionError if none does.
    """
    choices = [default_method(has_target)] if methods is None else [methods] if isinstance(methods, str) else methods
    if not choices:
        raise OptionError("Expected at least one method, got none.")
    pairs = [(get_method(name), specific) for name, specific in map(_named, choices)]
    for name in options:
        if not any(method.accepts(name) for method, _ in pairs):
            _refuse_option(name, pairs[0][0], default=methods is None, has_target=has_target)
    chosen = []
    for method, specific in pairs:
        shared = {name: value for name, value in options.items() if method.accepts(name)}
        values = method.complete({**shared, **specific})
        # Runs pass each method with all its options: a value that equals the default counts as not requested.
        given = {name for name in values if shared.get(name) is not None or values[name] != method.defaults[name]}
        requested = frozenset(name for name in given if name in OPTIONS and OPTIONS[name].droppable and values[name])
        chosen.append(ChosenMethod(method.name, values, method.name, requested))
    return chosen


def _named(choice: MethodChoice) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the specific options of a choice."""
    if isinstance(choice, str | Method):
        return (choice if isinstance(choice, str) else choice.name), {}
    if isinstance(choice, ChosenMethod):
        return choice.name, choice.options
    if not (isinstance(choice, tuple | list) and len(choice) == 2 and isinstance(choice[1], Mapping)):
        raise OptionError(
            f"Expected a method as a name or (name, options), got {choice!r}: several methods are methods=[…] of "
            "explain_batch."
        )
    return choice


def _refuse_option(name: str, method: Method, *, default: bool, has_target: bool) -> None:
    """Raise OptionError for an option that none of the methods accepts."""
    if name in _MISNAMED:
        raise OptionError(f"Unknown option {name!r}: use {_MISNAMED[name]}.")
    having = [each.name for each in METHODS.values() if each.accepts(name)]
    if default and having:
        raise OptionError(
            f"Method {method.name}, the default with{'' if has_target else 'out'} a target, has no option {name!r}. "
            f"Methods with this option (method=…, or --method): {', '.join(having)}."
        )
    method.complete({name: None})  # raises an error that lists the options


def check_methods(
    methods: Sequence[MethodChoice] | None, options: Mapping[str, Any], *, has_target: bool = False
) -> list[ChosenMethod]:
    """Choose methods like `choose_methods`; OptionError also for duplicates."""
    chosen = choose_methods(methods, options, has_target=has_target)
    for index, each in enumerate(chosen):
        if any((each.name, each.options) == (other.name, other.options) for other in chosen[:index]):
            raise OptionError(f"Method {each.name} was given twice with the same options.")
    return chosen


def left_out(refusals: Mapping[str, str | Exception]) -> list[str]:
    """Format notes on methods that do not apply, given their reasons by name.

    >>> left_out({"flow": "No layers.", "gae": "No layers."})
    ['Left out: flow, gae. No layers.']
    """
    reasons = dict.fromkeys(map(str, refusals.values()))
    names = [", ".join(name for name, each in refusals.items() if str(each) == reason) for reason in reasons]
    return [f"Left out: {listed}. {reason}" for listed, reason in zip(names, reasons, strict=True)]


def split_label(label: str) -> tuple[str, str]:
    """Split "NAME:OPTION=VALUE,…" into the name of a method and its options.

    >>> split_label("gae:refine=0"), split_label("cam:LayerCAM:layer=2"), split_label("captum:Saliency")
    (('gae', 'refine=0'), ('cam:LayerCAM', 'layer=2'), ('captum:Saliency', ''))
    """
    prefix = next((each for each in PEERS if label.startswith(each)), "")
    name, _, options = label.removeprefix(prefix).partition(":")
    return prefix + name, options
