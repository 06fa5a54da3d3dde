"""Format ``ec_csr`` (EC-SpMV): unstructured sparsity as delta-coded lists of columns. README.md gives the bytes."""

from __future__ import annotations

import torch

from semisparse.formats.base import Case, Format
from semisparse.formats.ec_csr import cpu, cuda, layout, pack, tiles
from semisparse.formats.ec_csr.stack import grain, stack
from semisparse.formats.ec_csr.unpack import prepare_unpack_and_multiply, unpack_refusal
from semisparse.formats.kernel import Kernel
from semisparse.patterns import Pattern
from semisparse.patterns.unstructured import Unstructured


def _accepts(pattern: Pattern) -> str | None:
    return None if isinstance(pattern, Unstructured) else "it stores unstructured patterns: 70%, 70%/row, ..."


def _wide() -> torch.Tensor:
    weight = torch.zeros(2, (1 << 16) + 70)
    weight[0, ::700] = 0.5
    weight[1, -1] = -1.0
    return weight


FORMAT = Format(
    name="ec_csr",
    version=1,
    summary="unstructured sparsity (70 %): a delta of 4 or 8 bits a column, columns shared by rows where wanted",
    accepts=_accepts,
    specs=layout.specs,
    counts=layout.counts,
    pack_weight=pack.pack_weight,
    unpack=pack.unpack,
    check_content=pack.check_content,
    grain=grain,
    stack=stack,
    kernels=(
        Kernel("cpu", "cpu", cpu.refusal, lambda problem: cpu.product),
        Kernel("decode_tiles", "cuda", tiles.tiles_refusal, tiles.prepare_tiles, tiles.tiles_pay),
        Kernel("decode_banks", "cuda", cuda.banks_refusal, cuda.prepare_banks),
        Kernel("decode_paper", "cuda", cuda.paper_refusal, lambda problem: cuda.decode_paper),
        Kernel("unpack_banks", "cuda", unpack_refusal, prepare_unpack_and_multiply),
    ),
    cost=cuda.cost,
    cases=(
        Case("columns-past-16-bits", "99%", _wide),
        Case("gaps-wider-than-a-delta", "90%", lambda: torch.eye(3, 2000).roll(1999, 1)),
        Case("more-parts-than-warps", "0%", lambda: torch.ones(3, 2500)),
        Case("one-long-row", "90%", lambda: torch.ones(40, 600) * (torch.arange(40)[:, None] == 33)),
    ),
    recipes={"ec-spmv": {"pattern": "70%", "prune": "sparsegpt", "format": "ec_csr"}},
)
