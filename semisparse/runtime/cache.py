"""The user's cache directory: compiled code and measurements that are worth keeping between processes."""

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
    """Say where the cache is: ``SEMISPARSE_CACHE``, or ``semisparse`` in the platform's own cache directory."""
    chosen = os.environ.get("SEMISPARSE_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "semisparse"


def cached(folder: str, key: bytes, build: Callable[[], bytes]) -> bytes:
    """Give an entry of the cache, building it where it is missing or damaged.

    An entry is written whole or not at all, so that processes may share the cache; it carries its own checksum.

    Args:
        folder: the kind of entry.
        key: everything that the content depends on.
        build: makes the content.
    Returns:
        The content. A directory that cannot be written costs a warning and the next process's time.
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
    """Write a file whole or not at all, creating its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".new-{uuid.uuid4().hex}")  # tempfile's files can be read by their owner alone
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
