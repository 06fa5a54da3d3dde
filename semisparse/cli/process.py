"""The command line as a process of its own: what ``semisparse`` and ``python -m semisparse.cli`` run."""

from __future__ import annotations

import atexit
import io
import os
import sys
import traceback

from semisparse.api.start import keep_bytecode
from semisparse.cli import main
from semisparse.cli.output import INTERRUPTED, say_interrupted


def _open_closed_streams() -> None:
    """Replace a closed stdout or stderr (``>&-``), which is None, by one that discards what is written."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def run() -> None:
    """Run the command line, and end the process once its output is written.

    Python's own end looks through every object once more and takes all modules apart: 0.8 CPU seconds after torch and
    transformers were imported. Nothing of it is needed. Functions registered with `atexit` still run.
    """
    status: str | int | None = 0
    _open_closed_streams()
    try:
        keep_bytecode()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a locale's encoding may lack what a model writes
        main()
    except SystemExit as leaving:
        status = leaving.code or 0
    except KeyboardInterrupt:  # before or after typer, which catches it while a verb runs
        say_interrupted()
        status = INTERRUPTED
    except Exception:  # --debug
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        raise SystemExit(status)
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        raise SystemExit(status) from None  # Python's own end says that the output could not be written
    os._exit(status)
