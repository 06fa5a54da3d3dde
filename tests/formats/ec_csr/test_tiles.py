"""Mask tiles: the bytes that README.md gives, and the weight that comes back."""

import pytest
import torch

from semisparse.formats.ec_csr.storage import tiles
from semisparse.formats.ec_csr.storage.gpu import to_tiles
from tests.formats.ec_csr.weights import EC_CSR, random_weight, uneven_weight


def read_tiles(packed) -> list[list[float]]:
    """Read the weight as README.md says, with plain loops."""
    n, k = packed.shape
    weight = [[0.0] * k for _ in range(n)]
    starts, column_tiles = packed.tensors["tile_starts"].tolist(), -(-k // 256)
    units = packed.tensors["tiles"].tolist()
    for tile, start in enumerate(starts[:-1]):
        masks = [word % 2**32 for unit in units[start : start + 4] for word in unit]
        for lane in range(32):
            number = 0
            for half in range(2):
                row = tile // column_tiles * 16 + lane // 4 + 8 * half
                for column in range(64):
                    word, offset = divmod((column + 1) % 64, 32)  # word h begins with column 32 h - 1
                    shift, byte = offset // 4, offset % 4
                    if masks[lane * 4 + half * 2 + word] >> (8 * byte + 7 - shift) & 1:
                        stored = torch.tensor([units[start + 4 + number // 2][lane]], dtype=torch.int32)
                        at = tile % column_tiles * 256 + lane % 4 * 64 + column
                        weight[row][at] = float(stored.view(packed.dtype)[number % 2])
                        number += 1
    return weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(40, 700), (16, 256), (1, 3)])
def test_the_weight_comes_back(monkeypatch: pytest.MonkeyPatch, n: int, k: int, dtype: torch.dtype):
    monkeypatch.setattr(tiles, "BATCH", 16 * 256 * 3)  # several batches
    for weight, pattern in ((random_weight(n, k, "70%", dtype), "70%"), (uneven_weight(n, k, dtype), "0%")):
        packed = to_tiles(EC_CSR.pack(weight, pattern))
        assert torch.equal(packed.unpack(), weight)
        assert read_tiles(packed) == weight.tolist()
