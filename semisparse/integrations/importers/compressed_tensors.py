"""Checkpoints in the formats of compressed-tensors: packed integers, 8-bit integers, fp8, and bit masks for 2:4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import CheckpointError, InputError
from semisparse.integrations.importers.method import (
    FLOATS,
    INDICES,
    Method,
    Parts,
    Rounded,
    columns_per_group,
    dtype_name,
    group_index,
    part,
    require_groups,
    require_shape,
)

VALUES = (torch.int8, torch.float8_e4m3fn)
"""The dtypes of 8-bit weights."""


def measure(tensors: Parts, block: Mapping[str, Any]) -> tuple[int, int]:
    """Return N and K: of ``weight_packed``, of ``compressed`` values and their ``bitmask``, or of ``weight``.

    Raises:
        CheckpointError: the tensors do not fit one another or the config.
        InputError: the weight is stored in 4-bit floats, or in the marlin-24 layout.
    """
    if {"weight_global_scale", "meta"} & set(tensors) or ("weight_packed" in tensors and "weight_shape" not in tensors):
        raise InputError(
            "compressed-tensors' marlin-24 and 4-bit floats (nvfp4, mxfp4) are not read; "
            "known: dense, pack-quantized, int-quantized, float-quantized, naive-quantized, sparse-bitmask"
        )
    if "weight_packed" in tensors:
        return _measure_packed(tensors, block)
    if "compressed" in tensors:
        shape = _shape(tensors, "shape")
        masks = part(tensors, "bitmask", (torch.uint8,), 2)
        require_shape("bitmask", masks, (shape[0], -(-shape[1] // 8)), f"a weight {list(shape)}")
        dtype = tensors["compressed"].dtype
    else:
        weight = part(tensors, "weight", (*VALUES, *FLOATS), 2)
        shape, dtype = (weight.shape[0], weight.shape[1]), weight.dtype
    if "weight_scale" in tensors:
        if dtype not in VALUES:
            raise CheckpointError(f"the weight is {dtype_name(dtype)} and has scales, expected int8 or float8_e4m3fn")
        _tile(tensors, shape, block)
    return shape


def read(tensors: Parts, block: Mapping[str, Any]) -> Rounded | Tensor:
    """Return the weight.

    Raises:
        CheckpointError: ``weight_g_idx`` names a group that does not exist, the ones in the bit mask are not as many
            as the values, or integers have more bits than declared.
    """
    if "weight_packed" in tensors:
        return _packed_integers(tensors, block)
    weight = _unmasked(tensors) if "compressed" in tensors else tensors["weight"]
    if "weight_scale" not in tensors:
        return weight
    shape = (weight.shape[0], weight.shape[1])
    tile = _tile(tensors, shape, block)
    tiles = (-(-shape[0] // tile[0]), -(-shape[1] // tile[1]))
    scale, zero, bits = tensors["weight_scale"].reshape(tiles), tensors.get("weight_zero_point"), 8
    if weight.dtype == torch.int8 and (zero is not None or _declared_bits(block) < 8):
        bits = _declared_bits(block)
        half = 2 ** (bits - 1)
        low, high = (int(end) for end in weight.aminmax())
        if low < -half or high >= half:
            raise CheckpointError(
                f"the weight holds integers from {low} to {high}, expected {-half} to {half - 1}, which are the "
                f"{bits} bits that config.json declares"
            )
        zero = (torch.zeros(tiles) if zero is None else zero.reshape(tiles)).to(torch.int32) + half
        weight = (weight.to(torch.int16) + half).to(torch.uint8)
    return Rounded(weight, scale, zero, tile, bits, _rounds_x(block))


def _measure_packed(tensors: Parts, block: Mapping[str, Any]) -> tuple[int, int]:
    """Measure ``weight_packed`` [N, ceil(K / codes per word)], ``weight_scale`` [N, groups]."""
    packed, scale = part(tensors, "weight_packed", (torch.int32,), 2), part(tensors, "weight_scale", FLOATS, 2)
    n, k = _shape(tensors, "weight_shape")
    why, groups = f"a weight {[n, k]}", scale.shape[1]
    bits, size = _bits_and_size(packed.shape, (n, k), groups, block)
    require_shape("weight_packed", packed, (n, -(-k // (32 // bits))), why)
    require_shape("weight_scale", scale, (n, groups), why)
    require_groups(groups, k, size)
    if "weight_zero_point" in tensors:
        zeros = part(tensors, "weight_zero_point", (torch.int32,), 2)
        require_shape("weight_zero_point", zeros, (-(-n // (32 // bits)), groups), why)
    return n, k


def _packed_integers(tensors: Parts, block: Mapping[str, Any]) -> Rounded:
    """Read unsigned codes: signed ones with 2^(bits - 1) added, the first in a word's lowest bits."""
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    (n, k), groups = _shape(tensors, "weight_shape"), scale.shape[1]
    bits, declared = _bits_and_size(packed.shape, (n, k), groups, block)
    size = columns_per_group(k, groups, declared)
    if "weight_zero_point" in tensors:
        zeros = _codes(tensors["weight_zero_point"].T, bits).T[:n].to(torch.int32)
    else:
        zeros = torch.full((n, groups), 2 ** (bits - 1), dtype=torch.int32)
    index = group_index(tensors, "weight_g_idx", k, groups, size)
    return Rounded(_codes(packed, bits)[:, :k].contiguous(), scale, zeros, (1, size), bits, _rounds_x(block), index)


def _bits_and_size(
    packed: torch.Size, shape: tuple[int, int], groups: int, block: Mapping[str, Any]
) -> tuple[int, int | None]:
    """Return the bits per code and the group size of the config group that fits the tensors' shapes.

    Config groups are not matched by their targets: these may be regular expressions, and the file is untrusted.
    """
    declared = [(arguments.get("num_bits"), arguments.get("group_size")) for arguments in _arguments(block, "weights")]
    fitting = [
        (bits, size if type(size) is int and size > 0 else -1)
        for bits, size in declared
        if type(bits) is int and 1 <= bits <= 8 and packed[1] == -(-shape[1] // (32 // bits))
    ]
    if not fitting:
        raise CheckpointError(
            f"weight_packed is {list(packed)} for a weight {list(shape)}, expected as many columns as one of the "
            f"config groups needs: bits {sorted({str(bits) for bits, _ in declared})}"
        )
    exact = [(bits, size) for bits, size in fitting if groups == (1 if size == -1 else -(-shape[1] // size))]
    return (exact or fitting)[0]


def _arguments(block: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return each config group's entry ``key``: ``weights`` or ``input_activations``; {} where it has none."""
    groups = block.get("config_groups")
    entries = (
        [group.get(key) for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    )
    return [arguments if isinstance(arguments, dict) else {} for arguments in entries]


def _declared_bits(block: Mapping[str, Any]) -> int:
    """Return the bits that all config groups declare; 8 if they differ or declare none."""
    first, *others = [arguments.get("num_bits") for arguments in _arguments(block, "weights")] or [8]
    return first if type(first) is int and 1 <= first <= 8 and all(bits == first for bits in others) else 8


def _rounds_x(block: Mapping[str, Any]) -> bool | None:
    """Return whether x is quantised to 8 bits; None if the config groups differ in that."""
    rounds = {arguments.get("num_bits") == 8 for arguments in _arguments(block, "input_activations")}
    return rounds.pop() if len(rounds) == 1 else None


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned codes of int32 words [rows, words], ``32 // bits`` per word: [rows, codes] uint8."""
    places = range(32 // bits)
    return torch.stack([(words >> bits * place & 2**bits - 1).to(torch.uint8) for place in places], dim=-1).flatten(1)


def _tile(tensors: Parts, shape: tuple[int, int], block: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns per scale of 8-bit values: the weight, a row, a group of a row, or a block."""
    (n, k), scale = shape, part(tensors, "weight_scale", FLOATS, tensors["weight_scale"].dim())
    zero = tensors.get("weight_zero_point")
    if zero is not None and (zero.is_floating_point() or zero.shape != scale.shape):
        raise CheckpointError(
            f"weight_zero_point is {dtype_name(zero.dtype)} {list(zero.shape)}, expected integers {list(scale.shape)}"
        )
    if scale.numel() == 1:
        return n, k
    tiles = (*scale.shape, 1)[:2]
    for arguments in _arguments(block, "weights"):
        match arguments.get("block_structure"):
            case [int(rows), int(columns)] if min(rows, columns) > 0:
                if tiles == (-(-n // rows), -(-k // columns)):
                    return rows, columns
    if scale.dim() > 2 or tiles[0] != n or tiles[1] == 0 or k % tiles[1]:
        raise CheckpointError(
            f"weight_scale is {list(scale.shape)} for a weight {[n, k]}, expected one scale, one per row, per group of "
            "columns, or per declared block"
        )
    return 1, k // tiles[1]


def _unmasked(tensors: Parts) -> Tensor:
    """Return the weight with the values ``compressed`` where ``bitmask`` (low bits first) has ones."""
    n, k = _shape(tensors, "shape")
    values, masks = tensors["compressed"].flatten(), tensors["bitmask"]
    kept = (masks[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten(1)[:, :k]
    if len(values) != int(kept.sum()):
        raise CheckpointError(f"compressed holds {len(values)} values, expected {int(kept.sum())}, the ones in bitmask")
    weight = torch.zeros(n, k, dtype=torch.uint8 if values.dtype.itemsize == 1 else values.dtype)
    weight[kept] = values.view(weight.dtype)
    return weight.view(values.dtype)


def _shape(tensors: Parts, name: str) -> tuple[int, int]:
    if name not in tensors or tensors[name].dtype not in INDICES or tensors[name].numel() != 2:
        raise CheckpointError(f"tensor {name} does not hold N and K")
    n, k = tensors[name].flatten().tolist()
    if n < 1 or k < 1:
        raise CheckpointError(f"tensor {name} says that the weight is {[n, k]}, expected at least [1, 1]")
    return n, k


METHOD = Method(
    markers=frozenset({"weight_packed", "weight_scale", "compressed"}),
    parts=frozenset(
        {
            *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
            *("weight_global_scale", "compressed", "bitmask", "shape", "row_offsets", "meta"),
            *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"),
        }
    ),
    measure=measure,
    read=read,
    dropped=frozenset({"k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point"}),
)
