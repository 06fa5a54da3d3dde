"""The CPU kernel: any number of threads, strides, instruction sets and 16-bit values, and specs that are replaced."""

import platform
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from semisparse.formats import Packed, linear
from semisparse.formats.bitmask.cpu import kernel as cpu
from semisparse.patterns import parse_pattern
from semisparse.runtime import cpp, row_matmul
from tests.formats.bitmask.weights import BITMASK
from tests.formats.cases import build, random
from tests.formats.checking import check_product

pytestmark = pytest.mark.skipif(cpp.refusal() is not None, reason=str(cpp.refusal()))


def packed_weight(pattern: str, n: int, k: int, dtype: torch.dtype = torch.float32) -> Packed:
    return BITMASK.pack(build(parse_pattern(pattern), random, n, k).to(dtype), pattern)


def random_x(m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m))


@pytest.mark.parametrize("pattern", ["32:64", "70%"])
def test_any_number_of_threads_returns_the_same_bits(pattern: str):
    packed = packed_weight(pattern, 301, 1000)
    before = torch.get_num_threads()
    for m in (1, 7, 32):
        results = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(linear(random_x(m, 1000), packed, kernel="cpu"))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(results[0], y) for y in results)


@pytest.mark.parametrize("pattern", ["32:64", "70%"])
def test_more_rows_than_torch_multiplies_at_a_time(pattern: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_matmul, "UNPACKED_ROWS", 8)  # 16: whole tiles
    packed, x = packed_weight(pattern, 33, 172), random_x(65, 172)
    for bias in (None, random_x(1, 33)[0]):
        check_product(linear(x, packed, bias, kernel="cpu"), x, packed, bias)


@pytest.mark.parametrize("pattern", ["32:64", "70%"])
def test_strided_tensors(pattern: str):
    packed, x = packed_weight(pattern, 40, 172), random_x(3, 172)
    strided = {name: torch.stack((t, t), -1)[..., 0] for name, t in packed.tensors.items()}
    assert torch.equal(linear(x, Packed(packed.spec, strided), kernel="cpu"), linear(x, packed, kernel="cpu"))


def every_number(dtype: torch.dtype) -> Tensor:
    """Every finite number of a 16-bit dtype, subnormals among them, [N, 4]."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()].view(-1, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number_is_read(dtype: torch.dtype):
    weight = every_number(dtype)
    packed = BITMASK.pack(weight, "0%")
    for m in (4, 65):
        y = linear(torch.eye(m, 4), packed, kernel="cpu")
        assert torch.equal(y[:4].T, weight.float())


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these instruction sets are those of x86-64")
@pytest.mark.parametrize(
    "without", ["-mno-avx512bf16", "-mno-avx512vbmi2", "-mno-avx512f", "-mno-avx512f -mno-avx2 -mno-f16c"]
)
def test_older_instruction_sets(without: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", f"{cpp.find_compiler().command[0]} {without}")
    monkeypatch.setattr(cpp, "find_compiler", cpp.find_compiler.__wrapped__)
    monkeypatch.setattr(row_matmul, "load", row_matmul.load.__wrapped__)
    older = cpu.load.__wrapped__()
    for pattern in ("32:64", "70%"):
        for dtype, m in ((torch.float16, 1), (torch.bfloat16, 7), (torch.float32, 16), (torch.float16, 65)):
            for kind in ("none", "w8", "w4"):
                weight, x = build(parse_pattern(pattern), random, 33, 172).to(dtype), random_x(m, 172)
                packed = BITMASK.pack(weight, pattern, kind=kind)
                check_product(older(x, packed, None), x, packed, None)
    for dtype in (torch.float16, torch.bfloat16):
        weight = every_number(dtype)
        assert torch.equal(older(torch.eye(4), BITMASK.pack(weight, "0%"), None).T, weight.float())
    # Only a checkpoint can hold these: packing refuses them.
    wild = torch.tensor([float("inf"), float("-inf"), float("nan"), 65504], dtype=torch.float16)
    packed = BITMASK.pack(torch.ones(4, 1, dtype=torch.float16), "0%")
    packed = Packed(packed.spec, {**packed.tensors, "values": wild})
    assert torch.equal(older(torch.ones(1, 1), packed, None).nan_to_num(7), wild.float().nan_to_num(7)[None])


@pytest.mark.parametrize("pattern", ["32:64", "70%"])
def test_a_spec_of_fewer_rows_multiplies_the_first_rows_eager_and_compiled(pattern: str):
    """The shape comes from the spec. When it was taken from the tensors, eager and compiled results differed."""
    packed = packed_weight(pattern, 8, 128)
    first = Packed(replace(packed.spec, shape=(4, 128)), packed.tensors)
    assert torch.equal(first.unpack(), packed.unpack()[:4])

    def product(x: Tensor) -> Tensor:
        return linear(x, first)

    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True, backend="eager")
    for m in (3, 40):
        x = random_x(m, 128)
        expected = linear(x, packed)[:, :4]
        assert torch.equal(product(x), expected)
        assert torch.equal(compiled(x), expected)
        check_product(linear(x, first, kernel="reference"), x, first, None)
