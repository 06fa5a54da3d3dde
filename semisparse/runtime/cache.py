"""The cache directory of the user: compiled code and measured rates, kept between processes."""

from __future__ import annotations

import hashlib
import os
import sys
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path

DIGEST_BYTES = hashlib.sha256().digest_size


def cache_directory() -> Path:
    """Return the cache directory: ``SEMISPARSE_CACHE``, or ``semisparse`` in the platform's cache directory."""
    override = os.environ.get("SEMISPARSE_CACHE")
    if override:
        return Path(override)
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "semisparse"


def cached(folder: str, key: bytes, build: Callable[[], bytes]) -> bytes:
    """Return a cache entry. It is built if it is missing or its checksum is wrong.

    Entries are written atomically, so that processes may share the cache. If the directory cannot be written, a warning
    is issued and the next process builds the entry again.

    Args:
        folder: the kind of entry, a subdirectory of the cache.
        key: everything that the content depends on. The file name is its SHA-256.
        build: computes the content.
    """
    path = cache_directory() / folder / hashlib.sha256(key).hexdigest()
    content = _read(path)
    if content is None:
        content = build()
        try:
            write_atomically(path, hashlib.sha256(content).digest() + content)
        except OSError as error:
            warnings.warn(
                f"cannot write the cache entry {path}: {error}; set SEMISPARSE_CACHE to a writable directory",
                stacklevel=2,
            )
    return content


def _read(path: Path) -> bytes | None:
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, content = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically, and create its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".new-{uuid.uuid4().hex}")  # files made by tempfile are readable by their owner only
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
