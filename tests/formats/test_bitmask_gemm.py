"""The order of x that tiled_gemm.cu multiplies, and how its work is dealt out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats.base import get_format
from semisparse.formats.bitmask.gemm import SPLIT, choose, pays
from semisparse.formats.kernel import Problem
from semisparse.patterns import parse_pattern
from tests.formats.test_bitmask_division import H200
from tests.formats.test_bitmask_tiles import Warp, random_weight


def columns_of(x, tokens, column_tiles):
    """Give x as tiled_columns.cu does: [token tiles, slices, tokens, 64]."""
    padded = torch.zeros(-(-len(x) // tokens) * tokens, 256 * column_tiles, dtype=x.dtype)
    padded[: len(x), : x.shape[1]] = x
    words = padded.view(-1, tokens, column_tiles, 4, 4, 8, 2)  # tile, token, column tile, block, slice, unit, value
    units = words.permute(0, 2, 4, 1, 5, 3, 6).reshape(-1, 4 * column_tiles, tokens, 8, 8)
    places = torch.arange(8) ^ torch.arange(tokens)[:, None] % 8  # 128-byte swizzle: an exchange, its own inverse
    return units.gather(3, places[..., None].expand_as(units)).flatten(3)


def operand(slice_of_x, step):
    """Read the 16 columns of a step as wgmma does: units 2 * step and 2 * step + 1 of each token's row."""
    rows = slice_of_x.unflatten(1, (8, 8))
    places = torch.arange(2 * step, 2 * step + 2) ^ torch.arange(len(rows))[:, None] % 8
    return rows.gather(1, places[..., None].expand(-1, -1, 8)).flatten(1).double().numpy()


@pytest.mark.parametrize("keep", [7, 32])
def test_the_products_of_fragments_and_columns_sum_to_the_product(keep):
    n, k, m, tokens = 16, 300, 13, 32
    weight = random_weight(n, k, f"{keep}:64")
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).half()
    tiles = get_format("bitmask").pack(weight, f"{keep}:64", layout="tiles").tensors["tiles"]
    columns = columns_of(x, tokens, tiles.shape[1])
    lane = np.arange(32)
    y = np.zeros((tokens, n))
    for column_tile in range(tiles.shape[1]):
        warp = Warp(tiles[0, column_tile])
        for step in range(16):
            fragment = np.zeros((16, 16))
            found = warp.take(step).view(np.float16)  # lane, row half, column
            for half in range(2):
                for i in range(4):
                    fragment[lane // 4 + 8 * half, lane % 4 * 2 + i % 2 + i // 2 * 8] = found[:, half, i]
            y += operand(columns[0, column_tile * 4 + step // 4], step % 4) @ fragment.T
    expected = x.double().numpy() @ weight.double().numpy().T
    assert np.abs(y[:m] - expected).max() <= 1e-12 * np.abs(expected).max()


@given(
    m=st.integers(1, 65_535),
    row_tiles=st.integers(1, 20_000),
    column_tiles=st.integers(1, 500),
    keep=st.integers(1, 64),
)
def test_every_grid_fits_a_processor_and_gives_each_share_work(m, row_tiles, column_tiles, keep):
    grid = choose(m, row_tiles, column_tiles, keep, H200)
    tile = 512 + -(-keep // 2) * 256
    rings = grid.x_stages * 4 * grid.tokens * 128 + grid.stages * grid.warpgroups * 4 * tile
    assert rings <= grid.shared(keep)
    assert grid.blocks * (grid.shared(keep) + 1024) <= H200.shared
    assert grid.tokens in SPLIT
    shares = grid.shares(m, row_tiles, column_tiles, H200.count)
    assert 1 <= shares <= grid.tiles(m, row_tiles) * column_tiles
    if grid.splits:
        assert grid.splits <= column_tiles
    else:  # those that wait for one another are there at the same time
        assert shares * grid.cluster <= H200.count * grid.blocks
    registers = 65536 // grid.blocks // (128 * (grid.warpgroups + 1)) // 8 * 8
    assert registers * (grid.warpgroups + 1) - 32 >= 72 * grid.warpgroups + grid.tokens // 2 * grid.warpgroups


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        (32, 4096, 4096, (1, 1, 4, 3)),
        (64, 28672, 8192, (2, 2, 0, 1)),
        (64, 1536, 8960, (1, 1, 5, 3)),
        (128, 4096, 11008, (2, 1, 4, 1)),
        (128, 28672, 8192, (2, 2, 0, 1)),
        (192, 4096, 11008, (2, 1, 4, 1)),
        (256, 4096, 4096, (2, 1, 4, 1)),
        (256, 11008, 4096, (2, 2, 0, 1)),
        (1024, 28672, 8192, (2, 2, 0, 1)),
    ],
)
def test_what_was_fastest_on_an_h200_is_chosen(m, n, k, expected):
    grid = choose(m, n // 16, k // 256, 32, H200)
    assert (grid.warpgroups, grid.cluster, grid.splits, grid.blocks) == expected


def test_other_kernels_are_left_what_they_do_faster():
    def paying(n, k, *tokens):
        half = torch.float16
        problems = [Problem(m, n, k, parse_pattern("32:64"), {}, half, half, torch.device("cuda")) for m in tokens]
        return [problem.m for problem in problems if pays(problem)]

    assert paying(1536, 1536, 1, 16, 17, 128, 129, 256, 1024, 1025) == [17, 128]
    assert paying(8960, 1536, 16, 17, 512, 513) == [17, 512]
    assert paying(4096, 4096, 16, 17, 1024, 1025) == [17, 1024]
