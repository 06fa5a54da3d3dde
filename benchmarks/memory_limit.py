"""Run a process in a container with little memory: a memory cgroup of its own, or a watch over what it holds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

INTERVAL = 0.02
"""Seconds between two looks at a watched process."""


def run_limited(command: Sequence[str], gigabytes: float) -> tuple[str, str]:
    """Run a command whose host memory is limited, and return its stdout and how it was limited.

    A cgroup's limit counts the page cache, too: the system drops it, and kills the process if that does not suffice.
    Where no cgroup can be made, the process is killed as soon as it holds more than that beside the page cache.

    Args:
        command: the program and its arguments.
        gigabytes: of host memory, 10^9 bytes each; 0 for no limit.

    Raises:
        RuntimeError: the process failed, or was killed for its memory.
    """
    group = _memory_cgroup(int(gigabytes * 1e9)) if gigabytes else None
    join = (lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None) if group else None
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, preexec_fn=join)
        killed = False
        while process.poll() is None:
            if gigabytes and not group and _anonymous(process.pid) > gigabytes * 1e9:
                process.kill()
                killed = True
            time.sleep(INTERVAL)
        out.seek(0)
        printed = out.read()
    if group:
        group.rmdir()
    if process.returncode:
        why = f"; it held more than {gigabytes} GB" if killed else ""
        raise RuntimeError(f"{command[1]} ended with {process.returncode}{why}")
    return printed, "" if not gigabytes else f"{gigabytes:g} GB, {'cgroup' if group else 'watched'}"


def _memory_cgroup(limit: int) -> Path | None:
    """Return a new memory cgroup below that of this process; None where that is not possible."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = (
            (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes")
            if controllers
            else (Path("/sys/fs/cgroup"), "memory.max")
        )
        group = root / path.lstrip("/") / f"semisparse-{os.getpid()}"
        try:
            group.mkdir()
            (group / name).write_text(str(limit))
            return group
        except OSError as error:
            print(f"no memory cgroup {group}: {error}", file=sys.stderr)
            if group.exists():
                group.rmdir()
    return None


def _anonymous(pid: int) -> int:
    """Return the bytes that a process holds beside the page cache; 0 once it has ended."""
    try:
        return sum(
            int(line.split()[1]) * 1024
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("RssAnon:")
        )
    except OSError:
        return 0
