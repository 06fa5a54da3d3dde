"""Run lift.cu by itself, and read x back from its tiles."""

import torch
from torch import Tensor

from semisparse.formats.slide24.cuda.lift import Lift


def lift_into_tiles(
    x: Tensor, dtype: torch.dtype | None, window: int, tokens: int, arrivals: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return x [M, K] lifted by lift.cu, [K tiles, tokens, 128 bytes], and the scales [M]."""
    (m, k), stored = x.shape, dtype or x.dtype
    lift = Lift(m, k, window, x.dtype, dtype)
    tiles = torch.empty((lift.token_bytes // 128, tokens, 128 // stored.itemsize), dtype=stored, device=x.device)
    scales = None if dtype is None else torch.empty(m, dtype=torch.float32, device=x.device)
    lift.prepare(x.device)(x, tokens, tiles, scales, arrivals, arrivals.numel())
    return tiles, scales


def rows_of(tiles: Tensor, m: int) -> Tensor:
    """Return the first tokens of lifted tiles, [m, columns]: the 16 bytes c of token t are at c ^ (t % 8)."""
    k_tiles, tokens = tiles.shape[:2]
    units = tiles.view(torch.uint8).view(k_tiles, tokens, 8, 16)[:, :m]
    at = torch.arange(8)[None, :] ^ torch.arange(m)[:, None] % 8
    plain = units.gather(2, at[None, :, :, None].expand_as(units))
    return plain.permute(1, 0, 2, 3).reshape(m, -1).view(tiles.dtype)
