"""What an earlier run has left in an output folder: pictures that need not be done again, and files."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from vitflow.errors import OptionError
from vitflow.folder.plan import Input, Listing
from vitflow.runs.journal import Journal
from vitflow.runs.places import RunFolder
from vitflow.runs.remote import RemoteFolder


def clear_outputs(
    journal: Journal, output: RunFolder, listing: Listing, endings: Sequence[str], *, overwrite: bool
) -> None:
    """Make room for a run that begins anew: remove what an earlier one has made, where that may be.

    Raises:
        OptionError: a file is in the way that no run made, and may not be replaced.
    """
    if overwrite:
        for row in journal.rows():
            maps = (row.get("maps") or {}).values()
            output.remove((*row.get("outputs", {}).values(), *maps, *row.get("shard", ())[:1]))
        return
    foreign = output.first_of(one.stem + ending for one in listing.plan(endings) for ending in endings)
    if foreign is not None:
        raise OptionError(
            f"There is already a file {foreign!r} in {str(output)!r}, and no record of a run that made it. Choose "
            "another folder, or replace it with --overwrite (overwrite=True)."
        )


def done_before(inputs: Sequence[Input], journal: Journal, length: Callable[[str], int | None]) -> set[str]:
    """The keys of the inputs that an earlier run has explained."""
    by_key = {one.key: one for one in inputs}
    there = [one for one in inputs if one.store is not None and one.key in journal]
    asked = [one for one in there if one.known is None or one.known.size is None]
    if asked:  # the listing of a web server tells nothing of its files
        store = RemoteFolder(str(asked[0].store))
        threads = ThreadPoolExecutor(8, thread_name_prefix="vitflow-ask")
        try:
            found = threads.map(lambda one: store.known(one.key), asked)
            by_key |= {one.key: replace(one, known=known) for one, known in zip(asked, found, strict=True)}
        finally:
            store.hurry()
            threads.shutdown(wait=True, cancel_futures=True)
    return {row["input"] for row in journal.rows(by_key) if _is_done(by_key[row["input"]], row, length)}


def _is_done(one: Input, row: Mapping[str, Any], length: Callable[[str], int | None]) -> bool:
    """Whether an earlier run explained this very file, and its outputs are still there."""
    if one.problem is not None or row["status"] != "explained" or row["stem"] != one.stem:
        return False
    return _is_same_file(one, row) and all(length(path) == written for path, written in row["written"].items())


def _is_same_file(one: Input, row: Mapping[str, Any]) -> bool:
    if one.store is not None:
        return one.known is not None and one.known.same(row)
    try:
        status = os.stat(one.path)  # noqa: PTH116
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (row["size"], row["mtime_ns"])
