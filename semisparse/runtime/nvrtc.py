"""Compiling .cu files at run time: one cubin for each architecture and set of macros, kept in the user's cache."""

from __future__ import annotations

import importlib.util
import io
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from semisparse.errors import KernelError
from semisparse.runtime.cache import cached
from semisparse.runtime.includes import read_with_includes

HEADERS = Path(__file__).parent / "cuda"
"""Headers that kernels of different formats share."""

STANDARD = "c++17"

FIRST_WITH_CACHE = (12, 9)
"""The first NVRTC that keeps a cache of its own, and that can be told not to."""

Defines = Mapping[str, str | int]


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers, bytes of stack and of spills per thread; static shared memory per CTA."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def spills(self) -> bool:
        """Whether anything lives in local memory."""
        return self.stack + self.spill_stores + self.spill_loads > 0


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, and what each of its kernels takes."""

    code: bytes
    resources: dict[str, Resources]


def unavailable() -> str | None:
    """Say why nothing can be compiled here, or None if it can."""
    for module in ("cuda.core", "cuda.bindings"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{module} is not installed: pip install 'semisparse[cuda]'"
    return None


def compile_cubin(path: Path, arch: str, defines: Defines | None = None) -> Cubin:
    """Compile a .cu file, or take the cubin that an earlier process made of the same text.

    Args:
        path: the file. It may include the CUDA headers, the shared headers and those beside it.
        arch: such as ``sm_90a``.
        defines: macros.
    Raises:
        KernelError: the compiler is missing or refuses the source; gives the compiler's log.
    """
    defines = dict(defines or {})
    key = _key(path, arch, defines)
    stored = cached("cubin", key, lambda: _compile(path, arch, defines))
    head, _, code = stored.partition(b"\n")
    return Cubin(code, {name: Resources(**found) for name, found in json.loads(head).items()})


def _key(path: Path, arch: str, defines: Defines) -> bytes:
    texts = read_with_includes(path, _include_path(path))
    return json.dumps(["nvrtc", _compiler_version(), STANDARD, arch, defines, texts], sort_keys=True).encode()


def _include_path(path: Path) -> tuple[Path, ...]:
    return (path.parent, HEADERS, _cuda_headers())


@cache
def _cuda_headers() -> Path:
    _require_compiler()
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if found is None:
        raise KernelError("the CUDA headers were not found: pip install 'semisparse[cuda]', or set CUDA_HOME")
    return Path(found)


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
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=path.name,
        arch=arch,
        std=STANDARD,
        define_macro=[(name, str(value)) for name, value in defines.items()] or None,
        include_path=[str(folder) for folder in _include_path(path)],
        ptxas_options=["-v"],
        # What the compiler takes from its own cache comes without a log; of 14 processes at once, one got that.
        no_cache=_compiler_version() >= FIRST_WITH_CACHE or None,
    )
    log = io.StringIO()
    try:
        made = Program(path.read_text(), "c++", options).compile("cubin", logs=log)
    except Exception as error:  # cuda.core has no public class for compiler errors; its message holds the log
        raise KernelError(f"{path.name} does not compile for {arch} with {dict(defines)}:\n{error}") from error
    resources = {name: asdict(found) for name, found in _resources(log.getvalue()).items()}
    return json.dumps(resources).encode() + b"\n" + made.code


def _resources(log: str) -> dict[str, Resources]:
    """Read the assembler's report, one paragraph for each kernel."""
    found = {}
    for paragraph in re.split(r"(?=ptxas info\s*: Compiling entry function)", log)[1:]:
        names = re.search(r"entry function '([^']+)'", paragraph)
        local = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", paragraph)
        registers = re.search(r"Used (\d+) registers", paragraph)
        if not (names and local and registers):
            raise KernelError(f"the assembler's report cannot be read: {paragraph!r}")
        shared = re.search(r"(\d+) bytes smem", paragraph)
        numbers = [int(part) for part in (registers[1], *local.groups(), shared[1] if shared else 0)]
        found[names[1]] = Resources(*numbers)
    return found
