"""The command ``semisparse``, and ``python -m semisparse``: Ctrl-C ends it with one sentence from the first moment on.

The command line is imported after SIGINT is handled: its imports take 0.2 s, and those of a verb seconds.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""Exit status of a command that SIGINT ended: 128 + 2."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C.

    It is no plain KeyboardInterrupt: Python ends a process by the signal itself, whatever status it asks for, after one
    that has passed through code compiled from a string, as dataclasses and namedtuples are.
    """


def main() -> None:
    """Handle SIGINT, import the command line and run it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell makes commands with & ignore it
        signal.signal(signal.SIGINT, _exit)
    from semisparse.cli.process import run

    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, _raise)
    run()


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """End the process at once: while modules are imported nothing has to be cleaned up."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    """Let verbs clean up: they catch KeyboardInterrupt, and typer ends with status 130."""
    raise Interrupted


if __name__ == "__main__":
    main()
