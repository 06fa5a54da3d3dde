"""The schedules of `full`: arithmetic that holds on every GPU."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats.gqs.cuda.full_schedule import MAX_TOKENS, choose_full, choose_fused
from semisparse.formats.kernel import MAX_FUSED_TOKENS, Problem
from tests.cuda_emulator import gpu
from tests.formats.gqs.reference import GQS

H200 = gpu()
A100 = replace(gpu(108, (8, 0)), shared_per_sm=164 << 10, shared_per_cta=163 << 10)
ADA = replace(gpu(128, (8, 9)), shared_per_sm=100 << 10, shared_per_cta=99 << 10)
KINDS_AND_SIZES = [(bits, size) for bits in (2, 3, 4, 8) for size in (16, 32, 64, 128) if (bits, size) != (3, 16)]


@given(
    m=st.integers(1, MAX_TOKENS),
    n=st.integers(1, 12_000).map(lambda tiles: 16 * tiles),
    k=st.integers(1, 8_000).map(lambda units: 8 * units),
    kind=st.sampled_from(KINDS_AND_SIZES),
    facts=st.sampled_from([H200, A100, ADA]),
)
def test_a_schedule_fits_the_gpu_and_covers_the_weight(m, n, k, kind, facts):
    bits, size = kind
    schedule = choose_full(m, n, k, bits, size, facts)
    assert schedule.fits(k, bits, size, facts)
    assert schedule.threads <= (512 if m <= 32 else 256)  # 128 or 255 registers per thread
    assert schedule.row_ctas(n) * schedule.warps_n * schedule.row_tiles * 16 >= n
    assert schedule.tile_m >= m
    assert not schedule.codes or (schedule.tile_m <= 16 and bits < 8 and size >= 64)


def test_weights_of_a_row_tile_or_two_per_sm_share_k_among_warps():
    assert choose_full(1, 4096, 4096, 4, 128, H200).warps_k == 8
    assert choose_full(1, 28672, 8192, 4, 128, H200).warps_n == 7


@given(
    m=st.integers(1, MAX_FUSED_TOKENS),
    n=st.integers(1, 3_000).map(lambda tiles: 32 * tiles),
    k=st.integers(1, 5_000).map(lambda units: 8 * units),
    epilogue=st.sampled_from(("none", "add", "silu_mul")),
    facts=st.sampled_from([H200, ADA]),
)
def test_a_fused_schedule_keeps_all_of_x(m, n, k, epilogue, facts):
    packed = GQS.pack(torch.ones(16, 256).half(), "g128@0%", kind="w4")
    spec = replace(GQS.structure(packed.spec), shape=(n, k))
    problem = Problem(m, spec, torch.float16, torch.device("cuda"), "rms_norm", epilogue)
    schedule = choose_fused(problem, facts)
    if schedule is None:
        return  # x does not fit
    assert schedule.x_tokens == m
    assert schedule.fits(k, 4, 128, facts)
    assert epilogue != "silu_mul" or schedule.row_tiles == 2
