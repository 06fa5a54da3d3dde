"""The schedules of `decode`: arithmetic that holds on every GPU."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats import get_format
from semisparse.formats.gqs.cuda.schedule import CODE_TOKENS, choose, choose_fused
from semisparse.formats.kernel import Problem
from tests.cuda_emulator import gpu

H200 = gpu()
ADA = replace(gpu(128, (8, 9)), shared_per_sm=100 << 10, shared_per_cta=99 << 10)


@given(
    m=st.sampled_from([1, 2, 4, 8, 16]),
    n=st.integers(1, 200_000),
    k=st.integers(1, 60_000),
    bits=st.sampled_from([4, 8]),
    int8_x=st.booleans(),
    facts=st.sampled_from([H200, ADA]),
)
def test_a_schedule_fits_the_gpu_and_covers_the_weight(m, n, k, bits, int8_x, facts):
    schedule = choose(m, n, k, torch.float16, bits, int8_x, facts)
    assert m <= schedule.tokens
    assert schedule.fits(n, k, facts)
    assert schedule.aligned_k == (k % 256 == 0)
    assert schedule.threads * schedule.ctas_per_sm <= 512  # 128 registers per thread
    row_tiles = -(-n // 16)
    ctas = schedule.ctas(row_tiles, facts)
    assert 1 <= ctas <= row_tiles
    assert ctas == row_tiles if not schedule.stream_k else ctas <= facts.sms * schedule.ctas_per_sm
    kept = -(-k // 16) * n // 2
    assert schedule.prefetched_groups(kept, ctas) % 16 == 0


def test_few_tokens_multiply_codes_unless_x_does_not_fit_beside_them():
    for m in (1, 2):
        assert choose(m, 4096, 4096, torch.float16, 4, False, H200).tokens == m
        assert choose(m, 4096, 4096, torch.float16, 8, False, H200).tokens == 8  # 8-bit codes are dequantised
    large = choose(2, 4096, 100_000, torch.float16, 4, True, H200)
    assert large.tokens not in CODE_TOKENS
    assert not large.int8_x


@pytest.mark.parametrize(("n", "stream_k"), [(16 * 264, False), (16 * 264 + 1, True)])
def test_more_row_tiles_than_two_per_sm_are_streamed(n: int, stream_k: bool):
    assert choose(1, n, 4096, torch.float16, 4, False, H200).stream_k == stream_k
    assert not choose(8, n, 4096, torch.float16, 4, False, H200).stream_k


@pytest.mark.parametrize("epilogue", ["none", "silu_mul"])
def test_what_a_gated_epilogue_keeps_in_shared_memory_counts(epilogue: str):
    """Without the accumulators of its row tiles the kernel would fit, and its launch fail."""
    weight = torch.randn(1024, 512, dtype=torch.float16)
    spec = get_format("gqs").pack(weight, "g16@0%", kind="w4").spec
    problem = Problem(2, spec, torch.float16, torch.device("cuda"), prologue="rms_norm", epilogue=epilogue)
    roomy = gpu(sms=4)
    schedule = choose_fused(problem, roomy)
    assert schedule is not None
    kept = schedule.gated_bytes(1024, roomy)
    assert kept == (2 * 9 * 16 * 2 * 4 if epilogue == "silu_mul" else 0)
    needed = next(
        room for room in range(roomy.shared_per_cta) if schedule.fits(1024, 512, replace(roomy, shared_per_cta=room))
    )
    tight = choose_fused(problem, replace(roomy, shared_per_cta=needed - 1))
    assert tight is None or tight.warps < schedule.warps
