"""The layers of a model directory read in threads, with their digests, while torch is still being imported.

This module imports no torch. torch and transformers take 3 s of one core to import, SHA-256 of 7 GB as much. Reading
and hashing release Python's lock, so both run beside the imports.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from semisparse.checkpoint.config import read_json
from semisparse.checkpoint.direct_read import ALIGNMENT, pieces, window_bytes
from semisparse.checkpoint.files import weight_files
from semisparse.checkpoint.ring import Part, Ring
from semisparse.errors import CheckpointError

DIGESTS = "digests"
"""Key of {tensor name: digest} in a layer's entry, and in the block, which has the tensors outside of packed layers by
their names on disk. What is without it is written back without it."""

BLAKE2B_DIGITS = 32
"""Hexadecimal digits of the BLAKE2b digests that earlier builds wrote. Digests are now SHA-256, of 64 digits: a core
with SHA instructions computes SHA-256 of 1.8 GB per second, but BLAKE2b of 0.9 GB."""

THREADS = min(8, os.cpu_count() or 1)
"""Threads that compute digests and check layers."""

READERS = THREADS + 2
"""Threads that read: while some wait for the disk, others compute digests."""

MEMORY = 1 << 29
"""Bytes of layers in memory, read and not yet checked: what a disk reads while torch is imported. With 1 GiB a virtual
machine takes 2 CPU seconds more to provide the memory (docs/experiments/loading.md)."""

MAX_HEADER_BYTES = 100_000_000
"""Maximum bytes of a safetensors header, as the package safetensors has it."""


def is_blake2b(digests: Any) -> bool:
    """Return whether an entry's digests are the BLAKE2b digests of an earlier version."""
    return isinstance(digests, Mapping) and any(len(str(digest)) == BLAKE2B_DIGITS for digest in digests.values())


def new_hash(blake: bool) -> Any:
    """Return an empty SHA-256 hash, or a BLAKE2b one."""
    return blake2b(digest_size=BLAKE2B_DIGITS // 2) if blake else sha256()


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it is stored.

    Args:
        data: its bytes, valid until `FileLayers.held` of its layer ends.
        digest: in hexadecimal digits; None if config.json has none to compare it with.
    """

    data: memoryview
    digest: str | None


@dataclass(frozen=True)
class _Range:
    """Where a tensor's bytes are: ``begin`` to ``end`` of a file."""

    tensor: str
    file: Path
    begin: int
    end: int


@dataclass
class _Layer:
    """A layer that is read as a whole: a compressed layer's tensors, or one dense weight.

    Args:
        ranges: one per tensor.
        digests: per tensor with a digest in config.json, whether it is BLAKE2b.
        part: the memory that it is read into.
        read: its tensors by name.
    """

    ranges: list[_Range] = field(default_factory=list)
    digests: dict[str, bool] = field(default_factory=dict)
    part: Part | None = None
    read: Future[dict[str, StoredTensor]] = field(default_factory=Future)

    @property
    def nbytes(self) -> int:
        """Bytes of memory to read it into."""
        return sum(window_bytes(each.begin, each.end) for each in self.ranges)


class FileLayers:
    """Compressed layers, dense two-dimensional weights and other tensors with digests of a model directory, read in the
    background until `stop`.

    What cannot be read is not held here: `open_directory` reads the same files and says what is wrong with them.
    Layers larger than `MEMORY` are not held either.

    Args:
        path: a model directory.
    """

    def __init__(self, path: str | Path) -> None:
        self._stopped = Event()
        self._layers: dict[str, _Layer] = {}
        with suppress(CheckpointError, OSError):
            self._layers = _find_layers(Path(path))
        self._ring = Ring(min(MEMORY, sum(layer.nbytes for layer in self._layers.values())))
        self._pending = iter(tuple(self._layers.values()))
        self._in_order = Lock()
        self._threads = [Thread(target=self._read_all, daemon=True) for _ in range(READERS if self._layers else 0)]
        for thread in self._threads:
            thread.start()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers in the order in which they are read: module names, and dense weights' names."""
        return tuple(self._layers)

    @contextmanager
    def held(self, name: str) -> Iterator[dict[str, StoredTensor] | None]:
        """Hold the tensors of a layer in memory, by their names in the files; None for a layer not held here.

        Layers have to be asked for once, and in the order of `names`, because the memory of one is that of a later one.

        Raises:
            CancelledError: `stop` was called.
        """
        layer = self._layers.get(name)
        if layer is None:
            yield None
            return
        try:
            try:
                tensors = layer.read.result()
            except OSError:
                tensors = None
            yield tensors
        finally:
            if layer.part is not None:
                self._ring.release(layer.part)

    def stop(self) -> None:
        """Read nothing further. Layers that are awaited raise `CancelledError`."""
        self._stopped.set()
        self._ring.close()
        for thread in self._threads:
            thread.join()
        for layer in self._layers.values():
            if not layer.read.done():
                layer.read.set_exception(CancelledError())

    def _read_all(self) -> None:
        """Read layer after layer, as far as there is memory for them."""
        while not self._stopped.is_set():
            with self._in_order:  # else a later layer could take the memory that the next one waits for
                layer = next(self._pending, None)
                part = None if layer is None else self._ring.acquire(layer.nbytes)
            if layer is None or part is None:
                return
            layer.part = part
            try:
                layer.read.set_result(self._read(layer, part.memory))
            except BaseException as error:
                layer.read.set_exception(error)

    def _read(self, layer: _Layer, memory: memoryview) -> dict[str, StoredTensor]:
        """Read a layer's tensors and compute their digests."""
        tensors = {}
        for each in layer.ranges:
            tensors[each.tensor] = self._tensor(each, memory, layer.digests.get(each.tensor))
            memory = memory[window_bytes(each.begin, each.end) :]
        return tensors

    def _tensor(self, where: _Range, window: memoryview, blake: bool | None) -> StoredTensor:
        """Read one tensor to the begin of ``window``; ``blake`` is None for no digest."""
        window = window[: window_bytes(where.begin, where.end)]
        hasher = None if blake is None else new_hash(blake)
        for piece in pieces(where.file, where.begin, where.end, window):
            if self._stopped.is_set():
                raise CancelledError
            if hasher is not None:
                hasher.update(piece)
        data = window[where.begin % ALIGNMENT :][: where.end - where.begin]
        return StoredTensor(data, None if hasher is None else str(hasher.hexdigest()))


def _find_layers(path: Path) -> dict[str, _Layer]:
    """Return what is to be read, in the order of the files."""
    config = read_json(path / "config.json")
    digests, dense = dict(_declared(config)), dense_digests(config.get("quantization_config"))
    layers: dict[str, _Layer] = {}
    for file in weight_files(path):
        for tensor, matrix, begin, end in _tensors(file):
            owner = tensor.rpartition(".")[0]
            if owner not in digests and tensor not in dense and not (matrix and tensor.endswith(".weight")):
                continue
            layer = layers.setdefault(owner if owner in digests else tensor, _Layer())
            layer.ranges.append(_Range(tensor, file, begin, end))
            layer.digests = digests.get(owner) or ({tensor: False} if tensor in dense else {})
    return {name: layer for name, layer in layers.items() if layer.nbytes <= MEMORY}


def dense_digests(block: Any) -> Mapping[str, str]:
    """Return the digests of the tensors outside of packed layers, by their names on disk.

    Args:
        block: the ``quantization_config`` block, or None.
    Raises:
        CheckpointError: they are no object with text.
    """
    digests = block.get(DIGESTS, {}) if isinstance(block, Mapping) else {}
    if not isinstance(digests, Mapping) or not all(isinstance(digest, str) for digest in digests.values()):
        raise CheckpointError("the digests under quantization_config in config.json are no object of texts")
    return digests


def _declared(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, bool]]]:
    """Yield each compressed layer's name in config.json, and per tensor with a digest whether it is BLAKE2b."""
    block = config.get("quantization_config")
    layers = block.get("layers") if isinstance(block, Mapping) else None
    for layer, entry in layers.items() if isinstance(layers, Mapping) else ():
        digests = entry.get(DIGESTS) if isinstance(entry, Mapping) else None
        blake = is_blake2b(digests)
        yield layer, {f"{layer}.{tensor}": blake for tensor in digests} if isinstance(digests, Mapping) else {}


def _tensors(file: Path) -> list[tuple[str, bool, int, int]]:
    """Return name, whether it has two dimensions, begin and end of each tensor of a safetensors file, in its order.

    A file that safetensors would refuse has none: tensors that overlap could claim any amount of memory.
    """
    if not file.is_file():  # opening a FIFO waits for its writer
        return []
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = struct.unpack("<Q", opened.read(8))[0] if size >= 8 else MAX_HEADER_BYTES + 1
        start = 8 + length
        if length > MAX_HEADER_BYTES or start > size:
            return []
        header = opened.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        offsets = {name: tuple(entry["data_offsets"]) for name, entry in entries.items()}
        if not all(type(at) is int for pair in offsets.values() for at in pair):
            return []
        ranges = sorted((start + begin, start + end, name) for name, (begin, end) in offsets.items())
        bounds = [start, *(at for begin, end, _ in ranges for at in (begin, end)), size]
        if bounds != sorted(bounds):
            return []
        return [(name, len(entries[name]["shape"]) == 2, begin, end) for begin, end, name in ranges]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
