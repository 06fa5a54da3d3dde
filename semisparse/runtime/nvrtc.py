"""Compiling .cu files at run time with NVRTC: one cubin per architecture and set of macros, cached on disk."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from semisparse.errors import KernelError
from semisparse.runtime.cache import cached
from semisparse.runtime.includes import read_with_includes

HEADERS = Path(__file__).parent / "cuda"
"""The folder of headers that several formats share."""

STANDARD = "c++17"

FIRST_WITH_CACHE = (12, 9)
"""The first NVRTC version with a cache of its own, and an option to disable it."""

RACECHECK = "SEMISPARSE_RACECHECK"
"""The environment variable that compiles kernels so that racecheck can follow them (``cuda/arrive_warp.cuh``)."""

Defines = Mapping[str, str | int]


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel: registers, bytes of stack and of spills per thread; bytes of static shared memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def spills(self) -> bool:
        """Whether the kernel uses local memory."""
        return self.stack + self.spill_stores + self.spill_loads > 0


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, and the resources of each of its kernels by name."""

    code: bytes
    resources: dict[str, Resources]


def unavailable() -> str | None:
    """Return why no CUDA kernel can be compiled here, or None if it can."""
    for module in ("cuda.core", "cuda.bindings"):
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            return f"{module} is not installed: pip install 'semisparse[cuda]'"
    return None


def compile_cubin(path: Path, arch: str, defines: Defines | None = None) -> Cubin:
    """Return the cubin of a .cu file, from the cache or compiled now.

    The cache key is NVRTC's version, ``arch``, ``defines``, and the texts of the file and of every header it includes.

    Args:
        path: the .cu file. It may include CUDA headers, the shared headers and those beside it.
        arch: the architecture, such as ``sm_90a``.
        defines: macros.
    Raises:
        KernelError: the compiler is missing, or the file does not compile (the message has the compiler's log).
    """
    defines = dict(defines or {}) | ({"EVERY_LANE_ARRIVES": 1} if os.environ.get(RACECHECK) else {})
    key = _key(path, arch, defines)
    stored = cached("cubin", key, lambda: _compile(path, arch, defines))
    head, _, code = stored.partition(b"\n")
    return Cubin(code, {name: Resources(**values) for name, values in json.loads(head).items()})


def _key(path: Path, arch: str, defines: Defines) -> bytes:
    parts = ["nvrtc", _compiler_version(), STANDARD, arch, defines, _digest_of_texts(path)]
    return json.dumps(parts, sort_keys=True).encode()


@cache
def _digest_of_texts(path: Path) -> str:
    """Return a digest of a file and the headers that it includes, wherever these are installed.

    Cached by path: CUDA's headers are 1.8 MB, which took 25 ms for each kernel that was looked up.
    """
    digest = sha256()
    for name, text in read_with_includes(path, _include_path(path)).items():
        digest.update(json.dumps([Path(name).name, text]).encode())
    return digest.hexdigest()


def _include_path(path: Path) -> tuple[Path, ...]:
    return (path.parent, HEADERS, _cuda_headers())


_IMPORTING = Lock()


def cuda_core() -> Any:
    """Import cuda.core, which two threads cannot do at once: the second sees a module without its names."""
    with _IMPORTING:
        import cuda.core

        return cuda.core


@cache
def _cuda_headers() -> Path:
    _require_compiler()
    from cuda.pathfinder import find_nvidia_header_directory

    directory = find_nvidia_header_directory("cudart")
    if directory is None:
        raise KernelError("the CUDA headers were not found: pip install 'semisparse[cuda]', or set CUDA_HOME")
    return Path(directory)


@cache
def _compiler_version() -> tuple[int, int]:
    _require_compiler()
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


def _require_compiler() -> None:
    reason = unavailable()
    if reason:
        raise KernelError(f"cannot compile CUDA kernels: {reason}")


def _compile(path: Path, arch: str, defines: Defines) -> bytes:
    core = cuda_core()
    options = core.ProgramOptions(
        name=path.name,
        arch=arch,
        std=STANDARD,
        define_macro=[(name, str(value)) for name, value in defines.items()] or None,
        include_path=[str(folder) for folder in _include_path(path)],
        ptxas_options=["-v"],
        # A cubin from NVRTC's own cache comes without the log that is read below; seen in 1 of 14 concurrent processes.
        no_cache=_compiler_version() >= FIRST_WITH_CACHE or None,
    )
    log = io.StringIO()
    try:
        cubin = core.Program(path.read_text(), "c++", options).compile("cubin", logs=log)
    except Exception as error:  # cuda.core has no public class for compiler errors; its message holds the log
        raise KernelError(f"{path.name} does not compile for {arch} with {dict(defines)}:\n{error}") from error
    resources = {name: asdict(used) for name, used in _read_resources(log.getvalue()).items()}
    return json.dumps(resources).encode() + b"\n" + cubin.code


def _read_resources(log: str) -> dict[str, Resources]:
    """Return each kernel's resources from the log of ``ptxas -v``, which has one paragraph per kernel."""
    resources = {}
    for paragraph in re.split(r"(?=ptxas info\s*: Compiling entry function)", log)[1:]:
        names = re.search(r"entry function '([^']+)'", paragraph)
        local = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", paragraph)
        registers = re.search(r"Used (\d+) registers", paragraph)
        if not (names and local and registers):
            raise KernelError(f"the log of ptxas cannot be read: {paragraph!r}")
        shared = re.search(r"(\d+) bytes smem", paragraph)
        numbers = [int(part) for part in (registers[1], *local.groups(), shared[1] if shared else 0)]
        resources[names[1]] = Resources(*numbers)
    return resources
