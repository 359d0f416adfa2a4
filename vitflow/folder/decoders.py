"""Decode pictures in processes of their own, so that a file on which a decoder hangs or crashes costs one row."""

import contextlib
import errno
import hashlib
import json
import os
import queue
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ImageError, printable
from vitflow.pictures.images import MAX_PIXELS, read_image

#: A picture that takes longer than this to decode, in seconds, is given up.
PATIENCE = 60.0

# How often that is looked after, in seconds.
_WATCH_EVERY = 0.25

# Bytes of a file that is read once, for its hash and its pixels; larger ones are read piece by piece, twice.
_AT_ONCE = 2**28

# Not `-m`, and not multiprocessing: both would run the caller's own script again, or put its folder on the path.
_SERVE = "import sys; sys.path.append(sys.argv[1]); from vitflow.folder.decoders import serve; serve()"
# Memory of pixels is kept for the next picture: to give it back and ask for it anew took a sixth of the time that
# decoding did. And nothing here multiplies matrices.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**26),
    "OPENBLAS_NUM_THREADS": "1",
}
_PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent.parent)


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """What reading one file gave: its pixels, or why there are none.

    Attributes:
        image: uint8 RGB [height, width, 3]; None where it could not be read.
        size: of the file in bytes; None where there is no file.
        mtime_ns: when the file was last changed, in nanoseconds, taken before it was read.
        sha256: of the file's bytes.
        etag: what a store says that another content would not have.
        error: the class of the error.
        message: what was expected, what came, and what to do.
    """

    image: NDArray[np.uint8] | None = None
    size: int | None = None
    mtime_ns: int | None = None
    sha256: str | None = None
    error: str | None = None
    message: str | None = None
    etag: str | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the pixels."""
        return 0 if self.image is None else self.image.nbytes


def decode_file(path: str, max_pixels: int = MAX_PIXELS) -> Decoded:
    """Read one file; whatever is wrong with it becomes an error in the result, never an exception.

    >>> decode_file("no such file.png").error
    'FileNotFoundError'
    """
    facts: dict[str, Any] = {}
    content = None
    try:
        status = os.stat(path)  # noqa: PTH116 - a name that may not be text
        facts = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if stat.S_ISREG(status.st_mode):  # reading from a pipe would wait for ever; read_image refuses it
            with open(path, "rb") as file:  # noqa: PTH123
                content = file.read(_AT_ONCE) if status.st_size <= _AT_ONCE else None
                digest = hashlib.file_digest(file, "sha256") if content is None else hashlib.sha256(content)
            facts["sha256"] = digest.hexdigest()
        return Decoded(read_image(path, max_pixels=max_pixels, content=content), **facts)
    except Exception as error:  # nothing that a file holds may stop the others
        return _failed(error, path, facts)


def decode_given(source: Any, name: str, max_pixels: int = MAX_PIXELS) -> Decoded:
    """Read a picture that is at hand, as the bytes of a file or an array; what is wrong with it becomes an error, too.

    >>> decode_given(b"no picture", "a.png").error, decode_given(np.zeros((2, 3)), "b").image.shape
    ('UnidentifiedImageError', (2, 3, 3))
    """
    facts: dict[str, Any] = {}
    if isinstance(source, bytes):
        facts = {"size": len(source), "sha256": hashlib.sha256(source).hexdigest()}
    try:
        return Decoded(read_image(source, max_pixels=max_pixels), **facts)
    except Exception as error:
        return _failed(error, name, facts)


def _failed(error: Exception, name: str, facts: dict[str, Any]) -> Decoded:
    """Why there are no pixels."""
    cause, message = error, printable(str(error)) or type(error).__name__
    if isinstance(error, ImageError):
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    elif isinstance(error, OSError):
        message = f"Could not read {printable(name)!r}: {error.strerror or error}."
    return Decoded(**facts, error=type(cause).__name__, message=message)


class DecoderPool:
    """Decoders, each a process of its own that loads no torch; used as a context manager.

    Args:
        workers: how many; with 0, pictures are read in this process, one at a time, without protection.
        max_pixels: pictures of more pixels are refused.
    """

    def __init__(self, workers: int, *, max_pixels: int = MAX_PIXELS) -> None:
        self._max_pixels = max_pixels
        self._idle: queue.SimpleQueue[_Decoder] = queue.SimpleQueue()
        self._decoders = [_Decoder(max_pixels) for _ in range(workers)]
        for decoder in self._decoders:
            self._idle.put(decoder)
        self._closed = threading.Event()
        if workers:
            threading.Thread(target=self._watch, name="vitflow-watch", daemon=True).start()
        self._threads = ThreadPoolExecutor(max(workers, 1), thread_name_prefix="vitflow-decode")

    def submit(self, path: str) -> "Future[Decoded]":
        """Have a file read; the future never raises for what is wrong with the file."""
        return self._threads.submit(self._decode, path)

    def _decode(self, path: str) -> Decoded:
        if not self._decoders:
            return decode_file(path, self._max_pixels)
        decoder = self._idle.get()
        try:
            return decoder.decode(path)
        finally:
            self._idle.put(decoder)

    def _watch(self) -> None:
        """Give up what takes too long: one thread for all pictures, for to start one each takes longer than to wait."""
        while not self._closed.wait(_WATCH_EVERY):
            for decoder in self._decoders:
                decoder.give_up_if_late()

    def close(self) -> None:
        """Stop at once: what was not read yet is not read any more."""
        self._closed.set()
        for decoder in self._decoders:
            decoder.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "DecoderPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Decoder:
    """One process: it is asked for a path in a line of JSON, and answers a line of JSON and the raw pixels."""

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        self._lock = threading.Lock()
        self._closed = False
        self._due: float | None = None  # when the picture that is being read will be given up
        self._late = False
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._closed:
                raise InterruptedError
            if self._process is not None:
                _end(self._process)  # it died between two pictures, and nobody has closed its pipes
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVE, _PACKAGE_ROOT, str(self._max_pixels)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # decoders in C print what they find odd about a file
                env=_ENVIRONMENT | os.environ,
                start_new_session=True,  # so that Ctrl-C reaches the parent alone
            )
            return self._process

    def decode(self, path: str) -> Decoded:
        process = self._process
        try:
            if process is None or process.poll() is not None:
                process = self._start()
        except InterruptedError:
            return Decoded(error="InterruptedError", message="The run was stopped.")
        with self._lock:
            self._due, self._late = time.monotonic() + PATIENCE, False
        try:
            return self._ask(process, path)
        except (OSError, ValueError, EOFError):
            code = _end(process)
            message = f"The decoder crashed on this file (exit status {code}): it is damaged, or memory ran out."
            if self._late:
                message = f"Decoding took more than {PATIENCE:g} seconds, and was given up."
            return Decoded(**_facts(path), error="TimeoutError" if self._late else "DecoderCrash", message=message)
        finally:
            with self._lock:
                self._due = None

    def give_up_if_late(self) -> None:
        """Kill the process if it has had its time for one picture."""
        with self._lock:
            if self._due is not None and time.monotonic() > self._due and self._process is not None:
                self._late = True
                self._process.kill()

    def _ask(self, process: "subprocess.Popen[bytes]", path: str) -> Decoded:
        to_child, from_child = process.stdin, process.stdout
        assert to_child is not None and from_child is not None
        to_child.write(json.dumps(path).encode() + b"\n")
        to_child.flush()
        line = from_child.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        facts = json.loads(line)
        shape = facts.pop("shape")
        if shape is None:
            return Decoded(**facts)
        image = np.empty(shape, dtype=np.uint8)
        view, filled = image.data.cast("B"), 0
        while filled < len(view):
            count = from_child.readinto(view[filled:])  # type: ignore[attr-defined]
            if not count:
                raise EOFError
            filled += count
        return Decoded(image, **facts)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Kill a process, close its pipes, and give its exit status."""
    process.kill()
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        # What was still to be written to a killed process is lost.
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    return code


def _facts(path: str) -> dict[str, Any]:
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return {}
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def serve() -> None:
    """Answer on stdout what is asked on stdin, until it is closed: the work of a decoder process."""
    max_pixels = int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory(max_pixels)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a C library prints must not get between the answers
    for line in sys.stdin.buffer:
        decoded = decode_file(json.loads(line), max_pixels)
        told = ("size", "mtime_ns", "sha256", "error", "message")
        facts: dict[str, Any] = {name: value for name in told if (value := getattr(decoded, name)) is not None}
        facts["shape"] = None if decoded.image is None else decoded.image.shape
        try:
            answers.write(json.dumps(facts).encode() + b"\n")
            if decoded.image is not None:
                answers.write(np.ascontiguousarray(decoded.image).data.cast("B"))
            answers.flush()
        except BrokenPipeError:  # the run was killed
            os._exit(0)


def _limit_memory(max_pixels: int) -> None:
    """Bound what a malicious file can make a decoder allocate; 32 bytes per pixel hold any picture that is allowed."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    bound = 2**31 + 32 * max_pixels
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or bound < hard:
        resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
