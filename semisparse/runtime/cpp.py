"""C++ for the CPU: compiled at first use by the user's compiler, kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from semisparse.errors import KernelError

FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
OPENMP = ("-fopenmp",)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that runs here.

    Args:
        command: the program and the arguments that the user's ``CXX`` gives it.
        flags: how it compiles a kernel; with OpenMP if it has it.
        target: every macro it predefines with these flags, which names its version and each feature of this CPU.
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]
    target: str

    @property
    def threads(self) -> bool:
        """Whether kernels are compiled with OpenMP; without it they run on one thread."""
        return OPENMP[0] in self.flags


def load(source: Path) -> ctypes.CDLL:
    """Open the shared library compiled from one C++ file, compiling it unless the cache holds it.

    Args:
        source: a file that includes nothing but system headers.
    Raises:
        KernelError: there is no compiler, it refuses the file (its log is in the message), or the cache is unusable.
    """
    compiler = find_compiler()
    inputs = "\0".join((*compiler.command, *compiler.flags, compiler.target)).encode() + source.read_bytes()
    folder = cache_folder() / "cpp"
    prefix = f"{source.stem}-{_digest(inputs)[:16]}-"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return ctypes.CDLL(str(_intact(folder, prefix) or _compile(compiler, source, folder, prefix)))
    except OSError as error:
        raise KernelError(f"cannot use {folder} ({error}); set SEMISPARSE_CACHE to a folder that can be") from error


@cache
def refusal() -> str | None:
    """Say why nothing can be compiled here, or None if it can."""
    try:
        find_compiler()
    except KernelError as error:
        return str(error)
    return None


@cache
def find_compiler() -> Compiler:
    """Find the compiler: ``CXX`` if it is set, else c++, g++ or clang++.

    Raises:
        KernelError: there is none, or it does not run.
    """
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        return _probe(chosen)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return _probe(name)
    raise KernelError("no C++ compiler found: install g++ or clang++, or set CXX")


def cache_folder() -> Path:
    """Give semisparse's folder in the user's cache: ``SEMISPARSE_CACHE``, or where the platform keeps caches."""
    if chosen := os.environ.get("SEMISPARSE_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "semisparse"
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    return Path(os.environ.get(variable) or Path.home() / ".cache") / "semisparse"


def _probe(chosen: str) -> Compiler:
    """Ask a compiler for its predefined macros, with OpenMP if it has the header, else without."""
    complaint = ""
    try:
        command = tuple(shlex.split(chosen))
        for openmp in (OPENMP, ()):
            header = ("-include", "omp.h") if openmp else ()
            arguments = (*command, *FLAGS, *openmp, *header, "-dM", "-E", "-x", "c++", os.devnull)
            answer = subprocess.run(arguments, capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                return Compiler(command, (*FLAGS, *openmp), answer.stdout)
            complaint = answer.stderr.strip()
    except (OSError, ValueError) as error:
        complaint = str(error)
    raise KernelError(
        f"the C++ compiler {chosen!r} does not run with {shlex.join(FLAGS)} ({complaint}): set CXX to g++ or clang++"
    )


def _intact(folder: Path, prefix: str) -> Path | None:
    """Find a cached library whose content is what its name says, and remove damaged ones."""
    for entry in sorted(folder.glob(f"{prefix}*.so")):
        with contextlib.suppress(FileNotFoundError):  # Another process has just removed it.
            if entry.name == f"{prefix}{_digest(entry.read_bytes())}.so":
                return entry
            entry.unlink()
    return None


def _compile(compiler: Compiler, source: Path, folder: Path, prefix: str) -> Path:
    """Compile beside the cache and move the library in whole, under a name that carries its content's digest."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch) / "library.so"
        arguments = [*compiler.command, *compiler.flags, str(source), "-o", str(output)]
        answer = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise KernelError(f"{shlex.join(arguments)} failed:\n{answer.stdout}{answer.stderr}")
        final = folder / f"{prefix}{_digest(output.read_bytes())}.so"
        os.replace(output, final)
    return final


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
