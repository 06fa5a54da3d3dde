"""CPU kernels of runtime/row_matmul.py: every remainder of their tiles, and results that nothing but the operands changes."""

import pytest
import torch
from torch import Tensor

from semisparse.formats import Packed, get_format, linear
from semisparse.patterns import parse_pattern
from semisparse.runtime import cpp
from tests.formats.checking import check_product, operands

pytestmark = pytest.mark.skipif(cpp.refusal() is not None, reason=str(cpp.refusal()))

WEIGHTS = [
    ("bitmask", "32:64", "none"),
    ("bitmask", "70%", "none"),
    ("bitmask", "32:64", "w8"),
    ("bitmask", "32:64", "w4"),
    ("gqs", "g16@50%", "w4"),
    ("gqs", "g128@0%", "w4"),
    ("gqs", "g8@50%", "w3"),
    ("gqs", "g4@50%", "w8"),
]
DTYPES = [torch.bfloat16, torch.float32]


def packed_weight(form: str, pattern: str, kind: str, n: int, k: int, dtype: torch.dtype) -> Packed:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))
    weight = weight * parse_pattern(pattern).mask(weight.abs())
    return get_format(form).pack(weight.to(dtype), pattern, **({} if kind == "none" else {"kind": kind}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=" ".join)
def test_every_remainder_of_tokens_rows_and_columns(weight: tuple[str, str, str], dtype: torch.dtype):
    for m, n, k in zip((*range(1, 15), 60), (1, 5, 8, 21, 33) * 3, (1, 70, 128, 300) * 4, strict=False):
        packed = packed_weight(*weight, n, k, dtype)
        x, bias = operands(packed, m, dtype)
        for added in (None, bias):
            check_product(linear(x, packed, added, kernel="cpu"), x, packed, added)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=" ".join)
def test_other_tokens_change_no_bit(weight: tuple[str, str, str], dtype: torch.dtype):
    packed = packed_weight(*weight, 40, 300, dtype)
    x, bias = operands(packed, 17, dtype)
    together = linear(x, packed, bias, kernel="cpu")
    for m in (1, 2, 5, 13):
        assert torch.equal(linear(x[:m], packed, bias, kernel="cpu"), together[:m])


@pytest.mark.parametrize("weight", WEIGHTS[::4], ids=" ".join)
def test_threads_change_no_bit_of_a_long_prompt(weight: tuple[str, str, str]):
    """From 256 tokens on, bands have more rows."""
    packed = packed_weight(*weight, 77, 200, torch.bfloat16)
    x, _ = operands(packed, 600, torch.bfloat16)
    results: list[Tensor] = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(linear(x, packed, kernel="cpu"))
    finally:
        torch.set_num_threads(before)
    check_product(results[0], x, packed, None)
    assert torch.equal(*results)
