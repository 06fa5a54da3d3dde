"""Ranges of a file, read piece by piece: from the page cache if they are in it, otherwise past it.

A read past the page cache (``O_DIRECT``) goes from the disk straight into the caller's memory. On a virtual machine it
takes 0.6 CPU seconds for 7.8 GB, a read through the page cache 3 to 12 (docs/experiments/loading.md). This module
imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

ALIGNMENT = 4096
"""File offset, length and memory address of a direct read are multiples of it: no usual disk has larger blocks."""

PIECE = 1 << 25
"""Bytes read at a time, without Python's lock: 20 ms or more, after up to 5 ms in which a thread waits for it."""


def window_bytes(begin: int, end: int) -> int:
    """Return the bytes of memory that `pieces` needs for the range from ``begin`` to ``end``."""
    return -(-end // ALIGNMENT) * ALIGNMENT - begin // ALIGNMENT * ALIGNMENT


def pieces(file: Path, begin: int, end: int, window: memoryview) -> Iterator[memoryview]:
    """Read the bytes from ``begin`` to ``end`` of a file into memory, and yield them in order, as parts of ``window``.

    Args:
        file: a regular file.
        begin: offset of the first byte.
        end: offset after the last byte.
        window: writable, `window_bytes` long, at an address that is a multiple of `ALIGNMENT`. The bytes stay where
            they are read to: ``window[begin % ALIGNMENT :][: end - begin]``.
    Raises:
        OSError: the file is unreadable or ends before ``end``.
    """
    first = at = begin // ALIGNMENT * ALIGNMENT
    with ExitStack() as opened:
        plain = opened.enter_context(FileIO(file))
        direct: FileIO | None = None
        cached = True
        while at < end:
            part = window[at - first : at - first + min(PIECE, len(window) - (at - first))]
            wanted = min(len(part), end - at)
            got = _read_cached(plain, at, part) if cached else 0
            if got < wanted:
                if cached:
                    cached, direct = False, _open_direct(file, opened)
                got, direct = _read(direct, plain, at, part)
            if not got:
                raise OSError(f"{file} ends at byte {at}, expected {end} bytes")
            yield window[max(begin, at) - first : min(end, at + got) - first]
            at += got


def _read_cached(plain: FileIO, at: int, part: memoryview) -> int:
    """Read what the page cache has, and return the number of bytes; 0 where the system cannot tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return 0
    try:
        # A page of the middle first, since those at the ends may be cached with the tensors beside this one. A read of
        # 32 MB that finds none would have the system read megabytes ahead: 2 to 14 CPU seconds in 7.8 GB.
        middle = len(part) // 2 // ALIGNMENT * ALIGNMENT
        os.preadv(plain.fileno(), [part[middle : middle + ALIGNMENT]], at + middle, os.RWF_NOWAIT)
        return os.preadv(plain.fileno(), [part], at, os.RWF_NOWAIT)
    except OSError:  # BlockingIOError: not in the page cache; others: the file system does not know the flag
        return 0


def _open_direct(file: Path, opened: ExitStack) -> FileIO | None:
    """Open a file for direct reads; None where system or file system has none."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return opened.enter_context(FileIO(file, opener=lambda path, flags: os.open(path, flags | os.O_DIRECT)))
    except OSError:
        return None


def _read(direct: FileIO | None, plain: FileIO, at: int, part: memoryview) -> tuple[int, FileIO | None]:
    """Read at an offset; return the number of bytes, and ``direct``, or None if the rest has to be read plainly."""
    if direct is not None and at % ALIGNMENT == 0:  # a read may end anywhere, so the next may begin anywhere
        try:
            direct.seek(at)
            return direct.readinto(part) or 0, direct
        except OSError:  # EINVAL of a file system that opens such files and cannot read them
            pass
    plain.seek(at)
    return plain.readinto(part) or 0, None
