"""A format's matmul: the problem that describes it, the kernels that compute it, and what they cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from semisparse.patterns import Pattern
from semisparse.runtime.expand_gemm import Matmul, PermutedX
from semisparse.runtime.experts import Routing
from semisparse.runtime.nvrtc import Defines

if TYPE_CHECKING:
    from semisparse.formats.packed import Packed
    from semisparse.formats.spec import Params, WeightSpec


@dataclass(frozen=True)
class Problem:
    """A matmul for a kernel to compute: ``y[M, N] = x[M, K] @ w[N, K].T``.

    Args:
        m: for a kernel the maximum M, the upper end of a bucket (`bucket_of`): what is prepared for it computes every M
            of the bucket. For `Format.cost` any M.
        spec: what `Format.structure` makes of the weight's spec. It lacks params that vary from weight to weight, such
            as the number of non-zeros, so weights of one shape share a prepared kernel.
        dtype: dtype of x and y.
        device: device of all operands.
        prologue: applied to x: ``none``, or ``rms_norm`` (each row is normalised).
        epilogue: applied to the result: ``none``, ``add`` (adds a residual [M, N]), or ``silu_mul`` (multiplies the
            outputs of the second half of w's rows by SiLU of those of the first half, the gate: y is [M, N / 2]).
        constant: whether no kernel on the stream writes the weight, so that GEMMs may start early (`constant_linear`).
    """

    m: int
    spec: WeightSpec
    dtype: torch.dtype
    device: torch.device
    prologue: str = "none"
    epilogue: str = "none"
    constant: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether it has a prologue or an epilogue.

        If so, callers promise that no kernel on the stream writes the weight, the bias or ``norm_weight``, so a kernel
        with PDL may read them before ``griddepcontrol.wait``.
        """
        return (self.prologue, self.epilogue) != ("none", "none")

    @property
    def fusion_defines(self) -> Defines:
        """The macros of fusion.cuh that select what is fused: 1 or 0 each."""
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
        """The pattern that the weight obeys."""
        return self.spec.pattern

    @property
    def params(self) -> Params:
        """The format's params, as `Format.structure` leaves them."""
        return self.spec.params

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dense weight's dtype."""
        return self.spec.dtype


def bucket_of(m: int) -> int:
    """Return the upper end of the bucket of M that ``m`` falls in: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128 ...

    Kernels are chosen and prepared once per bucket, so a new prompt length rarely costs a choice or a compilation.
    """
    upper = 1 << (m - 1).bit_length()
    return upper * 3 // 4 if m > 16 and 4 * m <= 3 * upper else upper


Product = Callable[[Tensor, "Packed", Tensor | None], Tensor]
"""(x [M, K], packed, bias [N] or None) -> y [M, N] in x's dtype, for any M of the problem's bucket."""


class PermutingProduct:
    """A `Product` of a GEMM that reads x in an order of its own.

    Args:
        run: the product; x may also be a `PermutedX`.
        matmul: the GEMM.

    Attributes:
        permutation: the order of the `PermutedX` that it takes.
    """

    def __init__(self, run: Callable[[Tensor | PermutedX, Packed, Tensor | None], Tensor], matmul: Matmul) -> None:
        self.run, self.permutation, self._matmul = run, matmul.permutation, matmul

    def permuted(self, x: Tensor) -> PermutedX:
        """Return x in that order, for a weight that no kernel on the stream writes: the GEMM may read it at once."""
        return self._matmul.permuted(x, constant=True)

    def __call__(self, x: Tensor | PermutedX, packed: Packed, bias: Tensor | None) -> Tensor:
        return self.run(x, packed, bias)


@dataclass(frozen=True)
class FusedOperands:
    """The operands of a prologue and an epilogue.

    Args:
        norm_weight: [K], the weight of ``rms_norm``, contiguous, at a multiple of 16 bytes, in x's dtype.
        epsilon: the epsilon of ``rms_norm``.
        residual: [M, N], the residual of ``add``, contiguous, in x's dtype.
    """

    norm_weight: Tensor | None = None
    epsilon: float = 0.0
    residual: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Tensor | float | None]:
        """The operands as a kernel's arguments by name."""
        return {"norm_weight": self.norm_weight, "residual": self.residual, "epsilon": self.epsilon}


NOTHING_FUSED = FusedOperands()


@dataclass(frozen=True)
class ExpertsProblem:
    """The matmuls of a mixture's experts: ``y[p] = x[row of p] @ w[expert of p].T``, p a pair of a token and an expert.

    Args:
        pairs: maximum number of pairs: the upper end of a bucket (`bucket_of`).
        experts: number of experts, whose weights [N, K] are stacked along N.
        spec: the stack's spec, as in `Problem`.
        dtype: dtype of x and y.
        device: device of all operands.
        epilogue: ``none``, or ``silu_mul`` as in `Problem`: y is [pairs, N / 2].
    """

    pairs: int
    experts: int
    spec: WeightSpec
    dtype: torch.dtype
    device: torch.device
    epilogue: str = "none"

    @property
    def n(self) -> int:
        """Output features of an expert."""
        return self.spec.shape[0] // self.experts

    @property
    def k(self) -> int:
        """Input features."""
        return self.spec.shape[1]


ExpertsProduct = Callable[[Tensor, "Packed", Tensor | None, Routing], Tensor]
"""(x, packed stack, bias [experts * N] or None, the step's routing) -> y [pairs, N] in x's dtype, for any number of
pairs of the problem's bucket. x is [tokens, K], where the pairs of a token share a row, or [pairs, K]."""

MAX_FUSED_TOKENS = 2
"""Maximum M of a `Problem` with a prologue or an epilogue (not of an `ExpertsProblem`).

For 8 tokens fusing gains nothing or loses (docs/experiments/decode-step.md, "Batches")."""


class FusedProduct(Protocol):
    """A `Product` that also takes the operands of its prologue and epilogue."""

    def __call__(
        self, x: Tensor, packed: Packed, bias: Tensor | None, fused: FusedOperands = NOTHING_FUSED, /
    ) -> Tensor: ...


@dataclass(frozen=True)
class Kernel:
    """One implementation of a format's matmul on one kind of device.

    Args:
        name: unique inside the format.
        device: ``cpu`` or ``cuda``; None runs on any.
        supports: problem -> None if the kernel can compute it on this machine, else the reason why not.
        prepare: problem -> the function that computes it. Imports, compiles and loads what it needs (Triton's kernels
            compile at the first call). Also computes what depends on neither the exact M nor the operands' values. This
            is done once per problem, because on the host it takes longer than a decode matmul takes on the GPU. Keeps
            no tensor.
        pays: problem -> whether ``auto`` may prefer it to the kernels after it; false if another is known to be faster.
        fuse: as ``prepare``, for a problem with a prologue or an epilogue; None if the kernel cannot fuse them, or if
            computing them in kernels of their own is faster.
    """

    name: str
    device: str | None
    supports: Callable[[Problem], str | None]
    prepare: Callable[[Problem], Product]
    pays: Callable[[Problem], bool] = lambda problem: True
    fuse: Callable[[Problem], FusedProduct | None] = lambda problem: None

    def refusal(self, problem: Problem) -> str | None:
        """Return why this kernel cannot compute ``problem``, or None if it can."""
        if self.device is not None and self.device != problem.device.type:
            return f"runs on {self.device}, the operands are on {problem.device.type}"
        return self.supports(problem)


def in_parallel(jobs: Iterable[Callable[[], object]]) -> None:
    """Run jobs, such as the preparation of kernels, in parallel, one thread per CPU core.

    NVRTC compiles in parallel threads: on two cores nine kernels take 4.8 s instead of 8.9 s.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = [pool.submit(job) for job in jobs]
    for job in running:
        job.result()


@dataclass(frozen=True)
class Pass:
    """One kernel launch of a matmul, for the roofline model.

    Args:
        bytes: bytes read and written: each operand once, and what the format knows to be read again.
        operations: multiplications and additions.
        unit: what executes them: ``tensor fp16`` (bfloat16 too), ``tensor fp8``, ``tensor int8`` or ``fp32``.
        strategy: a name, which ``plan`` shows, for the way to compute the matmul; empty if the format gives none.
        unpacking: further operations, on ``fp32`` units, to find and unpack weights.
        reached: fraction of the unit's peak that the kernel reaches.

    ``unpacking`` and ``reached`` come from measurements. They count in the time that ``plan`` predicts, but not in the
    floor: another kernel may need fewer operations, or reach more of the peak.
    """

    bytes: float
    operations: float
    unit: str
    strategy: str = ""
    unpacking: float = 0
    reached: float = 1


def one_pass_cost(problem: Problem, weight_bytes: float, unpacking: float = 0) -> tuple[Pass, ...]:
    """Return the cost of one kernel that computes the whole matmul, with as many operations as a dense one.

    Args:
        problem: the matmul.
        weight_bytes: bytes of the weight that the kernel reads: packed, or dense if it has been unpacked.
        unpacking: as in `Pass`. It is measured on GPUs and ignored for a CPU.
    """
    m, n, k = problem.m, problem.n, problem.k
    operands = m * (n + k) * problem.dtype.itemsize
    unit = "fp32" if problem.dtype == torch.float32 else "tensor fp16"
    on_gpu = problem.device.type == "cuda"
    return (Pass(weight_bytes + operands, 2 * m * n * k, unit, unpacking=unpacking if on_gpu else 0),)
