"""Launching a compiled kernel on torch's current stream, capturable in a CUDA graph."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import KernelError
from semisparse.runtime.nvrtc import Cubin

STATIC_SHARED_LIMIT = 48 << 10
"""Bytes of dynamic shared memory that need no attribute on the kernel."""

CONFIG = struct.Struct("@7I2PI0P")
"""CUlaunchConfig: grid and block by x, y and z, bytes of shared memory; stream and attributes; how many of these."""

OVERLAP = ctypes.create_string_buffer(struct.pack("@i4xi60x", 6, 1), 72)
"""The CUlaunchAttribute programmatic stream serialization, allowed."""

_OVERLAP_AT = ctypes.addressof(OVERLAP)

LAUNCH_SINCE = 11080
"""The CUDA that brought cuLaunchKernelEx."""


ALIGNMENT = 256
"""Of arrays that share an allocation, in bytes."""


def address(tensor: Tensor | None) -> int:
    """Give where a tensor's data begin, the null pointer for None."""
    return 0 if tensor is None else tensor.data_ptr()


def stream_of(device: torch.device) -> int:
    """Give the handle of torch's current stream on a GPU."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)  # torch.cuda.current_stream() makes an object: 4.2 us for .1


def places_of(*sizes: int) -> tuple[int, ...]:
    """Give where arrays of so many bytes begin that share one allocation and, last, its own size.

    An allocation for each would cost the host as much as a launch.
    """
    return tuple(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


class CudaKernel:
    """One kernel of a cubin. It loads at its first launch, which must not be inside a graph capture.

    Args:
        cubin: the compiled file.
        name: the kernel's, with C linkage.
        parameters: the ctypes type of each of its parameters; pointers are ``ctypes.c_void_p``.
        shared: bytes of dynamic shared memory that each block gets.
    Raises:
        KernelError: the cubin does not hold the kernel, or the device refuses it or its shared memory.
    """

    def __init__(self, cubin: Cubin, name: str, parameters: Sequence[Any], shared: int = 0) -> None:
        if name not in cubin.resources:
            raise KernelError(f"the cubin holds {', '.join(cubin.resources)}, not {name}")
        from cuda.core import ObjectCode

        self.name = name
        self.shared = shared
        self._launch = _launcher()
        self._code = ObjectCode.from_cubin(cubin.code)
        self._kernel = self._code.get_kernel(name).handle
        self._function = int(self._kernel)
        codes = [parameter._type_ for parameter in parameters]
        self._layout = struct.Struct("@" + "".join(codes))
        ends = [struct.calcsize("@" + "".join(codes[: i + 1])) for i in range(len(codes))]
        offsets = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        self._blocks = _Blocks(self._layout.size, offsets)
        self._devices_ready: set[int] = set()

    def __call__(
        self,
        device: torch.device,
        grid: tuple[int, int, int],
        threads: int,
        *arguments: int | float | None,
        dependent: bool = False,
    ) -> None:
        """Launch.

        Args:
            device: whose current stream runs the kernel.
            grid: blocks along x, y and z.
            threads: of a block.
            arguments: one for each parameter; addresses as ints, None for the null pointer.
            dependent: the kernel may begin before the one before it on the stream has ended; it must execute
                ``griddepcontrol.wait`` before it reads what others write, and before it writes.
        Raises:
            KernelError: the driver refuses the launch.
        """
        current = torch.cuda.current_device()
        index = current if device.index is None else device.index
        if index != current:
            with torch.cuda.device(index):
                self(device, grid, threads, *arguments, dependent=dependent)
            return
        if index not in self._devices_ready:
            self._allow_shared_memory(index)
        blocks = self._blocks
        stream = stream_of(device)
        CONFIG.pack_into(blocks.config, 0, *grid, threads, 1, 1, self.shared, stream, _OVERLAP_AT, dependent)
        self._layout.pack_into(blocks.arguments, 0, *[argument or 0 for argument in arguments])
        status = self._launch(blocks.config_at, self._function, blocks.pointers_at, None)
        if status:
            raise KernelError(f"launching {self.name} on {grid} blocks of {threads} threads failed: {_named(status)}")

    def _allow_shared_memory(self, index: int) -> None:
        from cuda.bindings import driver

        if self.shared > STATIC_SHARED_LIMIT:
            wanted = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(wanted, self.shared, self._kernel, driver.CUdevice(index))
            if status:
                raise KernelError(f"{self.name} cannot have {self.shared} bytes of shared memory: {status.name}")
        self._devices_ready.add(index)


class _Blocks(threading.local):
    """What the driver reads at a launch: in memory of each thread's own, so that none writes what another launches.

    Written in place, because making ctypes structures anew takes 4.6 us a launch, and packing into these 1.3.

    Args:
        size: bytes of all arguments.
        offsets: where each begins.
    """

    def __init__(self, size: int, offsets: Sequence[int]) -> None:
        self.config, self.arguments = ctypes.create_string_buffer(CONFIG.size), ctypes.create_string_buffer(size)
        begin = ctypes.addressof(self.arguments)
        self._pointers = (ctypes.c_void_p * len(offsets))(*[begin + offset for offset in offsets])
        self.config_at, self.pointers_at = ctypes.addressof(self.config), ctypes.addressof(self._pointers)


@cache
def _launcher() -> Callable[[int, int, int, None], int]:
    """Give the driver's cuLaunchKernelEx(config, function, parameters, extra), through ctypes.

    An empty kernel takes cuda.core 8.6 us a launch, and cuda.bindings 5.6 (H200 host).
    """
    from cuda.bindings import driver

    status, found, _ = driver.cuGetProcAddress(b"cuLaunchKernelEx", LAUNCH_SINCE, 0)
    if status or not found:
        raise KernelError(f"the CUDA driver has no cuLaunchKernelEx ({status.name}): it is older than CUDA 11.8")
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(found)


def _named(status: int) -> str:
    from cuda.bindings import driver

    return str(driver.CUresult(status).name)
