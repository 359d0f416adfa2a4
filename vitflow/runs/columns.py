"""The columns of a row, and how tables hold what stands in them."""

import os
from typing import Any

from vitflow.errors import OptionError

# Excel, LibreOffice and others compute what begins so; the apostrophe is there to tell ours from theirs.
_COMPUTED = ("=", "+", "-", "@", "\t", "\r", "'")


def plain_cell(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would compute, for readers to take away; numbers stay.

    >>> plain_cell("=1+2.jpg"), plain_cell("a.jpg"), plain_cell(-1.5)
    ("'=1+2.jpg", 'a.jpg', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_COMPUTED) else value


def load_pyarrow() -> tuple[Any, Any]:
    """The modules pyarrow and pyarrow.parquet; OptionError that says how to get it if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise OptionError(
            "Parquet needs pyarrow: pip install 'vitflow[parquet]', or take --manifest jsonl and --store overlays."
        ) from error
    return pyarrow, pyarrow.parquet


def shown_name(name: str) -> str:
    """An input's name as text; bytes that are none become escapes.

    >>> shown_name("caf\\udce9.jpg")
    'caf\\\\xe9.jpg'
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")
