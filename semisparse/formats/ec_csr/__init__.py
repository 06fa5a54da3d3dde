"""Format ``ec_csr`` (EC-SpMV): unstructured sparsity as delta-coded lists of columns. README.md gives the bytes."""

from __future__ import annotations

import torch

from semisparse.formats.base import Case, Format
from semisparse.formats.ec_csr.cost import cost, gpu_bytes
from semisparse.formats.ec_csr.cpu import kernel as cpu
from semisparse.formats.ec_csr.cuda import decode, decode_mma, decode_tiles, gemm, unpack, unpack_tiles
from semisparse.formats.ec_csr.paper import decode as paper
from semisparse.formats.ec_csr.storage import disk
from semisparse.formats.ec_csr.storage.check import check_content, violation
from semisparse.formats.ec_csr.storage.gpu import arrange, spec_on_gpu
from semisparse.formats.ec_csr.storage.stack import stack
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
    summary="unstructured sparsity (70 %): 4 or 8 bits per column, as the distance to the one before",
    accepts=_accepts,
    specs=disk.specs,
    counts=disk.counts,
    counted=("values", "span", "bundles", "deltas", "slots", "units"),
    options={
        "layout": ("banks", "paper"),
        "delta_bits": ("auto", 4, 8),
        "on_gpu": ("both", "lists", "tiles"),
        "granularity": (1, 2, 4, 8),
        "multiple": (),
        "clip": (),
    },
    pack_weight=disk.pack_weight,
    unpack=disk.unpack,
    check_content=check_content,
    violation=violation,
    grain=disk.grain,
    stack=stack,
    arrange=arrange,
    kernels=(
        Kernel("cpu", "cpu", cpu.refusal, cpu.prepare),
        Kernel("decode_mma", "cuda", decode_mma.refusal, decode_mma.prepare, decode_mma.pays),
        Kernel("decode", "cuda", decode.refusal, decode.prepare, decode.pays, decode.fuse),
        Kernel(
            "decode_tiles", "cuda", decode_tiles.refusal, decode_tiles.prepare, decode_tiles.pays, decode_tiles.fuse
        ),
        Kernel("gemm", "cuda", gemm.refusal, gemm.prepare, gemm.pays),
        Kernel("unpack_tiles", "cuda", unpack_tiles.refusal, unpack_tiles.prepare),
        Kernel("unpack", "cuda", unpack.refusal, unpack.prepare),
        Kernel("paper", "cuda", paper.refusal, paper.prepare, lambda problem: False),
    ),
    cost=cost,
    spec_on_gpu=spec_on_gpu,
    gpu_bytes=gpu_bytes,
    tuned_by=("on_gpu",),
    variants=({}, {"on_gpu": "lists"}),
    cases=(
        Case("columns-past-16-bits", "99%", _wide),
        Case("gaps-wider-than-a-delta", "90%", lambda: torch.eye(3, 2000).roll(1999, 1)),
        Case("more-parts-than-warps", "0%", lambda: torch.ones(3, 2500)),
        Case("one-long-row", "90%", lambda: torch.ones(40, 600) * (torch.arange(40)[:, None] == 33)),
    ),
    recipes={"ec-spmv": {"pattern": "70%", "prune": "sparsegpt", "format": "ec_csr"}},
    choices=(("70%", "none"), ("90%", "none")),
)
