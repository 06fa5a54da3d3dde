"""The decode kernel's own source, run thread by thread on a CPU, against float64: layout, Stream-K and barriers."""

from types import SimpleNamespace

import pytest
import torch

from semisparse.formats import get_format
from semisparse.formats.gqs import cuda, cuda_rows
from semisparse.patterns import parse_pattern
from tests.formats import emulated
from tests.formats.cases import build, random
from tests.formats.test_contract import check_product, random_operands

GQS = get_format("gqs")

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no g++ to compile the emulation")


def forget_kernels() -> None:
    cuda._decode_kernel.cache_clear()
    cuda_rows._kernel.cache_clear()


class _Stream:
    cuda_stream = 0


@pytest.fixture(autouse=True)
def emulated_kernels(monkeypatch: pytest.MonkeyPatch):
    for module in (cuda, cuda_rows):
        monkeypatch.setattr(module, "compile_cubin", emulated.compile_emulated)
        monkeypatch.setattr(module, "CudaKernel", emulated.EmulatedKernel)
        monkeypatch.setattr(module, "WARPS", 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    forget_kernels()
    yield
    forget_kernels()
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("kind", "dtype", "m", "n", "k", "pattern"),
    [
        ("w4", torch.float16, 1, 40, 1024, "g16@50%"),
        ("w4", torch.bfloat16, 13, 23, 684, "g16@50%"),
        ("w8", torch.float16, 9, 16, 1400, "g16@0%"),
        ("w8", torch.bfloat16, 5, 70, 200, "g16@80%"),
    ],
)
def test_any_division_of_the_work(monkeypatch, kind: str, dtype: torch.dtype, m: int, n: int, k: int, pattern: str):
    """From one block for all chunks to one for each: tiles whole, in two and in many parts."""
    weight = build(parse_pattern(pattern), random, n, k).to(dtype)
    weight[3] = 0
    packed = GQS.pack(weight, pattern, kind=kind)
    x, bias = random_operands(packed, m, dtype, "cpu")
    monkeypatch.setattr(cuda, "_blocks", lambda tiles, processors: processors)
    for blocks in (1, 2, 5, 99):
        monkeypatch.setattr(cuda, "device_facts", lambda _, blocks=blocks: SimpleNamespace(processors=blocks, arch=""))
        results = []
        for emulated.adverse[0] in (False, True):
            results.append(cuda.decode(x, packed, bias))
            check_product(results[-1], x, packed, bias)
        assert torch.equal(*results)
    assert not cuda.arrivals(x.device, 1).any()


@pytest.mark.parametrize(
    ("kind", "dtype", "m", "n", "k", "pattern"),
    [
        ("w4", torch.float16, 1, 9, 1500, "g16@50%"),
        ("w4", torch.bfloat16, 3, 7, 2040, "g16@30%"),
        ("w8", torch.float16, 2, 23, 172, "g16@50%"),
        ("w8", torch.bfloat16, 4, 5, 1000, "g16@0%"),
    ],
)
def test_rows_in_any_division(monkeypatch, kind: str, dtype: torch.dtype, m: int, n: int, k: int, pattern: str):
    """From one block for all steps to one for each: rows whole, in two and in many parts, and one without groups."""
    weight = build(parse_pattern(pattern), random, n, k).to(dtype)
    weight[3] = 0
    packed = GQS.pack(weight, pattern, kind=kind, layout="rows")
    x, bias = random_operands(packed, m, dtype, "cpu")
    monkeypatch.setattr(cuda_rows, "BATCH", 2)
    monkeypatch.setattr(cuda_rows, "BLOCKS_PER_PROCESSOR", 1)
    for blocks in (1, 2, 5, 99):
        monkeypatch.setattr(
            cuda_rows, "device_facts", lambda _, blocks=blocks: SimpleNamespace(processors=blocks, arch="")
        )
        results = []
        for emulated.adverse[0] in (False, True):
            results.append(cuda_rows.decode(x, packed, bias))
            check_product(results[-1], x, packed, bias)
        assert torch.equal(*results)
    assert not cuda.arrivals(x.device, 1).any()
