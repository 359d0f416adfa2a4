"""Conditions on rows, such as "probability < 0.5": a small language that is read, never run."""

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from vitflow.errors import OptionError, check_known, printable
from vitflow.runs.columns import kinds_in

Row = Mapping[str, Any]
Condition = Callable[[Row], bool]

#: What of a row a condition may ask for.
FIELDS = tuple(kinds_in("condition"))
_LONGEST = 1000
# Values of a field that are told.
_SHOWN = 8
_ORDER = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
_EQUALITY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda value, among: value in among,
    ast.NotIn: lambda value, among: value not in among,
}


def parse_condition(text: str) -> Condition:
    """A function that says whether a condition holds for a row: comparisons of fields and values, and, or, not.

    A field that a row does not have is None: it is equal to None alone, and neither less nor more than anything.

    Raises:
        OptionError: the text is no such condition.

    >>> holds = parse_condition("probability < 0.5 and class_name in ('cat', 'dog')")
    >>> holds({"probability": 0.25, "class_name": "cat"}), holds({"probability": None, "class_name": "cat"})
    (True, False)
    """
    try:
        if len(text) > _LONGEST:
            raise ValueError
        return _condition(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(
            "Expected a condition such as \"probability < 0.5 and class_name == 'cat'\", got "
            f"{printable(text[:80])!r}: use fields, values, <, <=, >, >=, ==, !=, in, and, or, not and brackets."
        ) from error


def misspelt(text: str, rows: Iterable[Row]) -> list[str]:
    """What a condition asks fields to be, and they are in none of the rows, each with what was probably meant.

    >>> misspelt("class_name == 'daissy'", [{"class_name": "daisy"}, {"class_name": None}])
    ["No picture has class_name 'daissy'. Did you mean 'daisy'? Known: daisy."]
    """
    asked: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            fields = [part.id for part in parts if isinstance(part, ast.Name)]
            values = [one.value for part in parts for one in ast.walk(part) if isinstance(one, ast.Constant)]
            asked += [(field, value) for field in fields for value in values if isinstance(value, str)]
    rows = list(rows) if asked else []
    found = []
    for field, value in dict.fromkeys(asked):
        known = sorted({str(row[field]) for row in rows if row.get(field) is not None})
        if value not in known:
            close = get_close_matches(value, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            some = f"{', '.join(known[:_SHOWN])}{', …' if len(known) > _SHOWN else ''}" or "none"
            found.append(printable(f"No picture has {field} {value!r}.{hint} Known: {some}."))
    return found


def _condition(node: ast.expr) -> Condition:
    if isinstance(node, ast.BoolOp):
        parts = [_condition(value) for value in node.values]
        every = isinstance(node.op, ast.And)
        return lambda row: (all if every else any)(part(row) for part in parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inside = _condition(node.operand)
        return lambda row: not inside(row)
    if isinstance(node, ast.Compare):
        values = [_value(one) for one in (node.left, *node.comparators)]
        tests = [_comparison(type(one)) for one in node.ops]
        return lambda row: all(
            test(left(row), right(row)) for test, left, right in zip(tests, values, values[1:], strict=False)
        )
    raise ValueError


def _comparison(kind: type[ast.cmpop]) -> Callable[[Any, Any], bool]:
    test: Any = _EQUALITY.get(kind) or _ORDER.get(kind)
    if test is None:
        raise ValueError

    def compare(left: Any, right: Any) -> bool:
        if kind in _ORDER and (left is None or right is None):
            return False
        try:
            return bool(test(left, right))
        except TypeError:
            raise OptionError(f"Expected to compare like with like, got {left!r} and {right!r}.") from None

    return compare


def _value(node: ast.expr) -> Callable[[Row], Any]:
    if isinstance(node, ast.Name):
        name = node.id
        check_known("field", name, FIELDS)
        return lambda row: row.get(name)
    known = ast.literal_eval(node)  # numbers, text, None, and lists of them; nothing is called
    return lambda row: known
