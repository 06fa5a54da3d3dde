"""The CPU kernel: unpacking, and the matmul, which reads row panels for up to 16 tokens and unpacks them for more."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats.ec_csr.cpu import kernel as cpu
from semisparse.formats.ec_csr.storage import panels
from semisparse.formats.product import linear
from semisparse.runtime import cpp
from tests.formats.ec_csr.weights import EC_CSR, check, operands, random_weight, uneven_weight

pytestmark = pytest.mark.skipif(cpp.refusal() is not None, reason=f"C++: {cpp.refusal()}")


@given(
    st.sampled_from((4, 8)),
    st.sampled_from(("0%", "50%", "70%", "99%")),
    st.integers(1, 80),
    st.integers(1, 300),
    st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
)
def test_the_weight_is_unpacked(bits: int, pattern: str, n: int, k: int, dtype: torch.dtype):
    packed = EC_CSR.pack(random_weight(n, k, pattern, dtype), pattern, delta_bits=bits)
    assert torch.equal(cpu.unpack(packed), packed.unpack())


@pytest.mark.parametrize(
    ("m", "n", "k", "bits", "dtype"),
    [
        (1, 70, 300, 4, torch.float16),
        (3, 33, 172, 8, torch.float32),
        (8, 1, 33, 4, torch.bfloat16),
        (16, 100, 1100, 8, torch.float16),
        (17, 40, 172, 4, torch.bfloat16),
    ],
)
def test_products(m: int, n: int, k: int, bits: int, dtype: torch.dtype):
    for weight, pattern in ((random_weight(n, k, "70%", dtype), "70%"), (uneven_weight(n, k, dtype), "0%")):
        packed = EC_CSR.pack(weight, pattern, delta_bits=bits)
        x, bias = operands(packed, m)
        check(linear(x, packed, bias, "cpu"), x, packed, bias)


def test_panels_of_64_rows():
    packed = EC_CSR.pack(random_weight(100, 300, "70%"), "70%", delta_bits=4)
    packed = packed.in_layout(*panels.pack(packed.unpack(), 4, 64))
    x, bias = operands(packed, 3)
    check(linear(x, packed, bias, "cpu"), x, packed, bias)
