"""Creating a GPU's CUDA context in a thread, before torch is there to do it. This module imports no torch."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from threading import Thread

LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
"""The CUDA driver's library on Linux and on Windows."""


def create_in_background() -> Thread:
    """Create the primary context of the first visible GPU in a thread, without Python's lock, and return the thread.

    torch uses the same context: what it then initialises is there already, or it waits for the thread. Nothing is said
    about errors: torch meets them, too, and reports them.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # read by cuInit; torch sets it later, before its own
    thread = Thread(target=_create, name="CUDA context", daemon=True)
    thread.start()
    return thread


def _create() -> None:
    for name in LIBRARIES:
        with suppress(OSError):
            driver = ctypes.CDLL(name)
            break
    else:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
