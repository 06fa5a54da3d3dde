"""Writing a directory atomically: it is either complete or absent."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from semisparse.errors import InputError, SemisparseError

MAX_SHOWN = 99
"""Characters of an impossible path that a message shows."""

MAX_PREFIX = 50
"""Characters of an output's name that its temporary directory's name begins with: at most 200 bytes."""


def refuse_existing(out: Path) -> None:
    """Refuse to overwrite an existing output, or one that could not be written.

    Raises:
        InputError: ``out`` exists and is not an empty directory, is a symbolic link or a mount point, which no
            directory can replace, or the current directory, which would be gone, or lies below a file or a directory
            that cannot be written, or has a name that is too long.
    """
    try:
        exists = out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir())))
        occupied = not exists and out.is_dir() and (out.is_mount() or out.samefile(Path.cwd()))
        parent = next((folder for folder in out.absolute().parents if folder.exists()), Path("/"))
    except OSError as error:
        raise InputError(f"cannot write to {str(out)[:MAX_SHOWN]}: {error.strerror}; choose another --out") from error
    if exists:
        raise InputError(f"{out} exists already; choose another --out or remove it")
    if occupied:
        raise InputError(
            f"{out} is a mount point or the current directory, which no new directory can replace; choose a folder in "
            "it as --out"
        )
    if not parent.is_dir():
        raise InputError(f"cannot write to {out}: {parent} is no directory; choose another --out")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write to {out}: {parent} is not writable; choose another --out")


@contextmanager
def atomic_directory(out: str | Path, scratch_parent: Path | None = None) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to ``out`` when the ``with`` block ends without an exception.

    All files are flushed to disk before the rename, so that a crash leaves ``out`` complete or absent.

    Args:
        out: the directory to create.
        scratch_parent: the parent of the temporary directory, on the file system of ``out``; by default the parent of
            ``out``.
    Raises:
        InputError: ``out`` exists already.
        SemisparseError: writing failed, for instance because the disk is full. The temporary directory is removed.
    """
    out = Path(out).absolute()
    refuse_existing(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{out.name[:MAX_PREFIX]}."  # the whole name, with mkdtemp's eight characters, may be too long
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=scratch_parent or out.parent))
    except OSError as error:
        raise SemisparseError(f"cannot write to {scratch_parent or out.parent}: {error}") from error
    try:
        yield scratch
        mask = _umask()
        scratch.chmod(0o777 & ~mask)
        for file in scratch.rglob("*"):  # safetensors writes files that only their owner can read
            if file.is_file() and not file.is_symlink():
                file.chmod(0o666 & ~mask)
        _flush_all(scratch)
        os.replace(scratch, out)
        _flush(out.parent)
    except (OSError, SafetensorError) as error:
        raise SemisparseError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def flushing(folder: Path) -> Iterator[None]:
    """Flush what a folder has to disk while the ``with`` block, which adds nothing to it, runs.

    Raises:
        OSError: writing failed.
    """
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(_flush_all, folder)
        yield
        flushed.result()


def _flush_all(folder: Path) -> None:
    for file in folder.rglob("*"):
        _flush(file)
    _flush(folder)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
