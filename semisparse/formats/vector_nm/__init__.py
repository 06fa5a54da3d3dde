"""Format ``vector_nm`` (NM-SpMM): of every window of vectors along K some are kept. README.md gives the bytes."""

from __future__ import annotations

import torch

from semisparse.formats.base import Case, Format
from semisparse.formats.kernel import Kernel
from semisparse.formats.vector_nm import cpu, cuda, decode_tensor, fours, layout, pack, plan, tiled
from semisparse.formats.vector_nm.cost import cost

FORMAT = Format(
    name="vector_nm",
    version=1,
    summary="keep:window vectors of L rows that share their columns, dense inside (8.1 bits a weight at 16:32v32)",
    accepts=layout.accepts,
    specs=layout.specs,
    counts=layout.counts,
    grain=layout.grain,
    arrange=plan.arrange,
    pack_weight=pack.pack_weight,
    unpack=pack.unpack,
    check_content=plan.check_content,
    kernels=(
        Kernel("cpu", "cpu", cpu.supports, lambda problem: cpu.gather_and_multiply),
        Kernel("decode_tensor", "cuda", decode_tensor.refusal, decode_tensor.prepare),
        Kernel("decode", "cuda", cuda.decode_refusal, cuda.prepare_decode),
        Kernel("simt", "cuda", tiled.simt_refusal, tiled.prepare),
        Kernel("fours", "cuda", fours.refusal, fours.prepare, fours.pays),
        Kernel("tensor", "cuda", tiled.tensor_refusal, tiled.prepare, tiled.tensor_pays),
        Kernel("unpack", "cuda", cuda.unpack_refusal, cuda.prepare_unpack_and_multiply),
        Kernel("unpack_torch", "cuda", cuda.unpack_torch_refusal, lambda problem: cuda.unpack_by_torch),
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
)
