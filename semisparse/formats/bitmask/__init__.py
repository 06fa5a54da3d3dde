"""One bit a weight says where the non-zeros stand, the values follow: README.md gives the bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from semisparse.formats.base import Case, Format
from semisparse.formats.bitmask import cpu, cuda, gemm, layouts, tiled
from semisparse.formats.bitmask.cost import cost
from semisparse.formats.bitmask.pack import BLOCK
from semisparse.formats.kernel import Kernel, Problem


def _of_rows(supports: Callable[[Problem], str | None]) -> Callable[[Problem], str | None]:
    """Narrow a kernel's support to the layout ``rows``."""

    def narrowed(problem: Problem) -> str | None:
        layout = layouts.layout_of(problem.params)
        return supports(problem) if layout == "rows" else f"reads the layout rows, this weight is stored in {layout}"

    return narrowed


FORMAT = Format(
    name="bitmask",
    version=1,
    summary="any pattern: one bit a weight and the non-zeros in 16 or 32 bits (9 bits a weight at 32:64)",
    accepts=lambda pattern: None,
    specs=layouts.specs,
    counts=layouts.counts,
    grain=lambda pattern, params: (1, BLOCK),
    pack_weight=layouts.pack_weight,
    unpack=layouts.unpack,
    check_content=layouts.check_content,
    arrange=layouts.arrange,
    kernels=(
        Kernel("cpu", "cpu", _of_rows(cpu.supports), lambda problem: cpu.load()),
        Kernel("tiled_gemm", "cuda", gemm.refusal, gemm.prepare, gemm.pays),
        Kernel("tiled_decode", "cuda", tiled.decode_refusal, tiled.prepare_decode),
        Kernel("tiled_unpack", "cuda", tiled.unpack_refusal, tiled.prepare_unpack_and_multiply),
        Kernel("decode", "cuda", _of_rows(cuda.decode_refusal), cuda.prepare_decode),
        Kernel("unpack", "cuda", _of_rows(cuda.unpack_refusal), lambda problem: cuda.unpack_and_multiply),
    ),
    cost=cost,
    cases=(
        Case("zeros-stored-past-k", "64:64", lambda: torch.ones(3, 65)),
        Case("one-of-each-block", "1:64", lambda: torch.eye(64).repeat(1, 3)),
        Case("window-that-divides-no-block", "6:10", lambda: torch.ones(2, 70) * (torch.arange(70) % 10 < 6)),
        Case("nothing-pruned", "0%", lambda: torch.ones(5, 130)),
    ),
    recipes={"rheosparse": {"pattern": "32:64", "prune": "sparsegpt", "search": "evolution", "format": "bitmask"}},
)
