"""Format ``dense``: the weight as it is, or rounded to 8 or 4 bits: what the sparse formats are measured against."""

from __future__ import annotations

from semisparse.formats.base import Format
from semisparse.formats.dense import pack, products
from semisparse.formats.kernel import Kernel, Problem, Product


def _triton_int8(problem: Problem) -> Product:
    from semisparse.formats.dense.triton_int8 import linear

    return linear


FORMAT = Format(
    name="dense",
    version=1,
    summary="the weight as it is, or rounded to int8, fp8 or int4: the baseline of the sparse formats",
    accepts=lambda pattern: None,
    specs=pack.specs,
    counts=pack.counts,
    pack_weight=pack.pack_weight,
    unpack=pack.unpack,
    check_content=pack.check_content,
    kernels=(
        Kernel("blas", None, products.blas_refusal, lambda problem: products.blas),
        Kernel("triton_int8", "cuda", products.triton_int8_refusal, _triton_int8),
        Kernel("int_mm", "cuda", products.int_mm_refusal, lambda problem: products.int_mm),
        Kernel("scaled_mm", "cuda", products.scaled_mm_refusal, lambda problem: products.scaled_mm),
        Kernel("int4pack_mm", "cuda", products.int4pack_mm_refusal, lambda problem: products.int4pack_mm),
    ),
    cost=pack.cost,
    grain=pack.grain,
    variants=({}, *({"kind": kind} for kind in pack.QUANTISED)),
)
