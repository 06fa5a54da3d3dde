"""A CUDA kernel: what it is compiled from, its named arguments, and its launch on torch's current stream."""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import KernelError
from semisparse.runtime.device import device_facts
from semisparse.runtime.nvrtc import Cubin, Defines, compile_cubin, unavailable

Argument = Tensor | int | float | None
"""Of a kernel: a tensor for its address, None for the null pointer."""

AMPERE, HOPPER = (8, 0), (9, 0)
"""Compute capabilities."""

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a")
"""What a .cu compiles for unless it says otherwise: A100, Ada, Hopper, Blackwell."""

STATIC_SHARED_LIMIT = 48 << 10
"""Bytes of dynamic shared memory that need no attribute on the kernel."""

LAUNCH_CONFIG = struct.Struct("@7I2PI0P")
"""CUlaunchConfig: grid and block along x, y and z, bytes of shared memory; stream and attributes; how many of these."""

PDL_ATTRIBUTE = ctypes.create_string_buffer(struct.pack("@i4xi60x", 6, 1), 72)
"""A CUlaunchAttribute: programmatic stream serialization, allowed."""

_PDL_ADDRESS = ctypes.addressof(PDL_ATTRIBUTE)

LAUNCH_SINCE = 11080
"""The CUDA version that brought cuLaunchKernelEx."""

ALIGNMENT = 256
"""Of arrays that share an allocation, in bytes."""

TYPE_CODES = {"int": "i", "unsigned int": "I", "Word": "I", "float": "f", "long long": "q", "unsigned long long": "Q"}
"""The `struct` codes of the types that a kernel's parameters may have beside pointers."""


def cuda_refusal(device: torch.device, at_least: tuple[int, int] = AMPERE) -> str | None:
    """Say why no CUDA kernel can be compiled for a GPU and run on it, or None if it can."""
    if device_facts(device).capability < at_least:
        name = {AMPERE: "Ampere", HOPPER: "Hopper"}.get(at_least, "such a GPU")
        return f"needs compute capability {at_least[0]}.{at_least[1]} ({name}) or later"
    return unavailable()


def hopper_refusal(device: torch.device) -> str | None:
    """Say why no kernel of Hopper's own instructions (wgmma) can run on a GPU, or None if it can."""
    if device_facts(device).capability != HOPPER:
        return "needs wgmma, so compute capability 9.0 (Hopper)"
    return unavailable()


@dataclass(frozen=True)
class CudaSource:
    """A .cu file and the ways it is compiled.

    Args:
        path: the file; its kernels have C linkage.
        variants: sets of macros that tests compile: the common ones and the extremes.
        spills_allowed: why this file may keep registers in local memory; None if it may not.
        architectures: what it compiles for.
    """

    path: Path
    variants: tuple[Defines, ...] = ({},)
    spills_allowed: str | None = None
    architectures: tuple[str, ...] = ARCHITECTURES

    def build(self, name: str, defines: Defines | None = None, shared: int = 0) -> KernelBuild:
        """Say how one of the file's kernels is compiled."""
        only = self.architectures[0] if len(self.architectures) == 1 else None
        return KernelBuild(self.path, name, tuple((defines or {}).items()), shared, only)


@dataclass(frozen=True)
class KernelBuild:
    """One kernel of a .cu file, compiled with given macros.

    Args:
        source: the file; `CudaSource.build` makes these.
        name: of the kernel, with C linkage; its parameters are read from the file.
        defines: the macros' names and values.
        shared: bytes of dynamic shared memory of a CTA.
        arch: what it is compiled for; by default the device's own architecture.
    """

    source: Path
    name: str
    defines: tuple[tuple[str, str | int], ...] = ()
    shared: int = 0
    arch: str | None = None

    def compile(self, arch: str) -> Cubin:
        """Compile it, or take what the cache has; needs no GPU."""
        return compile_cubin(self.source, self.arch or arch, dict(self.defines))

    def load(self, device: torch.device) -> LoadedKernel:
        """Compile it and load it on a GPU; once for each device and process.

        Raises:
            KernelError: it does not compile, the device refuses it or its shared memory, or the current stream is
                being captured and it is not loaded yet.
        """
        return _load(self, torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=4096)
def _load(build: KernelBuild, index: int) -> LoadedKernel:
    if torch.cuda.is_current_stream_capturing():
        raise KernelError(
            f"{build.name} is not compiled for this number of tokens yet, and a CUDA graph is being captured: "
            "run the model once with as many tokens before capturing it"
        )
    return LoadedKernel(build, index)


class LoadedKernel:
    """A kernel on a device, ready to launch.

    Args:
        build: what to load.
        index: of the device.
    Raises:
        KernelError: as `KernelBuild.load`.
    """

    def __init__(self, build: KernelBuild, index: int) -> None:
        self.name, self.shared, self.index = build.name, build.shared, index
        cubin = build.compile(device_facts(torch.device("cuda", index)).arch)
        if build.name not in cubin.resources:
            raise KernelError(f"the cubin holds {', '.join(cubin.resources)}, not {build.name}")
        self._launch = _launcher()
        self._code, self._function = _function_of(cubin, build, index)
        parameters = parameters_of(build.source, build.name)
        self._names = tuple(name for name, _ in parameters)
        codes = [code for _, code in parameters]
        self._layout = struct.Struct("@" + "".join(codes))
        ends = [struct.calcsize("@" + "".join(codes[: i + 1])) for i in range(len(codes))]
        offsets = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        self._buffers = _LaunchBuffers(index, self._layout.size, offsets)

    def __call__(self, grid: tuple[int, int, int], threads: int, *, pdl: bool = False, **arguments: Argument) -> None:
        """Launch on the device's current stream.

        Args:
            grid: CTAs along x, y and z.
            threads: of a CTA.
            pdl: programmatic dependent launch: the kernel may start before the preceding one on the stream has ended.
                It must execute ``griddepcontrol.wait`` before it reads what others write, and before it writes.
            arguments: one for each parameter of the kernel, by its name.
        Raises:
            KernelError: the driver refuses the launch.
        """
        if torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                self(grid, threads, pdl=pdl, **arguments)
            return
        values = [_value(arguments[name]) for name in self._names]
        if len(arguments) != len(values):
            raise TypeError(f"{self.name} takes {', '.join(self._names)}, got {', '.join(arguments)}")
        buffers = self._buffers
        stream = torch._C._cuda_getCurrentRawStream(self.index)  # current_stream() makes an object: 4.2 us, not 0.1
        LAUNCH_CONFIG.pack_into(buffers.config, 0, *grid, threads, 1, 1, self.shared, stream, _PDL_ADDRESS, pdl)
        self._layout.pack_into(buffers.arguments, 0, *values)
        status = self._launch(buffers.config_address, self._function, buffers.pointers_address, None)
        if status:
            raise KernelError(
                f"launching {self.name} with {grid} CTAs of {threads} threads failed: {_status_name(status)}"
            )


def _value(argument: Argument) -> int | float:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument or 0


class _LaunchBuffers(threading.local):
    """What the driver reads at a launch, per thread, so that no thread overwrites what another launches.

    Written in place: making ctypes structures anew takes 4.6 us per launch, packing into these 1.3.

    Args:
        index: of the device, which is the current one.
        size: bytes of all arguments.
        offsets: where each begins.
    """

    def __init__(self, index: int, size: int, offsets: Sequence[int]) -> None:
        torch._C._cuda_setDevice(index)  # binds the device's context to a new thread
        self.config = ctypes.create_string_buffer(LAUNCH_CONFIG.size)
        self.arguments = ctypes.create_string_buffer(size)
        begin = ctypes.addressof(self.arguments)
        self._pointers = (ctypes.c_void_p * len(offsets))(*[begin + offset for offset in offsets])
        self.config_address = ctypes.addressof(self.config)
        self.pointers_address = ctypes.addressof(self._pointers)


def offsets_in_workspace(*sizes: int) -> tuple[int, ...]:
    """Return where arrays of so many bytes begin that share one allocation and, last, the allocation's size.

    An allocation for each would cost the host as much as a launch.
    """
    return tuple(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


@cache
def parameters_of(source: Path, kernel: str) -> tuple[tuple[str, str], ...]:
    """Read a kernel's parameters from its file.

    Args:
        source: a .cu file.
        kernel: a ``__global__`` function in it, with C linkage.
    Returns:
        Each parameter's name and `struct` code.
    Raises:
        KernelError: the file has no such kernel, or a parameter's type is not one of `TYPE_CODES` or a pointer.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", source.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(rf"__global__[^;{{}}]*?\b{re.escape(kernel)}\s*\(([^(){{}}]*)\)\s*{{", text)
    if not found:
        raise KernelError(f"{source.name} has no kernel {kernel}")
    declarations = [" ".join(declaration.split()) for declaration in found[-1].split(",") if declaration.strip()]
    return tuple(_parameter(declaration, source) for declaration in declarations)


def _parameter(declaration: str, source: Path) -> tuple[str, str]:
    kind, _, name = declaration.replace("*", "* ").rpartition(" ")
    kind = kind.strip().removeprefix("const ")
    code = "P" if "*" in kind else TYPE_CODES.get(kind)
    if code is None:
        raise KernelError(f"{source.name}: parameter {declaration!r} is no pointer, {', '.join(TYPE_CODES)}")
    return name, code


def _function_of(cubin: Cubin, build: KernelBuild, index: int) -> tuple[Any, int]:
    """Load a kernel into a device's context: its code object, which must stay alive, and its CUfunction."""
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    with torch.cuda.device(index):
        torch._C._cuda_setDevice(index)  # binds the context also where the device was current already
        code = ObjectCode.from_cubin(cubin.code)
        kernel = code.get_kernel(build.name).handle
        if build.shared > STATIC_SHARED_LIMIT:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(attribute, build.shared, kernel, driver.CUdevice(index))
            if status:
                raise KernelError(f"{build.name} cannot have {build.shared} bytes of shared memory: {status.name}")
        status, function = driver.cuKernelGetFunction(kernel)  # loads it now, not at the first launch
        if status:
            raise KernelError(f"{build.name} cannot be loaded on device {index}: {status.name}")
        return code, int(function)


@cache
def _launcher() -> Callable[[int, int, int, None], int]:
    """Return the driver's cuLaunchKernelEx(config, function, parameters, extra), through ctypes.

    An empty kernel takes cuda.core 8.6 us per launch, and cuda.bindings 5.6 (H200 host).
    """
    from cuda.bindings import driver

    status, found, _ = driver.cuGetProcAddress(b"cuLaunchKernelEx", LAUNCH_SINCE, 0)
    if status or not found:
        raise KernelError(f"the CUDA driver has no cuLaunchKernelEx ({status.name}): it is older than CUDA 11.8")
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(found)


def _status_name(status: int) -> str:
    from cuda.bindings import driver

    return str(driver.CUresult(status).name)
