"""Detects that a rank has died, and ends the other ranks with an error that names it.

A process group alone would wait for the dead rank, or report only that some connection was closed. Each rank increments
a heartbeat count in the store of torch.distributed twice a second, and reads the counts of the others. The lowest rank
that is alive prints the error.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from semisparse.compress.distributed.exchange import LostRank
from semisparse.compress.distributed.ranks import local_rank
from semisparse.errors import InputError, SemisparseError

INTERVAL = 0.5
"""Seconds between two heartbeats."""

PATIENCE = 120
"""Heartbeats of this rank without one of another rank, after which the other is taken to be dead. A machine that pages
may miss some. Heartbeats are counted instead of seconds, so that a machine that was suspended does not take the others
to be dead."""

ALARMED = 10
"""The limit instead of `PATIENCE` once a connection was closed or torchrun has sent SIGTERM; torchrun kills all ranks
30 s after SIGTERM."""

Speak = Callable[[str], None]
"""Prints an error."""


class _Seen(NamedTuple):
    """What a rank wrote last, and how many heartbeats of this rank ago it changed."""

    text: str
    age: int

    @property
    def failure(self) -> tuple[int, str] | None:
        """Exit status and message of a rank that an error has ended."""
        kind, _, rest = self.text.partition(" ")
        status, _, message = rest.partition(" ")
        return (int(status), message) if kind == "failed" else None

    def silent(self, patience: int) -> bool:
        """Whether the rank has not ended, but wrote nothing for more than ``patience`` heartbeats."""
        return self.text.isdecimal() and self.age > patience


class Watch:
    """A thread that writes this rank's heartbeats, and watches those of the other ranks.

    Args:
        store: of the process group.
        rank: of this process.
        count: of processes.
        speak: prints an error.
    """

    def __init__(self, store: Any, rank: int, count: int, speak: Speak) -> None:
        self._store, self._rank, self._speak = store.clone(), rank, speak
        self._store.set(self._key(rank), "0")
        self._store.set(f"host {rank}", socket.gethostname())
        self._keys = [self._key(rank) for rank in range(count)]
        self._hosts = [store.get(f"host {other}").decode() for other in range(count)]  # waits until all have begun
        self._counts = 0
        self._alarmed_at: int | None = None
        self._alarm = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def alarm(self, sentence: str) -> None:
        """Report that a rank seems to have ended. The thread then ends this process, with the cause if it finds one."""
        if self._alarmed_at is None:
            self._alarmed_at, self._alarm = self._counts, sentence

    def wait(self) -> None:
        """Wait for the thread to end this process."""
        self._thread.join(4 * ALARMED * INTERVAL)

    def end(self, last_word: str) -> None:
        """Stop the thread, and write how this rank ends for the others to read."""
        self._stop.set()
        self._thread.join(ALARMED * INTERVAL)
        try:
            self._store.set(self._key(self._rank), last_word)
        except RuntimeError:  # the store has ended, which the other ranks notice
            return

    def _key(self, rank: int) -> str:
        return f"semisparse rank {rank}"

    def _run(self) -> None:
        seen = [_Seen("0", 0) for _ in self._keys]
        while not self._stop.wait(INTERVAL):
            self._counts += 1
            try:
                self._store.set(self._keys[self._rank], str(self._counts))
                texts = [text.decode() for text in self._store.multi_get(self._keys)]
            except RuntimeError as error:
                self._exit(1, True, f"the ranks' store has gone, with the host that torchrun made it on: {error}")
                return
            seen = [_Seen(text, old.age + 1 if text == old.text else 0) for old, text in zip(seen, texts, strict=True)]
            self._judge(seen)

    def _judge(self, seen: list[_Seen]) -> None:
        """End this process if another rank has failed or died."""
        alarmed = self._alarmed_at is not None
        lost = [rank for rank, one in enumerate(seen) if one.silent(ALARMED if alarmed else PATIENCE)]
        failed = {rank: one.failure for rank, one in enumerate(seen) if one.failure}
        speaks = self._rank == min(set(range(len(seen))) - set(lost) - failed.keys())
        rank = min(failed, default=None)
        if rank is not None and seen[rank].age > ALARMED / 2:  # first wait: this rank may fail, too
            status, message = failed[rank] or (1, "")
            self._exit(status, speaks and rank != 0, f"{self._name(rank)}: {message}")
        elif lost:
            names = " and ".join(self._name(rank) for rank in lost)
            self._exit(1, speaks, f"{names} died; the same command with --resume goes on, with any number of ranks")
        elif self._alarmed_at is not None and self._counts - self._alarmed_at > 2 * ALARMED:
            self._exit(143, speaks, f"{self._alarm}; the same command with --resume goes on")

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"

    def _exit(self, status: int, speaks: bool, sentence: str) -> None:
        """End this process, even if its main thread waits for a process that has ended."""
        if self._stop.is_set():
            return
        if speaks:
            self._speak(sentence)
        else:
            time.sleep(2 * INTERVAL)  # time for another rank to print: torchrun kills all once one has ended
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def joined_ranks(speak: Speak) -> Iterator[int]:
    """Join the ranks that torchrun has started; yield this process's number, 0 if it runs alone.

    Args:
        speak: prints an error, on whichever rank has to say it.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or dist.is_initialized():
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    dist.init_process_group("gloo")
    watch = Watch(dist.distributed_c10d._get_default_store(), dist.get_rank(), count, speak)
    signal.signal(signal.SIGTERM, lambda *_: watch.alarm("this run was ended from outside"))
    try:
        yield dist.get_rank()
    except LostRank:
        watch.alarm("the connection to another rank is lost, and all ranks live")
        watch.wait()
        raise
    except BaseException as error:
        watch.end(f"failed {2 if isinstance(error, InputError) else 1} {_sentence(error)}")
        raise
    watch.end("done")
    dist.barrier()  # the rank that holds the store must end last
    dist.destroy_process_group()


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, SemisparseError) else f"unexpected {type(error).__name__}: {error}"
