"""The cache of compiled C++: one compilation per source and machine; damaged libraries are never loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from semisparse.errors import KernelError
from semisparse.runtime import cpp, includes
from semisparse.runtime.cache import cache_directory
from tests.forked import run_at_once

needs_compiler = pytest.mark.skipif(cpp.refusal() is not None, reason=str(cpp.refusal()))
SOURCE = 'extern "C" int answer() { return 42; }'


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Give each test an empty cache, and search for the compiler again."""
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path / "cache"))
    cpp.find_compiler.cache_clear()
    cpp.refusal.cache_clear()
    yield
    cpp.find_compiler.cache_clear()
    cpp.refusal.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def rewrite(source: Path, text: str) -> None:
    source.write_text(text)
    includes._read.cache_clear()


def entries() -> list[Path]:
    return sorted((cache_directory() / "cpp").iterdir())


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Wrap the compiler in a script that logs a line per compiled file."""
    log = tmp_path / "log"
    log.touch()
    wrap_compiler(monkeypatch, tmp_path / "compiler", f"*-o*) echo compiled >> {log}")
    return log


def wrap_compiler(monkeypatch: pytest.MonkeyPatch, script: Path, case: str) -> None:
    """Make the compiler a script that runs a case of its arguments before the real one."""
    real = " ".join(cpp.find_compiler().command)
    script.write_text(f'#!/bin/sh\ncase "$*" in {case};; esac\nexec {real} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    cpp.find_compiler.cache_clear()


@needs_compiler
def test_a_library_is_compiled_once(source: Path, compilations: Path):
    assert cpp.load(source).answer() == 42
    assert cpp.load(source).answer() == 42
    assert compilations.read_text().count("compiled") == 1
    assert len(entries()) == 1


@needs_compiler
def test_another_source_command_or_flag_is_another_library(source: Path, monkeypatch: pytest.MonkeyPatch):
    assert cpp.load(source).answer() == 42
    rewrite(source, SOURCE.replace("42", "43"))
    assert cpp.load(source).answer() == 43
    monkeypatch.setenv("CXX", " ".join((*cpp.find_compiler().command, "-DNOTHING")))
    cpp.find_compiler.cache_clear()
    assert cpp.load(source).answer() == 43
    assert len(entries()) == 3
    monkeypatch.setattr(cpp, "FLAGS", (*cpp.FLAGS, "-fno-strict-aliasing"))
    cpp.find_compiler.cache_clear()
    assert cpp.load(source).answer() == 43
    assert len(entries()) == 4


@needs_compiler
def test_another_shared_header_is_another_library(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpp, "HEADERS", tmp_path / "shared")
    (tmp_path / "shared").mkdir()
    source.write_text('#include "number.hpp"\nextern "C" int answer() { return number; }')
    for number in (42, 43):
        rewrite(tmp_path / "shared" / "number.hpp", f"constexpr int number = {number};")
        assert cpp.load(source).answer() == number
    assert len(entries()) == 2


@needs_compiler
@pytest.mark.parametrize("damage", [lambda content: content[:100], lambda content: b"", lambda content: content[::-1]])
def test_a_damaged_library_is_compiled_again(source: Path, compilations: Path, damage):
    cpp.load(source)
    (entry,) = entries()
    content = entry.read_bytes()
    entry.write_bytes(damage(content))
    assert cpp.load(source).answer() == 42
    assert compilations.read_text().count("compiled") == 2
    assert [e.read_bytes() for e in entries()] == [content]


@needs_compiler
def test_processes_may_compile_at_the_same_time(source: Path):
    def load() -> None:
        assert cpp.load(source).answer() == 42

    run_at_once(load)
    assert len(entries()) == 1


@needs_compiler
def test_the_compilers_log_is_in_the_error(source: Path):
    source.write_text("int broken() { return undeclared_name; }")
    with pytest.raises(KernelError, match="undeclared_name"):
        cpp.load(source)
    assert not (cache_directory() / "cpp").exists()


@needs_compiler
def test_a_cache_that_cannot_be_written_costs_a_warning(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEMISPARSE_CACHE", str(source / "below-a-file"))
    with pytest.warns(UserWarning, match="set SEMISPARSE_CACHE to a writable directory"):
        assert cpp.load(source).answer() == 42


@needs_compiler
def test_a_library_that_cannot_be_opened_is_named(source: Path, compilations: Path):
    """Such as one with an undefined symbol."""
    source.write_text('extern "C" int missing(); extern "C" int answer() { return missing(); }')
    with pytest.raises(KernelError, match=r"cannot open the compiled answer.cpp: .*missing"):
        cpp.load(source).answer()


@needs_compiler
def test_openmp_is_used_where_the_compiler_has_it(source: Path):
    source.write_text("""
#ifdef _OPENMP
#include <omp.h>
extern "C" int threads() { return omp_get_max_threads() > 0; }
#else
extern "C" int threads() { return 0; }
#endif
""")
    assert cpp.load(source).threads() == ("-fopenmp" in cpp.find_compiler().flags)


@needs_compiler
def test_a_compiler_without_openmp_compiles_with_a_warning(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    wrap_compiler(monkeypatch, tmp_path / "compiler", "*-fopenmp*) echo no such option >&2; exit 1")
    assert "-fopenmp" not in cpp.find_compiler().flags
    assert "has no OpenMP: CPU kernels run on one thread" in caplog.text
    assert cpp.load(source).answer() == 42


@pytest.mark.parametrize(
    ("command", "complaint"),
    [("no-such-compiler", "No such file"), ("false", "does not run"), ("c++ 'unclosed", "No closing quotation")],
)
def test_a_cxx_that_does_not_run_is_named(command: str, complaint: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", command)
    reason = cpp.refusal()
    assert reason is not None
    assert complaint in reason
    assert "set CXX" in reason


def test_a_missing_compiler_is_an_error(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert cpp.refusal() == "no C++ compiler found: install g++ or clang++, or set CXX"
    with pytest.raises(KernelError, match="no C"):
        cpp.load(source)


FAULTS = """
#include <cstdint>
#include <limits>
extern "C" int past_the_end(const int32_t* x, int n) { return x[n]; }
extern "C" int overflow(const int32_t* x, int n) { return std::numeric_limits<int>::max() - x[0] + n; }
"""

USE_FAULT = """
import ctypes, sys, torch
from pathlib import Path
from semisparse.runtime import cpp
function = getattr(cpp.load(Path(sys.argv[1])), sys.argv[2])
x = torch.zeros(4, dtype=torch.int32)
function(ctypes.c_void_p(x.data_ptr()), 4)
"""


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "report"), [("past_the_end", "heap-buffer-overflow"), ("overflow", "signed integer overflow")]
)
def test_sanitizers_see_faults_of_compiled_code(tmp_path: Path, fault: str, report: str):
    """The same faults pass silently without `cpp.SANITIZE`."""
    source = tmp_path / "faults.cpp"
    source.write_text(FAULTS)
    command = [sys.executable, "-c", USE_FAULT, str(source), fault]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    compiler = cpp.find_compiler().command
    libraries = [
        subprocess.check_output([*compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    checks = {cpp.SANITIZE: "address,undefined", "ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": ":".join(libraries)}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **checks})
    assert process.returncode != 0
    assert report in process.stderr
