"""gemm.cu on mask tiles: split-K, Stream-K and clusters, on ragged shapes and on weights of uneven tiles."""

import pytest
import torch

from semisparse.formats.ec_csr.cuda import gemm
from semisparse.formats.ec_csr.storage.gpu import to_tiles
from semisparse.formats.product import problem_of
from semisparse.runtime.gemm_schedule import Schedule
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.ec_csr.weights import EC_CSR, check, operands, random_weight, uneven_weight

HALF, BF16 = torch.float16, torch.bfloat16

CASES = [  # n, k, pattern, dtype, m, SMs, schedule: tile_m, warpgroups, cluster, split_k, stages, x_stages, ctas_per_sm
    (80, 701, "70%", BF16, 20, 132, Schedule(32, 1, 1, 3, 3, 1, 3)),
    (80, 701, "90%", HALF, 9, 1, Schedule(16, 1, 1, 0, 1, 1, 1)),  # one range has all output tiles
    (130, 700, "50%", HALF, 100, 6, Schedule(64, 2, 2, 0, 3, 2, 1)),  # three ranges, one with parts of two tiles
    (70, 260, "30%", BF16, 40, 132, Schedule(32, 1, 1, 1, 2, 1, 2)),
    (37, 300, "0%", HALF, 20, 132, Schedule(256, 1, 1, 2, 1, 1, 1)),
]


@needs_compiler
@pytest.mark.parametrize(("n", "k", "pattern", "dtype", "m", "sms", "schedule"), mostly_slow(CASES, 0, 1))
def test_emulated(emulated, monkeypatch: pytest.MonkeyPatch, n, k, pattern, dtype, m, sms, schedule):
    emulate(monkeypatch, sms)
    for weight, given in ((random_weight(n, k, pattern, dtype), pattern), (uneven_weight(n, k, dtype), "0%")):
        packed = to_tiles(EC_CSR.pack(weight, given))
        x, bias = operands(packed, m)
        check(gemm.prepare(problem_of(x, packed), schedule)(x, packed, bias), x, packed, bias)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="wgmma is Hopper's"
)
@pytest.mark.parametrize(
    ("n", "k", "pattern", "dtype", "m"),
    [
        (64, 512, "70%", HALF, 1),
        (33, 701, "90%", BF16, 17),
        (1, 1, "0%", HALF, 33),
        (257, 4100, "50%", BF16, 65),
        (2200, 8200, "70%", HALF, 129),
        (9001, 1100, "70%", HALF, 300),
    ],
)
def test_on_a_gpu(n: int, k: int, pattern: str, dtype: torch.dtype, m: int, nan_filled_memory):
    for weight, given in ((random_weight(n, k, pattern, dtype), pattern), (uneven_weight(n, k, dtype), "0%")):
        packed = to_tiles(EC_CSR.pack(weight, given).to("cuda"))
        assert torch.equal(packed.unpack().cpu(), weight)
        x, bias = operands(packed, m)
        product = gemm.prepare(problem_of(x, packed))
        y = product(x, packed, bias)
        check(y, x, packed, bias)
        assert torch.equal(product(x, packed, bias), y), "two calls differ"
