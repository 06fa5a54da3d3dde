"""Digests of packed tensors, computed from the files in threads while torch is still being imported.

This module imports no torch. torch and transformers take 4 s of one core to import, SHA-256 of 7 GB as much. Hashing
releases Python's lock, so both run at once.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b, sha256
from mmap import ACCESS_READ, mmap
from pathlib import Path
from threading import Event, Thread
from typing import Any

from semisparse.checkpoint.config import read_json
from semisparse.checkpoint.files import read_ahead, weight_files
from semisparse.errors import CheckpointError

DIGESTS = "digests"
"""Key of {tensor name: digest} in a layer's entry. An entry without it is written back without it."""

BLAKE2B_DIGITS = 32
"""Hexadecimal digits of the BLAKE2b digests that earlier builds wrote. Digests are now SHA-256, of 64 digits: a core
with SHA instructions computes SHA-256 of 1.8 GB per second, but BLAKE2b of 0.9 GB."""

THREADS = min(8, os.cpu_count() or 1)
"""Threads that compute digests and check layers."""

PIECE = 1 << 26
"""Bytes that are hashed at a time, without Python's lock: 37 ms, after up to 5 ms in which a thread waits for it."""

MAX_HEADER_BYTES = 100_000_000
"""Maximum bytes of a safetensors header, as the package safetensors has it."""


def is_blake2b(digests: Any) -> bool:
    """Return whether an entry's digests are the BLAKE2b digests of an earlier version."""
    return isinstance(digests, Mapping) and any(len(str(digest)) == BLAKE2B_DIGITS for digest in digests.values())


def new_hash(blake: bool) -> Any:
    """Return an empty SHA-256 hash, or a BLAKE2b one."""
    return blake2b(digest_size=BLAKE2B_DIGITS // 2) if blake else sha256()


class FileDigests:
    """The digests of all tensors that have one in config.json, computed in the background until `stop`.

    What cannot be read has no digest here: `open_directory` reads the same files and says what is wrong with them.

    Args:
        path: a model directory.
    """

    def __init__(self, path: str | Path) -> None:
        self._stopped = Event()
        self._pool = ThreadPoolExecutor(THREADS)
        self._digests: dict[str, Future[str]] = {}
        with suppress(CheckpointError, OSError, ValueError, OverflowError):  # the last two: a file too large to map
            self._start(Path(path))

    def get(self, tensor: str) -> str | None:
        """Wait for the digest of a tensor, by its name in the files; None if it is not computed here."""
        digest = self._digests.get(tensor)
        return None if digest is None else digest.result()

    def stop(self) -> None:
        """Compute no further digests. Those that are awaited raise `CancelledError`."""
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def _start(self, path: Path) -> None:
        wanted = dict(_wanted(read_json(path / "config.json")))
        files = weight_files(path)
        Thread(target=read_ahead, args=(files, self._stopped), daemon=True).start()
        for file in files:
            with file.open("rb") as opened:
                if not os.fstat(opened.fileno()).st_size:
                    continue
                data = memoryview(mmap(opened.fileno(), 0, access=ACCESS_READ))
            for name, begin, end in _ranges(data):
                if name in wanted:
                    self._digests[name] = self._pool.submit(self._digest, data[begin:end], wanted[name])

    def _digest(self, data: memoryview, blake: bool) -> str:
        found = new_hash(blake)
        for at in range(0, len(data), PIECE):
            if self._stopped.is_set():
                raise CancelledError
            found.update(data[at : at + PIECE])
        return str(found.hexdigest())


def _wanted(config: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the names of tensors with a digest in config.json, and whether it is BLAKE2b."""
    block = config.get("quantization_config")
    layers = block.get("layers") if isinstance(block, Mapping) else None
    for layer, entry in layers.items() if isinstance(layers, Mapping) else ():
        digests = entry.get(DIGESTS) if isinstance(entry, Mapping) else None
        if isinstance(digests, Mapping):
            yield from ((f"{layer}.{tensor}", is_blake2b(digests)) for tensor in digests)


def _ranges(data: memoryview) -> list[tuple[str, int, int]]:
    """Return each tensor's name, begin and end in a safetensors file, in the order of the file."""
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else MAX_HEADER_BYTES + 1
    start = 8 + length
    if length > MAX_HEADER_BYTES or start > len(data):
        return []
    try:
        header = json.loads(bytes(data[8:start]))
        offsets = {name: tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__"}
        if not all(type(at) is int for pair in offsets.values() for at in pair):
            return []
        ranges = sorted((start + begin, start + end, name) for name, (begin, end) in offsets.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    return [(name, begin, end) for begin, end, name in ranges if start <= begin <= end <= len(data)]
