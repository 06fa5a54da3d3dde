"""The order of x that tiled_gemm.cu multiplies, and how its work is dealt out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats.base import get_format
from semisparse.formats.bitmask.gemm import TOKENS, choose
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
def test_every_grid_fits_a_processor_and_gives_each_split_columns(m, row_tiles, column_tiles, keep):
    grid = choose(m, row_tiles, column_tiles, keep, H200)
    tile = 512 + -(-keep // 2) * 256
    rings = 4 * grid.tokens * 128 + grid.stages * grid.warpgroups * 4 * tile
    assert rings <= grid.shared(keep)
    assert grid.tokens * grid.warpgroups * 64 * 4 <= grid.shared(keep)
    assert grid.blocks * (grid.shared(keep) + 1024) <= H200.shared
    assert grid.tokens in TOKENS
    assert 1 <= grid.splits <= column_tiles
    registers = 65536 // grid.blocks // (128 * (grid.warpgroups + 1)) // 8 * 8
    assert registers * (grid.warpgroups + 1) - 32 >= 72 * grid.warpgroups + grid.tokens // 2 * grid.warpgroups
