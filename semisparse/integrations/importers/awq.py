"""AWQ checkpoints: 4-bit codes packed along N in an interleaved order, scales and zero points per group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import InputError
from semisparse.integrations.importers.method import (
    FLOATS,
    Method,
    Parts,
    Rounded,
    columns_per_group,
    part,
    require_groups,
    require_shape,
)

BITS = 4

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of the 8 columns in a 32-bit word, which of the word's 4-bit fields holds it; field 0 is the lowest."""


def measure(tensors: Parts, block: Mapping[str, Any]) -> tuple[int, int]:
    """Return N and K of ``qweight`` [K, N / 8] int32; ``qzeros`` is [groups, N / 8] int32, ``scales`` [groups, N].

    Raises:
        CheckpointError: the tensors do not fit one another or the config.
        InputError: the checkpoint is not 4-bit in the layout of AWQ's GEMM kernels.
    """
    bits, version = (
        block.get("bits", block.get("w_bit")),
        str(block.get("version", block.get("format", "gemm"))).lower(),
    )
    if bits != BITS or version != "gemm":
        raise InputError(f"an AWQ checkpoint of {bits!r} bits, version {version!r}; known: 4 bits, version 'gemm'")
    qweight, scales = part(tensors, "qweight", (torch.int32,), 2), part(tensors, "scales", FLOATS, 2)
    (k, words), groups = qweight.shape, len(scales)
    n, why = 8 * words, f"codes [{k}, {8 * words}]"
    require_shape("scales", scales, (groups, n), why)
    require_shape("qzeros", part(tensors, "qzeros", (torch.int32,), 2), (groups, words), why)
    require_groups(groups, k, _group_size(block))
    return n, k


def read(tensors: Parts, block: Mapping[str, Any]) -> Rounded:
    """Return the weight: ``(code - zero) * scale``."""
    codes, zeros, scales = _unpacked(tensors["qweight"]), _unpacked(tensors["qzeros"]), tensors["scales"]
    size = columns_per_group(len(codes), len(scales), _group_size(block))
    return Rounded(codes.T.contiguous(), scales.T, zeros.T.to(torch.int32), (1, size), BITS)


def _group_size(block: Mapping[str, Any]) -> Any:
    return block.get("group_size", block.get("q_group_size"))


def _unpacked(words: Tensor) -> Tensor:
    """Return the codes of words [rows, columns / 8]: [rows, columns] uint8."""
    return torch.stack([(words >> 4 * place & 15).to(torch.uint8) for place in ORDER], dim=-1).flatten(1)


METHOD = Method(
    markers=frozenset({"qweight"}),
    parts=frozenset({"qweight", "qzeros", "scales"}),
    measure=measure,
    read=read,
)
