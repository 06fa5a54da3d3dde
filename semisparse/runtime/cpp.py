"""C++ for the CPU: compiled at first use by the user's compiler, kept in the user's cache."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shlex
import shutil
import subprocess
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
"""Headers that kernels of different formats share."""

WORK_PER_THREAD = 1 << 16
"""Multiply-adds below which another thread costs more than it brings."""

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


def load(source: Path) -> ctypes.CDLL:
    """Open the shared library compiled from one C++ file, compiling it unless the cache holds it.

    Args:
        source: a file. It may include the system's headers and the shared ones.
    Raises:
        KernelError: there is no compiler, it refuses the file (its log is in the message), or nothing can be opened
            from the temporary directory.
    """
    compiler = find_compiler()
    texts = read_with_includes(source, (HEADERS,))
    key = json.dumps([compiler.command, compiler.flags, compiler.target, texts], sort_keys=True).encode()
    code = cached("cpp", key, lambda: _compile(compiler, source))
    try:
        # An opened library needs no file any more, so what runs is what the cache has just checked.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            library = Path(directory) / f"{source.stem}.so"
            library.write_bytes(code)
            return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelError(
            f"cannot open the compiled {source.name}: {error}; set TMPDIR to a directory that can"
        ) from error


def threads_for(work: int) -> int:
    """Say how many threads share so many multiply-adds."""
    return max(1, min(torch.get_num_threads(), work // WORK_PER_THREAD))


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
                if not openmp:
                    logger.warning("the C++ compiler %s has no OpenMP: CPU kernels run on one thread", chosen)
                return Compiler(command, (*FLAGS, *openmp), answer.stdout)
            complaint = answer.stderr.strip()
    except (OSError, ValueError) as error:
        complaint = str(error)
    raise KernelError(
        f"the C++ compiler {chosen!r} does not run with {shlex.join(FLAGS)} ({complaint}): set CXX to g++ or clang++"
    )


def _compile(compiler: Compiler, source: Path) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "library.so"
        arguments = [*compiler.command, *compiler.flags, "-I", str(HEADERS), str(source), "-o", str(output)]
        answer = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise KernelError(f"{shlex.join(arguments)} failed:\n{answer.stdout}{answer.stderr}")
        return output.read_bytes()
