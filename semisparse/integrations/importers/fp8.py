"""fp8 checkpoints: e4m3 weights with a scale per tile (DeepSeek), per row (``fbgemm_fp8``) or per tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import CheckpointError
from semisparse.integrations.importers.method import FLOATS, Method, Parts, Rounded, part

TILE = (128, 128)
"""Rows and columns per scale, if the config has no ``weight_block_size``."""


def measure(tensors: Parts, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return N and K of ``weight`` [N, K] e4m3.

    The scale is ``weight_scale_inv`` or ``weight_scale``; both multiply the values, in spite of the ``_inv``. It has
    one number, one per row, or one per tile of ``weight_block_size`` (else of `TILE`). ``config`` is
    ``quantization_config`` of config.json.

    Raises:
        CheckpointError: the tensors do not fit one another or the config.
    """
    n, k = part(tensors, "weight", (torch.float8_e4m3fn,), 2).shape
    _tile(_scale(tensors), (n, k), config)
    return n, k


def read(tensors: Parts, config: Mapping[str, Any]) -> Rounded:
    """Return the weight's values and its scales: one for the weight, one per row, or one per tile (see `measure`)."""
    weight, scale = tensors["weight"], _scale(tensors)
    (n, k), tile = weight.shape, _tile(scale, (weight.shape[0], weight.shape[1]), config)
    return Rounded(weight, scale.reshape(-(-n // tile[0]), -(-k // tile[1])), None, tile, 8, rounds_x=True)


def _scale(tensors: Parts) -> Tensor:
    name = next((name for name in ("weight_scale_inv", "weight_scale") if name in tensors), None)
    if name is None:
        raise CheckpointError(f"there is no scale among {', '.join(sorted(tensors))}")
    return part(tensors, name, FLOATS, tensors[name].dim())


def _tile(scale: Tensor, shape: tuple[int, int], config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns per scale, from the shape of the scales."""
    (n, k), size = shape, config.get("weight_block_size") or TILE
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(s) is int and s > 0 for s in size):
        raise CheckpointError(f"weight_block_size is {size!r} in config.json, expected two positive integers")
    tiles = (-(-n // size[0]), -(-k // size[1]))
    if tuple(scale.shape) == tiles and config.get("weight_block_size"):
        return size[0], size[1]
    if scale.numel() == 1:
        return n, k
    if tuple(scale.shape) in ((n,), (n, 1)):
        return 1, k
    if tuple(scale.shape) == tiles:
        return size[0], size[1]
    raise CheckpointError(
        f"the scales of a weight {[n, k]} are {list(scale.shape)}, expected one, {n} (one per row) or {list(tiles)} "
        f"(one per tile of {size[0]} x {size[1]})"
    )


METHOD = Method(
    markers=frozenset({"weight_scale_inv", "weight_scale"}),
    parts=frozenset({"weight", "weight_scale_inv", "weight_scale", "input_scale", "input_scale_ub"}),
    measure=measure,
    read=read,
)
