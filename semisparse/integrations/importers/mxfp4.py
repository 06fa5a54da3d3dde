"""MXFP4 checkpoints (GPT-OSS): a layer's experts in 4-bit floats, with a power of two as scale per 32 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from semisparse.integrations.importers.method import Method, Parts, part, require_shape

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7 (e2m1); those of 8 to 15 are their negatives."""

BLOCK_BYTES = 16
"""Bytes of a block of 32 codes."""

EXPONENT_BIAS = 127


def measure(tensors: Parts, block: Mapping[str, Any]) -> tuple[int, ...]:
    """Return E (experts), K and N of ``blocks`` [E, N, K / 32, 16] and ``scales`` [E, N, K / 32], both uint8.

    Raises:
        CheckpointError: the tensors do not fit one another.
    """
    experts, n, groups, width = part(tensors, "blocks", (torch.uint8,), 4).shape
    require_shape("blocks", tensors["blocks"], (experts, n, groups, BLOCK_BYTES), "blocks of 32 codes")
    scales = part(tensors, "scales", (torch.uint8,), 3)
    require_shape("scales", scales, (experts, n, groups), f"blocks {[experts, n, groups, width]}")
    return experts, 2 * BLOCK_BYTES * groups, n


def read(tensors: Parts, block: Mapping[str, Any]) -> Tensor:
    """Return the weights of all experts, [E, K, N] bfloat16, which holds each of these numbers exactly."""
    blocks, exponents = tensors["blocks"], tensors["scales"].to(torch.int32) - EXPONENT_BIAS
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    weight = torch.ldexp(values[codes.int()].float(), exponents[..., None]).to(torch.bfloat16)
    return weight.flatten(-2).transpose(1, 2).contiguous()


METHOD = Method(
    markers=frozenset({"blocks"}),
    parts=frozenset({"blocks", "scales"}),
    measure=measure,
    read=read,
    separator="_",
    weight="",
)
