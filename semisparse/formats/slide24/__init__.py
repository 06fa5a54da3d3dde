"""Format ``slide24`` (SlideSparse): keep 2N-2 of 2N as overlapping 2:4 windows. README.md gives the bytes."""

from __future__ import annotations

import torch

from semisparse.errors import PatternError
from semisparse.formats.base import Case, Format
from semisparse.formats.kernel import Kernel
from semisparse.formats.slide24 import cpu, gpu, layouts, pack, products
from semisparse.formats.slide24.cost import cost
from semisparse.formats.slide24.theory import Decomposition
from semisparse.patterns import NM, Pattern

TAKEN = "it stores keep:window with keep = window - 2 and an even window: 2:4, 4:6, 6:8, 8:10, ..."


def _accepts(pattern: Pattern) -> str | None:
    """Refuse what does not fill every 2:4 window: it would pay for more columns than it has weights."""
    if not isinstance(pattern, NM):
        return TAKEN
    try:
        onto = Decomposition(pattern.keep, pattern.window)
    except PatternError:
        return TAKEN
    return None if onto.exists and onto.capacity == pattern.keep else TAKEN


FORMAT = Format(
    name="slide24",
    version=1,
    summary="keep 2N-2 of 2N (4:6, 6:8, 8:10 ...) as overlapping 2:4 windows, in 16 bits, int8 or fp8",
    accepts=_accepts,
    specs=layouts.specs,
    counts=layouts.counts,
    pack_weight=pack.pack_weight,
    unpack=layouts.unpack,
    check_content=layouts.check_content,
    arrange=layouts.arrange,
    kernels=(
        Kernel("hopper", "cuda", gpu.tiles_refusal, gpu.prepare_tiles, gpu.tiles_pay),
        Kernel("cusparselt", "cuda", gpu.compressed_refusal, lambda problem: gpu.multiply_compressed),
        Kernel("unpack", "cuda", gpu.unpack_refusal, lambda problem: gpu.unpack_and_multiply),
        Kernel("cpu", "cpu", cpu.supports, lambda problem: cpu.load()),
        Kernel("dense", "cpu", lambda problem: None, lambda problem: products.dense),
        Kernel("lifted", "cpu", lambda problem: None, lambda problem: products.lifted),
    ),
    cases=(
        Case("first-columns-dead", "6:8", lambda: torch.ones(2, 40) * (torch.arange(40) % 8 > 1)),
        Case("last-columns-dead", "6:8", lambda: torch.ones(2, 40) * (torch.arange(40) % 8 < 6)),
        Case("zeros-stored-past-k", "14:16", lambda: torch.ones(3, 67) * (torch.arange(67) % 16 < 14)),
        Case("wide-group", "32:34", lambda: torch.ones(2, 70) * (torch.arange(70) % 34 > 1)),
    ),
    recipes={"slidesparse": {"pattern": "6:8", "prune": "sparsegpt", "quant": "int8", "format": "slide24"}},
    cost=cost,
    grain=pack.grain,
    variants=({}, *({"kind": kind} for kind in pack.KINDS)),
)
