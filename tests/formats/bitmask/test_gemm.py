"""gemm.cu and permute_x.cu: split-K, Stream-K and clusters, on ragged shapes, several output tiles and ranges."""

import os

import pytest
import torch

from semisparse.formats.bitmask.cuda import gemm
from semisparse.formats.bitmask.cuda.schedule import gemm_tiles
from semisparse.formats.bitmask.storage.gpu import tiling
from semisparse.formats.product import problem_of
from semisparse.runtime.device import device_facts
from semisparse.runtime.gemm_schedule import Schedule, fit
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.bitmask.weights import BITMASK, check, check_on_gpu, in_tiles, needs_gpu, operands

HALF, BF16 = torch.float16, torch.bfloat16

needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="wgmma is Hopper's"
)

CASES = [  # n, k, keep, dtype, m, SMs, schedule: tile_m, warpgroups, cluster, split_k, stages, x_stages, ctas_per_sm
    (80, 701, 31, BF16, 20, 132, Schedule(32, 1, 1, 3, 3, 1, 3)),
    (80, 701, 5, HALF, 40, 1, Schedule(32, 1, 1, 0, 1, 1, 1)),  # one range has all output tiles
    (130, 700, 32, HALF, 100, 6, Schedule(64, 2, 2, 0, 3, 2, 1)),  # three ranges, one with parts of two output tiles
    (70, 260, 31, BF16, 40, 132, Schedule(32, 1, 1, 1, 2, 1, 2)),
    (37, 300, 64, HALF, 20, 132, Schedule(256, 1, 1, 2, 1, 1, 1)),
    (80, 701, 31, BF16, 20, 2, Schedule(16, 1, 1, 0, 2, 1, 3)),
    (80, 701, 31, BF16, 40, 132, Schedule(32, 1, 1, 3, 3, 1, 3, split_in_cluster=True)),
    (130, 1300, 32, HALF, 100, 132, Schedule(128, 2, 1, 5, 1, 1, 1, split_in_cluster=True)),
]


@needs_compiler
@pytest.mark.parametrize(("n", "k", "keep", "dtype", "m", "sms", "schedule"), mostly_slow(CASES, 0, 2, 6))
def test_emulated(emulated, monkeypatch: pytest.MonkeyPatch, n, k, keep, dtype, m, sms, schedule):
    emulate(monkeypatch, sms)
    check(gemm.prepare, in_tiles(n, k, f"{keep}:64", dtype), m, aligned=m != 100, schedule=schedule)


def test_more_tokens_than_a_grid_has_rows_are_refused(emulated, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("semisparse.runtime.kernel.unavailable", lambda: None)
    packed = in_tiles(16, 64, "32:64")
    assert gemm.refusal(problem_of(torch.empty(49_152, 64, dtype=HALF), packed)) is None
    assert "up to 65280 tokens" in gemm.refusal(problem_of(torch.empty(49_153, 64, dtype=HALF), packed))


@needs_gpu
@needs_hopper
@pytest.mark.parametrize(
    ("n", "k", "keep", "dtype", "m"),
    [
        (64, 512, 32, HALF, 1),
        (33, 701, 31, BF16, 17),
        (1, 1, 64, HALF, 33),
        (257, 4100, 5, BF16, 65),
        (2200, 8200, 16, HALF, 129),
        (130, 520, 64, BF16, 200),
        (9001, 1100, 32, HALF, 300),
    ],
)
def test_on_a_gpu(n: int, k: int, keep: int, dtype: torch.dtype, m: int, nan_filled_memory):
    check_on_gpu("gemm", in_tiles(n, k, f"{keep}:64", dtype), m)


@needs_gpu
@needs_hopper
@pytest.mark.parametrize("cut", ["few output tiles", "more output tiles than ranges"])
@pytest.mark.parametrize(
    ("tile_m", "warpgroups", "cluster", "ctas_per_sm", "split_k"),
    [
        (32, 1, 1, 3, 8),
        (64, 2, 1, 2, 1),
        (64, 2, 2, 1, 0),
        (128, 2, 2, 1, 2),
        (192, 2, 1, 1, 5),
        (256, 2, 2, 1, 0),
    ],
)
def test_schedules_on_a_gpu(tile_m: int, warpgroups: int, cluster: int, ctas_per_sm: int, split_k: int, cut: str):
    n, k = (300, 2500) if cut == "few output tiles" else (9001, 1100)
    packed = in_tiles(n, k, "32:64").to("cuda")
    weight = gemm_tiles(tiling(packed.spec))
    most = min(split_k, weight.column_tiles)
    schedule = fit(weight, device_facts("cuda"), tile_m, warpgroups, cluster, most, ctas_per_sm)
    check(gemm.prepare, packed, 270, schedule=schedule)
    x, _ = operands(packed, 270)
    product = gemm.prepare(problem_of(x, packed), schedule)
    assert torch.equal(product(x, packed, None), product(x, packed, None)), "two calls differ"


@needs_gpu
@needs_hopper
@pytest.mark.skipif("PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ, reason="torch captures no graph without its cache")
def test_in_a_graph_each_launch_waits_for_the_one_before():
    packed = in_tiles(2048, 2048, "32:64", BF16).to("cuda")
    x, _ = operands(packed, 40)
    product = BITMASK.choose(problem_of(x, packed), "gemm").prepare(problem_of(x, packed))

    def chain():
        y = x
        for _ in range(10):
            y = product(y, packed, None)
        return y

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(3):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)
