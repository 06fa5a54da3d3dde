"""One bit a weight says where the non-zeros stand, the values follow: README.md gives the bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from semisparse.formats.base import Case, Format, Kernel, Params, TensorSpec
from semisparse.formats.bitmask import cpu, cuda
from semisparse.formats.bitmask.pack import BLOCK, check_content, pack_weight, unpack, values_per_block
from semisparse.patterns import Pattern

EXACT = (
    TensorSpec("masks", torch.int64, ("N", "blocks"), split_n=0, split_k=1),
    TensorSpec("values", None, ("N", "slots"), split_n=0, split_k=1),
)
VARIABLE = (
    TensorSpec("masks", torch.int64, ("N", "blocks")),
    TensorSpec("values", None, ("kept",)),
    TensorSpec("row_starts", torch.int64, ("N+1",)),
)


def _specs(pattern: Pattern, params: Params) -> tuple[TensorSpec, ...]:
    return VARIABLE if values_per_block(pattern) is None else EXACT


def _counts(n: int, k: int, pattern: Pattern, params: Params) -> Mapping[str, int]:
    blocks = -(-k // BLOCK)
    count = values_per_block(pattern)
    if count is None:
        return {"blocks": blocks, "kept": int(params["kept"])}
    return {"blocks": blocks, "slots": blocks * count}


FORMAT = Format(
    name="bitmask",
    version=1,
    summary="any pattern: one bit a weight and the non-zeros in 16 or 32 bits (9 bits a weight at 32:64)",
    accepts=lambda pattern: None,
    specs=_specs,
    counts=_counts,
    pack_weight=pack_weight,
    unpack=unpack,
    check_content=check_content,
    kernels=(
        Kernel("cpu", "cpu", cpu.supports, cpu.load),
        Kernel("decode", "cuda", cuda.decode_refusal, lambda: cuda.decode),
        Kernel("unpack", "cuda", cuda.unpack_refusal, lambda: cuda.unpack_and_multiply),
    ),
    cost=cuda.cost,
    cases=(
        Case("zeros-stored-past-k", "64:64", lambda: torch.ones(3, 65)),
        Case("one-of-each-block", "1:64", lambda: torch.eye(64).repeat(1, 3)),
        Case("window-that-divides-no-block", "6:10", lambda: torch.ones(2, 70) * (torch.arange(70) % 10 < 6)),
        Case("nothing-pruned", "0%", lambda: torch.ones(5, 130)),
    ),
    recipes={"rheosparse": {"pattern": "32:64", "prune": "sparsegpt", "format": "bitmask", "search": "evolution"}},
)
