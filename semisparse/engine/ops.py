"""The operations of a decoder layer between its linear layers: own kernels on a GPU, torch elsewhere.

The kernels and torch round to the model's dtype where transformers does: each result, and both factors before a
multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.runtime import elementwise
from semisparse.runtime.device import device_facts
from semisparse.runtime.elementwise import SCALARS, VECTORS, vector_of
from semisparse.runtime.expand_gemm import Permutation, PermutedX
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.nvrtc import Defines

FOLDER = Path(__file__).parent / "cuda"

RMS_NORM = CudaSource(FOLDER / "rms_norm.cu", (*VECTORS, {"SCALAR": "__nv_bfloat16", "VECTOR": 8, "PERMUTED": 1}))
GREEDY = CudaSource(FOLDER / "greedy.cu", tuple({key: of[key] for key in ("SCALAR", "VECTOR")} for of in VECTORS))


def kernels_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Say why the engine's kernels cannot run on a device, or None if they can."""
    if dtype not in SCALARS:
        return f"the model is {dtype}; the kernels take float16, bfloat16 and float32"
    if head_dim % 8 or head_dim > 256:
        return f"heads have {head_dim} values; the kernels take multiples of 8 up to 256"
    return cuda_refusal(device)


@dataclass(frozen=True)
class Columns:
    """Where parts of a joined linear layer's output begin, and how many columns it has."""

    starts: tuple[int, ...]
    width: int


@overload
def rms_norm(x: Tensor, weight: Tensor, epsilon: float, delta: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, delta: Tensor | None, permutation: Permutation | None
) -> tuple[Tensor, Tensor | PermutedX]: ...
def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, delta: Tensor | None = None, permutation: Permutation | None = None
) -> tuple[Tensor, Tensor | PermutedX]:
    """Add to the residual stream and normalise.

    Args:
        x: [M, C], the residual stream.
        weight: [C]; no kernel on the stream may write it: it is read before the kernel before has ended.
        epsilon: added to the mean of squares.
        delta: [M, C], added to x first, or None.
        permutation: the order in which the GEMM that is next reads the rows, or None.
    Returns:
        The residual stream with delta added, and the normalised rows, both [M, C] in x's dtype. The normalised rows are
        in the permutation's order, if there is one and rows are aligned to 16 bytes.
    """
    if device_facts(x.device).kind == "cuda":
        rows, columns = x.shape
        total = x if delta is None else torch.empty_like(x)
        vector = vector_of(x.dtype, [columns], [x, weight, delta])
        threads = min(1024, -(-columns // vector // 32) * 32)
        defines: Defines = {"SCALAR": SCALARS[x.dtype], "VECTOR": vector, "PERMUTED": 0}
        operands = {"x": x, "delta": delta, "weight": weight, "sum": total, "columns": columns, "epsilon": epsilon}
        shared, pdl = 2 * columns * x.dtype.itemsize, device_facts(x.device).has_pdl
        if permutation is not None and vector > 1:
            permuted = permutation.allocate(rows, x.dtype, x.device)
            build = RMS_NORM.build("semisparse_engine_rms_norm_permuted", {**defines, "PERMUTED": 1}, shared)
            kernel = replace(build, shares_sm=True).load(x.device)
            kernel((permuted.launch.tokens, 1, 1), threads, pdl=pdl, **operands, **permuted.arguments)
            return total, permuted
        out = torch.empty_like(x)
        kernel = RMS_NORM.build("semisparse_engine_rms_norm", defines, shared).load(x.device)
        kernel((rows, 1, 1), threads, pdl=pdl, **operands, out=out)
        return total, out
    total = x if delta is None else x + delta
    wide = total.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return total, weight * normalised.to(x.dtype)


def silu_mul(gate_up: Tensor, at: Columns, columns: int, permutation: Permutation | None = None) -> Tensor | PermutedX:
    """Return ``silu(gate) * up``, [M, columns], where gate and up are columns of a joined output, [M, at.width].

    If there is a permutation, and pairs of values are aligned, it is in that order, for the GEMM that is next.
    """
    if device_facts(gate_up.device).kind == "cuda":
        if permutation is not None and elementwise.has_aligned_pairs(gate_up, at.starts, columns):
            return elementwise.silu_mul_permuted(gate_up, at.starts, columns, permutation)
        return elementwise.silu_mul(gate_up, at.starts, columns)
    gate, up = (gate_up.narrow(-1, start, columns) for start in at.starts)
    return F.silu(gate) * up


def greedy_step(logits: Tensor, tokens: Tensor, positions: Tensor, output: Tensor, steps: Tensor) -> None:
    """Choose each sequence's most probable token, and advance the decoding state.

    Args:
        logits: [sequences, vocabulary].
        tokens: [sequences] int64: set to these tokens.
        positions: [sequences] int32: incremented.
        output: [capacity, sequences] int64: row ``steps[0]`` is set to the tokens.
        steps: [2] int32. The first is the number of rows of ``output`` that are written; it is incremented. The second
            is a counter of greedy.cu, 0 between calls.
    """
    if device_facts(logits.device).kind == "cuda":
        vector = vector_of(logits.dtype, [logits.shape[1]], [logits])
        defines: Defines = {"SCALAR": SCALARS[logits.dtype], "VECTOR": vector}
        GREEDY.build("semisparse_engine_greedy", defines).load(logits.device)(
            (len(tokens), 1, 1), 1024, pdl=device_facts(logits.device).has_pdl,
            logits=logits, tokens=tokens, positions=positions, output=output, steps=steps,
            vocabulary=logits.shape[1], capacity=len(output),
        )  # fmt: skip
        return
    move_on(logits.argmax(-1), tokens, positions, output, steps)


def move_on(chosen: Tensor, tokens: Tensor, positions: Tensor, output: Tensor, steps: Tensor) -> None:
    """Advance the decoding state with chosen tokens, as `greedy_step` does, without waiting for the device."""
    tokens.copy_(chosen)
    positions += 1
    output.index_copy_(0, steps[:1].clamp(max=len(output) - 1).long(), chosen[None])
    steps[0] += 1
