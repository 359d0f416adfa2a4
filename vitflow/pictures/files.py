"""Write files so that nothing half-written ever stands under a final name."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file beside its final place; it moves there when the block ends well, and is removed when it does not.

    Folders are made as needed.

    Raises:
        OSError: the folder or file cannot be written.
    """
    target = Path(path)
    # A short name of its own: the target's may be as long as the file system allows.
    unfinished = target.with_name(f".vitflow-{secrets.token_hex(8)}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("xb") as file:
            yield file
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
