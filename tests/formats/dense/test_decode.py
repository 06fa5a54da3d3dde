"""decode.cu, emulated: ragged rows and columns, several row tiles per CTA, one and two mma operands of 8 tokens."""

from dataclasses import replace

import pytest
import torch

from semisparse.formats import get_format
from semisparse.formats.dense.cuda import decode
from semisparse.formats.product import problem_of
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, emulated, needs_compiler
from tests.formats.checking import check_product
from tests.formats.fusion import check_fused

__all__ = ["emulated"]

HALF, BF16 = torch.float16, torch.bfloat16
KERNEL = get_format("dense").kernels[0]


@needs_compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "sms"),
    mostly_slow(
        [(1, 37, 520, HALF, 132), (3, 100, 1096, BF16, 1), (11, 40, 72, HALF, 1), (16, 16, 2048, BF16, 132)], 1, 2
    ),
)
def test_products(emulated, monkeypatch: pytest.MonkeyPatch, m, n, k, dtype, sms):
    emulate(monkeypatch, sms)
    generator = torch.Generator().manual_seed(n + k)
    packed = get_format("dense").pack(torch.randn(n, k, generator=generator).to(dtype), "0%")
    x, bias = torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    for given in (None, bias):
        check_product(decode.prepare(problem_of(x, packed))(x, packed, given), x, packed, given)


@needs_compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "prologue", "epilogue", "sms"),
    mostly_slow(
        [
            (1, 80, 520, BF16, "rms_norm", "silu_mul", 2),
            (2, 37, 1096, HALF, "rms_norm", "none", 1),
            (1, 37, 5000, BF16, "none", "add", 132),
            (2, 48, 600, HALF, "rms_norm", "silu_mul", 1),
            (2, 20, 5000, HALF, "none", "add", 2),
        ],
        0,
        3,
    ),
)
def test_fused(emulated, monkeypatch: pytest.MonkeyPatch, m, n, k, dtype, prologue, epilogue, sms):
    emulate(monkeypatch, sms)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).to(dtype)
    packed = get_format("dense").pack(weight, "0%")
    check_fused(KERNEL, packed, weight, m, prologue, epilogue, bias=m % 2 == 1)


def test_what_is_not_fused(monkeypatch: pytest.MonkeyPatch):
    emulate(monkeypatch)
    packed = get_format("dense").pack(torch.zeros(40, 8192).half(), "0%")
    problem = problem_of(torch.zeros(2, 8192).half(), packed)
    wide = problem_of(torch.zeros(2, 20480).half(), get_format("dense").pack(torch.zeros(16, 20480).half(), "0%"))
    assert KERNEL.fuse(replace(wide, prologue="rms_norm")) is None  # 80 KB of x
    assert KERNEL.fuse(replace(problem, m=1, epilogue="silu_mul")) is None  # 20 rows of a gate
