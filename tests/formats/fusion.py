"""Checking fused products against their parts: a norm before, a residual or a gate after."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.kernel import FusedOperands, Kernel
from semisparse.formats.product import problem_of

EPSILON = 0.5
"""So large that a result without it differs by more than rounding."""


def expected_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, prologue: str, epilogue: str, fused: FusedOperands
) -> Tensor:
    """Compute in float64, rounding to x's dtype where transformers rounds."""

    def rounded(value: Tensor) -> Tensor:
        return value.to(x.dtype).double()

    wide = x.double()
    if prologue == "rms_norm":
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + fused.epsilon)
        wide = rounded(rounded(normalised) * fused.norm_weight.double())
    y = rounded(wide @ weight.double().T + (0 if bias is None else bias.double()))
    if epilogue == "add":
        return fused.residual.double() + y
    if epilogue == "silu_mul":
        gate, up = y.chunk(2, dim=-1)
        return rounded(F.silu(gate)) * up
    return y


def check_fused(
    kernel: Kernel, packed: Packed, weight: Tensor, m: int, prologue: str, epilogue: str, bias: bool = False
) -> None:
    """Compare a kernel's fused product with float64; inputs are chosen such that sums do not cancel.

    Args:
        kernel: the kernel.
        packed: the weight, as the kernel takes it.
        weight: [N, K], what it is multiplied as.
        m: tokens.
        prologue: as of `Problem`.
        epilogue: as of `Problem`.
        bias: whether there is one.
    """
    n, k = packed.shape
    dtype, device = packed.spec.dtype, packed.device
    generator = torch.Generator().manual_seed(n + k + m)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    x, biases = 3 * drawn(m, k), drawn(n) if bias else None
    fused = FusedOperands(
        1 + drawn(k) / 4 if prologue == "rms_norm" else None, EPSILON, drawn(m, n) if epilogue == "add" else None
    )
    problem = replace(problem_of(x, packed), prologue=prologue, epilogue=epilogue)
    product = kernel.fuse(problem)
    assert product is not None
    found = product(x, packed, biases, fused)
    expected = expected_product(x, weight, biases, prologue, epilogue, fused)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    # If a normalised x rounds to the neighbouring number, a sum that cancels is off by more than its own rounding.
    atol = eps * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=4 * eps, atol=atol)
    assert torch.equal(found, product(x, packed, biases, fused))
