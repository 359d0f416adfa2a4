"""Which class to explain: by index, by name, or the most probable ones."""

import re
from collections.abc import Sequence
from difflib import get_close_matches

import torch
from torch import Tensor

from vitflow.errors import OptionError

# A class index, a class name, "top1" … for the most probable ones, or None for the predicted class.
Target = int | str | None


def resolve_targets(
    targets: Target | Sequence[Target], probabilities: Tensor | None, class_names: Sequence[str] | None
) -> list[Tensor | None]:
    """Turn what the caller asked for into class indices, one tensor [batch] per target.

    Args:
        targets: one target or several; "top5" stands for five, the most probable classes of each picture.
        probabilities: [batch, classes]; None where the model has no classes.
        class_names: names by class index, where known.

    Raises:
        OptionError: there is no such class, or the model has no classes.

    >>> resolve_targets(["top2"], torch.tensor([[0.1, 0.7, 0.2]]), None)
    [tensor([1]), tensor([2])]
    """
    asked = [targets] if targets is None or isinstance(targets, int | str) else list(targets)
    if probabilities is None:
        if any(target is not None for target in asked):
            raise OptionError(f"This model has no classes, so none can be asked for (got {asked[0]!r}).")
        return [None]
    batch, count = probabilities.shape
    found: list[Tensor | None] = []
    for target in asked or [None]:
        top = _top(target)
        if top is not None:
            ranked = probabilities.topk(min(top, count), dim=1).indices
            found.extend(ranked[:, rank] for rank in range(ranked.shape[1]))
        else:
            assert target is not None
            found.append(torch.full((batch,), class_index(target, count, class_names), device=probabilities.device))
    return found


def class_index(target: int | str, num_classes: int, class_names: Sequence[str] | None) -> int:
    """The index of a class given by index or name (without regard to case); OptionError if there is none or several."""
    text = str(target).strip()
    if text.lstrip("-").isdigit():
        index = int(text)
        if not 0 <= index < num_classes:
            raise OptionError(f"Expected a class index from 0 to {num_classes - 1}, got {index}.")
        return index
    if class_names is None:
        raise OptionError(f"The names of this model's classes are not known: give an index instead of {text!r}.")
    wanted = text.lower()
    names = [name.lower() for name in class_names]
    matches = [i for i, name in enumerate(names) if name == wanted]
    matches = matches or [i for i, name in enumerate(names) if wanted in name.split(", ")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(f"{class_names[i]!r} ({i})" for i in matches[:5])
        raise OptionError(f"Several classes are called {text!r}: {listed}. Give the index.")
    close = get_close_matches(wanted, names, n=3)
    hint = f" Did you mean {', '.join(repr(name) for name in close)}?" if close else ""
    raise OptionError(f"Unknown class {text!r}.{hint} Give a name of the model's {num_classes} classes, or an index.")


def _top(target: Target) -> int | None:
    """k where the target is "topk", or 1 where it is None; else None."""
    if target is None:
        return 1
    match = re.fullmatch(r"top([1-9]\d*)", target) if isinstance(target, str) else None
    return int(match.group(1)) if match else None
