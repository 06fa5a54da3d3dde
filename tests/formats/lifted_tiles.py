"""Lifted activations read back from tiles."""

import torch
from torch import Tensor


def rows_in(tiles: Tensor, m: int) -> Tensor:
    """Read the first tokens back from lifted tiles, [m, columns]."""
    blocks, tokens = tiles.shape[:2]
    units = tiles.view(torch.uint8).view(blocks, tokens, 8, 16)[:, :m]
    places = torch.arange(8)[None, :] ^ torch.arange(m)[:, None] % 8
    plain = units.gather(2, places[None, :, :, None].expand_as(units))
    return plain.permute(1, 0, 2, 3).reshape(m, -1).view(tiles.dtype)
