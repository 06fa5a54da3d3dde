"""A child process that starts an engine or a server of vLLM, and takes its turn to measure.

Children are forked from a parent that has imported vLLM: twelve imports side by side take longer than everything else
that an engine's start needs. The parent never initialises CUDA.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

CONTEXT = multiprocessing.get_context("fork")


class Turn:
    """The child's side: it tells the parent something, and waits until the parent lets it go on.

    Args:
        connection: the child's end of a pipe.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def say(self, word: str, value: Any = None) -> None:
        """Send a message."""
        self._connection.send((word, value))

    def wait(self) -> None:
        """Wait for `Child.go`; end the process if the parent has closed the pipe."""
        try:
            self._connection.recv()
        except EOFError:
            raise SystemExit from None


class Child:
    """A forked process in a process group of its own, its output in a file.

    Args:
        name: what is printed about it.
        log: the file.
        work: called in the process with a `Turn` and ``arguments``.
        arguments: further arguments.
    """

    started: ClassVar[list[Child]] = []
    """All children of this process."""

    def __init__(self, name: str, log: Path, work: Callable[..., None], *arguments: Any) -> None:
        self.name, self.log = name, log
        self._pipe, theirs = CONTEXT.Pipe()
        sys.stdout.flush()
        self.process = CONTEXT.Process(target=_run, args=(log, work, self._pipe, theirs, arguments))
        self.process.start()
        theirs.close()
        Child.started.append(self)

    def messages(self, last: str, seconds: float) -> dict[str, Any] | None:
        """Return all messages up to one that is called ``last``; None without it, after ``seconds`` or a child's death.

        What came by then is in `partial`.
        """
        deadline = time.monotonic() + max(seconds, 0.1)
        self.partial: dict[str, Any] = {}
        while last not in self.partial:
            try:
                if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                    break
                word, value = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                break
            self.partial[word] = value
        found = last in self.partial
        print(time.strftime("%X"), self.name, last if found else f"no {last}: see {self.log}", flush=True)
        return self.partial if found else None

    def go(self) -> None:
        """Let the process go on; nothing happens if it has ended."""
        try:
            self._pipe.send(None)
        except BrokenPipeError:
            print(time.strftime("%X"), self.name, f"has ended: see {self.log}", flush=True)

    def end(self, seconds: float = 0.0) -> None:
        """Close the pipe, wait, and kill what is left of the process group."""
        self._pipe.close()
        self.process.join(seconds)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        self.process.join()


def end_all() -> None:
    """End every child; Python would wait for them at its exit."""
    for child in Child.started:
        child.end()


def _run(log: Path, work: Callable[..., None], parents: Any, connection: Any, arguments: tuple[Any, ...]) -> None:
    """Run in the child: output goes to the log, and an exception too."""
    parents.close()
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1)
    try:
        work(Turn(connection), *arguments)
    except Exception:
        traceback.print_exc()
        os._exit(1)
