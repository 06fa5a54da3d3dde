"""CUDA kernels on a CPU: their own sources, with stand-ins for the headers in runtime/cuda/ptx. README.md says how."""

import atexit
import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from semisparse.runtime import device as runtime_device
from semisparse.runtime.cache import cached
from semisparse.runtime.device import DeviceFacts
from semisparse.runtime.kernel import Argument, KernelBuild, parameters_of
from semisparse.runtime.nvrtc import HEADERS

STAND_INS = Path(__file__).parent

COMPILER = shutil.which("g++")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="emulating CUDA kernels takes g++: none here")

C_TYPES = {
    "P": ctypes.c_void_p,
    "i": ctypes.c_int,
    "I": ctypes.c_uint,
    "f": ctypes.c_float,
    "q": ctypes.c_longlong,
    "Q": ctypes.c_ulonglong,
}

adverse = [False]
"""Whether threads run in reverse order, and asynchronous copies and wgmma products complete as late as possible."""


def gpu(sms: int = 132, capability: tuple[int, int] = (9, 0)) -> DeviceFacts:
    """Describe the GPU that is emulated: an H200, or one with fewer SMs."""
    arch = f"sm_{capability[0]}{capability[1]}" + ("a" if capability[0] >= 9 else "")
    return DeviceFacts("emulated", "cuda", arch, sms, 50 << 20, 141 << 30, "", capability, 228 << 10, 227 << 10)


def emulate(monkeypatch: pytest.MonkeyPatch, sms: int = 132, capability: tuple[int, int] = (9, 0)) -> None:
    """Make kernels that are loaded for the CPU run in the emulator."""
    monkeypatch.setattr(runtime_device, "_cpu_facts", lambda threads: gpu(sms, capability))
    monkeypatch.setattr(KernelBuild, "load", lambda build, device: EmulatedKernel(build))


@pytest.fixture(params=[False, True], ids=["early", "late"])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Emulate a GPU of 132 SMs, with all asynchronous work as early and then as late as possible; new memory is NaN."""
    emulate(monkeypatch)
    adverse[0] = request.param
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    adverse[0] = False


class EmulatedKernel:
    """Stand in for `LoadedKernel`."""

    def __init__(self, build: KernelBuild) -> None:
        parameters = parameters_of(build.source, build.name)
        self.names = [name for name, _ in parameters]
        self.types = [C_TYPES[code] for _, code in parameters]
        self.shared = build.shared
        head = rf"__cluster_dims__\([^{{}};]*\b{build.name}\("
        clustered = re.search(head, build.source.read_text()) is not None
        macros = dict(build.defines)
        self.cluster = int(macros["SPLIT_K" if macros.get("SPLIT_IN_CLUSTER") else "CLUSTER"]) if clustered else 1
        self.launch = _library(build.source, build.defines, build.name).launch
        self.launch.restype = ctypes.c_char_p

    def __call__(self, grid: tuple[int, int, int], threads: int, *, pdl: bool = False, **arguments: Argument) -> None:
        assert set(arguments) == set(self.names), f"takes {self.names}, got {list(arguments)}"
        values = [kind(_value(arguments[name])) for kind, name in zip(self.types, self.names, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        failure = self.launch(
            (ctypes.c_int * 3)(*grid),
            ctypes.c_int(threads),
            ctypes.c_int(self.cluster),
            ctypes.c_size_t(self.shared),
            ctypes.c_bool(adverse[0]),
            pointers,
            ctypes.c_size_t(len(values)),
        )
        assert failure is None, failure.decode()


def _value(argument: Argument) -> int | float | None:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


FLAGS = ("-std=c++17", "-shared", "-fPIC", "-w")
KERNEL_FLAGS = (*FLAGS, "-Og", "-fvisibility=hidden", "-nostdlib")
"""Compiler flags. Hidden symbols, because the libraries of a process would share static arrays of inline functions. -O1
takes twice as long, and kernels ran no faster."""
MACHINE_FLAGS = (*FLAGS, "-O1", "-fvisibility-inlines-hidden", "-U_FORTIFY_SOURCE", "-Wl,-soname=emulated-machine.so")
"""No fortified longjmp, because it refuses to change stacks. By its soname a kernel's library finds the machine's."""


@cache
def _library(source: Path, defines: tuple, name: str) -> ctypes.CDLL:
    """Compile a kernel for the CPU: the shared headers and the format's own sources, with ptx/ replaced.

    Libraries are kept in the cache directory, because a test's two orders of execution may run in two processes.
    """
    root = source.parent.parent
    texts = _source_texts(root)
    macros = [f"-D{key}={value}" for key, value in defines]
    key = repr((_compiler_version(), KERNEL_FLAGS, macros, name, str(source.relative_to(root)), texts, _header_texts()))

    def compile_it() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            for path, text in texts.items():
                copy = Path(folder, "format", path)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(text)
            whole = Path(folder, "emulated.cpp")
            included = Path(folder, "format", source.relative_to(root))
            whole.write_text(f'#include "machine.cuh"\n#include "{included}"\nLAUNCHER({name})\n')
            return _compile([*KERNEL_FLAGS, *macros, str(whole), machine, "-lgcc"])

    machine = _machine()
    code = cached("emulated", key.encode(), compile_it)
    with tempfile.NamedTemporaryFile(suffix=".so") as file:  # a loaded library needs no file
        file.write(code)
        file.flush()
        return ctypes.CDLL(file.name)


def _compile(arguments: list[str]) -> bytes:
    with tempfile.NamedTemporaryFile() as output:
        subprocess.run([COMPILER, "-I", _header_folder(), *arguments, "-o", output.name], check=True)
        return Path(output.name).read_bytes()


@cache
def _compiler_version() -> str:
    return subprocess.run([COMPILER, "--version"], check=True, capture_output=True, text=True).stdout


@cache
def _source_texts(root: Path) -> dict[str, str]:
    """Return a format's CUDA sources by their path below its folder."""
    sources = sorted((*root.rglob("*.cu"), *root.rglob("*.cuh")))
    return {str(path.relative_to(root)): _with_emulated_shared_memory(path.read_text()) for path in sources}


@cache
def _header_texts() -> dict[str, str]:
    """Return the machine, and the headers that a kernel may include, by name: shared ones, and the stand-ins."""
    shared = {path for path in HEADERS.rglob("*.cuh") if path.parent.name != "ptx"}
    headers = {str(path.relative_to(HEADERS)): path for path in shared}
    headers |= {path.name: path for pattern in ("*.cpp", "*.cuh", "*.h") for path in STAND_INS.glob(pattern)}
    headers |= {f"ptx/{path.name}": path for path in (STAND_INS / "ptx").glob("*.cuh")}
    return {name: _with_emulated_shared_memory(path.read_text()) for name, path in sorted(headers.items())}


@cache
def _header_folder() -> str:
    """Write the headers to a folder."""
    folder = tempfile.mkdtemp(prefix="semisparse-emulator-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, text in _header_texts().items():
        path = Path(folder, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@cache
def _machine() -> str:
    """Load the machine's library, and return its path for linking."""
    source, library = Path(_header_folder(), "machine.cpp"), Path(_header_folder(), "machine.so")
    key = repr((_compiler_version(), MACHINE_FLAGS, _header_texts())).encode()
    library.write_bytes(cached("emulated", key, lambda: _compile([*MACHINE_FLAGS, str(source)])))
    ctypes.CDLL(str(library))
    return str(library)


def _with_emulated_shared_memory(text: str) -> str:
    """Put shared arrays into the CTA's own memory: dynamic ones, all named ``shared``, at its beginning."""
    dynamic = r"extern __shared__ (?:__align__\(\d+\) )?(.+) shared\[\];"
    text = re.sub(dynamic, r"\n#define shared (reinterpret_cast<\1*>(here->shared))\n", text)
    return re.sub(r"__shared__ (?:__align__\(\d+\) )?((?:unsigned )?[\w:]+) ([^;=]+);", _static_arrays, text)


def _static_arrays(declaration: re.Match) -> str:
    kind, names = declaration.groups()
    arrays = re.findall(r"(\w+)((?:\[[^\]]+\])*)", names)
    alias = f"using shared_{arrays[0][0]} = {kind};"  # a type of two words takes no brackets
    return alias + " ".join(
        f'auto& {name} = static_shared<shared_{arrays[0][0]}{size}>("{name}");' for name, size in arrays
    )
