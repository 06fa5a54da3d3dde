"""Run-time compilation: every .cu for every architecture, without a GPU, and the cache of cubins."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import semisparse
from semisparse.errors import KernelError
from semisparse.runtime import includes, nvrtc
from semisparse.runtime.kernel import ARCHITECTURES, CudaSource
from semisparse.runtime.nvrtc import Defines, compile_cubin

ROOT = Path(semisparse.__file__).parent

needs_compiler = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"NVRTC: {nvrtc.unavailable()}")


def declared_sources() -> list[CudaSource]:
    modules = [path for path in ROOT.rglob("*.py") if "CudaSource(" in path.read_text() and path.name != "kernel.py"]
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in modules]
    values = (value for name in names for value in vars(importlib.import_module(name)).values())
    found = {(source.path, source.architectures): source for source in values if isinstance(source, CudaSource)}
    return [found[key] for key in sorted(found)]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path / "cache"))
    includes._read.cache_clear()
    nvrtc._digest_of_texts.cache_clear()
    (tmp_path / "factor.cuh").write_text("constexpr float kFactor = 2.0f;\n")
    path = tmp_path / "scale.cu"
    path.write_text(
        '#include <cuda_fp16.h>\n#include "factor.cuh"\n'
        'extern "C" __global__ void scale(__half* x) {\n'
        "  x[threadIdx.x] = __half2float(x[threadIdx.x]) * kFactor * TIMES;\n}\n"
    )
    yield path
    includes._read.cache_clear()
    nvrtc._digest_of_texts.cache_clear()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record each real compilation."""
    compiled: list[Path] = []
    compile_now = nvrtc._compile

    def record(path, arch, defines):
        compiled.append(path)
        return compile_now(path, arch, defines)

    monkeypatch.setattr(nvrtc, "_compile", record)
    return compiled


def test_every_cu_file_is_declared():
    assert {source.path for source in declared_sources()} == set(ROOT.rglob("*.cu"))


def builds() -> Iterator[pytest.param]:
    """Give each source, architecture and variant. Of a source, `make test` compiles the first variant for Hopper."""
    for source in declared_sources():
        for arch in source.architectures:
            for number, variant in enumerate(source.variants):
                usual = number == 0 and arch == "sm_90a"
                few = "" if len(source.architectures) == len(ARCHITECTURES) else "-few"
                case = f"{source.path.parent.parent.name}-{source.path.stem}{few}-{arch}-{number}"
                yield pytest.param(source, arch, variant, id=case, marks=() if usual else pytest.mark.slow)


@needs_compiler
@pytest.mark.parametrize(("source", "arch", "variant"), builds())
def test_a_kernel_compiles_without_spills(source: CudaSource, arch: str, variant: Defines):
    for name, used in compile_cubin(source.path, arch, variant).resources.items():
        assert name.startswith("semisparse_"), "make test-gpu SANITIZE=... filters by this prefix"
        if source.spills_allowed is None:
            assert not used.spills, f"{source.path.name} keeps registers in local memory on {arch}: {name} {variant}"


@needs_compiler
def test_a_cubin_is_cached_until_something_it_depends_on_changes(source, compilations):
    def compile_it(arch="sm_90a", times=1):
        includes._read.cache_clear()
        nvrtc._digest_of_texts.cache_clear()
        return compile_cubin(source, arch, {"TIMES": times})

    first = compile_it()
    assert first.code[:4] == b"\x7fELF"
    assert first.resources["scale"].registers > 0
    assert compile_it() == first
    assert len(compilations) == 1
    assert compile_it(times=3).code != first.code
    assert compile_it(arch="sm_80").code != first.code
    assert len(compilations) == 3
    header = source.parent / "factor.cuh"
    header.write_text(header.read_text().replace("2.0f", "5.0f"))
    assert compile_it().code != first.code
    source.write_text(source.read_text().replace("kFactor", "7.0f"))
    compile_it()
    assert len(compilations) == 5


@needs_compiler
def test_a_cubin_depends_on_the_shared_headers(source, compilations, tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "HEADERS", tmp_path / "shared")
    (tmp_path / "factor.cuh").rename(tmp_path / "shared.cuh")
    (tmp_path / "shared").mkdir()
    header = tmp_path / "shared" / "factor.cuh"
    header.write_text('#include "../shared.cuh"\n')
    first = compile_cubin(source, "sm_90a", {"TIMES": 1})
    header.write_text("constexpr float kFactor = 5.0f;\n")
    includes._read.cache_clear()
    nvrtc._digest_of_texts.cache_clear()
    assert compile_cubin(source, "sm_90a", {"TIMES": 1}).code != first.code
    assert len(compilations) == 2


@needs_compiler
def test_a_damaged_cubin_is_compiled_again(source, compilations, tmp_path):
    first = compile_cubin(source, "sm_90a", {"TIMES": 1})
    (entry,) = (tmp_path / "cache" / "cubin").iterdir()
    entry.write_bytes(entry.read_bytes()[:-100])
    assert compile_cubin(source, "sm_90a", {"TIMES": 1}).code == first.code
    assert len(compilations) == 2


@needs_compiler
def test_the_compilers_log_is_in_the_error(source):
    source.write_text('extern "C" __global__ void broken() { nonsense; }')
    with pytest.raises(KernelError, match=r"(?s)scale\.cu does not compile for sm_90a.*nonsense"):
        compile_cubin(source, "sm_90a")


@needs_compiler
def test_a_spill_is_detected(source):
    source.write_text(
        'extern "C" __global__ void local(float* x, int n) {\n'
        "  float kept[64]; for (int i = 0; i < 64; ++i) kept[i] = x[i * 32 + threadIdx.x];\n"
        "  float sum = 0; for (int i = 0; i < 64; ++i) sum += kept[(i * n) & 63];\n  x[threadIdx.x] = sum;\n}\n"
    )
    assert compile_cubin(source, "sm_90a").resources["local"].spills


def test_without_a_compiler_the_reason_says_what_to_install(source, monkeypatch):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "cuda.core is not installed: pip install 'semisparse[cuda]'")
    nvrtc._cuda_headers.cache_clear()
    with pytest.raises(KernelError, match="pip install"):
        compile_cubin(source, "sm_90a")
