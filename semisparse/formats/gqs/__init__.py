"""Format ``gqs`` (GQSA): groups of weights along K, dropped or kept in 8, 4, 3 or 2 bits. README.md describes it."""

from __future__ import annotations

import torch

from semisparse.formats.base import Case, Format
from semisparse.formats.gqs.cost import cost
from semisparse.formats.gqs.cpu import kernel as cpu
from semisparse.formats.gqs.cuda import decode, experts, full, full_schedule, gemm, gemm_wgmma, unpack, wgmma_schedule
from semisparse.formats.gqs.cuda.gemm_schedule import decode_pays, gemm_pays
from semisparse.formats.gqs.storage import disk
from semisparse.formats.gqs.storage.check import check_content, violation
from semisparse.formats.gqs.storage.regroup import regroup
from semisparse.formats.gqs.storage.stack import stack
from semisparse.formats.kernel import Kernel
from semisparse.quant.group import KINDS

FORMAT = Format(
    name="gqs",
    version=1,
    summary="groups of 4 to 128 along K, dropped whole or kept in 8, 4, 3 or 2 bits (2.9 bits per weight at W4S50 G16)",
    accepts=disk.accepts,
    specs=disk.specs,
    counts=disk.counts,
    pack_weight=disk.pack,
    unpack=disk.unpack,
    check_content=check_content,
    codes=disk.codes_of,
    violation=violation,
    counted=("kept",),
    facts=disk.facts,
    tuned_by=("kind",),
    kernels=(
        Kernel("cpu", "cpu", cpu.refusal, cpu.prepare),
        Kernel("unpack_cpu", "cpu", lambda problem: None, cpu.prepare_unpack),
        Kernel("decode", "cuda", decode.refusal, decode.prepare, decode_pays, decode.fuse),
        Kernel("full", "cuda", full.refusal, full.prepare, full_schedule.pays, full.fuse),
        Kernel("gemm_wgmma", "cuda", gemm_wgmma.refusal, gemm_wgmma.prepare, wgmma_schedule.pays),
        Kernel("gemm", "cuda", gemm.refusal, gemm.prepare, gemm_pays),
        Kernel("unpack", "cuda", unpack.refusal, unpack.prepare),
    ),
    experts=experts.prepare,
    cost=cost,
    cases=(
        Case("nothing-dropped", "g16@0%", lambda: torch.randn(20, 70, generator=torch.Generator().manual_seed(0))),
        Case("one-group-per-row", "g8@80%", lambda: torch.eye(20).repeat_interleave(8, dim=1)[:, :150]),
        Case("small-groups", "g4@50%", lambda: torch.ones(17, 40) * (torch.arange(40) // 4 % 2)),
        Case("large-groups", "g128@80%", lambda: torch.ones(3, 300) * (torch.arange(300) < 128)),
    ),
    recipes={
        "gqsa": {"pattern": "g16@50%", "prune": "sparsegpt", "quant": "w4", "format": "gqs", "tune": "bqpo+e2e"},
        **{
            f"dense-{kind}": {
                "pattern": "g128@0%",
                "prune": "sparsegpt",
                "quant": kind,
                "format": "gqs",
                "tune": "bqpo",
            }
            for kind in ("w8", "w4", "w3", "w2")
        },
    },
    lossless=False,
    regroup=regroup,
    grain=disk.grain,
    scale_columns=disk.scale_columns,
    stack=stack,
    variants=({"kind": "w4"}, *({"kind": kind} for kind in KINDS if kind != "w4")),
    choices=(
        *(("g128@0%", kind) for kind in ("w2", "w3", "w4", "w8")),
        *(("g64@0%", kind) for kind in ("w2", "w3", "w4")),
        *(("g32@0%", kind) for kind in ("w2", "w3", "w4", "w8")),
        *((f"g16@{percent}%", "w4") for percent in (20, 30, 40, 50)),
    ),
)
