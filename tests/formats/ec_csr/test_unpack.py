"""`unpack`, emulated: tiles of whole panels, and so small that most segments reach none."""

import pytest
import torch

from semisparse.formats.ec_csr.cuda import schedule, unpack
from semisparse.formats.product import problem_of
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.ec_csr.weights import EC_CSR, check, operands, random_weight, uneven_weight

pytestmark = needs_compiler


@pytest.mark.parametrize(
    ("n", "k", "pattern", "sms", "bits", "dtype"),
    mostly_slow(
        [
            (40, 300, "70%", 132, 4, torch.float16),
            (110, 430, "50%", 2, 8, torch.float32),
            (1, 33, "0%", 132, 4, torch.float16),
        ],
        1,
    ),
)
def test_the_weight_is_unpacked(emulated, monkeypatch, n, k, pattern, sms, bits, dtype):
    emulate(monkeypatch, sms)
    for weight in (random_weight(n, k, pattern, dtype), uneven_weight(n, k, dtype)):
        packed = EC_CSR.arrange(EC_CSR.pack(weight, "0%", delta_bits=bits), "cuda")
        problem = problem_of(torch.empty(1, k, dtype=dtype), packed)
        for tile_bytes in (64 << 10, 4096):
            monkeypatch.setattr(schedule, "UNPACK_TILE_BYTES", tile_bytes)
            unpacked = unpack.prepare_unpack(problem)(packed)
            assert torch.equal(unpacked, weight)
            assert unpacked.stride() == (-(-k // 32) * 32, 1)


def test_products(emulated):
    packed = EC_CSR.arrange(EC_CSR.pack(random_weight(40, 300, "70%"), "70%", delta_bits=4), "cuda")
    x, bias = operands(packed, 20)
    check(unpack.prepare(problem_of(x, packed))(x, packed, bias), x, packed, bias)
