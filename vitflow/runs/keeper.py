"""What a run over many pictures remembers, so that the same command goes on where a run was ended.

One run at a time works in an output folder, and only one that would give the same results goes on with its rows. Folder
runs and evaluations are kept alike.
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vitflow.errors import OptionError, VitflowError
from vitflow.runs.fingerprints import check_same_run
from vitflow.runs.journal import Journal
from vitflow.runs.places import RunFolder
from vitflow.runs.stores import StoreError

# Distributions whose versions a run's record tells.
_DISTRIBUTIONS = ("vitflow", "torch", "timm", "numpy", "opencv-python-headless", "pillow")


@contextmanager
def keep_rows(
    folder: RunFolder,
    header: Mapping[str, Any],
    accepts: Callable[[Mapping[str, Any]], bool],
    *,
    overwrite: bool,
    clear: Callable[[Journal], None] = lambda _: None,
) -> Iterator[Journal]:
    """The journal of a run, with the rows of an earlier one that computed the same; the folder is locked meanwhile.

    Args:
        folder: the output folder.
        header: the journal's first line; "run" in it is the fingerprint.
        accepts: says of a row whether this run could have written it.
        overwrite: begin anew, whatever run the folder holds.
        clear: called with the journal that was there before a run begins anew.

    Raises:
        OptionError: the folder holds another run, another one is working in it, or it cannot be written to.
    """
    with folder.lock():
        journal = folder.open_journal(accepts)
        if journal.header is None or overwrite:
            clear(journal)
            try:
                journal.start(header)
            except StoreError as error:
                raise OptionError(
                    f"The output folder {str(folder)!r} cannot be written to: {error} Choose another one with -o "
                    "(output=…)."
                ) from error
        else:
            check_same_run(journal.header, folder, header["run"])
            journal.header = dict(header)  # what no row depends on may have changed; it is written at the end
        folder.remove_leftovers()
        yield journal


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Where a run stands, for a progress callback: called at the start (without a row), then once per picture.

    Attributes:
        done: pictures with a row, those of earlier runs included.
        total: pictures of the run.
        row: the newest row.
        under_way: how many more pictures' worth of work is done, as far as it is known. Methods that take long are told
            of in between, without a row.
    """

    done: int
    total: int
    row: Mapping[str, Any] | None
    under_way: float = 0.0


class Tally:
    """Counts the pictures of a run that have a row, and tells a callback where the run stands."""

    def __init__(self, tell: Callable[[RunProgress], None] | None, total: int, done: int = 0) -> None:
        self._tell, self._total, self.done = tell, total, done
        self.share(0.0)

    def row(self, row: Mapping[str, Any], under_way: float = 0.0) -> None:
        """One more picture has a row."""
        self.done += 1
        self._say(row, under_way)

    def share(self, under_way: float) -> None:
        """So many more pictures' worth of work is done."""
        self._say(None, under_way)

    def _say(self, row: Mapping[str, Any] | None, under_way: float) -> None:
        if self._tell is not None:
            self._tell(RunProgress(self.done, self._total, row, under_way))


def versions() -> dict[str, str]:
    """The versions of what a run's results come from."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # built another way, such as opencv without its wheel
            continue
    return found


@contextmanager
def finishing(output: object) -> Iterator[None]:
    """Say of what a run writes at its end, and could not write, that nothing else is lost.

    Raises:
        VitflowError: the disk is full, or the folder is read-only.
    """
    try:
        yield
    except OSError as error:
        raise VitflowError(
            f"What was done is kept, but the tables and reports could not be written to {str(output)!r}: "
            f"{error.strerror or error}. Make room and run the same command again."
        ) from error
