"""The layout of torch's int4 GEMM: tiles of 8 rows by 128 columns in the fragment order of ``mma.m16n8k16``.

Lane l of 32 holds its fragments' columns of row l / 4 of the tile; eight values share an int32. Each group of 32
columns has a scale and a zero. This module packs instead of torch, whose packer runs on a GPU only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import TensorSpec

GROUP = 32
ROWS, COLUMNS = 8, 128
"""Rows and columns of a tile: 128 columns are eight inner k-tiles of 16, with which torch's kernel is fastest."""

SPECS = (
    TensorSpec("values", torch.int32, ("row_tiles", "column_tiles", "lanes", "words"), split_n=0, split_k=1),
    TensorSpec("scale_and_zero", torch.bfloat16, ("groups", "N", "pair"), split_n=1, split_k=0),
)

SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bit positions of a lane's values 0 to 7 in their int32: even-numbered ones in the low half, odd ones in the high."""


def counts(n: int, k: int) -> Mapping[str, int]:
    """Return the sizes of the stored dimensions: tiles, lanes, words per lane, groups, and scale with zero."""
    return {
        "row_tiles": n // ROWS,
        "column_tiles": k // COLUMNS,
        "lanes": 32,
        "words": 4,
        "groups": k // GROUP,
        "pair": 2,
    }


def pack(weight: Tensor) -> dict[str, Tensor]:
    """Round a weight [N, K] to 4 bits, asymmetric, ``w = (q - 8) * scale + zero`` with q in 0..15.

    Raises:
        FormatError: N is no multiple of 8, or K none of 128.
    """
    n, k = weight.shape
    if n % ROWS or k % COLUMNS:
        raise FormatError(f"kind int4 takes N in multiples of {ROWS} and K of {COLUMNS}, got N, K = {n}, {k}")
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).bfloat16().float()
    scale = torch.where(scale == 0, 1.0, scale)
    zero = (low + 8 * scale).bfloat16().float()
    codes = ((groups - zero) / scale + 8).round().clamp(0, 15).to(torch.int64).flatten(1)
    rows, columns = _fragment_order(weight.device)
    tiles = codes.unflatten(0, (-1, ROWS)).unflatten(2, (-1, COLUMNS)).transpose(1, 2)
    shifts = torch.tensor(SHIFTS, device=weight.device)
    words = (tiles[:, :, rows, columns] << shifts).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    pairs = torch.cat((scale, zero), dim=-1).transpose(0, 1).contiguous().bfloat16()
    return {"values": words, "scale_and_zero": pairs}


def unpack(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """Return the dequantised weight, [N, K] float32."""
    words = tensors["values"].to(torch.int64)
    rows, columns = _fragment_order(words.device)
    values = (words[..., None] >> torch.tensor(SHIFTS, device=words.device)) & 15
    tiles = torch.empty(*words.shape[:2], ROWS, COLUMNS, dtype=torch.int64, device=words.device)
    tiles[:, :, rows, columns] = values
    codes = tiles.transpose(1, 2).reshape(shape)
    scale, zero = tensors["scale_and_zero"].float().transpose(0, 1).unbind(-1)
    groups = codes.unflatten(1, (-1, GROUP)).float()
    return ((groups - 8) * scale[..., None] + zero[..., None]).flatten(1)


def _fragment_order(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return row and column within the tile of each lane's values, both [32 lanes, 4 words, 8 values]."""
    lane = torch.arange(32, device=device)[:, None, None]
    word = torch.arange(4, device=device)[None, :, None]
    value = torch.arange(8, device=device)[None, None, :]
    columns = word * 32 + (value // 4) * 16 + (lane % 4) * 2 + (value % 2) + 8 * (value // 2 % 2)
    return (lane // 4).expand_as(columns), columns
