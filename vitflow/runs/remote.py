"""Images that are elsewhere: URLs such as s3://bucket/folder, through fsspec."""

import io
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, BinaryIO, TypeVar

from vitflow.errors import VitflowError
from vitflow.runs.stores import Known, StoreError, TooLargeError, file_system, protocols_of, reason_of

T = TypeVar("T")

#: Bytes of a file that is read whole: the largest photographs of cameras have a quarter of it.
LARGEST = 2**28

# Seconds after which what a store is asked for is given up: of all of it, since the last bytes came, and once a run was
# interrupted.
_LONGEST, _STALLED, _HURRY = 600.0, 30.0, 2.0
_WATCH_EVERY = 0.1
_PIECE = 2**20


class RemoteFolder:
    """A folder at a URL; small to pickle. What it is asked for is given up when it takes too long.

    Args:
        url: of the folder.

    Attributes:
        patience: seconds after which anything is given up; what runs already, too.
    """

    def __init__(self, url: str) -> None:
        scheme, mark, rest = url.partition("://")
        self.url = scheme + mark + (rest.rstrip("/") or rest[:1])
        self.patience = _LONGEST

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "patience": self.patience}

    @cached_property
    def _system(self) -> tuple[Any, str]:
        return file_system(self.url)

    @cached_property
    def _alone(self) -> Any:
        """Held by those that use a connection which several threads must not share."""
        return nullcontext() if self._system[0].async_impl else threading.Lock()

    def hurry(self) -> None:
        """Have everything done or given up in a moment."""
        self.patience = min(self.patience, _HURRY)

    def _at(self, path: str) -> str:
        root = self._system[1]
        return f"{root.rstrip('/')}/{path}" if root else path  # what lies in an archive has no root

    def _ask(self, what: str, work: Callable[[Any, Callable[[], None]], T], stalled: float | None = None) -> T:
        """What `work` gives, in time: it is called with the file system, and a function to call when something came.

        It runs in a thread that nobody waits for: no store of fsspec can be stopped.

        Raises:
            FileNotFoundError: there is no such file.
            StoreError: whatever else is wrong.
        """
        system, alone = self._system[0], self._alone
        done = threading.Event()
        found: list[T] = []
        failed: list[BaseException] = []
        began = time.monotonic()
        heard = [began]

        def run() -> None:
            try:
                with alone:
                    found.append(work(system, lambda: heard.__setitem__(0, time.monotonic())))
            except BaseException as error:
                failed.append(error)
            finally:
                done.set()

        threading.Thread(target=run, name="vitflow-store", daemon=True).start()
        while not done.wait(_WATCH_EVERY):
            now = time.monotonic()
            if now - began > self.patience or (stalled is not None and now - heard[0] > stalled):
                raise StoreError(f"Could not {what}: the store did not answer in time.")
        if not failed:
            return found[0]
        [error] = failed
        if isinstance(error, FileNotFoundError | VitflowError):
            raise error
        raise StoreError(f"Could not {what}: {reason_of(error)}.") from error

    def fetch(self, path: str, file: BinaryIO, largest: int | None = None) -> None:
        """Copy a file below the folder into one of this machine, piece by piece.

        Raises:
            FileNotFoundError: it is not there.
            TooLargeError: it has more bytes than the largest may have, whatever the store says of its length.
            StoreError: it cannot be read, or no more of it comes.
        """
        target = self._at(path)

        def copy(system: Any, heard: Callable[[], None]) -> None:
            # As a stream: else a web server is asked for its pieces one by one, and for its length before.
            web: dict[str, Any] = {"block_size": 0, "size": 1} if "http" in protocols_of(system) else {}
            count = 0
            with system.open(target, "rb", **web) as source:
                while piece := source.read(_PIECE):
                    heard()
                    count += len(piece)
                    if largest is not None and count > largest:
                        raise TooLargeError(f"Expected a file of at most {largest // 2**20} MiB, got more: {path!r}.")
                    file.write(piece)

        self._ask(f"read {path!r} from {self.url!r}", copy, _STALLED)

    def read(self, path: str) -> bytes:
        """The content of a file below the folder; errors as for `fetch`."""
        file = io.BytesIO()
        self.fetch(path, file, LARGEST)
        return file.getvalue()

    def known(self, path: str) -> Known | None:
        """What is known of a file below the folder; None where it is not there."""
        try:
            facts = self._ask(
                f"look for {path!r} in {self.url!r}", lambda system, _: system.info(self._at(path)), _STALLED
            )
        except FileNotFoundError:
            return None
        return Known.of(facts)

    def listed(self, *, recursive: bool = True) -> list[tuple[str, Known]]:
        """The files below the folder, as paths below it, with what the listing tells of them.

        Raises:
            FileNotFoundError: there is no such folder.
            StoreError: it cannot be listed.
        """
        root, depth = self._system[1], None if recursive else 1
        found = self._ask(f"list {self.url!r}", lambda system, _: system.find(root, maxdepth=depth, detail=True))
        # The files of an archive have names without a slash before them.
        base = f"{root.rstrip('/')}/" if root.strip("/") else root
        return [
            (name.removeprefix(base).lstrip("/"), Known.of(facts))
            for name, facts in found.items()
            if name.startswith(base)
        ]
