"""Activations lifted into tiles, and read back from them."""

import torch
from semisparse.runtime.launch import address
from torch import Tensor

from semisparse.formats.slide24 import cuda_lift


def lifted(
    x: Tensor, dtype: torch.dtype | None, window: int, tokens: int, counters: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Lift x, [M, K], by lift.cu; give [blocks, tokens, 128 bytes] and the scales [M]."""
    shape, lift = cuda_lift.prepare(
        *x.shape, x.dtype, dtype, window, tokens, 0 if counters is None else counters.numel()
    )
    tiles = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
    scales = None if dtype is None else torch.empty(len(x), dtype=torch.float32, device=x.device)
    lift(x, tiles.data_ptr(), address(scales), address(counters))
    return tiles, scales


def rows_in(tiles: Tensor, m: int) -> Tensor:
    """Read the first tokens back from lifted tiles, [m, columns]."""
    blocks, tokens = tiles.shape[:2]
    units = tiles.view(torch.uint8).view(blocks, tokens, 8, 16)[:, :m]
    places = torch.arange(8)[None, :] ^ torch.arange(m)[:, None] % 8
    plain = units.gather(2, places[None, :, :, None].expand_as(units))
    return plain.permute(1, 0, 2, 3).reshape(m, -1).view(tiles.dtype)
