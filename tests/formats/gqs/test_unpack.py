"""`unpack` and the quantisation of x before it: their sources in the emulator, and on a GPU."""

import pytest
import torch

from semisparse.formats import linear
from semisparse.formats.gqs.cuda import quantise_x, unpack
from semisparse.formats.product import problem_of
from tests.cuda_emulator import needs_compiler
from tests.formats.gqs.reference import check, operands, packed_weight, quantised

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the unpack kernel: no GPU here")


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "dtype", "n", "k", "pattern"),
    [
        ("w4", HALF, 40, 300, "g16@50%"),
        ("w8", BFLOAT, 17, 172, "g16@0%"),
        ("w3", FLOAT, 5, 700, "g128@30%"),
        ("w2", BFLOAT, 16, 130, "g4@50%"),
        ("w3", HALF, 1, 33, "g8@50%"),
    ],
)
def test_the_unpacked_weight_is_that_of_packed_unpack(emulated, kind, dtype, n, k, pattern):
    packed = packed_weight(n, k, pattern, dtype, kind=kind)
    w = unpack.prepare_unpack(problem_of(torch.empty(1, k, dtype=dtype), packed))(packed)
    assert torch.equal(w, packed.unpack())
    assert w.stride() == (-(-k // 8) * 8, 1)


@needs_compiler
@pytest.mark.parametrize("kind", ["w4", "w4a8"])
def test_many_tokens(emulated, kind: str):
    packed = packed_weight(40, 300, kind=kind)
    x, bias = operands(packed, 33)
    y = unpack.prepare(problem_of(x, packed))(x, packed, bias)
    check(y, quantised(x).to(HALF) if kind == "w4a8" else x, packed.unpack(), bias)


@needs_compiler
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
def test_quantised_tokens_have_the_bits_of_the_reference(emulated, dtype: torch.dtype):
    quantise = quantise_x.prepare(torch.device("cpu"), dtype)
    for m, k in ((1, 1), (3, 33), (2, 1400)):
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).to(dtype)
        x[m // 2, : k // 2] *= 100
        x[-1] *= m == 1  # a token of zeros
        assert torch.equal(quantise(x), quantised(x).float().to(dtype))


@needs_compiler
def test_a_token_that_is_not_finite_stays_so_and_spoils_no_other(emulated):
    quantise = quantise_x.prepare(torch.device("cpu"), HALF)
    for bad in (float("nan"), float("inf")):
        x = torch.randn(3, 700, generator=torch.Generator().manual_seed(1)).half()
        x[1, 69] = bad
        finite = quantise(x).isfinite()
        assert finite[[0, 2]].all()
        assert not finite[1, 69]


@needs_gpu
@pytest.mark.parametrize(
    ("kind", "dtype", "pattern"),
    [("w4", HALF, "g16@50%"), ("w3", BFLOAT, "g128@30%"), ("w4a8", HALF, "g16@50%"), ("w8", FLOAT, "g4@80%")],
)
def test_many_tokens_on_a_gpu(kind: str, dtype: torch.dtype, pattern: str):
    packed = packed_weight(2000, 1000, pattern, dtype, kind=kind).to("cuda")
    x, bias = operands(packed, 100, device="cuda")
    multiplied = quantised(x).float().to(dtype) if kind == "w4a8" else x
    check(linear(x, packed, bias, kernel="unpack"), multiplied, packed.unpack(), bias)
