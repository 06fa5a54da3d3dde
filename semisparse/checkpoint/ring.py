"""Memory into which files are read, used again and again in the order of the reads."""

from __future__ import annotations

import mmap
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition


@dataclass(eq=False)
class Part:
    """A part of a ring's memory that is in use.

    Args:
        begin: its first byte's offset.
        end: the offset after its last byte.
        memory: its bytes.
    """

    begin: int
    end: int
    memory: memoryview
    released: bool = False


class Ring:
    """Memory that is given out in order, part after part, and from its begin again when the end is reached.

    The system zeroes a page when it is first written: 0.1 CPU seconds per GB, on a virtual machine up to 1.5. Here each
    page is new once.

    Args:
        size: bytes, a multiple of the page size.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._memory = memoryview(_map(size)) if size else memoryview(b"")
        self._used: deque[Part] = deque()
        self._changed = Condition()
        self._closed = False

    def acquire(self, nbytes: int) -> Part | None:
        """Wait for ``nbytes`` in one piece, at most the ring's size, and return them; None once the ring is closed."""
        with self._changed:
            while not self._closed:
                begin = self._place(nbytes)
                if begin is not None:
                    part = Part(begin, begin + nbytes, self._memory[begin : begin + nbytes])
                    self._used.append(part)
                    return part
                self._changed.wait()
        return None

    def release(self, part: Part) -> None:
        """Take a part back. Its memory is given out again once all parts before it are released, too."""
        with self._changed:
            part.released = True
            while self._used and self._used[0].released:
                self._used.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        """Give out no more memory: `acquire` returns None to all that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _place(self, nbytes: int) -> int | None:
        """Return the offset of the next part, or None if there is no room for it."""
        if not self._used:
            return 0
        oldest, newest = self._used[0].begin, self._used[-1].end
        if newest > oldest:  # in use is one piece in the middle
            if newest + nbytes <= self._size:
                return newest
            return 0 if nbytes <= oldest else None
        return newest if newest + nbytes <= oldest else None


def _map(size: int) -> mmap.mmap:
    """Return memory of this process, in huge pages where the system has them: 512 times fewer page faults."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
