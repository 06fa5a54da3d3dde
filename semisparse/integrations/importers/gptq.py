"""GPTQ checkpoints: codes packed along K, scales and zero points per group (AutoGPTQ, GPTQModel)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import CheckpointError, InputError
from semisparse.integrations.importers.method import FLOATS, Method, Parts, groups_of_columns, part, unpack_words

BITS = (2, 3, 4, 8)


def dequantise(tensors: Parts, block: Mapping[str, Any]) -> Tensor:
    """Return the dense weight [N, K]: ``(code - zero) * scale``.

    ``qweight`` [K * bits / 32, N] and ``qzeros`` [groups, N * bits / 32] are int32; ``scales`` is [groups, N];
    ``g_idx`` [K] names each column's group. Zero points are stored less 1, except where ``checkpoint_format`` is
    ``gptq_v2``.

    Raises:
        CheckpointError: the tensors do not fit one another.
        InputError: the number of bits is not one of `BITS`.
    """
    bits = block.get("bits")
    if bits not in BITS:
        raise InputError(f"a GPTQ checkpoint of {bits!r} bits; known: {', '.join(map(str, BITS))}")
    codes = unpack_words(part(tensors, "qweight", (torch.int32,), 2), bits)
    scales = part(tensors, "scales", FLOATS, 2).float()
    zeros = unpack_words(part(tensors, "qzeros", (torch.int32,), 2).T.contiguous(), bits).T
    if block.get("checkpoint_format") != "gptq_v2":
        zeros = zeros + 1 & 2**bits - 1
    (k, n), groups = codes.shape, len(scales)
    if scales.shape != (groups, n) or zeros.shape[0] != groups or zeros.shape[1] < n:
        raise CheckpointError(
            f"qweight holds codes [{k}, {n}], qzeros {list(zeros.shape)} zero points, scales are {list(scales.shape)}"
        )
    index = groups_of_columns(tensors, "g_idx", k, groups)
    return ((codes - zeros[:, :n][index]).float() * scales[index]).T.contiguous()


METHOD = Method(
    markers=frozenset({"qweight"}),
    parts=frozenset({"qweight", "qzeros", "scales", "g_idx"}),
    dequantise=dequantise,
)
