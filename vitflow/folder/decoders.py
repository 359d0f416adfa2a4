"""Decode images in separate processes, so that a file on which a decoder hangs or crashes fails one row only.

Pools of multiprocessing, and with them concurrent.futures and DataLoader, run the caller's script again unless they
fork, which a process with the threads of a model must not do; and a worker that ends, ends the pool with every file in
flight. pebble with the processes of loky does neither, and takes 1.5 times as long for 160 JPEGs in two processes.
"""

import errno
import faulthandler
import hashlib
import os
import pickle
import queue
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ImageError, printable
from vitflow.folder.columns import Row, failed_row
from vitflow.images.reading import MAX_PIXELS, read_with_notes

#: Timeout for decoding an image, in seconds.
TIMEOUT = 60.0

_PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent.parent)
# Neither `-m` nor multiprocessing: they rerun the caller's script, or add its folder to the path.
_PROGRAM = f"import sys; sys.path += sys.argv[1:]; from {__name__} import answer_requests; answer_requests()"
# Memory of pixels is reused for the next image: returning and requesting it took a sixth of the decoding time.
# OpenBLAS is not used here.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**26), "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """The result of reading one file: uint8 RGB [height, width, 3], None if it failed, and what is known of its row.

    The row has "size", "mtime_ns" (before the file was read) and "sha256", and "status", "error" and "message" if it
    failed. For the notes, see `read_with_notes`.
    """

    image: NDArray[np.uint8] | None
    row: Row
    notes: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """The size of the pixels in bytes."""
        return 0 if self.image is None else self.image.nbytes

    def named(self, known: Row) -> "Decoded":
        """Return the result with further columns, such as the name of the input."""
        return Decoded(self.image, known | self.row, self.notes)


def decode_file(path: str) -> Decoded:
    """Read one file; a failure becomes a failed row, never an exception.

    >>> decode_file("no such file.png").row["error"]
    'FileNotFoundError'
    """
    facts: Row = {}
    content = None
    try:
        status = os.stat(path)  # noqa: PTH116 - a name that may not be text
        facts = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        if stat.S_ISDIR(status.st_mode):
            os.scandir(path).close()  # raises if the folder may not be listed
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if stat.S_ISREG(status.st_mode):  # reading a pipe would block; read_image refuses it
            with open(path, "rb") as file:  # noqa: PTH123
                content = file.read()
            facts["sha256"] = hashlib.sha256(content).hexdigest()
    except Exception as error:
        return failed(error, path, facts)
    return decode(path, path, facts, content)


def decode(source: Any, name: str, facts: Row, content: bytes | None = None) -> Decoded:
    """Read an image with the columns that are known of it; a failure becomes a failed row with this name.

    Other arguments are as for `read_image`.
    """
    try:
        image, notes = read_with_notes(source, content=content)
        return Decoded(image, facts, notes)
    except Exception as error:  # no file content may stop the run
        return failed(error, name, facts)


def decode_bytes(content: bytes, name: str) -> Decoded:
    """Read the content of a file; a failure becomes a failed row. `name` is for its message."""
    facts: Row = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return decode(name, name, facts, content)


def failed(error: Exception, name: str, facts: Row) -> Decoded:
    """Convert an exception to a result."""
    cause, message = error, str(error)
    if isinstance(error, ImageError):
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    elif isinstance(error, OSError):
        message = f"Could not read {printable(name)!r}: {error.strerror or error}."
    return Decoded(None, failed_row(facts, cause, message))


# -- processes


class WorkerCrashed(Exception):
    """Raised if a process ended on a request; `args` has its exit status."""


class Child:
    """A process that calls a function on request, and is restarted after it has ended on a request.

    The function is pickled with each request; `paths` are further folders from which the process imports.
    """

    def __init__(self, function: Callable[[Any], Any], paths: Sequence[str] = (_PACKAGE_ROOT,)) -> None:
        self._function = function
        self._command = [sys.executable, "-P", "-c", _PROGRAM, *paths]
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # decoders in C print warnings about files
            env=_ENVIRONMENT | os.environ,
            start_new_session=True,  # so that Ctrl-C reaches the parent alone
        )

    def ask(self, request: Any) -> Any:
        """Return the result for a request; WorkerCrashed if the process ended on it."""
        if self._process.poll() is not None:
            self.close()  # the pipes of a process that ended between two requests
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump((self._function, request), process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise WorkerCrashed(self.close()) from error

    def close(self) -> int:
        """End the process immediately, with its request, and return its exit status."""
        self._process.kill()
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            # Buffered data for a killed process cannot be flushed.
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return code


def answer_requests() -> None:
    """Call the functions that stdin requests until it is closed: the main function of a `Child` process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep output of C libraries out of the answers
    with suppress(EOFError, BrokenPipeError):  # the run has ended, or was killed
        while True:
            function, request = pickle.load(sys.stdin.buffer)
            pickle.dump(function(request), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
    os._exit(0)


class DecoderPool:
    """Processes that decode images without importing torch; a context manager.

    With 0 workers, this process reads images, one at a time, without protection; the timeout per image is in seconds.
    """

    def __init__(self, workers: int, *, timeout: float = TIMEOUT) -> None:
        self._timeout = timeout
        decode = partial(_decode_limited, timeout=timeout)
        self._idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._children = [Child(decode) for _ in range(workers)]
        for child in self._children:
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(max(workers, 1), thread_name_prefix="vitflow-decode")

    def submit(self, path: str) -> "Future[Decoded]":
        """Read a file; failures are in the future's result, not raised."""
        return self._threads.submit(self._decode, path)

    def _decode(self, path: str) -> Decoded:
        if not self._children:
            return decode_file(path)
        child, started = self._idle.get(), time.monotonic()
        try:
            answer: Decoded = child.ask(path)
            return answer
        except WorkerCrashed as crashed:
            kind = "DecoderCrash"
            message = f"The decoder crashed on this file (exit status {crashed}): it is damaged, or memory ran out."
            if time.monotonic() - started >= self._timeout:
                kind, message = "TimeoutError", f"Decoding timed out after {self._timeout:g} seconds."
            return Decoded(None, failed_row({}, kind, message))
        finally:
            self._idle.put(child)

    def close(self) -> None:
        """Cancel pending requests, and stop immediately."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()
        self._threads.shutdown(wait=True)

    def __enter__(self) -> "DecoderPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _decode_limited(path: str, timeout: float) -> Decoded:
    """Read a file in a process of a `DecoderPool`, which ends if this takes too long."""
    _limit_memory()
    limit_time(timeout)
    result = decode_file(path)
    limit_time(0)
    return result


def limit_time(seconds: float) -> None:
    """End this process after a time, even in C code; 0 removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
    elif seconds:  # Windows: a C thread, which takes a fifth of the time of a small JPEG
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def _limit_memory() -> None:
    """Limit the memory of decoders; 48 bytes per pixel suffice for any permitted image."""
    try:
        import resource
    except ImportError:  # not available on this system
        return
    bound = 2**31 + 48 * MAX_PIXELS
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or bound < hard:
        resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
