"""The CPU kernel: which problems it refuses, and its results with several gathers."""

import pytest
import torch

from semisparse.formats import linear
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.cpu import kernel
from tests.formats.vector_nm.reference import VECTOR_NM, check, operands, pack


@pytest.mark.parametrize(
    ("pattern", "m", "chosen"),
    [("2:4v4", 16, "cpu"), ("2:4v4", 17, "reference"), ("2:4v32", 16, "cpu"), ("2:4v32", 17, "cpu")],
)
def test_short_vectors_are_left_to_others_where_gathering_does_not_pay(pattern: str, m: int, chosen: str):
    packed = VECTOR_NM.pack(torch.zeros(40, 8), pattern)
    assert VECTOR_NM.choose(problem_of(torch.zeros(m, 8), packed)).name == chosen


@pytest.mark.parametrize(
    ("pattern", "n", "k", "m", "dtype"),
    [
        ("3:8v4", 45, 70, 3, torch.float32),
        ("16:32v32", 33, 172, 20, torch.bfloat16),
        ("64:256v128", 130, 300, 1, torch.float16),
    ],
)
def test_kernel(pattern: str, n: int, k: int, m: int, dtype: torch.dtype, nan_filled_memory, monkeypatch):
    packed = pack(pattern, n, k, dtype)
    x, bias = operands(packed, m)
    whole = linear(x, packed, bias, "cpu")
    check(whole, x, packed, bias)
    monkeypatch.setattr(kernel, "GATHERED_BYTES", 1)
    assert torch.equal(linear(x, packed, bias, "cpu"), whole), "a group at a time gives other bits"
