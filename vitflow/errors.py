"""The errors that vitflow raises: each says what was expected, what came, and what to do."""

import json
import os
import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from importlib import import_module
from operator import index
from typing import Any


class VitflowError(Exception):
    """Base class of every error that vitflow raises on purpose."""


class OptionError(VitflowError, ValueError):
    """An option has a value that does not exist or makes no sense."""


class OutsideGridError(OptionError):
    """A patch was asked for that the image's grid does not have."""


class OutsideImageError(OptionError):
    """A box was asked for that lies beside what the model saw of the image."""


class SameClassError(OptionError):
    """Both sides of a contrast are one class: of every image, or of one that the model answers with that class."""


class ShapeError(VitflowError, ValueError):
    """A tensor or array has the wrong shape, or holds values that it must not hold."""


class ImageError(VitflowError):
    """An image could not be read, or is not an image."""


class ModelError(VitflowError):
    """A model could not be found or loaded."""


class UnsupportedModelError(ModelError):
    """The model computes something to which the asked method does not apply."""


class VitflowWarning(UserWarning):
    """Something was done that the caller should know of, such as a class count that was read from a file."""


class ValueNormsError(UnsupportedModelError):
    """Value weighting does not apply to how the model joins its heads; `args` hold the reason alone."""

    def __str__(self) -> str:
        return f"{self.args[0]} Use value_weighted=False."


class NoAttentionError(UnsupportedModelError):
    """A forward pass ran, and no attention between tokens was seen in it."""


def stops_all(error: Exception, fit: str) -> bool:
    """Whether an error is that of every image; where each has a grid or a size of its own, others may do."""
    if isinstance(error, SameClassError | OutsideImageError) or (
        isinstance(error, OutsideGridError) and fit == "native"
    ):
        return False
    return isinstance(error, OptionError | UnsupportedModelError)


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """Say that a name is unknown, which one was probably meant, and which ones exist.

    >>> unknown_name("method", "rolout", ["attention", "rollout"])
    "Unknown method 'rolout'. Did you mean 'rollout'? Known: attention, rollout."
    """
    names = sorted(known)
    close = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown {kind} {str(name)!r}.{hint} Known: {', '.join(names)}."


def check_known(kind: str, name: object, known: Collection[str]) -> None:
    """Raise OptionError unless a name is one of those that exist."""
    if name not in known:
        raise OptionError(unknown_name(kind, name, known))


def load_extra(
    module: str, needed_for: str, extra: str, error: type[VitflowError] = OptionError, otherwise: str = ""
) -> Any:
    """A module that comes with an extra alone; the error says what needs it, how to get it, and how to do without."""
    try:
        return import_module(module)
    except ImportError as cause:
        package = module.partition(".")[0]
        get = f"pip install 'vitflow[{extra}]'{otherwise and f', or {otherwise}'}"
        raise error(f"{needed_for} needs {package}, which is not installed: {get}.") from cause


# Control characters, separators of lines, marks that turn the direction of writing, what has no width and no part in a
# script (joiners have one), tags, broken UTF-8, and what XML forbids.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)


def printable(text: str | os.PathLike[str], *, lines: bool = False) -> str:
    """One line that any terminal, file or page can show: what is no text, or would be no mark on it, becomes escapes.

    With `lines`, for what may have several, ends of lines and tabs stay as they are.

    >>> printable("caf\\udce9.jpg"), printable("two\\nlines")
    ('caf\\\\xe9.jpg', 'two\\\\nlines')
    """
    return _UNPRINTABLE.sub(
        lambda found: found[0] if lines and found[0] in "\t\n" else _escape(found[0]), os.fspath(text)
    )


def printable_json(text: str) -> str:
    """JSON whose strings hold nothing that `printable` would not show; a parser gets back the same.

    >>> printable_json('["a\\u202eb"]')
    '["a\\\\u202eb"]'
    """
    return _UNPRINTABLE.sub(
        lambda found: found[0] if found[0] in "\t\n" else json.dumps(found[0])[1:-1].replace("\x7f", "\\u007f"), text
    )


def _escape(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte of a file's name that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def whole_number(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """The value as an int; OptionError unless it is a whole number within the bounds.

    >>> whole_number("head", 2, 0, 11)
    2
    """
    try:
        number = index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        bounds = f" from {least} to {most}" if most is not None else "" if least is None else f" of at least {least}"
        kind = " to be a whole number" if number is None else ""
        raise OptionError(f"Expected {name}{kind}{bounds}, got {value!r}.")
    return number
