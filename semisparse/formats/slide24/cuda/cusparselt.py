"""The kernel ``cusparselt``: activations lifted in Triton, cuSPARSELt's 2:4 GEMM, then scales and bias in Triton."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.slide24.cuda import cusparselt_library as library
from semisparse.formats.slide24.cuda.gemm import operand_refusal
from semisparse.formats.slide24.storage.disk import lifted_columns, quantised_dtype, value_dtype, window_of
from semisparse.formats.slide24.storage.gpu import compressed_refusal


def refusal(problem: Problem) -> str | None:
    """Return why the kernel cannot compute ``problem`` here, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton, which lifts the activations, is not installed: pip install 'semisparse[cuda]'"
    return compressed_refusal(value_dtype(problem.spec), problem.device) or operand_refusal(problem, "compressed")


def prepare(problem: Problem) -> Product:
    """Return the matmul: find the fastest algorithm and make a plan for the bucket's largest M.

    Other M of the bucket get a plan at their first call. x is float16, bfloat16 or float32, and has the weight's dtype
    if the weight is not quantised. Sums of int8 are exact in int32; for a bfloat16 x they are rounded to bfloat16
    before they are scaled.

    Raises:
        KernelError: there is no plan yet, and a CUDA graph is being captured.
    """
    from semisparse.formats.slide24.cuda import lift_triton
    from semisparse.formats.slide24.cuda.scale_triton import scale_and_add

    n, window, dtype = problem.n, window_of(problem.pattern), quantised_dtype(problem.params)
    rows, columns = library.padded_rows(n), lifted_columns(problem.k, window)
    out = problem.dtype if dtype is None else unscaled_dtype(dtype, problem.dtype)
    shape = library.Shape(
        library.index_of(problem.device), padded(problem.m), rows, columns, value_dtype(problem.spec), out
    )
    library.plan_for(shape)

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        m = x.shape[0]
        if dtype is None:
            lifted, scales = lift_triton.lift(x, window, padded(m)), None
        else:
            lifted, token_scales = lift_triton.quantise_and_lift(x, dtype, window, padded(m))
            scales = token_scales, packed.tensors["scale"]
        y = library.plan_for(replace(shape, m=padded(m))).multiply(lifted, packed.tensors["compressed"])
        if scales is None and bias is None and rows == n:
            return y[:m]
        return scale_and_add(y, scales, bias, m, n, x.dtype)

    return matmul


def padded(m: int) -> int:
    """Return M rounded up to a multiple of `library.TOKENS`."""
    return m + -m % library.TOKENS


def unscaled_dtype(dtype: torch.dtype, x_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of unscaled sums of ``dtype``: bfloat16 if x and so y are bfloat16, else a 32-bit one."""
    if x_dtype == torch.bfloat16:
        return torch.bfloat16
    return torch.int32 if dtype == torch.int8 else torch.float32
