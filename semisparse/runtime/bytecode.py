"""Where Python keeps the bytecode of what a command imports. This module imports no torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from semisparse.runtime.cache import cache_directory, distrust

FOLDER = "bytecode"
"""The folder of the cache directory."""


def keep_bytecode() -> None:
    """Keep bytecode in the user's cache directory if torch's is missing and Python would not write it.

    In many containers packages are installed without bytecode, and are read-only or used with PYTHONDONTWRITEBYTECODE.
    Python then compiles 2,700 modules at each start: `generate` took 12.5 CPU seconds there, and takes 4.3 with this
    (results/cpu/start.csv).
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.cached or Path(spec.cached).exists():
        return
    if not sys.dont_write_bytecode and _can_write(Path(spec.cached).parent):
        return
    folder = cache_directory() / FOLDER
    if distrust(cache_directory()) or distrust(folder):
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # the folders that Python makes inside follow the umask
    except OSError:
        return  # as without this function
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


def _can_write(folder: Path) -> bool:
    """Return whether a folder can be written, or made."""
    return os.access(next(path for path in (folder, *folder.parents) if path.exists()), os.W_OK)
