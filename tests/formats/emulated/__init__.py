"""CUDA kernels on a CPU: their own sources, compiled with the headers beside this file instead of their namesakes."""

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from semisparse.runtime.device import DeviceFacts
from semisparse.runtime.nvrtc import HEADERS

STAND_INS = Path(__file__).parent

COMPILER = shutil.which("g++")

adverse = [False]
"""Whether threads run in reverse order and copies arrive late."""


def compile_emulated(path: Path, arch: str, defines: Mapping[str, str | int]) -> tuple[Path, tuple]:
    """Stand in for `compile_cubin`: nothing is compiled before the kernel's name is known."""
    return path, tuple(defines.items())


def stand_in(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let kernels of some modules be emulated."""
    for module in modules:
        monkeypatch.setattr(module, "compile_cubin", compile_emulated)
        monkeypatch.setattr(module, "CudaKernel", EmulatedKernel)


def hopper(processors: int = 132) -> DeviceFacts:
    """Describe a GPU whose launches overlap."""
    return DeviceFacts("emulated", "cuda", "sm_90a", processors, 0, 0, "")


class EmulatedKernel:
    """Stand in for `CudaKernel`."""

    def __init__(self, cubin, name: str, parameters: Sequence, shared: int = 0) -> None:
        path, defines = cubin
        self.launch = _library(path, defines, name).launch
        self.launch.restype = ctypes.c_char_p
        self.parameters, self.shared = parameters, shared

    def __call__(self, device, grid: tuple[int, int, int], threads: int, *arguments, dependent: bool = False) -> None:
        values = [kind(value) for kind, value in zip(self.parameters, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        failure = self.launch(
            (ctypes.c_int * 3)(*grid),
            ctypes.c_int(threads),
            ctypes.c_size_t(self.shared),
            ctypes.c_bool(adverse[0]),
            pointers,
            ctypes.c_size_t(len(values)),
        )
        assert failure is None, failure.decode()


@cache
def _library(path: Path, defines: tuple, name: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        for place in (HEADERS, path.parent, STAND_INS):  # the last written stays
            for source in (*place.glob("*.cuh"), *place.glob("*.h"), path):
                text = re.sub(
                    r"extern __shared__ (?:__align__\(\d+\) )?(.+) shared\[\];",
                    r"\1* shared = reinterpret_cast<\1*>(machine_shared);",
                    source.read_text(),
                )
                (Path(folder) / source.name).write_text(text)
        whole = Path(folder) / "emulated.cpp"
        whole.write_text(f'#include "{path.name}"\nLAUNCHER({name})\n')
        library = Path(folder) / f"{hashlib.sha256(repr((path, defines)).encode()).hexdigest()[:16]}.so"
        macros = [f"-D{key}={value}" for key, value in defines]
        # Shared arrays of inline functions would be one for all libraries of the process, whatever their sizes.
        apart = "-fno-gnu-unique"
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", apart, "-w", "-I", folder, "-include", "machine.cuh"]
        command = [COMPILER, *flags, *macros, str(whole), "-o", str(library)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))
