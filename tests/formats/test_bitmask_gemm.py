"""The order of x that tiled_gemm.cu multiplies, and how its work is dealt out."""

import numpy as np
import pytest
import torch

from tests.formats.test_bitmask_tiles import Warp, random_weight
from semisparse.formats.base import get_format


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
