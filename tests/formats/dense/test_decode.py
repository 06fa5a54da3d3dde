"""decode.cu, emulated: ragged rows and columns, several row tiles per CTA, one and two operands of tokens."""

import pytest
import torch

from semisparse.formats import get_format
from semisparse.formats.dense.cuda import decode
from semisparse.formats.product import problem_of
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, emulated, needs_compiler
from tests.formats.checking import check_product

__all__ = ["emulated"]

HALF, BF16 = torch.float16, torch.bfloat16


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
