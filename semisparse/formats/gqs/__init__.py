"""Format ``gqs`` (GQSA): groups along K dropped whole, the rest in 8 to 2 bits. README.md gives the bytes."""

from __future__ import annotations

import torch

from semisparse.formats.base import Case, Format
from semisparse.formats.gqs import cpu, cuda, pack, unpack
from semisparse.formats.gqs.regroup import regroup
from semisparse.formats.gqs.stack import stack
from semisparse.formats.kernel import Kernel
from semisparse.quant.group import KINDS

FORMAT = Format(
    name="gqs",
    version=1,
    summary="groups of 4 to 128 along K, dropped whole or kept in 8, 4, 3 or 2 bits (2.9 bits a weight at W4S50 G16)",
    accepts=pack.accepts,
    specs=lambda pattern, params: pack.SPECS,
    counts=pack.counts,
    pack_weight=pack.pack_weight,
    unpack=pack.unpack,
    check_content=pack.check_content,
    kernels=(
        Kernel("cpu", "cpu", cpu.supports, lambda problem: cpu.load()),
        Kernel("unpack_cpu", "cpu", cpu.unpack_refusal, lambda problem: cpu.unpack_and_multiply),
        Kernel("decode", "cuda", cuda.decode_refusal, cuda.prepare_decode),
        Kernel("unpack", "cuda", unpack.unpack_refusal, unpack.prepare_unpack_and_multiply),
    ),
    cost=cuda.cost,
    cases=(
        Case("nothing-dropped", "g16@0%", lambda: torch.randn(20, 70, generator=torch.Generator().manual_seed(0))),
        Case("one-group-a-row", "g8@80%", lambda: torch.eye(20).repeat_interleave(8, dim=1)[:, :150]),
        Case("small-groups", "g4@50%", lambda: torch.ones(17, 40) * (torch.arange(40) // 4 % 2)),
        Case("large-groups", "g128@80%", lambda: torch.ones(3, 300) * (torch.arange(300) < 128)),
    ),
    recipes={
        "gqsa": {"pattern": "g16@50%", "prune": "sparsegpt", "quant": "w4", "format": "gqs", "tune": "bqpo+e2e"},
    },
    lossless=False,
    regroup=regroup,
    grain=lambda pattern, params: (pack.TILE_ROWS, pack.TILE_GROUPS * pack.size_of(pattern)),
    stack=stack,
    variants=({"kind": "w4"}, *({"kind": kind} for kind in KINDS if kind != "w4")),
)
