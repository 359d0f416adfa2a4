"""Commands as a user types them: in this process, or in a separate one that can be interrupted or killed."""

import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

from vitflow.cli import main


def typed_here(monkeypatch, captured, folder: Path, *words: object) -> tuple[int, str, str]:
    """A command in this process and in a folder: its exit code, stdout and stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["vitflow", *map(str, words)])
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *captured.readouterr()


def forked(work, *arguments):
    """A process that does some work, a moment after it was asked for."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.folder.test_run"])  # what it imports is imported once, not at every start
    process = context.Process(target=work, args=arguments)
    process.start()
    return process


class Typed:
    """A command, and what it says; it leads a process group, as in a terminal."""

    def __init__(self, *words: object) -> None:
        self._said = Path(tempfile.mkdtemp(prefix="typed-"))
        self._process = forked(_type, self._said, [*map(str, words)])
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.exitcode

    def talk(self) -> str:
        """Return its stderr so far."""
        return (self._said / "2").read_text()

    def ended(self, timeout: float) -> tuple[int, str, str]:
        """Wait for its end: exit code, stdout and stderr."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(f"The command was to end within {timeout} s. It said: {self.talk()}")
        return self._process.exitcode, (self._said / "1").read_text(), self.talk()


def _type(said: Path, words: list[str]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background has it ignored
    for number in (1, 2):
        os.dup2(os.open(said / str(number), os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["vitflow", *words]
    main()
