"""Pictures that lie elsewhere: found by their URLs, and brought to this machine one by one for the decoders to read."""

import posixpath
import secrets
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from vitflow.errors import ImageError, VitflowError, printable
from vitflow.folder.decoders import Decoded, DecoderPool
from vitflow.runs.remote import LARGEST, RemoteFolder
from vitflow.runs.stores import Known, StoreError, reason_of


def find_remote(source: str, recursive: bool) -> dict[str, Known]:
    """The files below a URL, by their path below it, with what the store's listing tells of them.

    Raises:
        ImageError: there is nothing there.
    """
    try:
        found = RemoteFolder(source).listed(recursive=recursive)
    except (FileNotFoundError, StoreError) as error:
        raise ImageError(f"Could not list {printable(source)!r}: {reason_of(error)}") from error
    if not found:
        raise ImageError(f"Expected a folder with pictures, but there is nothing at {printable(source)!r}.")
    return dict(found)


class Fetcher:
    """Brings files to this machine one by one, for the decoders to read.

    Args:
        decoders: the processes that read.
    """

    def __init__(self, decoders: DecoderPool) -> None:
        self._decoders = decoders
        self._scratch = TemporaryDirectory(prefix="vitflow-", ignore_cleanup_errors=True)
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="vitflow-fetch")
        self._stores: dict[str, RemoteFolder] = {}

    def submit(self, store: str, path: str, known: Known | None) -> "Future[Decoded]":
        """Have a file of a store fetched and read; the future never raises for what is wrong with the file.

        Args:
            store: URL of the folder.
            path: of the file below it.
            known: what is known of it already.
        """
        if store not in self._stores:
            self._stores[store] = RemoteFolder(store)
        return self._threads.submit(self._fetch, self._stores[store], path, known or Known())

    def _fetch(self, store: RemoteFolder, path: str, known: Known) -> Decoded:
        place = Path(self._scratch.name, secrets.token_hex(8))
        try:
            if known.size is None:  # before it is read: if it changes meanwhile, the next run reads it again
                with suppress(StoreError):
                    known = store.known(path) or known
            place.mkdir()
            copy = place / (posixpath.basename(path)[-200:] or "picture")
            with copy.open("wb") as file:
                store.fetch(path, file, LARGEST)
            decoded = self._decoders.submit(str(copy)).result()
            return replace(decoded, mtime_ns=known.changed, etag=known.tag)
        except Exception as error:  # a store's own errors are of many kinds
            cause = error.__cause__ if isinstance(error, StoreError) and error.__cause__ is not None else error
            told = f"Could not read {printable(path)!r} from {printable(store.url)!r}: {reason_of(error)}."
            return Decoded(
                mtime_ns=known.changed,
                etag=known.tag,
                error=type(cause).__name__,
                message=printable(str(error)) if isinstance(error, VitflowError) else told,
            )
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def close(self) -> None:
        """Stop at once: what is on its way is not waited for."""
        for store in self._stores.values():
            store.patience = 0.0
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._scratch.cleanup()
