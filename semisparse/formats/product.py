"""The product every user calls: ``y = x @ w.T + bias`` with a packed weight."""

from __future__ import annotations

from torch import Tensor

from semisparse.errors import InputError
from semisparse.formats.base import Packed, Problem, get_format


def problem_of(x: Tensor, packed: Packed) -> Problem:
    """Describe the product of ``x`` ([M, K]) with a packed weight."""
    n, k = packed.shape
    return Problem(x.shape[0], n, k, packed.pattern, packed.params, packed.dtype, x.dtype, x.device)


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None, kernel: str = "auto") -> Tensor:
    """Compute ``y = x @ w.T + bias`` with a packed weight.

    Args:
        x: [..., K], float16, bfloat16 or float32, on the packed tensors' device.
        packed: a weight [N, K]; trusted: call `validate` first if it comes from a file.
        bias: [N] or None.
        kernel: a kernel's name, or ``auto`` for the first that can.
    Returns:
        [..., N] in x's dtype, accumulated in float32.
    Raises:
        InputError: x or bias has the wrong size.
        KernelError: no kernel can compute this; gives every candidate's reason.
    """
    n, k = packed.shape
    if x.shape[-1] != k:
        raise InputError(f"x has {x.shape[-1]} features, the weight takes K = {k}")
    if bias is not None and tuple(bias.shape) != (n,):
        raise InputError(f"bias is {list(bias.shape)}, expected [{n}]")
    rows = x.reshape(-1, k)
    chosen = get_format(packed.format).choose(problem_of(rows, packed), kernel)
    return chosen.load()(rows, packed, bias).reshape(*x.shape[:-1], n)
