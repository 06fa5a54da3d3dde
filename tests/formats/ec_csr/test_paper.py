"""The paper's kernel, emulated: blocks of one to eight rows, clipped, and weights without any block."""

import pytest
import torch

from semisparse.formats.ec_csr.paper import decode
from semisparse.formats.product import problem_of
from tests.cuda_emulator import needs_compiler
from tests.formats.ec_csr.weights import EC_CSR, check, operands, random_weight

pytestmark = needs_compiler


@pytest.mark.parametrize(
    ("m", "n", "k", "pattern", "options", "granularity", "dtype"),
    [
        (5, 20, 400, "10%", {"multiple": 32, "delta_bits": 4, "clip": 1}, 8, torch.float16),
        (3, 9, 33000, "99%", {"delta_bits": 8}, 1, torch.float32),
    ],
)
def test_products(emulated, m, n, k, pattern, options, granularity, dtype):
    packed = EC_CSR.pack(random_weight(n, k, pattern, dtype), pattern, layout="paper", **options)
    assert packed.params["granularity"] == granularity
    x, bias = operands(packed, m)
    product = decode.prepare(problem_of(x, packed))
    check(product(torch.stack((x, x), -1)[..., 0], packed, bias.double()), x, packed, bias)
    check(product(x[:1], packed, None), x[:1], packed, torch.zeros(n))


def test_a_weight_of_zeros(emulated):
    packed = EC_CSR.pack(torch.zeros(3, 33000), "99%", layout="paper", delta_bits=8)
    assert not len(packed.tensors["bundles"])
    x, bias = operands(packed, 3)
    assert torch.equal(decode.prepare(problem_of(x, packed))(x, packed, bias), bias.expand(3, 3))
