"""What an earlier run has left in an output folder: pictures that need not be done again, and files."""

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitflow.errors import OptionError
from vitflow.files import remove_inside
from vitflow.folder.plan import Input, Listing
from vitflow.runs.columns import Row
from vitflow.runs.remote import RemoteFolder
from vitflow.runs.store import Run


def clear_outputs(
    rows: Iterable[Row], output: Path, listing: Listing, endings: Sequence[str], *, overwrite: bool
) -> None:
    """Make room for a run that begins anew: remove what an earlier one has made, if that may be.

    Raises:
        OptionError: a file is in the way that no run made, and may not be replaced.
    """
    if overwrite:
        for row in rows:
            # The files of a picture are its stem and an ending each: no other file is removed, whatever a row says.
            paths = [*(row.get("outputs") or {}).values(), *(row.get("maps") or {}).values()]
            remove_inside(output, (path for path in paths if path.startswith(f"{row['stem']}-")))
        return
    names = (one.stem + ending for one in listing.plan(endings) for ending in endings)
    foreign = next((name for name in names if os.path.lexists(output / name)), None)
    if foreign is not None:
        raise OptionError(
            f"There is already a file {foreign!r} in {str(output)!r}, and no record of a run that made it. Choose "
            "another folder, or replace it with --overwrite (overwrite=True)."
        )


def done_before(inputs: Sequence[Input], run: Run) -> set[str]:
    """The keys of the inputs that an earlier run has explained."""
    by_key = {one.key: one for one in inputs}
    asked = [one for one in inputs if one.store is not None and (one.known is None or one.known.size is None)]
    there = {row["input"] for row in run.rows(one.key for one in asked)}
    asked = [one for one in asked if one.key in there]
    if asked:  # the listing of a web server tells nothing of its files
        store = RemoteFolder(str(asked[0].store))
        threads = ThreadPoolExecutor(8, thread_name_prefix="vitflow-ask")
        try:
            found = threads.map(lambda one: store.known(one.key), asked)
            by_key |= {one.key: replace(one, known=known) for one, known in zip(asked, found, strict=True)}
        finally:
            store.hurry()
            threads.shutdown(wait=True, cancel_futures=True)
    return set(by_key) - set(run.missing(list(by_key), lambda row: _is_done(by_key[row["input"]], row, run.folder)))


def _is_done(one: Input, row: Mapping[str, Any], output: Path) -> bool:
    """Whether an earlier run explained this very file, and its outputs are still there."""
    if one.problem is not None or row["status"] != "explained" or row["stem"] != one.stem:
        return False
    return _is_same_file(one, row) and all(_length(output / path) == size for path, size in row["written"].items())


def _length(path: Path) -> int | None:
    """The length of a file in bytes; None if it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _is_same_file(one: Input, row: Mapping[str, Any]) -> bool:
    if one.store is not None:
        return one.known is not None and one.known.same(row)
    try:
        status = os.stat(one.path)  # noqa: PTH116
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (row["size"], row["mtime_ns"])
