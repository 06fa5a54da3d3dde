"""AWQ checkpoints: 4-bit codes packed along N in an interleaved order, scales and zero points per group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import CheckpointError, InputError
from semisparse.integrations.importers.method import FLOATS, Method, Parts, groups_of_columns, part

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which 4 bits of a 32-bit word each of its 8 columns lies."""


def dequantise(tensors: Parts, block: Mapping[str, Any]) -> Tensor:
    """Return the dense weight [N, K]: ``(code - zero) * scale``.

    ``qweight`` [K, N / 8] and ``qzeros`` [groups, N / 8] are int32; ``scales`` [groups, N].

    Raises:
        CheckpointError: the tensors do not fit one another.
        InputError: the checkpoint has not 4 bits in the layout of AWQ's GEMM kernels.
    """
    bits, version = block.get("bits", block.get("w_bit")), str(block.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise InputError(f"an AWQ checkpoint of {bits!r} bits, version {version!r}; known: 4 bits, version 'gemm'")
    codes = _unpacked(part(tensors, "qweight", (torch.int32,), 2))
    zeros = _unpacked(part(tensors, "qzeros", (torch.int32,), 2))
    scales = part(tensors, "scales", FLOATS, 2).float()
    if zeros.shape != scales.shape or codes.shape[1] != scales.shape[1]:
        raise CheckpointError(
            f"qweight holds codes {list(codes.shape)}, qzeros {list(zeros.shape)} zero points, "
            f"scales are {list(scales.shape)}"
        )
    index = groups_of_columns(tensors, "g_idx", len(codes), len(scales))
    return ((codes - zeros[index]).float() * scales[index]).T.contiguous()


def _unpacked(words: Tensor) -> Tensor:
    """Return the codes of words [rows, columns / 8]: [rows, columns] int32."""
    return torch.stack([words >> 4 * place & 15 for place in ORDER], dim=-1).flatten(1)


METHOD = Method(
    markers=frozenset({"qweight"}),
    parts=frozenset({"qweight", "qzeros", "scales", "g_idx"}),
    dequantise=dequantise,
)
