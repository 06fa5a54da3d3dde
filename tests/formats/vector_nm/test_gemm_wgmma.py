"""`gemm_wgmma` on the emulator, with patterns and every way to divide the work; on a GPU, real launches."""

from dataclasses import replace

import pytest
import torch

from semisparse.formats import linear
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.cuda import gemm_wgmma
from semisparse.formats.vector_nm.cuda.wgmma_schedule import choose_schedule, tiles_of
from semisparse.patterns import VectorNM
from semisparse.runtime.device import device_facts
from semisparse.runtime.gemm_schedule import SPLIT_K, STREAM_K, Schedule, fit
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, emulated, needs_compiler
from tests.formats.vector_nm.reference import VECTOR_NM, check, check_kernel, operands, pack

__all__ = ["emulated"]

HALF, BFLOAT = torch.float16, torch.bfloat16
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
)

CASES = [  # pattern, n, k, m, dtype, SMs, then the fields of Schedule in their order
    ("16:32v32", 100, 700, 20, HALF, 3, (16, 1, 1, 0, 3, 2, 1)),  # Stream-K: ranges with parts of two output tiles
    ("4:32v128", 130, 336, 11, BFLOAT, 132, (32, 1, 1, 2, 2, 1, 3)),
    ("3:4v16", 33, 530, 9, HALF, 132, (16, 2, 2, 1, 4, 2, 1)),  # a cluster, warps past the last row tile
    ("1:32v64", 70, 1030, 40, HALF, 2, (64, 1, 1, 0, 2, 1, 1)),
    ("32:32v48", 50, 300, 70, BFLOAT, 132, (64, 1, 1, 1, 1, 1, 1)),
    ("5:16v32", 40, 261, 33, BFLOAT, 132, (64, 1, 1, 2, 2, 1, 1)),
    ("16:32v32", 200, 700, 20, HALF, 2, (32, 3, 1, 0, 2, 1, 1, 2)),  # two producer warpgroups
]


@needs_compiler
@pytest.mark.parametrize(("pattern", "n", "k", "m", "dtype", "sms", "schedule"), mostly_slow(CASES, 0, 1, 6))
def test_emulated(emulated, monkeypatch, pattern, n, k, m, dtype, sms, schedule):
    emulate(monkeypatch, sms)
    check_kernel(lambda problem: gemm_wgmma.prepare(problem, Schedule(*schedule)), pack(pattern, n, k, dtype), m)


@pytest.mark.parametrize("pattern", [(16, 32, 32), (32, 32, 16), (1, 32, 128), (1, 2, 48)])
def test_every_schedule_fits_and_gives_each_range_work(monkeypatch, pattern: tuple[int, int, int]):
    emulate(monkeypatch)
    facts = device_facts("cpu")
    for n, k in ((16, 64), (4096, 4096), (28672, 8192), (333, 20_000)):
        tiles = tiles_of(n, k, VectorNM(*pattern))
        for m in (1, 16, 24, 64, 100, 256, 5000):
            found = choose_schedule(m, tiles, facts)
            assert found.ctas_per_sm * (found.shared(tiles) + 1024) <= facts.shared_per_sm
            ranges = found.ranges(m, tiles, facts.sms)
            assert 1 <= ranges <= found.tiles(m, tiles) * tiles.column_tiles
            assert found.split_k == 1 or ranges * found.cluster <= facts.sms * found.ctas_per_sm


def test_large_weights_have_two_producer_warpgroups(monkeypatch):
    """As they were the fastest on an H200: results/h200/sweeps/few-tokens.csv."""
    emulate(monkeypatch)
    for (n, k), producers in (
        ((28672, 8192), [2, 2, 2, 1]),
        ((4096, 4096), [1, 1, 1, 1]),
        ((11008, 4096), [1, 1, 1, 1]),
    ):
        tiles = tiles_of(n, k, VectorNM(16, 32, 32))
        found = [choose_schedule(m, tiles, device_facts("cpu")) for m in (16, 32, 64, 256)]
        assert [schedule.producers for schedule in found] == producers


@pytest.mark.parametrize(
    ("pattern", "dtype", "reason"),
    [
        ("16:32v32", torch.float32, "takes float16 and bfloat16"),
        ("16:32v8", HALF, "multiple of 16 rows"),
        ("24:48v32", HALF, "windows that divide 32"),
    ],
)
def test_what_the_kernel_refuses(monkeypatch, pattern, dtype, reason):
    emulate(monkeypatch)
    packed = pack(pattern, 40, 96, dtype)
    assert reason in gemm_wgmma.refusal(problem_of(torch.empty(1, 96, dtype=dtype), packed))


@needs_hopper
@pytest.mark.parametrize("m", [1, 17, 40, 64, 100, 200, 600])
@pytest.mark.parametrize(
    ("pattern", "dtype", "n", "k"),
    [
        ("16:32v32", HALF, 9000, 1024),
        ("16:32v32", BFLOAT, 700, 4100),
        ("8:32v64", BFLOAT, 1000, 5000),
        ("24:32v128", HALF, 333, 2600),
        ("3:4v16", BFLOAT, 2048, 3000),
    ],
)
def test_on_a_gpu(pattern: str, dtype: torch.dtype, n: int, k: int, m: int):
    packed = VECTOR_NM.arrange(pack(pattern, n, k, dtype).to("cuda"), "cuda")
    x, bias = operands(packed, m)
    y = linear(x, packed, bias, kernel="gemm_wgmma")
    check(y, x, packed, bias)
    assert all(torch.equal(y, linear(x, packed, bias, kernel="gemm_wgmma")) for _ in range(5))


@needs_hopper
@pytest.mark.parametrize(
    ("tile_m", "shape", "split_k"),
    [(tile_m, shape, 0) for tile_m, shapes in STREAM_K.items() for shape in shapes]
    + [(tile_m, shape, split_k) for tile_m, shapes in SPLIT_K.items() for shape in shapes for split_k in (1, 3)]
    + [(tile_m, (4, 1, 1), 0) for tile_m in (16, 32, 64)],
)
@pytest.mark.parametrize("slow_copies", [False, True])
def test_every_shape_on_a_gpu(tile_m: int, shape: tuple[int, int, int], split_k: int, slow_copies: bool):
    packed = pack("16:32v32", 3000, 4100).to("cuda")
    x, bias = operands(packed, 2 * tile_m - 3)
    warpgroups, cluster, ctas = shape
    tiles = replace(tiles_of(3000, 4100, VectorNM(16, 32, 32)), slow_copies=slow_copies)
    schedule = fit(tiles, device_facts("cuda"), tile_m, warpgroups, cluster, split_k, ctas)
    product = gemm_wgmma.prepare(problem_of(x, packed), schedule)
    y = product(x, packed, bias)
    check(y, x, packed, bias)
    assert all(torch.equal(y, product(x, packed, bias)) for _ in range(10))
