"""A format's product: the problem that is asked, the kernels that compute it, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from semisparse.patterns import Pattern
from semisparse.runtime.nvrtc import Defines

if TYPE_CHECKING:
    from semisparse.formats.base import Packed, Params, WeightSpec


@dataclass(frozen=True)
class Problem:
    """One product that a kernel is asked for: ``y[M, N] = x[M, K] @ w[N, K].T``.

    Args:
        m: the most tokens that it is prepared for: a product takes every M of its bucket (`bucket_of`).
        spec: of the weight, without the params that count what is stored (`Format.structure`).
        dtype: of x and y.
        device: of all operands.
        prologue: what is done to x first: ``none``, or ``rms_norm`` (each row is normalised).
        epilogue: what becomes of the product: ``none``, ``add`` (to a residual [M, N]), or ``silu_mul`` (the first half
            of w's rows is a gate, the second is multiplied by its SiLU: y is [M, N / 2]).
    """

    m: int
    spec: WeightSpec
    dtype: torch.dtype
    device: torch.device
    prologue: str = "none"
    epilogue: str = "none"

    @property
    def is_fused(self) -> bool:
        """Whether it has a prologue or an epilogue; then no kernel on the stream writes the weight meanwhile."""
        return (self.prologue, self.epilogue) != ("none", "none")

    @property
    def fusion_defines(self) -> Defines:
        """The macros of fusion.cuh."""
        return {
            "RMS_NORM": int(self.prologue == "rms_norm"),
            "ADD_RESIDUAL": int(self.epilogue == "add"),
            "SILU_MUL": int(self.epilogue == "silu_mul"),
        }

    @property
    def n(self) -> int:
        """Output features."""
        return self.spec.shape[0]

    @property
    def k(self) -> int:
        """Input features."""
        return self.spec.shape[1]

    @property
    def pattern(self) -> Pattern:
        """What the weight obeys."""
        return self.spec.pattern

    @property
    def params(self) -> Params:
        """The format's own numbers, without counts."""
        return self.spec.params

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.spec.dtype


def bucket_of(m: int) -> int:
    """Return the upper end of the bucket of M that ``m`` falls in: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128 ...

    Products are chosen and prepared once per bucket, so that a new prompt length prepares next to nothing.
    """
    upper = 1 << (m - 1).bit_length()
    return upper * 3 // 4 if m > 16 and 4 * m <= 3 * upper else upper


Product = Callable[[Tensor, "Packed", Tensor | None], Tensor]
"""(x [M, K], packed, bias [N] or None) -> y [M, N] in x's dtype, for any M of the problem's bucket."""


@dataclass(frozen=True)
class FusedOperands:
    """What a fused product takes beside x, the weight and the bias.

    Args:
        norm_weight: [K] of the prologue ``rms_norm``, contiguous, in x's dtype.
        epsilon: of that norm.
        residual: [M, N] of the epilogue ``add``, contiguous, in x's dtype.
    """

    norm_weight: Tensor | None = None
    epsilon: float = 0.0
    residual: Tensor | None = None


NOTHING_FUSED = FusedOperands()

MAX_FUSED_TOKENS = 2
"""Of a product with a prologue or an epilogue: every CTA normalises all tokens, and for 8 that gains nothing."""


class FusedProduct(Protocol):
    """As `Product`, with the operands of its prologue and epilogue."""

    def __call__(
        self, x: Tensor, packed: Packed, bias: Tensor | None, fused: FusedOperands = NOTHING_FUSED, /
    ) -> Tensor: ...


@dataclass(frozen=True)
class Kernel:
    """One implementation of a format's product on one kind of device.

    Args:
        name: unique inside the format.
        device: ``cpu`` or ``cuda``; None runs on any.
        supports: None if it can compute this problem on this machine, else the reason why not.
        prepare: return the product for one problem: import, compile and load what it needs, and compute whatever x, the
            stored tensors and the bias do not change. Called once per problem, because a decode call takes the GPU less
            time than such choices take the host. It keeps no tensor.
        pays: whether ``auto`` may prefer it to the kernels after it; false where another was measured to be faster.
        fuse: as ``prepare``, for a problem with a prologue or an epilogue; None if the kernel cannot fuse these, or if
            doing them around the product is faster.
    """

    name: str
    device: str | None
    supports: Callable[[Problem], str | None]
    prepare: Callable[[Problem], Product]
    pays: Callable[[Problem], bool] = lambda problem: True
    fuse: Callable[[Problem], FusedProduct | None] = lambda problem: None

    def refusal(self, problem: Problem) -> str | None:
        """Say why this kernel cannot compute ``problem``, or None if it can."""
        if self.device is not None and self.device != problem.device.type:
            return f"runs on {self.device}, the operands are on {problem.device.type}"
        return self.supports(problem)


@dataclass(frozen=True)
class Pass:
    """One kernel launch of a product, as the roofline model sees it.

    Args:
        bytes: read and written, each operand once.
        operations: multiplications and additions.
        unit: what computes them: ``tensor fp16`` (bfloat16 too), ``tensor fp8``, ``tensor int8`` or ``fp32``.
        strategy: how the kernel goes about it, where a format has several ways; ``plan`` shows it.
        unpacking: operations of ``fp32`` units that finding and unpacking weights takes beside these.
        reached: share of the unit's rate that the kernel reaches.

    The last two are as measured, and belong to the time that ``plan`` predicts, not to the floor: another kernel may do
    with fewer, or reach more.
    """

    bytes: float
    operations: float
    unit: str
    strategy: str = ""
    unpacking: float = 0
    reached: float = 1


def fused_cost(problem: Problem, weight_bytes: float, unpacking: float = 0) -> tuple[Pass, ...]:
    """Return what a kernel costs that unpacks the weight as it reads it: packed bytes, dense operations.

    Args:
        problem: the product.
        weight_bytes: of the packed weight.
        unpacking: as in `Pass`, measured on GPUs, and so left out for a CPU.
    """
    m, n, k = problem.m, problem.n, problem.k
    operands = m * (n + k) * problem.dtype.itemsize
    unit = "fp32" if problem.dtype == torch.float32 else "tensor fp16"
    on_gpu = problem.device.type == "cuda"
    return (Pass(weight_bytes + operands, 2 * m * n * k, unit, unpacking=unpacking if on_gpu else 0),)
