"""Schedules fit their kernels, and costs are those by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats import Pass, WeightSpec
from semisparse.formats.kernel import Problem
from semisparse.formats.vector_nm.cuda import decode_schedule
from semisparse.formats.vector_nm.cuda.decode_schedule import choose_decode, choose_decode_tensor
from semisparse.formats.vector_nm.cuda.schedule import choose_gemm, gemm_lengths
from semisparse.patterns import VectorNM, parse_pattern
from tests.formats.vector_nm.reference import VECTOR_NM

HALF = VectorNM(16, 32, 32)
FP16, FP32 = torch.float16, torch.float32

windows = st.integers(1, 20) | st.sampled_from([32, 64, 256])
lengths = st.sampled_from([1, 3, 4, 8, 16, 32, 64, 128])
patterns = windows.flatmap(lambda window: st.builds(VectorNM, st.integers(1, window), st.just(window), lengths))
limits = st.sampled_from([99 << 10, 163 << 10, 227 << 10])


@given(patterns, st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([FP16, FP32]), limits)
def test_gemm_stages_hold_the_columns_of_their_slots(pattern: VectorNM, m: int, n: int, dtype, limit: int):
    schedule = choose_gemm(pattern, m, n, dtype, 132, limit)
    if schedule is None:
        assert pattern.length not in gemm_lengths(dtype.itemsize)
        return
    assert schedule.shared <= limit
    assert schedule.slots % (16 if dtype == FP16 else 4) == 0
    for first in range(0, 40 * schedule.slots, schedule.slots):
        windows = (first + schedule.slots - 1) // pattern.keep - first // pattern.keep + 1
        assert schedule.columns >= min(schedule.groups * schedule.slots, windows * pattern.window)
        if not schedule.packed:
            assert first % pattern.keep == 0
            assert schedule.columns == windows * pattern.window


@given(patterns, st.integers(1, 16), st.integers(1, 30000), limits)
def test_panels_of_x_fit_and_end_with_tiles(pattern: VectorNM, m: int, k: int, limit: int):
    schedule = choose_decode_tensor(pattern, FP16, m, k, limit)
    if schedule is None:
        assert pattern.window * 16 > 99 << 10 or pattern.window > 8
        return
    windows = schedule.windows_per_panel(k, limit)
    assert schedule.tile_m >= m
    assert schedule.shared_bytes(windows) <= limit
    if windows * pattern.window < k:
        assert windows * pattern.keep % decode_schedule.TILE_SLOTS == 0
        assert windows * pattern.window % decode_schedule.CHUNK_COLUMNS == 0


def test_small_products_take_small_tiles():
    """Each of 132 SMs has work: 4096 x 4096 outputs are 512 of the largest tiles."""
    tiles = [choose_gemm(HALF, m, 4096, FP32, 132).tile for m in (4096, 512, 256, 64)]
    assert [(tile.m, tile.n) for tile in tiles] == [(128, 256), (128, 128), (64, 128), (32, 64)]
    assert [choose_decode(HALF, FP16, 1, n, 132).warps for n in (4096, 11008)] == [16, 8]
    assert [choose_decode_tensor(HALF, FP16, m, 4096, 227 << 10).tile_m for m in (1, 2, 8, 16)] == [1, 8, 8, 16]


def test_ctas_that_are_replaced_together_count_as_full_waves():
    """344 CTAs of 128 x 128 are two waves of 264 on 132 SMs, the second mostly empty: small CTAs are faster."""
    tile = choose_gemm(HALF, 512, 11008, FP32, 132).tile
    assert (tile.m, tile.n) == (32, 64)


def test_intensity_is_equation_3():
    """Whole windows read all of x, packed ones what any of the eight groups of a tile is expected to keep."""
    schedule = choose_gemm(HALF, 4096, 4096, FP32, 132)
    assert (schedule.tile.m, schedule.tile.n, schedule.packed) == (128, 256, False)
    whole = 2 * 128 * 256 * 2048 / (4 * (128 * 4096 + 2048 * 256 + 128 * 256))
    assert schedule.intensity(HALF, 4096) == pytest.approx(whole)
    sixteenth = VectorNM(2, 32, 32)
    schedule = choose_gemm(sixteenth, 4096, 4096, FP32, 132)
    assert (schedule.tile.m, schedule.tile.n, schedule.packed) == (128, 256, True)
    columns = (1 - (15 / 16) ** 8) * 4096
    packed = 2 * 128 * 256 * 256 / (4 * (128 * columns + 256 * 256 + 128 * 256))
    assert schedule.intensity(sixteenth, 4096) == pytest.approx(packed)


def cost(m: int, n: int, k: int, pattern: str, dtype: torch.dtype) -> tuple[Pass, ...]:
    spec = WeightSpec("vector_nm", 1, parse_pattern(pattern), (n, k), dtype)
    return VECTOR_NM.cost(Problem(m, spec, dtype, torch.device("cuda")), 1e6)


def test_costs_by_hand():
    one = cost(1, 4096, 2048, "8:32v32", FP16)
    assert one == (Pass(1e6 + 2 * (4096 + 2048), 2 * 4096 * 512, "tensor fp16"),)
    assert cost(16, 4096, 2048, "8:32v32", FP16)[0].bytes == 1e6 + 16 * 2 * (4096 + 2048)
    assert cost(16, 4096, 2048, "8:32v8", FP16)[0].bytes == 2e6 + 16 * 2 * (4096 + 2048)
    assert cost(16, 4096, 2048, "8:32v8", FP16)[0].unit == "fp32"
    moved, product = cost(4096, 8192, 2048, "2:32v32", FP32)
    assert (moved.bytes, moved.operations) == (2 * 4096 * 2048 * 4, 0)
    assert (product.operations, product.unit) == (2 * 4096 * 8192 * 128, "fp32")
    assert product.strategy.startswith("packing, ")
    assert cost(4096, 8192, 2048, "8:32v1", FP16)[0].strategy == "unpacked"
    assert cost(4096, 8192, 2048, "16:32v32", FP16)[0].strategy == "unpacked"
    assert cost(4096, 8192, 2048, "8:32v32", FP16)[1].strategy.startswith("non-packing, ")
