"""`decode_tiles` on mask tiles: slices of K, ragged shapes, several row tiles per CTA."""

import pytest
import torch

from semisparse.formats.ec_csr.cuda import decode_tiles
from semisparse.formats.ec_csr.cuda.tile_schedule import WARPS_PER_SM, tiles_in
from semisparse.formats.ec_csr.storage.gpu import to_tiles
from semisparse.formats.product import problem_of
from semisparse.runtime.device import device_facts
from semisparse.runtime.tile_decode import fit
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.ec_csr.weights import EC_CSR, check, operands, random_weight, uneven_weight

HALF, BF16 = torch.float16, torch.bfloat16


@needs_compiler
@pytest.mark.parametrize(
    ("n", "k", "pattern", "dtype", "m", "sms", "shape"),
    mostly_slow(
        [
            (100, 1301, "70%", HALF, 1, 1, (1, 3, 2)),
            (100, 1304, "90%", BF16, 7, 2, (2, 2, 2)),
            (40, 520, "0%", HALF, 16, 132, (1, 1, 1)),
        ],
        0,
        1,
    ),
)
def test_emulated(emulated, monkeypatch: pytest.MonkeyPatch, n, k, pattern, dtype, m, sms, shape):
    emulate(monkeypatch, sms)
    for weight, given in ((random_weight(n, k, pattern, dtype), pattern), (uneven_weight(n, k, dtype), "0%")):
        packed = to_tiles(EC_CSR.pack(weight, given))
        x, bias = operands(packed, m)
        problem = problem_of(x, packed)
        schedule = fit(shape, m, tiles_in(packed.spec), WARPS_PER_SM, device_facts(problem.device))
        check(decode_tiles.prepare(problem, schedule)(x, packed, bias), x, packed, bias)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(
    ("n", "k", "pattern", "dtype", "m"),
    [
        (64, 512, "70%", HALF, 1),
        (1, 1, "0%", BF16, 2),
        (257, 4100, "50%", BF16, 8),
        (2200, 8200, "70%", HALF, 5),
        (9001, 1100, "90%", HALF, 16),
    ],
)
def test_on_a_gpu(n: int, k: int, pattern: str, dtype: torch.dtype, m: int, nan_filled_memory):
    for weight, given in ((random_weight(n, k, pattern, dtype), pattern), (uneven_weight(n, k, dtype), "0%")):
        packed = to_tiles(EC_CSR.pack(weight, given).to("cuda"))
        x, bias = operands(packed, m)
        product = decode_tiles.prepare(problem_of(x, packed))
        y = product(x, packed, bias)
        check(y, x, packed, bias)
        assert torch.equal(product(x, packed, bias), y), "two calls differ"
