"""Writing a directory that is either whole or absent."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from semisparse.errors import InputError, SemisparseError


def refuse_existing(out: Path) -> None:
    """Refuse to write over something.

    Raises:
        InputError: ``out`` exists and is not an empty directory.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError(f"{out} exists already; choose another --out or remove it")


@contextmanager
def whole_directory(out: str | Path, workplace: Path | None = None) -> Iterator[Path]:
    """Give a temporary directory that takes the name ``out`` once the block has ended well.

    Everything is flushed to the disk before the rename, so that a crash leaves ``out`` whole or absent.

    Args:
        out: the directory to make.
        workplace: where the temporary directory is made, on the same disk; by default beside ``out``.
    Raises:
        InputError: ``out`` exists already.
        SemisparseError: writing failed, for instance because the disk is full; nothing is left behind.
    """
    out = Path(out).absolute()
    refuse_existing(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=workplace or out.parent))
    except OSError as error:
        raise SemisparseError(f"cannot write to {workplace or out.parent}: {error}") from error
    try:
        yield scratch
        scratch.chmod(0o777 & ~_umask())
        for file in scratch.rglob("*"):
            _flush(file)
        _flush(scratch)
        os.replace(scratch, out)
        _flush(out.parent)
    except (OSError, SafetensorError) as error:
        raise SemisparseError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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
