"""`decode_mma`, emulated: tiles of 8 and 2 lanes."""

import pytest
import torch

from semisparse.formats.ec_csr.cuda import decode_mma, schedule
from semisparse.formats.product import problem_of
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.ec_csr.weights import EC_CSR, check, operands, random_weight, uneven_weight

pytestmark = needs_compiler


@pytest.mark.parametrize(
    ("lanes", "m", "n", "k", "sms", "bits", "dtype"),
    mostly_slow(
        [
            (8, 16, 70, 300, 132, 4, torch.float16),
            (2, 5, 57, 200, 1, 8, torch.bfloat16),
        ],
        1,
    ),
)
def test_products(emulated, monkeypatch, lanes, m, n, k, sms, bits, dtype):
    """One product for all of a bucket, of a random weight and of one whose lanes are in rows far apart."""
    monkeypatch.setattr(schedule, "MMA_LANES", ((lanes, 1),))
    emulate(monkeypatch, sms)
    for weight, pattern in ((random_weight(n, k, "70%", dtype), "70%"), (uneven_weight(n, k, dtype), "0%")):
        packed = EC_CSR.arrange(EC_CSR.pack(weight, pattern, delta_bits=bits), "cuda")
        x, bias = operands(packed, m)
        product = decode_mma.prepare(problem_of(x, packed))
        check(product(x, packed, bias), x, packed, bias)
    strided = torch.stack((x, x), -1)[:-1, :, 0]
    check(product(strided, packed, None), x[:-1], packed, torch.zeros(n))
