"""`unpack_tiles`: the whole weight unpacked from mask tiles by torch, then cuBLAS, for what no other kernel takes."""

from __future__ import annotations

from semisparse.formats.ec_csr.cuda.decode_tiles import tiles_refusal
from semisparse.formats.ec_csr.storage.tiles import unpack
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.blas import multiply_dense


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    return tiles_refusal(problem)


def prepare(problem: Problem) -> Product:
    """Return the matmul, for more tokens than `gemm` takes. It takes milliseconds; x has w's dtype."""
    return lambda x, packed, bias: multiply_dense(x, unpack(packed), bias)
