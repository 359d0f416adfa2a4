"""Cells of CSV files: text that no spreadsheet takes for a formula."""

from typing import Any

# Excel, LibreOffice and others compute what begins so; the apostrophe is there to tell ours from theirs.
_COMPUTED = ("=", "+", "-", "@", "\t", "\r", "'")


def plain_cell(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would compute, for readers to take away; numbers stay.

    >>> plain_cell("=1+2.jpg"), plain_cell("a.jpg"), plain_cell(-1.5)
    ("'=1+2.jpg", 'a.jpg', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_COMPUTED) else value
