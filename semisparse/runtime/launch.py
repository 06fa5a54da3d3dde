"""Launching a compiled kernel on torch's current stream, capturable in a CUDA graph."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from semisparse.errors import KernelError
from semisparse.runtime.nvrtc import Cubin

STATIC_SHARED_LIMIT = 48 << 10
"""Bytes of dynamic shared memory that need no attribute on the kernel."""


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
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self.name = name
        self.shared = shared
        # cuda.core.launch costs 8.6 us a call with everything prepared (H200 host).
        self._launch = driver.cuLaunchKernel
        self._launch_dependent = driver.cuLaunchKernelEx
        self._code = ObjectCode.from_cubin(cubin.code)
        self._kernel = self._code.get_kernel(name).handle
        self._function = driver.CUfunction(int(self._kernel))
        fields = [(f"argument{i}", parameter) for i, parameter in enumerate(parameters)]
        self._arguments = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
        self._offsets = [getattr(self._arguments, name).offset for name, _ in fields]
        self._pointers = ctypes.c_void_p * len(parameters)
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
        current = torch._C._cuda_getDevice()  # torch.cuda.current_device() asks first whether CUDA has been started
        index = current if device.index is None else device.index
        if index != current:
            with torch.cuda.device(index):
                self(device, grid, threads, *arguments, dependent=dependent)
            return
        if index not in self._devices_ready:
            self._allow_shared_memory(index)
        values = self._arguments(*arguments)
        base = ctypes.addressof(values)
        pointers = self._pointers(*[base + offset for offset in self._offsets])
        stream = torch._C._cuda_getCurrentRawStream(index)
        place = ctypes.addressof(pointers)
        if dependent:
            (status,) = self._launch_dependent(self._configured(grid, threads, stream), self._function, place, 0)
        else:
            (status,) = self._launch(self._function, *grid, threads, 1, 1, self.shared, stream, place, 0)
        if status:
            raise KernelError(f"launching {self.name} on {grid} blocks of {threads} threads failed: {status.name}")

    def _configured(self, grid: tuple[int, int, int], threads: int, stream: int) -> Any:
        from cuda.bindings import driver

        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self.shared
        config.hStream = stream
        config.attrs = [overlap]
        config.numAttrs = 1
        return config

    def _allow_shared_memory(self, index: int) -> None:
        from cuda.bindings import driver

        if self.shared > STATIC_SHARED_LIMIT:
            wanted = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(wanted, self.shared, self._kernel, driver.CUdevice(index))
            if status:
                raise KernelError(f"{self.name} cannot have {self.shared} bytes of shared memory: {status.name}")
        self._devices_ready.add(index)
