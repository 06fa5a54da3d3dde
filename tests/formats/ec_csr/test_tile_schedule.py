"""Schedules of decode_tiles, which fit the GPU whatever the weight, and which kernel takes how many tokens."""

from dataclasses import replace

import pytest
import torch

from semisparse.formats.base import Params
from semisparse.formats.ec_csr.cuda import decode, decode_tiles, gemm
from semisparse.formats.ec_csr.cuda.tile_schedule import WARPS_PER_SM, choose_fused_tiles, choose_tiles
from semisparse.formats.ec_csr.storage.gpu import to_tiles
from semisparse.formats.ec_csr.storage.tiles import LIMITS
from semisparse.formats.kernel import Problem
from semisparse.formats.product import problem_of
from semisparse.formats.tuned import measured_times
from tests.cuda_emulator import emulate, gpu
from tests.formats.ec_csr.weights import EC_CSR, random_weight

SMALL_GPU = replace(gpu(84, (8, 9)), shared_per_sm=100 << 10, shared_per_cta=99 << 10)


def problem(n: int, k: int, m: int, words: int, epilogue: str = "none") -> Problem:
    packed = to_tiles(EC_CSR.pack(random_weight(16, 256, "70%"), "70%"))
    spec = replace(packed.spec, shape=(n, k), params=Params({**packed.params, "words_limit": words}))
    return Problem(m, spec, torch.float16, torch.device("cpu"), epilogue=epilogue)


@pytest.mark.parametrize("facts", [gpu(), SMALL_GPU])
@pytest.mark.parametrize("words", [LIMITS[0], 34, LIMITS[-1]])
def test_every_shape_has_a_schedule_that_fits(facts, words: int):
    for n, k in ((16, 64), (4096, 4096), (11008, 4096), (4096, 11008), (28672, 8192), (512, 65536)):
        for m in (1, 2, 8, 16):
            schedule = choose_tiles(problem(n, k, m, words), facts)
            assert schedule.shared <= facts.shared_per_cta
            assert m <= schedule.tile_m
            assert schedule.warps <= WARPS_PER_SM[schedule.tile_m]
            assert schedule.ctas * schedule.warps_n < -(-n // 16) + schedule.warps_n
            fused = choose_fused_tiles(problem(n, k, min(m, 2), words, "silu_mul"), facts)
            assert fused is None or (fused.warps_n == 2 and fused.shared <= facts.shared_per_cta)


def test_what_runs_with_how_many_tokens(monkeypatch: pytest.MonkeyPatch):
    emulate(monkeypatch)
    monkeypatch.setattr("semisparse.runtime.kernel.unavailable", lambda: None)
    packed = to_tiles(EC_CSR.pack(random_weight(9000, 64, "70%"), "70%"))
    for m, pays, runs in ((8, True, True), (16, False, True), (17, False, False)):
        of_m = problem_of(torch.zeros(m, 64).half(), packed)
        assert (decode_tiles.pays(of_m), decode_tiles.refusal(of_m) is None) == (pays, runs)
        assert gemm.refusal(of_m) is None
    assert decode_tiles.pays(problem(4096, 4096, 16, 34))
    in_lists = EC_CSR.arrange(EC_CSR.pack(random_weight(40, 64, "70%"), "70%", on_gpu="lists"), "cuda")
    assert "stored in banks" in gemm.refusal(problem_of(torch.zeros(1, 64).half(), in_lists))


def both(m: int) -> Problem:
    """Return the problem of a weight in lists and tiles."""
    of_tiles = problem(4096, 11008, m, 34)
    return replace(of_tiles, spec=replace(of_tiles.spec, params=Params({**of_tiles.params, "layout": "both"})))


@pytest.mark.parametrize(("n", "k"), [(28672, 8192), (4096, 4096), (11008, 4096), (4096, 11008)])
def test_by_the_shipped_table_an_h200_reads_lists_for_few_tokens_and_tiles_for_more(n: int, k: int):
    packed = EC_CSR.pack(random_weight(16, 256, "70%"), "70%")
    on_tiles = {"decode_tiles", "gemm"}
    for m in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024):
        of_m = Problem(m, replace(packed.spec, shape=(n, k)), torch.float16, torch.device("cuda"))
        times = measured_times(of_m, EC_CSR.tuned_by, "NVIDIA H200")
        if not times:  # 4 tokens at 4096 x 11008 were not timed: `pays` decides
            assert (n, k, m) == (4096, 11008, 4)
            assert not decode.pays(both(m))
            assert decode_tiles.pays(both(m))
            continue
        fastest = min(times, key=lambda kernel: times[kernel].us)
        assert (fastest == "decode") if m <= 2 else (fastest in on_tiles), (m, times)
        if 4 <= m <= 32:
            assert times[fastest].us < times[fastest].dense_us
