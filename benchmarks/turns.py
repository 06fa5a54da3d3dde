"""Benchmarks that prepare at the same time and measure one after another: compiling takes longer than measuring.

python benchmarks/turns.py FOLDER 6 --seconds 50   # creates FOLDER/go when 6 processes are ready, or after 50 s
"""

from __future__ import annotations

import argparse
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path | None) -> Iterator[None]:
    """Wait until all processes are prepared, and then until no other measures; without a folder do not wait."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"ready-{os.getpid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Wait for the processes, and let them go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("processes", type=int)
    parser.add_argument("--seconds", type=float, required=True, help="after which those that are ready go")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    while len(list(options.folder.glob("ready-*"))) < options.processes:
        if time.perf_counter() - start > options.seconds:
            break
        time.sleep(0.1)
    (options.folder / "go").touch()
    ready = len(list(options.folder.glob("ready-*")))
    print(f"{ready} of {options.processes} processes are ready after {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
