"""What a row of a journal must be to be believed: a journal is a file that anybody may have edited."""

import base64
import json
import math
import os
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np

Check = Callable[[Any], bool]


# Deeper values are none of ours, and could not be written again.
_DEEPEST = 12


_WHOLE = 2**63


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None where it is torn, nested too deep, or holds numbers that JSON does not have."""
    try:
        record = _DECODER.decode(line.decode("ascii"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and _is_flat(record, _DEEPEST) else None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _is_flat(value: dict[str, Any] | list[Any], deepest: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    return deepest > 0 and all(_is_flat(one, deepest - 1) for one in inside if isinstance(one, dict | list))


def is_name(value: Any) -> bool:
    """Whether a value names a picture: text whose bytes a file name may have."""
    if not isinstance(value, str) or not value or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


def is_inside(value: Any) -> bool:
    """Whether a value is a path that stays below the folder that it is joined to.

    >>> is_inside("a/b.jpg"), is_inside("../b.jpg"), is_inside("/b.jpg"), is_inside(None)
    (True, False, False, False)
    """
    if not is_name(value):
        return False
    parts = value.replace(os.sep, "/").split("/")
    rooted = os.path.isabs(value) or os.path.splitdrive(value)[0]  # noqa: PTH117 - once per row and path
    return not rooted and ".." not in parts and parts[-1] not in ("", ".")


def is_text(value: Any) -> bool:
    """Whether a value is text that can be written as UTF-8."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value))


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number that a table can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and -_WHOLE <= value < _WHOLE


def is_number(value: Any) -> bool:
    """Whether a value is a number that a table can hold."""
    return isinstance(value, float) or is_whole(value)


def or_none(check: Check) -> Check:
    """The same check, which None passes as well."""
    return lambda value: value is None or check(value)


def dict_of(check: Check, names: Set[str] | None = None) -> Check:
    """A check for a dict of such values by name, with exactly these names where they are given."""

    def is_such(value: Any) -> bool:
        named = isinstance(value, dict) and (all(map(is_text, value)) if names is None else set(value) == names)
        return named and all(map(check, value.values()))

    return is_such


def is_dict(value: Any) -> bool:
    """Whether a value is an object of JSON."""
    return isinstance(value, dict)


def list_of(check: Check, length: int | None = None) -> Check:
    """A check for a list of such values, of this length where one is given."""
    return lambda value: isinstance(value, list) and length in (None, len(value)) and all(map(check, value))


def is_side(value: Any) -> bool:
    """Whether a value may be the side of a picture or a grid."""
    return is_whole(value) and 0 < value < 2**31


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0 on."""
    return is_whole(value) and value >= 0


def has(row: Mapping[str, Any], fields: Mapping[str, Check]) -> bool:
    """Whether a row has all of these fields, each of its kind."""
    return all(name in row and check(row[name]) for name, check in fields.items())


def is_grid(value: Any) -> bool:
    """Whether a value is a map as the journal keeps it: a shape, and so many finite float32 in base 64."""
    if not isinstance(value, dict) or not _is_shape(value.get("shape")) or not isinstance(value.get("values"), str):
        return False
    try:
        values = base64.b64decode(value["values"], validate=True)
    except ValueError:
        return False
    rows, cols = value["shape"]
    return len(values) == 4 * rows * cols and bool(np.isfinite(np.frombuffer(values, "<f4")).all())


_is_shape = list_of(is_side, 2)
