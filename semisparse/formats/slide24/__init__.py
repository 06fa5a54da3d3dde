"""Format ``slide24`` (SlideSparse): keep 2N-2 of 2N as overlapping 2:4 windows. README.md describes it."""

from __future__ import annotations

import torch

from semisparse.formats.base import Case, Format
from semisparse.formats.kernel import Kernel
from semisparse.formats.slide24.cost import cost
from semisparse.formats.slide24.cpu import kernel as cpu
from semisparse.formats.slide24.cuda import cusparselt, gemm, unpack
from semisparse.formats.slide24.storage import disk, gpu

FORMAT = Format(
    name="slide24",
    version=1,
    summary="keep 2N-2 of 2N (4:6, 6:8, 8:10 ...) as overlapping 2:4 windows, in 16 bits, int8 or fp8",
    accepts=disk.accepts,
    specs=gpu.specs,
    counts=gpu.counts,
    pack_weight=disk.pack_weight,
    unpack=gpu.unpack,
    check_content=gpu.check_content,
    codes=disk.codes_of,
    violation=lambda packed: None,  # metadata that check_content accepts cannot break the pattern
    arrange=gpu.arrange,
    kernels=(
        Kernel("gemm", "cuda", gemm.refusal, gemm.prepare, gemm.pays),
        Kernel("cusparselt", "cuda", cusparselt.refusal, cusparselt.prepare),
        Kernel("unpack", "cuda", unpack.refusal, unpack.prepare),
        Kernel("cpu", "cpu", cpu.refusal, cpu.prepare),
    ),
    cases=(
        Case("first-columns-dead", "6:8", lambda: torch.ones(2, 40) * (torch.arange(40) % 8 > 1)),
        Case("last-columns-dead", "6:8", lambda: torch.ones(2, 40) * (torch.arange(40) % 8 < 6)),
        Case("zeros-stored-past-k", "14:16", lambda: torch.ones(3, 67) * (torch.arange(67) % 16 < 14)),
        Case("wide-group", "32:34", lambda: torch.ones(2, 70) * (torch.arange(70) % 34 > 1)),
    ),
    recipes={"slidesparse": {"pattern": "6:8", "prune": "sparsegpt", "quant": "int8", "format": "slide24"}},
    cost=cost,
    grain=disk.grain,
    scale_columns=disk.scale_columns,
    tuned_by=("kind",),
    variants=({}, *({"kind": kind} for kind in disk.KINDS)),
    choices=(("2:4", "none"), ("2:4", "int8"), ("4:6", "int8"), ("6:8", "int8")),
)
