"""`gemm_wgmma`: its sources in the emulator, with every kind, size of groups and schedule; on a GPU, real launches."""

from dataclasses import replace

import pytest
import torch

from semisparse.formats.gqs.cuda import gemm_wgmma
from semisparse.formats.gqs.cuda.wgmma_schedule import RATES, tiles_of
from semisparse.formats.kernel import Problem
from semisparse.formats.product import problem_of
from semisparse.runtime.device import device_facts
from semisparse.runtime.gemm_schedule import SPLIT_K, STREAM_K, Schedule, choose, fit
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.gqs.reference import GQS, check, check_product, operands, packed_weight
from tests.formats.gqs.test_gemm import KINDS_AND_SIZES

HALF, BFLOAT = torch.float16, torch.bfloat16
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
)

SCHEDULES = [  # kind, dtype, m, n, k, pattern, SMs, then the fields of Schedule in their order
    (
        "w4",
        HALF,
        20,
        100,
        2100,
        "g16@50%",
        3,
        (16, 1, 1, 0, 3, 2, 1),
    ),  # Stream-K: ranges with parts of two output tiles
    ("w4", BFLOAT, 40, 70, 1030, "g128@30%", 132, (32, 1, 1, 3, 2, 1, 3)),  # split-K inside of chunks
    ("w2", HALF, 9, 300, 700, "g64@0%", 132, (16, 2, 2, 1, 4, 2, 1)),  # a cluster, warps past the last row tile
    ("w8", HALF, 70, 40, 1400, "g16@50%", 2, (64, 1, 1, 0, 2, 1, 1)),
    ("w3", BFLOAT, 5, 33, 2600, "g8@50%", 1, (16, 1, 1, 0, 4, 2, 1)),  # several windows of headers
    ("w4a8", HALF, 18, 40, 512, "g16@50%", 132, (32, 1, 1, 2, 3, 1, 1)),
    ("w4", BFLOAT, 32, 80, 2100, "g16@50%", 132, (32, 1, 1, 6, 3, 2, 3)),  # o and down with 32 tokens in the engine
]


@needs_compiler
@pytest.mark.parametrize(("kind", "dtype", "size"), mostly_slow(KINDS_AND_SIZES, 0))
def test_every_kind_and_size(emulated, kind: str, dtype: torch.dtype, size: int):
    """Weights are those of `Packed.unpack`: a token that has a single 1 shows a column of them."""
    k = 4 * size + 56
    packed = packed_weight(21, k, f"g{size}@30%", dtype, kind=kind)
    weight, x = packed.unpack(), torch.zeros(16, k, dtype=dtype)
    for i, column in enumerate(range(0, k, -(-k // 16))):
        x[i, column] = 1
    product = gemm_wgmma.prepare(problem_of(x, packed), Schedule(16, 1, 1, 1, 2, 1, 1))
    assert torch.equal(product(x, packed, None), x @ weight.T)
    x, bias = operands(packed, 16)
    check_product(product(x, packed, bias), x, packed, bias)


@needs_compiler
@pytest.mark.parametrize(("kind", "dtype", "m", "n", "k", "pattern", "sms", "schedule"), mostly_slow(SCHEDULES, 0, 1))
def test_every_schedule(emulated, monkeypatch, kind, dtype, m, n, k, pattern, sms, schedule):
    emulate(monkeypatch, sms)
    packed = packed_weight(n, k, pattern, dtype, kind=kind)
    x, bias = operands(packed, m)
    product = gemm_wgmma.prepare(problem_of(x, packed), Schedule(*schedule))
    y = product(x, packed, bias)
    check_product(y, x, packed, bias)
    check_product(product(x, packed, None), x, packed, None)
    assert torch.equal(y, product(x, packed, bias))


def test_gemms_that_start_early_fill_every_sm():
    """Few tokens of a layer of 4,096 outputs: 384 CTAs, as many as three per SM, instead of 256."""
    gpu, weight = replace(device_facts("cpu"), sms=132, shared_per_sm=228 << 10), tiles_of(4096, 11008, 4, 16)
    ranges = {
        (m, early): choose(m, weight, gpu, RATES, early).ranges(m, weight, gpu.sms)
        for m in (16, 32, 64)
        for early in (False, True)
    }
    assert [ranges[m, False] for m in (16, 32, 64)] == [256, 256, 384]
    assert [ranges[m, True] for m in (16, 32, 64)] == [384, 384, 384]


FULL_SCHEDULES = [  # as SCHEDULES, of weights of which nothing is dropped
    ("w4", HALF, 20, 96, 2100, 128, 3, (16, 1, 1, 0, 3, 2, 1)),  # one group in the last chunk
    ("w4", BFLOAT, 40, 80, 1030, 128, 132, (32, 1, 1, 3, 2, 1, 3)),
    ("w2", HALF, 9, 304, 700, 64, 132, (16, 2, 2, 1, 4, 2, 1)),
    ("w3", BFLOAT, 5, 32, 1100, 32, 1, (16, 1, 1, 0, 4, 2, 1)),
    ("w4", HALF, 5, 48, 2120, 16, 2, (16, 1, 1, 0, 4, 2, 1)),  # chunks past K in the last tile
    ("w8", BFLOAT, 18, 48, 520, 8, 132, (32, 1, 1, 2, 3, 1, 1)),
    ("w8", HALF, 70, 32, 1400, 128, 2, (64, 1, 1, 0, 2, 1, 1)),
]


@needs_compiler
@pytest.mark.parametrize(("kind", "dtype", "m", "n", "k", "size", "sms", "schedule"), mostly_slow(FULL_SCHEDULES, 0))
def test_weights_of_which_nothing_is_dropped(emulated, monkeypatch, kind, dtype, m, n, k, size, sms, schedule):
    emulate(monkeypatch, sms)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(dtype)
    packed = GQS.pack(weight, f"g{size}@0%", kind=kind)
    x, bias = operands(packed, m)
    problem = problem_of(x, packed)
    assert problem.params["full"]
    product = gemm_wgmma.prepare(problem, Schedule(*schedule))
    y = product(x, packed, bias)
    check_product(y, x, packed, bias)
    assert torch.equal(y, product(x, packed, bias))
    masked = Problem(problem.m, replace(problem.spec, params=problem.params.without("full")), dtype, problem.device)
    assert torch.equal(y, gemm_wgmma.prepare(masked, Schedule(*schedule))(x, packed, bias))


@needs_compiler
@pytest.mark.slow
def test_chunks_and_rows_that_keep_nothing(emulated):
    """M and the number of kept groups are read at each call; a weight may keep none."""
    weight = torch.randn(50, 1100, generator=torch.Generator().manual_seed(1)).half()
    weight[:16, 64:512] = 0
    weight[16:32] = 0
    weight[:, 1048:] = 0
    some, none = GQS.pack(weight, "g16@0%", kind="w4"), GQS.pack(weight * 0, "g16@0%", kind="w4")
    problem = Problem(8, GQS.structure(some.spec), HALF, torch.device("cpu"))
    product = gemm_wgmma.prepare(problem, Schedule(16, 1, 1, 2, 3, 1, 1))
    for packed in (some, none):
        for m in (5, 8):
            x, bias = operands(packed, m)
            check(product(x, packed, bias), x, packed.unpack(), bias)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [8, 16, 32, 64, 128])
def test_every_schedule_fits_and_gives_each_range_work(monkeypatch, bits: int, size: int):
    emulate(monkeypatch)
    facts = device_facts("cpu")
    for n, k in ((16, 64), (4096, 4096), (28672, 8192), (333, 20_000)):
        tiles = tiles_of(n, k, bits, size)
        for m in (1, 16, 24, 64, 100, 256, 5000):
            found = choose(m, tiles, facts, RATES)
            assert found.ctas_per_sm * (found.shared(tiles) + 1024) <= facts.shared_per_sm
            ranges = found.ranges(m, tiles, facts.sms)
            assert 1 <= ranges <= found.tiles(m, tiles) * tiles.column_tiles
            assert found.split_k == 1 or ranges * found.cluster <= facts.sms * found.ctas_per_sm


@needs_hopper
@pytest.mark.parametrize(
    ("tile_m", "shape", "split_k"),
    [(tile_m, shape, 0) for tile_m, shapes in STREAM_K.items() for shape in shapes]
    + [(tile_m, shape, split_k) for tile_m, shapes in SPLIT_K.items() for shape in shapes for split_k in (1, 3)],
)
def test_every_shape_on_a_gpu(tile_m: int, shape: tuple[int, int, int], split_k: int):
    packed = packed_weight(3000, 4100, "g16@50%", HALF, kind="w4").to("cuda")
    x, bias = operands(packed, 2 * tile_m - 3, device="cuda")
    warpgroups, cluster, ctas = shape
    schedule = fit(tiles_of(3000, 4100, 4, 16), device_facts("cuda"), tile_m, warpgroups, cluster, split_k, ctas)
    product = gemm_wgmma.prepare(problem_of(x, packed), schedule)
    y = product(x, packed, bias)
    check_product(y, x, packed, bias)
    assert all(torch.equal(y, product(x, packed, bias)) for _ in range(10))
