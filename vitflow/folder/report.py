"""The report of a folder run: its rows and photographs, handed to the viewer."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError
from vitflow.folder.decoders import decode_file
from vitflow.folder.journal import Journal
from vitflow.folder.keeper import RunFolder
from vitflow.folder.rows import is_folder_row, is_folder_run, is_whole
from vitflow.pictures.images import MAX_PIXELS
from vitflow.viewer.report import write_report


def report_run(output: str | os.PathLike[str], *, keys: Sequence[str] | None = None, **options: Any) -> Path:
    """Write the report of the run in a folder, `report.html` and further pages; the first page's path.

    Args:
        output: the run's output folder.
        keys: inputs to show, in this order; by default all of the run.
        options: per_page, thumbnail and embed_bytes as for `vitflow.viewer.report.write_report`.

    Raises:
        OptionError: the folder holds no run, or its record is damaged.
    """
    folder = RunFolder(Path(output))
    journal = Journal(folder.journal, is_folder_row)
    run, max_pixels = _run_of(journal, folder)
    states = {row["input"]: row["status"] for row in journal.rows(keys)}

    def read_picture(path: str) -> NDArray[np.uint8] | None:
        return decode_file(path, max_pixels).image

    return write_report(folder.path, run, states, journal.rows, read_picture, **options)


def _run_of(journal: Journal, folder: RunFolder) -> tuple[Mapping[str, Any], int]:
    """What the folder's run was asked for, and its bound on pixels."""
    header = journal.header or {}
    run = header.get("run", {})
    if not run or run.get("kind") == "evaluation":
        raise OptionError(
            f"There is no folder run in {str(folder.path)!r}: make one with vitflow folder IN -o OUT, and name OUT."
        )
    max_pixels = header.get("max_pixels", MAX_PIXELS)  # runs of earlier versions did not keep it
    if not is_folder_run(run) or not is_whole(max_pixels) or max_pixels < 1:
        raise OptionError(
            f"The record of the run in {str(folder.path)!r} is damaged: do it again with vitflow folder --overwrite."
        )
    return run, max_pixels
