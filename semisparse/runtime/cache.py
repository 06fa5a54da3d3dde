"""The cache directory of the user: compiled code and measured rates, kept between processes.

What lies in the cache is run. So a directory or an entry is used only if nobody but this user (or root) can write it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import uuid
import warnings
from collections.abc import Callable
from functools import cache
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

    Entries are written atomically, so that processes may share the cache. If the directory cannot be written, or others
    can write it, a warning is issued and the next process builds the entry again.

    Args:
        folder: the kind of entry, a subdirectory of the cache.
        key: everything that the content depends on. The file name is its SHA-256.
        build: computes the content.
    """
    name = hashlib.sha256(key)
    path = cache_directory() / folder / name.hexdigest()
    reason = distrust(cache_directory()) or distrust(path.parent)
    if reason:
        _warn_once(f"{reason}: the cache is not used; set SEMISPARSE_CACHE to a directory of yours")
        return build()
    content = _read(path, name.digest())
    if content is None:
        content = build()
        try:
            write_atomically(path, _checksum(name.digest(), content) + content)
        except OSError as error:
            reason = f"cannot write the cache in {cache_directory()}: {error.strerror or error}"
            _warn_once(f"{reason}; set SEMISPARSE_CACHE to a writable directory")
    return content


def lookup(folder: str, key: bytes) -> bytes | None:
    """Return a cache entry; None if it is missing, wrong or not trusted. Arguments as in `cached`."""
    try:
        return cached(folder, key, _absent)
    except LookupError:
        return None


def _absent() -> bytes:
    raise LookupError


@cache
def _warn_once(message: str) -> None:
    """Warn, once per process: a command asks for several entries."""
    warnings.warn(message, stacklevel=3)


def distrust(directory: Path) -> str | None:
    """Say why a directory must not be used; None if it may, or does not exist.

    The write permission of others is removed from a directory of this user. Files that others have put there before
    belong to them, so `_read` ignores these.
    """
    try:
        status = directory.stat()
    except OSError:
        return None
    if not _is_ours(status):
        return f"{directory} belongs to another user"
    if status.st_mode & _OTHERS_WRITE and hasattr(os, "getuid"):
        try:
            directory.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
        except OSError:
            return f"{directory} can be written by others"
    return None


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def _is_ours(status: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or status.st_uid in (os.getuid(), 0)


def _checksum(name: bytes, content: bytes) -> bytes:
    """Return the checksum of an entry's name and content: with the name, so that no entry can replace another."""
    return hashlib.sha256(name + content).digest()


def _read(path: Path, name: bytes) -> bytes | None:
    """Return an entry's content; None if it is absent, damaged, or could have been written by others."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a FIFO would be waited for
    try:
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            others_write = status.st_mode & _OTHERS_WRITE and hasattr(os, "getuid")
            if others_write or not (stat.S_ISREG(status.st_mode) and _is_ours(status)):
                return None
            stored = file.read()
    except OSError:
        return None
    digest, content = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
    return content if _checksum(name, content) == digest else None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically, and create its directory. Other users cannot write it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    temporary = path.with_name(f".new-{uuid.uuid4().hex}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
