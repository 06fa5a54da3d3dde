"""Forked processes with limits on memory and time, for input that may crash, hang or fill the memory."""

import gc
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

MEMORY = 1 << 30
"""Bytes that a child may allocate beyond what it was forked with."""

SECONDS = 10


class Ended(NamedTuple):
    """How a child ended.

    Args:
        value: what the function returned; None unless it ended well.
        signal: what killed it: SIGKILL after too much time, SIGSEGV and the like; 0 if nothing did.
        seconds: wall time.
    """

    value: Any
    signal: int
    seconds: float


def limited(work: Callable[..., Any], *arguments: Any, memory: int = MEMORY, seconds: float = SECONDS) -> Ended:
    """Run a function in a child forked from this process.

    Args:
        work: returns JSON values and raises nothing.
        memory: bytes that it may allocate.
        seconds: after which it is killed.
    """
    start = time.perf_counter()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        _run(work, arguments, memory, write)
    os.close(write)
    content = _read(read, start + seconds)
    if content is None:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    value = json.loads(content) if content and not killed else None
    return Ended(value, killed, time.perf_counter() - start)


def _run(work: Callable[..., Any], arguments: tuple[Any, ...], memory: int, write: int) -> None:
    """Run the work in the child, and exit."""
    try:
        gc.disable()  # a collection would write to every page, which is then copied
        torch.set_num_threads(1)  # OpenMP's threads are not forked
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        with open(write, "w") as pipe:
            pipe.write(json.dumps(work(*arguments)))
    finally:
        os._exit(0)


def _read(pipe: int, deadline: float) -> bytes | None:
    """Read a pipe to its end; return None if the end does not come in time."""
    content = b""
    with open(pipe, "rb", buffering=0) as file:
        while True:
            if not select.select([file], [], [], max(0.0, deadline - time.perf_counter()))[0]:
                return None
            part = file.read(1 << 16)
            if not part:
                return content
            content += part
