"""GPTQ checkpoints: codes packed along K, scales and zero points per group (AutoGPTQ, GPTQModel)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from semisparse.errors import InputError
from semisparse.integrations.importers.method import (
    FLOATS,
    Method,
    Parts,
    Rounded,
    columns_per_group,
    group_index,
    part,
    require_groups,
    require_shape,
    unpack_words,
)

BITS = (2, 3, 4, 8)

LAYOUTS = ("gptq", "gptq_v2")
"""Values of ``checkpoint_format``: zero points stored minus 1, or unchanged."""


def measure(tensors: Parts, block: Mapping[str, Any]) -> tuple[int, int]:
    """Return N and K of ``qweight`` [K * bits / 32, N] int32.

    ``qzeros`` is [groups, N * bits / 32] int32, ``scales`` [groups, N].

    Raises:
        CheckpointError: the tensors do not fit one another or the config.
        InputError: the number of bits is not one of `BITS`, layers differ in bits, or the layout is unknown.
    """
    bits, _ = _bits(block), _layout(block)
    qweight, scales = part(tensors, "qweight", (torch.int32,), 2), part(tensors, "scales", FLOATS, 2)
    k, n, groups = 32 * len(qweight) // bits, qweight.shape[1], len(scales)
    why = f"{bits}-bit codes [{k}, {n}]"
    require_shape("scales", scales, (groups, n), why)
    require_shape("qzeros", part(tensors, "qzeros", (torch.int32,), 2), (groups, -(-n * bits // 32)), why)
    require_groups(groups, k, block.get("group_size"))
    if "g_idx" in tensors:
        require_shape("g_idx", tensors["g_idx"], (k,), why)
    return n, k


def read(tensors: Parts, block: Mapping[str, Any]) -> Rounded:
    """Return the weight: ``(code - zero) * scale``.

    ``g_idx`` [K] names each column's group. Tools that store zero points minus 1 subtract from whole words, so that a
    zero point of 0 borrows from the next one; adding to whole words undoes that. 3-bit zero points may straddle two
    words: each is corrected by itself.

    Raises:
        CheckpointError: ``g_idx`` names a group that does not exist.
    """
    bits, scales = _bits(block), tensors["scales"]
    codes = unpack_words(tensors["qweight"], bits)
    k, n = codes.shape
    words, minus_1 = tensors["qzeros"].T.contiguous(), _layout(block) == "gptq"
    if minus_1 and bits != 3:
        words = (words.to(torch.int64) + sum(1 << shift for shift in range(0, 32, bits))).to(torch.int32)
    zeros = unpack_words(words, bits)[:n].to(torch.int32)
    if minus_1 and bits == 3:
        zeros = zeros + 1 & 7
    size = columns_per_group(k, len(scales), block.get("group_size"))
    index = group_index(tensors, "g_idx", k, len(scales), size)
    return Rounded(codes.T.contiguous(), scales.T, zeros, (1, size), bits, index=index)


def _bits(block: Mapping[str, Any]) -> int:
    bits = block.get("bits")
    if block.get("dynamic"):
        raise InputError("a GPTQ checkpoint whose layers differ (dynamic) is not read; expected one number of bits")
    if bits not in BITS:
        raise InputError(f"a GPTQ checkpoint of {bits!r} bits is not read; known: {', '.join(map(str, BITS))}")
    return int(bits)


def _layout(block: Mapping[str, Any]) -> str:
    layout = block.get("checkpoint_format", block.get("format", LAYOUTS[0]))
    if layout not in LAYOUTS:
        raise InputError(f"a GPTQ checkpoint of format {layout!r} is not read; known: {', '.join(LAYOUTS)}")
    return str(layout)


METHOD = Method(
    markers=frozenset({"qweight"}),
    parts=frozenset({"qweight", "qzeros", "scales", "g_idx"}),
    measure=measure,
    read=read,
)
