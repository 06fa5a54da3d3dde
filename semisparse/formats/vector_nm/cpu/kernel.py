"""The CPU kernel: the columns of x of each group gathered once, then one small dense matmul per group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.storage.disk import columns_of, vectors_of

GATHERED_BYTES = 4 << 20
"""Maximum bytes of x, in float32, that are gathered at a time, unless one group has more."""
LONG = 32
"""Minimum rows per vector with which gathering beats unpacking at any number of tokens."""
FEW_TOKENS = 16
"""Maximum number of tokens with which gathering beats unpacking for shorter vectors.

16 tokens take 18 ms gathered and 36 unpacked, 256 take 359 and 88 (2048 x 2048, 16:32v8, Zen 4)."""


def refusal(problem: Problem) -> str | None:
    """Say why the kernel leaves ``problem`` to another, or None if it takes it."""
    length = vectors_of(problem.pattern).length
    if length < LONG and problem.m > FEW_TOKENS:
        return f"vectors have {length} rows: from {FEW_TOKENS + 1} tokens on gathering x takes longer than unpacking"
    return None


def prepare(problem: Problem) -> Product:
    """Return the matmul; nothing needs preparing."""
    return gather_and_multiply


def gather_and_multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply with the kept vectors only, in float32.

    Args:
        x: [M, K], any floating dtype.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype.
    """
    (m, k), n = x.shape, packed.shape[0]
    values, columns = packed.tensors["values"].detach(), columns_of(packed)  # bmm with out= refuses gradients
    groups, slots, length = values.shape
    x_t = F.pad(x.float(), (0, -k % vectors_of(packed.pattern).window)).T.contiguous()
    y = x_t.new_empty(groups, m, length)
    step = max(1, GATHERED_BYTES // (4 * slots * m))
    for first in range(0, groups, step):
        chunk = slice(first, first + step)
        weights, chunk_columns = values[chunk].float(), columns[chunk]
        gathered = x_t.index_select(0, chunk_columns.flatten()).view(*chunk_columns.shape, m)
        # x times the weights: 0.44 ms; the weights times x: 3.26 (M = 1, 2048 x 2048, 16:32v32, Zen 4).
        torch.bmm(gathered.transpose(1, 2), weights, out=y[chunk])
    y = y.transpose(0, 1).reshape(m, groups * length)[:, :n]
    return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()
