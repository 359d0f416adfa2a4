"""Errors of vitflow. Each message names what was expected, what was given and the remedy."""

import os
import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from operator import index
from typing import Any

#: Remedy for models whose attention gives no map.
OTHER_METHODS = "Use sampling, occlusion or input_gradient."


class VitflowError(Exception):
    """Base class of every error that vitflow raises on purpose."""


class OptionError(VitflowError, ValueError):
    """An option has an unknown or invalid value."""


class OutsideGridError(OptionError):
    """A requested patch is outside the patch grid of the image."""


class OutsideImageError(OptionError):
    """A requested region, detection or class is not in the part of the image that the model sees."""


class SameClassError(OptionError):
    """Both targets of a contrast are the same class, for all images or for one whose predicted class it is."""


class ShapeError(VitflowError, ValueError):
    """A tensor or array has a wrong shape or invalid values."""


class FrameError(ShapeError):
    """An annotation does not fit its image."""


class ImageError(VitflowError):
    """A file could not be read as an image."""


class ModelError(VitflowError):
    """A model could not be found or loaded."""


class UnsupportedModelError(ModelError):
    """The requested method does not support the model."""


class VitflowWarning(UserWarning):
    """A notice for the caller, such as a class count that was read from a file."""


class ValueNormsError(UnsupportedModelError):
    """The model does not support value weighting; `args` contain only the reason."""

    def __str__(self) -> str:
        return f"{self.args[0]} Use value_weighted=False (--value-weighted off)."


class NoGradientError(UnsupportedModelError):
    """The explained output of some images of a batch has no gradient; `args` are the message and their indices."""

    def __init__(self, message: str, images: Sequence[int]) -> None:
        super().__init__(message, images)

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def images(self) -> Sequence[int]:
        """Indices of the images in their batch."""
        indices: Sequence[int] = self.args[1]
        return indices


class NoAttentionError(UnsupportedModelError):
    """A forward pass computed no attention between tokens."""


def stops_all(error: Exception, fit: str) -> bool:
    """Return True if an error affects all images; with native sizes, an image may be refused for its own."""
    by_size = (OutsideGridError, UnsupportedModelError) if fit == "native" else ()
    of_one = (SameClassError, OutsideImageError, NoGradientError, *by_size)
    return isinstance(error, OptionError | UnsupportedModelError) and not isinstance(error, of_one)


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the error message for an unknown name, with the closest match and the known names.

    >>> unknown_name("method", "rolout", ["attention", "rollout"])
    "Unknown method 'rolout'. Did you mean 'rollout'? Known: attention, rollout."
    """
    names = sorted(known)
    close = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown {kind} {str(name)!r}.{hint} Known: {', '.join(names)}."


def check_known(kind: str, name: object, known: Collection[str]) -> None:
    """Raise OptionError if a name is unknown."""
    if name not in known:
        raise OptionError(unknown_name(kind, name, known))


def load_extra(
    module: str, needed_for: str, extra: str, error: type[VitflowError] = OptionError, otherwise: str = ""
) -> Any:
    """Import a module of an optional extra; the error names the feature, the installation and the alternative."""
    try:
        return import_module(module)
    except ImportError as cause:
        package = module.partition(".")[0]
        get = f"pip install 'vitflow[{extra}]'{otherwise and f', or {otherwise}'}"
        raise error(f"{needed_for} requires {package}, which is not installed: {get}.") from cause


# Control characters, line separators, bidirectional marks, zero-width characters (except joiners, which scripts use),
# tags, surrogates, and characters that XML forbids.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)


def printable(text: str | os.PathLike[str], *, lines: bool = False) -> str:
    """Return text on one line, with unprintable characters escaped; with `lines`, line ends and tabs are kept.

    >>> printable("caf\\udce9.jpg"), printable("two\\nlines")
    ('caf\\\\xe9.jpg', 'two\\\\nlines')
    """
    return _UNPRINTABLE.sub(
        lambda match: match[0] if lines and match[0] in "\t\n" else _escape(match[0]), os.fspath(text)
    )


def _escape(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def whole_number(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return the value as an int; raise OptionError unless it is a whole number within the bounds.

    >>> whole_number("refine", 2, 0, 100)
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
