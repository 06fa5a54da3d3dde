"""How work is divided: what must hold for every shape, whatever the measured constants are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats import Problem, WeightSpec
from semisparse.formats.base import Params
from semisparse.formats.kernel import bucket_of
from semisparse.formats.slide24.cuda import gemm, schedule
from semisparse.formats.slide24.cuda.lift import Lift
from semisparse.formats.slide24.storage import gpu
from semisparse.patterns import parse_pattern

SHARED = 227 << 10


@given(
    m=st.integers(1, 70000),
    row_tiles=st.integers(3, 600),
    k_tiles=st.integers(1, 300),
    sms=st.sampled_from((132, 114, 78)),
)
def test_every_m_of_a_bucket_is_computed_by_the_buckets_tile(m, row_tiles, k_tiles, sms):
    tile = schedule.choose(bucket_of(m), row_tiles, k_tiles, sms).tile
    launch = schedule.launch_of(tile, m, row_tiles, k_tiles, sms)
    clusters, tiles = sms // tile.cluster, tile.count(m, row_tiles)
    assert 0 <= launch.tokens - m < tile.tokens
    assert launch.tokens % tile.tokens == 0
    assert tiles * tile.tokens * tile.warpgroups * tile.cluster >= m * row_tiles
    split = tiles - launch.whole_tiles
    assert launch.whole_tiles % clusters == 0 or not split, "only the last wave is split"
    assert split * launch.splits <= clusters, "what is split is one wave"
    assert 1 <= launch.splits <= k_tiles, "every split has a K tile"
    assert launch.arrivals == split * tile.cluster * tile.warpgroups
    assert launch.partial_bytes == launch.arrivals * launch.splits * 64 * tile.tokens * 4
    assert launch.ctas == min(launch.whole_tiles + split * launch.splits, clusters) * tile.cluster


def test_few_tiles_of_many_columns_are_split():
    few, many = (schedule.choose(m, 56, 222, 132) for m in (64, 4096))
    assert few.splits > 1
    assert few.whole_tiles(64, 56, 132) == 0
    assert many.splits > 1, "3.4 waves"
    assert many.whole_tiles(4096, 56, 132) == 3 * 66
    assert schedule.choose(4096, 592, 42, 132).splits == 1, "35.9 waves"


def test_every_tile_fits_into_shared_memory():
    for tile in schedule.CTA_TILES:
        for itemsize in (1, 2):
            assert tile.stages(itemsize, SHARED) >= 3
            assert tile.shared_bytes(itemsize, SHARED) <= SHARED - schedule.GEMM_STATIC_SHARED
            assert tile.stages(itemsize, SHARED) > schedule.STAGGER, "a warpgroup waits for one with stages left"
        assert tile.tokens * gpu.K_TILE_BYTES // tile.cluster % 1024 == 0, "multicasts are whole units of 8 tokens"
        assert tile.warpgroups <= gpu.MIN_ROW_TILES


@given(
    st.integers(1, 4096),
    st.integers(1, 60_000),
    st.sampled_from((4, 6, 8, 10, 34)),
    st.sampled_from((None, torch.int8)),
)
def test_a_lifted_token_has_room_for_every_window(m, k, window, dtype):
    lift, chosen = Lift(m, k, window, torch.float16, dtype), schedule.choose_lift(m, k)
    assert lift.token_bytes % 128 == chosen.threads % 32 == 0
    assert chosen.vectors in schedule.LIFT_VECTORS
    for pair in (window // 2 - 1, window // 2, lift.token_bytes - 1):
        assert pair * schedule.reciprocal_of(window // 2) >> 32 == pair // (window // 2), "the division of lift.cu"


@given(st.integers(2, 600).map(lambda half: 2 * half), st.sampled_from((1, 2)))
def test_a_span_holds_whole_groups(window, itemsize):
    span = schedule.unpack_span(window, itemsize)
    lifted = span.columns // window * 2 * (window - 2)
    assert span.columns % window == 0
    assert lifted * itemsize == span.k_tiles * gpu.K_TILE_BYTES


@pytest.mark.parametrize(
    ("pattern", "kind", "most"),
    [("2:4", None, 65536), ("4:6", None, 65536), ("6:8", None, 2048), ("6:8", "int8", 65536), ("8:10", None, 1024)],
)
def test_the_gemm_pays_up_to_the_tokens_that_the_readme_names(pattern: str, kind: str | None, most: int):
    params = Params({"layout": "tiles"} if kind is None else {"layout": "tiles", "kind": kind})
    spec = WeightSpec("slide24", 1, parse_pattern(pattern), (4096, 4096), torch.bfloat16, params)
    for m in (1, 64, 1024, 1536, 2048, 3072, 4096, 65536):
        problem = Problem(m, spec, torch.bfloat16, torch.device("cuda"))
        assert gemm.pays(problem) == (m <= most), m
