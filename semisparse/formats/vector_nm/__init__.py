"""Format ``vector_nm`` (NM-SpMM): every window of vectors along K keeps a fixed number. Layout: README.md."""

from __future__ import annotations

import torch

from semisparse.formats.base import Case, Format
from semisparse.formats.kernel import Kernel
from semisparse.formats.vector_nm.cost import cost
from semisparse.formats.vector_nm.cpu import kernel as cpu
from semisparse.formats.vector_nm.cuda import (
    decode,
    decode_tensor,
    gemm,
    gemm_fp32,
    gemm_sparse,
    gemm_wgmma,
    unpack,
    wgmma_schedule,
)
from semisparse.formats.vector_nm.storage import check, disk, gpu

FORMAT = Format(
    name="vector_nm",
    version=1,
    summary="N:M over vectors of L rows in one column; kept vectors are dense (8.1 bits per weight at 16:32v32)",
    accepts=disk.accepts,
    specs=gpu.specs,
    counts=gpu.counts,
    counted=("blocks",),
    grain=disk.grain,
    arrange=gpu.arrange,
    pack_weight=disk.pack_weight,
    unpack=disk.unpack,
    check_content=check.check_content,
    violation=lambda packed: None,  # any content that passes check_content has the pattern
    kernels=(
        Kernel("cpu", "cpu", cpu.refusal, cpu.prepare),
        Kernel("decode_tensor", "cuda", decode_tensor.refusal, decode_tensor.prepare, fuse=decode_tensor.fuse),
        Kernel("decode", "cuda", decode.refusal, decode.prepare),
        Kernel("gemm_fp32", "cuda", gemm_fp32.refusal, gemm_fp32.prepare),
        Kernel("gemm_sparse", "cuda", gemm_sparse.refusal, gemm_sparse.prepare, gemm_sparse.pays),
        Kernel("gemm_wgmma", "cuda", gemm_wgmma.refusal, gemm_wgmma.prepare, wgmma_schedule.pays),
        Kernel("gemm", "cuda", gemm.refusal, gemm.prepare, gemm.pays),
        Kernel("unpack", "cuda", unpack.refusal, unpack.prepare),
    ),
    cost=cost,
    cases=(
        Case("half-of-32", "16:32v32", lambda: torch.ones(70, 172) * (torch.arange(172) % 2)),
        Case("single-rows", "3:7v1", lambda: torch.ones(5, 30) * (torch.arange(30) % 7 < 3)),
        Case("length-of-no-power-of-two", "2:5v3", lambda: torch.ones(10, 23) * (torch.arange(23) % 5 > 2)),
        Case("last-window-shorter-than-keep", "16:32v4", lambda: torch.ones(9, 35) * (torch.arange(35) % 32 > 15)),
        Case("widest-window-and-vector", "64:256v128", lambda: torch.ones(130, 300) * (torch.arange(300) % 4 == 3)),
        Case("nothing-pruned", "32:32v8", lambda: torch.ones(12, 64)),
    ),
    recipes={"nm-spmm": {"pattern": "16:32v32", "prune": "sparsegpt", "format": "vector_nm"}},
    choices=(("16:32v32", "none"),),
)
