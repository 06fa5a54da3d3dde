"""CUDA kernels: their source and macros, their arguments by name, and launches on torch's current stream."""

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
from semisparse.runtime.nvrtc import Cubin, Defines, compile_cubin, cuda_core, unavailable

Argument = Tensor | int | float | None
"""An argument of a kernel. A tensor is passed as its address, None as the null pointer."""

AMPERE, HOPPER = (8, 0), (9, 0)
"""Compute capabilities."""

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a")
"""The architectures that a .cu file compiles for by default: A100, Ada, Hopper, Blackwell."""

UNASKED_SHARED = 48 << 10
"""Maximum bytes of shared memory per CTA, static and dynamic, of a kernel without the attribute that allows more."""

LAUNCH_CONFIG = struct.Struct("@7I2PI0P")
"""CUlaunchConfig: grid and block along x, y and z, bytes of shared memory, stream, attributes, number of attributes."""

PDL_ATTRIBUTE = ctypes.create_string_buffer(struct.pack("@i4xi60x", 6, 1), 72)
"""A CUlaunchAttribute that allows programmatic stream serialization (PDL)."""

_PDL_ADDRESS = ctypes.addressof(PDL_ATTRIBUTE)

LAUNCH_SINCE = 11080
"""The first CUDA version with cuLaunchKernelEx: 11.8."""

ALIGNMENT = 256
"""Alignment, in bytes, of arrays that share one allocation."""

TYPE_CODES = {"int": "i", "unsigned int": "I", "Word": "I", "float": "f", "long long": "q", "unsigned long long": "Q"}
"""The `struct` codes of the parameter types that kernels may have, apart from pointers."""


def cuda_refusal(device: torch.device, at_least: tuple[int, int] = AMPERE) -> str | None:
    """Return why no CUDA kernel can be compiled for a GPU and run on it, or None if it can."""
    if device_facts(device).capability < at_least:
        name = {AMPERE: "Ampere", HOPPER: "Hopper"}.get(at_least, "such a GPU")
        return f"needs compute capability {at_least[0]}.{at_least[1]} ({name}) or later"
    return unavailable()


def hopper_refusal(device: torch.device) -> str | None:
    """Return why no kernel with Hopper's own instructions (wgmma) can run on a GPU, or None if it can."""
    if device_facts(device).capability != HOPPER:
        return "needs wgmma, so compute capability 9.0 (Hopper)"
    return unavailable()


@dataclass(frozen=True)
class CudaSource:
    """A .cu file and how it is compiled.

    Args:
        path: the file. Its kernels have C linkage.
        variants: the sets of macros that tests compile: common and extreme ones.
        spills_allowed: why this file's kernels may spill registers; None if they may not.
        architectures: those that it compiles for.
    """

    path: Path
    variants: tuple[Defines, ...] = ({},)
    spills_allowed: str | None = None
    architectures: tuple[str, ...] = ARCHITECTURES

    def build(self, name: str, defines: Defines | None = None, shared: int = 0) -> KernelBuild:
        """Return the build of one of the file's kernels.

        Args:
            name: the kernel's name.
            defines: macros.
            shared: bytes of dynamic shared memory per CTA.
        """
        only = self.architectures[0] if len(self.architectures) == 1 else None
        return KernelBuild(self.path, name, tuple((defines or {}).items()), shared, only)


@dataclass(frozen=True)
class KernelBuild:
    """One kernel of a .cu file, with its macros. `CudaSource.build` returns these.

    Args:
        source: the file.
        name: the kernel's name. The kernel has C linkage, and its parameters are read from the file.
        defines: the macros' names and values.
        shared: bytes of dynamic shared memory per CTA.
        arch: the architecture to compile for; by default the device's own.
        shares_sm: whether CTAs of another kernel, one that needs much shared memory, are to start on an SM beside CTAs
            of this one. The kernel is then loaded with a preference for the largest shared memory per SM.
    """

    source: Path
    name: str
    defines: tuple[tuple[str, str | int], ...] = ()
    shared: int = 0
    arch: str | None = None
    shares_sm: bool = False

    def compile(self, arch: str) -> Cubin:
        """Return the compiled kernel, from the cache on disk or compiled now. Needs no GPU."""
        return compile_cubin(self.source, self.arch or arch, dict(self.defines))

    def load(self, device: torch.device) -> LoadedKernel:
        """Return the kernel loaded on a GPU. Loaded kernels are cached in the process, per build and device.

        Raises:
            KernelError: the kernel does not compile, the device refuses it or its shared memory, or the current stream
                is being captured and the kernel is not loaded yet.
        """
        return _load(self, torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=4096)
def _load(build: KernelBuild, index: int) -> LoadedKernel:
    if torch.cuda.is_current_stream_capturing():
        raise KernelError(
            f"{build.name} is not loaded for this number of tokens yet, and a CUDA graph is being captured: "
            "run the model once with as many tokens before capturing it"
        )
    return LoadedKernel(build, index)


class LoadedKernel:
    """A kernel loaded on a device.

    Args:
        build: the kernel.
        index: the device's index.
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
        current = torch.cuda.current_device()
        self._buffers = _LaunchBuffers(index, self._layout.size, offsets)
        torch._C._cuda_setDevice(current)

    def __call__(self, grid: tuple[int, int, int], threads: int, *, pdl: bool = False, **arguments: Argument) -> None:
        """Launch on the device's current stream.

        Args:
            grid: CTAs along x, y and z.
            threads: threads per CTA.
            pdl: whether to use programmatic dependent launch: the kernel may start before its predecessor on the stream
                has ended. It must then execute ``griddepcontrol.wait`` before it reads what other kernels write, and
                before it writes.
            arguments: the kernel's arguments, by parameter name.
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
        stream = torch._C._cuda_getCurrentRawStream(self.index)  # 0.1 us; torch.cuda.current_stream() takes 4.2
        LAUNCH_CONFIG.pack_into(buffers.config, 0, *grid, threads, 1, 1, self.shared, stream, _PDL_ADDRESS, pdl)
        self._layout.pack_into(buffers.arguments, 0, *values)
        status = self._launch(buffers.config_address, self._function, buffers.pointers_address, None)
        if status:
            raise KernelError(
                f"launching {self.name} with {grid} CTAs of {threads} threads failed: {_status_name(status)}"
            )


def _value(argument: Argument) -> int | float:
    return argument.data_ptr() or _null(argument) if isinstance(argument, Tensor) else argument or 0


def _null(tensor: Tensor) -> int:
    """Return 0, the address of a tensor without elements.

    Raises:
        KernelError: it has elements, but its storage was freed, as FSDP and offloading do between uses. A kernel that
            read address 0 would end every other one of the process.
    """
    if tensor.numel():
        raise KernelError(f"the memory of a {tensor.dtype} {list(tensor.shape)} was freed: load it before the launch")
    return 0


class _LaunchBuffers(threading.local):
    """The memory that the driver reads at a launch, one instance per thread so that threads can launch concurrently.

    A launch packs its configuration and arguments into it in 1.3 us; new ctypes structures would take 4.6 us.

    Args:
        index: the device's index. It becomes the current device of the thread.
        size: bytes of all arguments.
        offsets: the offset of each argument in bytes.
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
    """Return the offsets in bytes of arrays that share one allocation and, last, the allocation's size.

    One allocation per array would cost the host as much as a launch.

    Args:
        sizes: the arrays' sizes in bytes.
    """
    return tuple(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


@cache
def parameters_of(source: Path, kernel: str) -> tuple[tuple[str, str], ...]:
    """Return a kernel's parameters, read from its .cu file: each parameter's name and `struct` code.

    Args:
        source: the .cu file.
        kernel: the name of a ``__global__`` function with C linkage.
    Raises:
        KernelError: the file has no such kernel, or a parameter is neither a pointer nor of a type in `TYPE_CODES`.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", source.read_text(encoding="utf-8"), flags=re.DOTALL)
    definitions = re.findall(rf"__global__[^;{{}}]*?\b{re.escape(kernel)}\s*\(([^(){{}}]*)\)\s*{{", text)
    if not definitions:
        raise KernelError(f"{source.name} has no kernel {kernel}")
    declarations = [" ".join(declaration.split()) for declaration in definitions[-1].split(",") if declaration.strip()]
    return tuple(_parameter(declaration, source) for declaration in declarations)


def _parameter(declaration: str, source: Path) -> tuple[str, str]:
    kind, _, name = declaration.replace("*", "* ").rpartition(" ")
    kind = kind.strip().removeprefix("const ")
    code = "P" if "*" in kind else TYPE_CODES.get(kind)
    if code is None:
        raise KernelError(f"{source.name}: parameter {declaration!r} is neither a pointer nor {', '.join(TYPE_CODES)}")
    return name, code


def _function_of(cubin: Cubin, build: KernelBuild, index: int) -> tuple[Any, int]:
    """Load a kernel into a device's context. Return its code object, which must stay alive, and its CUfunction."""
    from cuda.bindings import driver

    with torch.cuda.device(index):
        torch._C._cuda_setDevice(index)  # binds the context even if the device was current already
        code = cuda_core().ObjectCode.from_cubin(cubin.code)
        kernel = code.get_kernel(build.name).handle
        if build.shared + cubin.resources[build.name].shared > UNASKED_SHARED:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(attribute, build.shared, kernel, driver.CUdevice(index))
            if status:
                raise KernelError(f"{build.name} cannot use {build.shared} bytes of shared memory: {status.name}")
        if build.shares_sm:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            (status,) = driver.cuKernelSetAttribute(attribute, 100, kernel, driver.CUdevice(index))
            if status:
                raise KernelError(f"{build.name} cannot set its shared memory carveout: {status.name}")
        status, function = driver.cuKernelGetFunction(kernel)  # loads the code now instead of at the first launch
        if status:
            raise KernelError(f"{build.name} cannot be loaded on device {index}: {status.name}")
        return code, int(function)


@cache
def _launcher() -> Callable[[int, int, int, None], int]:
    """Return the driver's cuLaunchKernelEx(config, function, parameters, extra), through ctypes.

    Launching an empty kernel takes 4.1 us this way, where cuda.core takes 8.6 and cuda.bindings 5.4 (H200 host;
    docs/experiments/host-path.md).
    """
    from cuda.bindings import driver

    status, address, _ = driver.cuGetProcAddress(b"cuLaunchKernelEx", LAUNCH_SINCE, 0)
    if status or not address:
        raise KernelError(f"the CUDA driver has no cuLaunchKernelEx ({status.name}): it is older than CUDA 11.8")
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(address)


def _status_name(status: int) -> str:
    from cuda.bindings import driver

    return str(driver.CUresult(status).name)
