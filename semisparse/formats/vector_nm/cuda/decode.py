"""Kernel `decode`: GEMV and skinny GEMM (M <= 16) on CUDA cores, straight from the packed weight (decode.cu)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.cuda.decode_schedule import MAX_M, VECTOR_LENGTHS, DecodeSchedule, choose_decode
from semisparse.formats.vector_nm.cuda.operands import operands_refusal
from semisparse.formats.vector_nm.storage.disk import groups_and_slots, vectors_of
from semisparse.patterns import VectorNM
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.operands import aligned, bias_as

HALF, LONG_VECTORS, SHORT_VECTORS = VectorNM(16, 32, 32), VectorNM(5, 7, 128), VectorNM(4, 32, 8)

SOURCE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    tuple(
        DecodeSchedule(*settings).defines
        for settings in (
            (HALF, torch.float16, 1, 16, 2),
            (HALF, torch.float16, 2, 16, 2),
            (HALF, torch.float16, 4, 16, 2),
            (HALF, torch.float16, 8, 8, 4),
            (LONG_VECTORS, torch.bfloat16, 1, 8, 2),
            (SHORT_VECTORS, torch.bfloat16, 8, 8, 4),
        )
    ),
    spills_allowed="for 2 tokens ptxas keeps 16 warps at 64 registers on sm_80 and sm_89, 8 bytes too few",
)


def refusal(problem: Problem, lengths: tuple[int, ...] = VECTOR_LENGTHS) -> str | None:
    """Return why a decode kernel for vectors of ``lengths`` rows cannot compute ``problem``; None if it can."""
    length = vectors_of(problem.pattern).length
    if problem.m > MAX_M:
        return f"takes up to {MAX_M} tokens, got {problem.m}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16, got {problem.dtype}"
    if length not in lengths:
        return f"takes vectors of {', '.join(map(str, lengths))} rows, not {length}"
    return operands_refusal(problem)


def prepare(problem: Problem) -> Product:
    """Return the matmul for ``problem``: x, w and y all float16 or all bfloat16; accumulators are float32."""
    (n, k), facts = problem.spec.shape, device_facts(problem.device)
    groups, slots = groups_and_slots(problem.spec)
    schedule = choose_decode(vectors_of(problem.pattern), problem.dtype, problem.m, n, facts.sms)
    build = SOURCE.build("semisparse_vector_nm_decode", schedule.defines, schedule.shared_bytes(k))
    kernel, threads = build.load(problem.device), 32 * schedule.warps
    sizes = {"n": n, "k": k, "slots": slots, "panel_windows": schedule.windows_per_panel(k)}

    def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x, values, bias = aligned(x), aligned(packed.tensors["values"]), bias_as(bias, x.dtype)
        m, positions = x.shape[0], packed.tensors["positions"].contiguous()
        y = x.new_empty(m, n)
        grid = (groups, -(-m // schedule.tile_m), 1)
        operands = {"x": x, "values": values, "positions": positions, "bias": bias, "y": y}
        kernel(grid, threads, pdl=facts.has_pdl, **operands, m=m, **sizes)
        return y

    return decode
