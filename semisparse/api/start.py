"""The start of a command that runs a model: disk and GPU are at work while torch and transformers are imported.

This module imports neither of them before `importing` is entered.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from semisparse.checkpoint.files import read_ahead_in_background
from semisparse.runtime.bytecode import keep_bytecode
from semisparse.runtime.cuda_context import create_in_background

__all__ = ["importing", "keep_bytecode"]


@contextmanager
def importing(model: Path | None = None, device: str = "cpu", waits: bool = True) -> Iterator[None]:
    """Import torch and transformers in this block, while threads prepare what comes next.

    The garbage collector does not run meanwhile and ignores the imported objects afterwards: looking through them again
    and again takes a fifth of the imports' time, 0.7 of 3.4 CPU seconds (results/cpu/start.csv). If torch has been
    imported before, nothing is done: the process is not a command's own.

    Args:
        model: a directory whose weights are read into the page cache meanwhile; None for none.
        device: ``auto`` or ``cuda`` to create the GPU's context meanwhile, if there is a GPU, and to load cuBLAS and
            cuDNN once torch is imported.
        waits: whether the block ends only when these libraries have been loaded. An `Engine` waits for them itself.
    """
    if "torch" in sys.modules:
        yield
        return
    if model is not None:
        read_ahead_in_background(model)
    on_gpu = device in ("auto", "cuda")
    if on_gpu:
        create_in_background()
    gc.disable()
    try:
        if on_gpu:
            _libraries().load_in_background()
        yield
        if on_gpu and waits:
            _libraries().wait()
    finally:
        gc.freeze()
        gc.enable()


def _libraries() -> ModuleType:
    """Import torch, and return the module that loads its GPU libraries."""
    from semisparse.runtime import cuda_libraries

    return cuda_libraries
