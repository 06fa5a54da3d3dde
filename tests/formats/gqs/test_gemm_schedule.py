"""The schedules of `gemm`: arithmetic that holds on every GPU."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats.gqs.cuda.gemm_schedule import SIZES, choose_gemm
from tests.cuda_emulator import gpu

H200 = gpu()
A100 = replace(gpu(108, (8, 0)), shared_per_sm=164 << 10, shared_per_cta=163 << 10)
ADA = replace(gpu(128, (8, 9)), shared_per_sm=100 << 10, shared_per_cta=99 << 10)


@given(
    m=st.integers(1, 5000),
    n=st.integers(1, 200_000),
    k=st.integers(1, 60_000),
    bits=st.sampled_from((2, 3, 4, 8)),
    size=st.sampled_from(SIZES),
    facts=st.sampled_from([H200, A100, ADA]),
)
def test_a_schedule_fits_the_gpu_and_covers_the_weight(m, n, k, bits, size, facts):
    schedule = choose_gemm(m, n, k, bits, size, facts)
    assert schedule.slices(bits, size) % schedule.prefetch == 0
    assert schedule.slices(bits, size) >= 2
    assert schedule.fits(facts)
    assert schedule.threads * schedule.ctas_per_sm <= (384 if schedule.tile_m <= 32 else 256)  # 168 or 255 registers
    assert 1 <= schedule.split_k <= schedule.k_tiles(k, size)
    assert schedule.row_ctas(n) * schedule.warps_n * schedule.row_tiles * 16 >= n
    assert schedule.k_tiles(k, size) * 4 * schedule.k_tile >= k
    assert -(-m // schedule.tile_m) * schedule.tile_m - m < max(8, m)


def test_tokens_are_divided_into_even_tiles():
    assert [choose_gemm(m, 4096, 4096, 4, 16, H200).tile_m for m in (1, 16, 17, 96, 128, 192, 256)] == [
        8, 16, 24, 96, 64, 96, 64,
    ]  # fmt: skip


def test_small_weights_split_k_and_large_ones_do_not():
    assert choose_gemm(64, 1024, 8192, 4, 16, H200).split_k > 1
    assert choose_gemm(64, 200_000, 4096, 4, 16, H200).split_k == 1
