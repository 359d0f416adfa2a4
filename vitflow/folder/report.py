"""The report of a folder run: its rows and photographs, handed to the viewer."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitflow.errors import OptionError
from vitflow.folder.decoders import decode_file
from vitflow.folder.manifest import Journal, RunFolder
from vitflow.viewer.report import write_report


def report_run(output: str | os.PathLike[str], *, keys: Sequence[str] | None = None, **options: Any) -> Path:
    """Write the report of the run in a folder, `report.html` and further pages; the first page's path.

    Args:
        output: the run's output folder.
        keys: inputs to show, in this order; by default all of the run.
        options: per_page, thumbnail and embed_bytes as for `vitflow.viewer.report.write_report`.

    Raises:
        OptionError: the folder holds no run.
    """
    folder = RunFolder(Path(output))
    journal = Journal(folder.journal)
    if journal.header is None:
        raise OptionError(
            f"There is no folder run in {str(folder.path)!r}: make one with vitflow folder IN -o OUT, and name OUT."
        )
    states = {row["input"]: row["status"] for row in journal.rows(keys)}
    run = journal.header["run"]
    return write_report(folder.path, run, states, journal.rows, lambda path: decode_file(path).image, **options)
