"""C++ kernels for the CPU: compiled at first use with the user's compiler, and cached on disk."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from semisparse.errors import KernelError
from semisparse.runtime.cache import cached
from semisparse.runtime.includes import read_with_includes

logger = logging.getLogger(__name__)

HEADERS = Path(__file__).parent / "host"
"""The folder of headers that several formats share."""

WORK_PER_THREAD = 1 << 16
"""Multiply-adds per thread below which another thread costs more time than it saves."""

FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
HARDENING = ("-D_FORTIFY_SOURCE=2", "-fstack-protector-strong", "-Wl,-z,relro,-z,now")

SANITIZE = "SEMISPARSE_SANITIZE"
"""The environment variable that names sanitizers to compile with: ``address,undefined`` in `make test-sanitize`."""

OPENMP = ("-fopenmp",)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that runs here.

    Args:
        command: the program, and the arguments in the user's ``CXX``.
        flags: the flags for compiling a kernel, with OpenMP if the compiler has it.
        target: the macros predefined with these flags. They identify the compiler's version and the CPU's features.
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]
    target: str


def load(source: Path) -> ctypes.CDLL:
    """Load the shared library of one C++ file. It is compiled unless the cache has it.

    The cache key is the compiler, its flags and target, and the texts of the file and of every header it includes.

    Args:
        source: the C++ file. It may include system headers and those in `HEADERS`.
    Raises:
        KernelError: there is no compiler, the file does not compile (the message has the compiler's log), or no library
            can be opened from the temporary directory.
    """
    compiler = find_compiler()
    texts = read_with_includes(source, (HEADERS,))
    key = json.dumps([compiler.command, compiler.flags, compiler.target, texts], sort_keys=True).encode()
    code = cached("cpp", key, lambda: _compile(compiler, source))
    try:
        # A loaded library needs no file. A private copy is loaded, so that the bytes that run are those just verified.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            library = Path(directory) / f"{source.stem}.so"
            library.write_bytes(code)
            return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelError(
            f"cannot open the compiled {source.name}: {error}; set TMPDIR to a directory that allows it"
        ) from error


def threads_for(work: int) -> int:
    """Return the number of threads for a kernel of ``work`` multiply-adds."""
    return max(1, min(torch.get_num_threads(), work // WORK_PER_THREAD))


@cache
def refusal() -> str | None:
    """Return why no C++ can be compiled here, or None if it can."""
    try:
        find_compiler()
    except KernelError as error:
        return str(error)
    return None


@cache
def find_compiler() -> Compiler:
    """Return the compiler: ``CXX`` if it is set, else c++, g++ or clang++.

    Raises:
        KernelError: there is no compiler, or it does not run.
    """
    cxx = os.environ.get("CXX", "").strip()
    if cxx:
        return _probe(cxx)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return _probe(name)
    raise KernelError("no C++ compiler found: install g++ or clang++, or set CXX")


def _probe(cxx: str) -> Compiler:
    """Run a compiler for its predefined macros, first with OpenMP, then without.

    Raises:
        KernelError: it does not run with the flags.
    """
    complaint, flags = "", (*FLAGS, *_checks())
    try:
        command = tuple(shlex.split(cxx))
        for openmp in (OPENMP, ()):
            header = ("-include", "omp.h") if openmp else ()
            arguments = (*command, *flags, *openmp, *header, "-dM", "-E", "-x", "c++", os.devnull)
            process = subprocess.run(arguments, capture_output=True, text=True, check=False)
            if process.returncode == 0:
                if not openmp:
                    logger.warning("the C++ compiler %s has no OpenMP: CPU kernels run on one thread", cxx)
                return Compiler(command, (*flags, *openmp), process.stdout)
            complaint = process.stderr.strip()
    except (OSError, ValueError) as error:
        complaint = str(error)
    raise KernelError(
        f"the C++ compiler {cxx!r} does not run with {shlex.join(flags)} ({complaint}): set CXX to g++ or clang++"
    )


def _checks() -> tuple[str, ...]:
    """Return the flags of the checks to compile in: the sanitizers that `SANITIZE` names, or `HARDENING`.

    A process that loads code compiled with AddressSanitizer must preload the sanitizer's library (``LD_PRELOAD``).
    """
    names = os.environ.get(SANITIZE, "").strip()
    if names:
        return (f"-fsanitize={names}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
    return HARDENING if sys.platform == "linux" else ()


def _compile(compiler: Compiler, source: Path) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "library.so"
        arguments = [*compiler.command, *compiler.flags, "-I", str(HEADERS), str(source), "-o", str(output)]
        process = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            raise KernelError(f"{shlex.join(arguments)} failed:\n{process.stdout}{process.stderr}")
        return output.read_bytes()
