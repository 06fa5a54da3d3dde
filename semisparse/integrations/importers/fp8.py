"""fp8 checkpoints: e4m3 weights with a scale per tile (DeepSeek, transformers' ``fp8``) or per row (``fbgemm_fp8``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import CheckpointError
from semisparse.integrations.importers.method import FLOATS, Method, Parts, part

TILE = (128, 128)
"""Rows and columns of a scale's tile, where the config does not say."""


def dequantise(tensors: Parts, block: Mapping[str, Any]) -> Tensor:
    """Return the dense weight [N, K]: each value times the scale of its tile, or of its row.

    ``weight`` [N, K] is e4m3; ``weight_scale_inv`` [ceil(N / rows), ceil(K / columns)] multiplies tiles of
    ``weight_block_size``; ``weight_scale`` [N, 1] or [N] multiplies rows.

    Raises:
        CheckpointError: the tensors do not fit one another.
    """
    weight = part(tensors, "weight", (torch.float8_e4m3fn,), 2).float()
    if "weight_scale_inv" not in tensors:
        return weight * scale_of_tiles(tensors["weight_scale"].float(), weight, (1, weight.shape[1]))
    size = block.get("weight_block_size") or TILE
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(s, int) and s > 0 for s in size):
        raise CheckpointError(f"weight_block_size is {size!r}, expected two positive integers")
    return weight * scale_of_tiles(part(tensors, "weight_scale_inv", FLOATS, 2).float(), weight, (size[0], size[1]))


def scale_of_tiles(scale: Tensor, weight: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the scale of each value of a weight.

    Args:
        scale: [ceil(N / rows), ceil(K / columns)], or as many values in fewer dimensions.
        weight: [N, K].
        size: rows and columns of a tile.
    Returns:
        A tensor that can be multiplied with the weight.
    Raises:
        CheckpointError: there is another number of scales.
    """
    (n, k), (rows, columns) = weight.shape, size
    tiles = (-(-n // rows), -(-k // columns))
    if scale.numel() != tiles[0] * tiles[1]:
        raise CheckpointError(
            f"there are {scale.numel()} scales, expected {tiles[0]} x {tiles[1]} for a weight {[n, k]} in tiles {size}"
        )
    return scale.view(tiles).repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


METHOD = Method(
    markers=frozenset({"weight_scale_inv", "weight_scale"}),
    parts=frozenset({"weight", "weight_scale_inv", "weight_scale", "input_scale", "input_scale_ub"}),
    dequantise=dequantise,
)
