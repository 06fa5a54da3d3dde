"""Checkpoints in the formats of compressed-tensors: packed integers, 8-bit integers, fp8, and bit masks for 2:4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import CheckpointError, InputError
from semisparse.integrations.importers.fp8 import scale_of_tiles
from semisparse.integrations.importers.method import FLOATS, Method, Parts, groups_of_columns, part

INTEGERS = (torch.int32, torch.int64)


def dequantise(tensors: Parts, block: Mapping[str, Any]) -> Tensor:
    """Return the dense weight [N, K].

    Raises:
        CheckpointError: the tensors do not fit one another.
        InputError: the weight is stored in 4-bit floats.
    """
    if tensors.get("weight_packed", tensors.get("weight_global_scale")) is not None and "weight_shape" not in tensors:
        raise InputError("compressed-tensors' formats of 4-bit floats (nvfp4, mxfp4) are not read")
    if "weight_packed" in tensors:
        return _packed_integers(tensors, block)
    weight = _unmasked(tensors) if "compressed" in tensors else tensors.get("weight")
    if weight is None:
        raise CheckpointError(f"there is no weight among {', '.join(sorted(tensors))}")
    if "weight_scale" not in tensors:
        return weight
    return _scaled(weight, tensors, block)


def _packed_integers(tensors: Parts, block: Mapping[str, Any]) -> Tensor:
    """Dequantise ``weight_packed`` [N, ceil(K / per word)]: unsigned codes less half their range, lowest bits first."""
    packed = part(tensors, "weight_packed", (torch.int32,), 2)
    scale = part(tensors, "weight_scale", FLOATS, 2).float()
    n, k = _shape(tensors, "weight_shape")
    bits = _bits(packed.shape, (n, k), block)
    codes = _integers(packed, bits)[:, :k]
    groups = scale.shape[1]
    if codes.shape != (n, k) or len(scale) != n:
        raise CheckpointError(
            f"weight_packed is {list(packed.shape)}, weight_scale {list(scale.shape)}, but weight_shape says {[n, k]}"
        )
    index = groups_of_columns(tensors, "weight_g_idx", k, groups)
    values = codes.float()
    if "weight_zero_point" in tensors:
        zeros = _integers(part(tensors, "weight_zero_point", (torch.int32,), 2).T, bits).T[:n]
        if zeros.shape != (n, groups):
            raise CheckpointError(f"weight_zero_point holds {list(zeros.shape)} zero points, expected {[n, groups]}")
        values = values - zeros.float()[:, index]
    return values * scale[:, index]


def _bits(packed: torch.Size, shape: tuple[int, int], block: Mapping[str, Any]) -> int:
    """Return the bits per code: the number that a config group declares and that explains the packed width."""
    declared = {arguments.get("num_bits") for arguments in _weight_arguments(block)}
    for bits in sorted(bits for bits in declared if isinstance(bits, int) and 1 <= bits <= 8):
        if packed[1] == -(-shape[1] // (32 // bits)):
            return bits
    raise CheckpointError(
        f"weight_packed is {list(packed)} for a weight {list(shape)}, which fits none of the declared bits {declared}"
    )


def _weight_arguments(block: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what the config groups declare of weights."""
    groups = block.get("config_groups")
    found = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    return [arguments for arguments in found if isinstance(arguments, dict)]


def _integers(words: Tensor, bits: int) -> Tensor:
    """Return the signed codes of int32 words [rows, words], ``32 // bits`` per word: [rows, codes] int32."""
    places = range(32 // bits)
    unsigned = torch.stack([words >> bits * place & 2**bits - 1 for place in places], dim=-1).flatten(1)
    return unsigned - 2 ** (bits - 1)


def _scaled(weight: Tensor, tensors: Parts, block: Mapping[str, Any]) -> Tensor:
    """Dequantise 8-bit values with one scale for all, or a scale per row, group of columns or tile."""
    scale, values = tensors["weight_scale"].float(), weight.float()
    if values.dim() != 2:
        raise CheckpointError(f"the weight is {list(values.shape)}, expected two dimensions")
    (n, k), zeros = values.shape, tensors.get("weight_zero_point")
    if scale.dim() == 0 or scale.numel() == 1:
        return (values - _like(zeros, scale)) * scale.reshape(1, 1)
    if scale.dim() == 1:
        scale = scale[:, None]
    if scale.dim() != 2 or 0 in scale.shape:
        raise CheckpointError(f"weight_scale is {list(scale.shape)}")
    tile = _tile((scale.shape[0], scale.shape[1]), (n, k), block)
    if zeros is not None:
        values = values - scale_of_tiles(_like(zeros, scale), values, tile)
    return values * scale_of_tiles(scale, values, tile)


def _tile(scales: tuple[int, int], shape: tuple[int, int], block: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns that one scale is for: those of a declared block, else equally many per scale."""
    for arguments in _weight_arguments(block):
        match arguments.get("block_structure"):
            case [int(rows), int(columns)] if min(rows, columns) > 0:
                if scales == (-(-shape[0] // rows), -(-shape[1] // columns)):
                    return rows, columns
    return -(-shape[0] // scales[0]), -(-shape[1] // scales[1])


def _like(zeros: Tensor | None, scale: Tensor) -> Tensor:
    return torch.zeros_like(scale) if zeros is None else zeros.float().reshape(scale.shape)


def _unmasked(tensors: Parts) -> Tensor:
    """Return the weight with the values ``compressed`` where ``bitmask`` (low bits first) has ones."""
    n, k = _shape(tensors, "shape")
    masks = part(tensors, "bitmask", (torch.uint8,), 2)
    if masks.shape != (n, -(-k // 8)):
        raise CheckpointError(f"bitmask is {list(masks.shape)}, expected {[n, -(-k // 8)]} for a weight {[n, k]}")
    kept = (masks[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten(1)[:, :k]
    values = tensors["compressed"].flatten()
    if len(values) != int(kept.sum()):
        raise CheckpointError(f"compressed holds {len(values)} values, bitmask has {int(kept.sum())} ones")
    weight = torch.zeros(n, k, dtype=torch.float32)
    weight[kept] = values.float()
    return weight if values.dtype.itemsize == 1 else weight.to(values.dtype)


def _shape(tensors: Parts, name: str) -> tuple[int, int]:
    if name not in tensors or tensors[name].dtype not in INTEGERS or tensors[name].numel() != 2:
        raise CheckpointError(f"tensor {name} does not hold N and K")
    n, k = tensors[name].flatten().tolist()
    if n < 1 or k < 1:
        raise CheckpointError(f"tensor {name} says that the weight is {[n, k]}")
    return n, k


METHOD = Method(
    markers=frozenset({"weight_packed", "weight_scale", "compressed"}),
    parts=frozenset(
        {
            *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
            *("compressed", "bitmask", "shape", "row_offsets"),
            *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
        }
    ),
    dequantise=dequantise,
    dropped=frozenset({"k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point"}),
)
