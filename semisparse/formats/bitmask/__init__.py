"""Format ``bitmask`` (RheoSparse): one bit per weight says where the non-zeros are; README.md is its page."""

from __future__ import annotations

import torch

from semisparse.formats.base import Case, Format
from semisparse.formats.bitmask.cost import cost
from semisparse.formats.bitmask.cpu import kernel as cpu
from semisparse.formats.bitmask.cuda import decode, decode_rows, experts, gemm, unpack
from semisparse.formats.bitmask.cuda.schedule import gemm_pays
from semisparse.formats.bitmask.storage import codes, disk, layouts
from semisparse.formats.bitmask.storage.check import check_content, violation
from semisparse.formats.bitmask.storage.regroup import regroup
from semisparse.formats.kernel import Kernel
from semisparse.patterns import Group

FORMAT = Format(
    name="bitmask",
    version=1,
    summary="any pattern: a bit per weight, the non-zeros in 16, 8 or 4 bits (9, 5.25, 3.25 bits per weight at 32:64)",
    accepts=lambda pattern: None,
    specs=layouts.specs,
    counts=layouts.counts,
    counted=("kept",),
    tuned_by=("kind",),
    grain=disk.grain,
    scale_columns=disk.scale_columns,
    regroup=regroup,
    pack_weight=disk.pack,
    unpack=layouts.unpack,
    check_content=check_content,
    violation=violation,
    arrange=layouts.arrange,
    kernels=(
        Kernel("cpu", "cpu", cpu.refusal, cpu.prepare),
        Kernel("gemm", "cuda", gemm.refusal, gemm.prepare, gemm_pays),
        Kernel("decode", "cuda", decode.refusal, decode.prepare, fuse=decode.fuse),
        Kernel("decode_rows", "cuda", decode_rows.refusal, decode_rows.prepare),
        Kernel("unpack", "cuda", unpack.refusal, unpack.prepare),
    ),
    experts=experts.prepare,
    cost=cost,
    variants=({}, *({"kind": kind} for kind in codes.CODED)),
    rounds=lambda pattern: not isinstance(pattern, Group),  # quantised groups have zero points: only gqs stores those
    cases=(
        Case("zeros-stored-past-k", "64:64", lambda: torch.ones(3, 65)),
        Case("one-of-each-block", "1:64", lambda: torch.eye(64).repeat(1, 3)),
        Case("window-that-divides-no-block", "6:10", lambda: torch.ones(2, 70) * (torch.arange(70) % 10 < 6)),
        Case("nothing-pruned", "0%", lambda: torch.ones(5, 130)),
    ),
    recipes={"rheosparse": {"pattern": "32:64", "prune": "sparsegpt", "search": "profile", "format": "bitmask"}},
    choices=tuple((f"{keep}:64", kind) for kind in ("none", *codes.CODED) for keep in (16, 32, 48)),
)
