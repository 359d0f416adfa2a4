"""What an evaluation is asked for: methods with their baselines, and the metrics that data and model allow."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vitflow.errors import OptionError, UnsupportedModelError, VitflowError, VitflowWarning
from vitflow.evaluation.data.datasets import Dataset, Sample
from vitflow.evaluation.measures.perturbation import REPLACEMENTS
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.method_choices import MethodChoice, choose_methods
from vitflow.explaining.method_table import BASELINES, get_method, list_methods

# (label, name, options) of a method.
Labelled = tuple[str, str, Mapping[str, Any]]


def check_options(points: int, sanity_pictures: int, batch_size: int | None, replace_by: str | None) -> None:
    """What can be known to be wrong before anything is loaded."""
    for name, value, least in (
        ("points", points, 2),
        ("sanity_pictures", sanity_pictures, 0),
        ("batch_size", batch_size, 1),
    ):
        if value is not None and value < least:
            raise OptionError(f"Expected {name} of at least {least}, got {value}.")
    if replace_by is not None and replace_by not in REPLACEMENTS:
        raise OptionError(f"Expected replace_by of {', '.join(REPLACEMENTS)}, got {replace_by!r}.")


def choose_all(methods: str | Sequence[MethodChoice] | None) -> list[MethodChoice]:
    """The methods that were asked for, and the baselines behind them."""
    if methods is None:
        found: list[MethodChoice] = [method.name for method in list_methods() if "predict" not in method.needs]
    elif methods == "all":
        found = [method.name for method in list_methods()]
    else:
        found = [methods] if isinstance(methods, str) else list(methods)
    names = [name if isinstance(name, str) else name[0] for name in found]
    ahead = [choice for choice, name in zip(found, names, strict=True) if name not in BASELINES]
    last = [choice for choice, name in zip(found, names, strict=True) if name in BASELINES]
    return [*ahead, *last, *(name for name in BASELINES if name not in names)]


def label_methods(choices: Sequence[MethodChoice], options: Mapping[str, Any]) -> list[Labelled]:
    """(label, name, options) of each method; a label tells the options that were given with the name."""
    found: list[Labelled] = []
    for choice, (method, complete) in zip(choices, choose_methods(choices, options), strict=True):
        own = {} if isinstance(choice, str) else choice[1]
        label = method.name + (":" + ",".join(f"{key}={value}" for key, value in own.items()) if own else "")
        if any(label == other or (method.name, complete) == (name, given) for other, name, given in found):
            raise OptionError(f"Expected different methods or options, got {label} twice.")
        found.append((label, method.name, complete))
    return found


def make_explainer(model: str | Path | nn.Module | Explainer | Callable[[], Explainer]) -> Explainer:
    """The explainer for whatever stands for a model."""
    if isinstance(model, Explainer):
        return model
    if callable(model) and not isinstance(model, nn.Module):
        return model()
    return Explainer(model)


def possible_groups(groups: Sequence[str], dataset: Dataset, explainer: Explainer) -> tuple[list[str], list[str]]:
    """The groups that this data and model allow, and what to tell of the others; an error if nothing is left."""
    missing: dict[str, str] = {}
    if not dataset.has_regions:
        missing["localisation"] = "the data says nothing of where objects are (masks, boxes)"
    if not explainer.num_classes:
        missing["faithfulness"] = missing["correlation"] = "the model has no classes"
    left = [group for group in groups if group not in missing]
    told = [f"Left out: {group}, for {missing[group]}." for group in groups if group in missing]
    if not left:
        raise OptionError(f"None of the metrics can be measured. {' '.join(told)}")
    return left, told


def applicable_methods(
    explainer: Explainer, dataset: Dataset, chosen: Sequence[Labelled]
) -> tuple[list[Labelled], list[str]]:
    """Of all methods those that apply to the model, tried on one picture; and what to tell of the others."""
    picture = next((image for sample in dataset.samples[:20] if (image := _image(sample)) is not None), None)
    if picture is None:
        return list(chosen), []  # the run will tell what is wrong with the pictures
    kept: list[Labelled] = []
    refused: dict[str, list[str]] = {}
    for label, name, options in chosen:
        try:
            if "predict" not in get_method(name).needs:  # those only run the model, which any model allows
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", VitflowWarning)
                    explainer.explain_batch([picture], methods=[(name, options)])
        except (UnsupportedModelError, OptionError) as error:
            refused.setdefault(str(error), []).append(label)
        else:
            kept.append((label, name, options))
    return kept, [f"Left out: {', '.join(labels)}. {reason}" for reason, labels in refused.items()]


def _image(sample: Sample) -> Any:
    try:
        return sample.read().image
    except (VitflowError, OSError):
        return None
