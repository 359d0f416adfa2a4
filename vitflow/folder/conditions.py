"""Conditions on rows, such as "probability < 0.5": a small language that is read, never run."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from vitflow.errors import OptionError, printable, unknown_name

Row = Mapping[str, Any]
Condition = Callable[[Row], bool]

#: What of a row a condition may ask for.
FIELDS = (
    *("input", "class_index", "class_name", "probability", "target", "value", "predicted_index"),
    *("width", "height", "size", "saturated_share", "seconds"),
)
_LONGEST = 1000
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
        if name not in FIELDS:
            raise OptionError(unknown_name("field", name, FIELDS))
        return lambda row: row.get(name)
    known = ast.literal_eval(node)  # numbers, text, None, and lists of them; nothing is called
    return lambda row: known
