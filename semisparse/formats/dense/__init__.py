"""Format ``dense``: all weights, unquantised or rounded to 8 or 4 bits: the baseline of the sparse formats."""

from __future__ import annotations

from semisparse.formats.base import Format
from semisparse.formats.dense import blas
from semisparse.formats.dense.cost import cost
from semisparse.formats.dense.cpu import int_mm
from semisparse.formats.dense.cuda import decode, int4pack_mm, int8_gemm, scaled_mm
from semisparse.formats.dense.storage import disk
from semisparse.formats.dense.storage.check import check_content
from semisparse.formats.kernel import Kernel

FORMAT = Format(
    name="dense",
    version=1,
    summary="all weights, unquantised or rounded to int8, fp8 or int4: the baseline of the sparse formats",
    accepts=lambda pattern: None,
    specs=disk.specs,
    counts=disk.counts,
    pack_weight=disk.pack,
    unpack=disk.unpack,
    check_content=check_content,
    codes=disk.codes_of,
    kernels=(
        Kernel("decode", "cuda", decode.refusal, decode.prepare, decode.pays, decode.fuse),
        Kernel("blas", None, blas.refusal, blas.prepare),
        Kernel("int8_gemm", "cuda", int8_gemm.refusal, int8_gemm.prepare),
        Kernel("scaled_mm", "cuda", scaled_mm.refusal, scaled_mm.prepare),
        Kernel("int4pack_mm", "cuda", int4pack_mm.refusal, int4pack_mm.prepare),
        Kernel("int_mm", "cpu", int_mm.refusal, int_mm.prepare),
    ),
    cost=cost,
    grain=disk.grain,
    scale_columns=disk.scale_columns,
    tuned_by=("kind",),
    variants=({}, *({"kind": kind} for kind in disk.KINDS)),
    choices=(("0%", "none"), ("0%", "int8")),
)
